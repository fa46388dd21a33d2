"""The "hbm" table: all rows in the backend's memory, growing without bound."""

from functools import partial
from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, plan_set, publish
from sok_lite.engine.owner import MOD, OwnerRule
from sok_lite.engine.row_initializer import GivesFirstRows
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.table.base import EmbeddingTable
from sok_lite.engine.table.counters import Count, counter
from sok_lite.engine.table.det_index import DetIndex
from sok_lite.engine.table.dumped import plan_forget
from sok_lite.engine.table.insertion import claim_rows, plan_content
from sok_lite.engine.table.parts import checked_num_keys
from sok_lite.engine.table.stages import COMMIT, RESERVE, NewKeys, Stage, Stages, WithRows


class DetTable(EmbeddingTable):
    """A table over an open-addressing index. See EmbeddingTable for what it does.

    Args:
      backend: where it lives.
      dim: elements of a row.
      initializer: gives the initial values of rows.
      key_type: "int64", "int32" or "uint64".
      dtype: of the rows, a name that RowDtype lists.
      name: in errors; it also seeds the rows.
      seed: of the rows.
      owner: which rank owns a key, the same on all ranks.
      init_capacity: keys to make room for at once.
      rounds_gradients: whether gradients travel to other ranks as bfloat16; see
        engine/sent_gradients.py. The same on all ranks.
    """

    var_type = "hbm"

    def __init__(
        self,
        backend: Backend,
        dim: int,
        *,
        initializer: GivesFirstRows,
        key_type: str = "int64",
        dtype: str = "float32",
        name: str = "table",
        seed: int = 0,
        owner: OwnerRule = MOD,
        init_capacity: int = 0,
        rounds_gradients: bool = False,
    ) -> None:
        super().__init__(
            backend,
            dim,
            initializer=initializer,
            key_type=key_type,
            dtype=dtype,
            name=name,
            seed=seed,
            owner=owner,
            rounds_gradients=rounds_gradients,
        )
        init_capacity = checked_num_keys(name, "init_capacity", init_capacity)
        self.index: DetIndex
        index = DetIndex(backend, self.key_dtype, name, init_capacity)
        publish(self.plan_parts(index, self.store))

    def make_room(self, count: int) -> Claim:
        self.index.make_room(count)
        return claim_rows(self, count)

    def insertion_stages(
        self,
        new: NewKeys,
        before: list[Action],
        after: WithRows,
        counters: Array,
        evicted: list[Any] | None = None,
    ) -> Stages:
        xp, index, n = self.backend.xp, self.index, int(new.keys.size)
        claim, placed = self.make_room(n), xp.empty(n, np.int64)
        rows, num_refused = claim.rows, 0
        for has_new_seed in (False, True):
            place = index.plan_reserve(
                new.keys, new.lookup_number, placed, counter(counters, Count.REFUSED)
            )
            undo = [*index.plan_take_back(new.keys, placed), *plan_set(self, unfinished=None)]
            undoing = plan_set(self, unfinished=partial(publish, undo))
            counted = yield Stage(RESERVE, [place, *undoing], is_counted=True)
            if counted[Count.REFUSED] == num_refused:
                break
            num_refused = counted[Count.REFUSED]
            yield Stage(RESERVE, undo)
            if has_new_seed:
                raise index.error_of_chosen_keys()
            index.take_new_seed()
        yield Stage(
            COMMIT,
            [
                *before,
                *self.store.plan_list(claim, placed),
                plan_content(self, new, rows),
                *self.store.plan_take(claim),
                *plan_set(index, size=index.size + n),
                *self.plan_count(inserted=n),
                *after(rows),
                *plan_set(self, unfinished=None),
            ],
        )

    def scores_of(self, keys: Array) -> Array:
        return self.index.last_seen(keys).astype(np.uint64)

    def plan_scores(self, keys: Array, scores: Any) -> list[Action]:
        last_seen = scores.astype(np.uint32)
        return [*self.index.plan_update(keys, last_seen=last_seen), *plan_forget(self)]

"""The "hbm" table: all rows in the backend's memory, growing without bound."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, plan_set, publish
from sok_lite.engine.owner import MOD, OwnerRule
from sok_lite.engine.row_initializer import GivesFirstRows
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.base import EmbeddingTable
from sok_lite.engine.table.counters import Count, counter
from sok_lite.engine.table.det_index import DetIndex
from sok_lite.engine.table.dumped import plan_forget
from sok_lite.engine.table.insertion import claim_rows, plan_content
from sok_lite.engine.table.parts import checked_num_keys
from sok_lite.engine.table.stages import (
    COMMIT,
    RESERVE,
    NewKeys,
    Settle,
    Stage,
    Stages,
    WithRows,
)


class _Items(NamedTuple):
    """An insertion of items, before the counters know of it.

    Attributes:
      keys, rows, number, counters: as of `plan_insert_items`.
      placed: (n,) int64, the slots of their keys; 0: none.
      new_rows: (n,) uint32, the row of the one item of each key that has taken it.
      claim: rows from which they took theirs.
      size: of the index before.
    """

    keys: Array
    rows: Array
    number: Array
    placed: Array
    new_rows: Array
    claim: Claim
    counters: Array
    size: int


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
        engine/batch_pooling.py. The same on all ranks.
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
                *plan_set(index.record, size=index.size + n),
                *self.plan_count(inserted=n),
                *after(rows),
                *plan_set(self, unfinished=None),
            ],
        )

    def inserts_items(self, most: int) -> bool:
        return self.index.has_room(most) and self.store.has_room(most)

    def plan_insert_items(
        self, keys: Array, rows: Array, number: Array, most: int, counters: Array
    ) -> tuple[list[Action], Settle]:
        xp, store, n = self.backend.xp, self.store, int(keys.size)
        claim = self.make_room(most)
        placed, new_rows = xp.empty(n, np.int64), xp.empty(n, np.uint32)
        items = _Items(keys, rows, number, placed, new_rows, claim, counters, self.index.size)
        first = (self.backend, store, new_rows, keys, self.table_seed)
        settle = partial(self._settle_items, items)
        actions = [
            *self.index.plan_insert_items(
                *(keys, rows, self.clock.now, claim, (placed, number, new_rows)),
                counter(counters, Count.REFUSED, Count.USED),
            ),
            self.initializer.plan_fill(*first),
            *(store.plan_fill(state, new_rows) for state in store.states_with_values),
            *plan_set(self, unfinished=settle),
        ]
        return actions, settle

    def _settle_items(
        self, items: _Items, counted: list[int] | None = None, stays: bool = True
    ) -> None:
        """Brings the counters to what the kernels have done, or takes all back if it is not to
        stay, or keys found no slot. It can be done again."""
        if counted is None:
            counted = self.backend.to_host(items.counters).tolist()
        used = counted[Count.USED]
        if counted[Count.REFUSED] or not stays:
            publish(
                [
                    *self.index.plan_take_back(items.keys, items.placed, items.new_rows),
                    *plan_set(self, unfinished=None),
                ]
            )
            items.rows[items.number >= 0] = NO_ROW
            items.counters[Count.REFUSED : Count.USED + 1] = 0
            return
        publish(
            [
                *self.store.plan_take(items.claim, used),
                *plan_set(self.index.record, size=items.size + used),
                *self.plan_count(inserted=used),
                *plan_set(self, unfinished=None),
            ]
        )

    def scores_of(self, keys: Array) -> Array:
        return self.index.last_seen(keys).astype(np.uint64)

    def plan_scores(self, keys: Array, scores: Any) -> list[Action]:
        last_seen = scores.astype(np.uint32)
        return [*self.index.plan_update(keys, last_seen=last_seen), *plan_forget(self)]

"""The "hybrid" table: up to a number of keys, then the lowest score goes; two tiers of rows."""

import warnings
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, publish, setting
from sok_lite.engine.dtypes import is_integer, row_dtype
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.rows.store import ABSENT
from sok_lite.engine.rows.tiers import RowTiers
from sok_lite.engine.table.admission import SightingCounter, drawn
from sok_lite.engine.table.base import EmbeddingTable
from sok_lite.engine.table.exclusive import changing
from sok_lite.engine.table.hkv_index import HkvIndex
from sok_lite.engine.table.hkv_options import HkvOptions
from sok_lite.engine.table.index import Warming
from sok_lite.engine.table.insertion import Admission, NewKeys, WithRows
from sok_lite.engine.table.lookups import Asked, Output, look_up
from sok_lite.engine.table.results import GivesFirstRows


class Evicted(NamedTuple):
    """Keys that lost their place to others.

    Attributes:
      keys: (n,) of the table's key type.
      values: (n, dim) of the storage dtype, their last rows.
      scores: (n,) uint64.
    """

    keys: Array
    values: Array
    scores: Array


class _Eviction(NamedTuple):
    """An insertion that has evicted, before the counters know of it.

    Attributes:
      keys: (n,) int64, that were to be inserted.
      rows: (n,) uint32, which they got, or ABSENT.
      claim: rows from which they took theirs where a slot was free.
      counts: (3,) int64: rows taken of the claim, keys placed, keys evicted.
      size: of the index before.
      before: the counters before.
    """

    keys: Array
    rows: Array
    claim: Claim
    counts: Array
    size: int
    before: dict[str, int]


class RefusedError(RuntimeError):
    """Keys were refused, and the table was made with on_refused="error".

    Their buckets were full of keys of the same batch, or of keys with higher scores than they came
    with.

    Attributes:
      evicted: what the other keys of the batch evicted, where the call was to return it.
    """

    evicted: Evicted | None = None


class HkvTable(EmbeddingTable):
    """A table over buckets with scores. See EmbeddingTable for what every table does.

    It doubles up to `max_capacity` slots. A new key that then finds both of its buckets full takes
    the place of the key with the lowest score there; a key that the same lookup has found or
    inserted is never taken. Where a batch has more keys for two buckets than they have slots, the
    surplus is refused: it gets no row this time. So is a key that comes with a score below all
    others in its two buckets.

    Args:
      backend, dim, initializer, key_type, dtype, name, seed: as of DetTable.
      options: the fields of HkvOptions.

    Attributes:
      tiers: which rows are hot. A lookup that may insert warms its rows and, every so often,
        moves hot rows near first: then `generation` changes.
    """

    var_type = "hybrid"

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
        **options: Any,
    ) -> None:
        try:
            self.options = HkvOptions.checked(options)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error} (Of table {name!r}.)") from error
        backend = backend.for_table(
            self.options.block_size, self.options.device_id, bool(self.options.io_by_cpu)
        )
        super().__init__(
            backend,
            dim,
            initializer=initializer,
            key_type=key_type,
            dtype=dtype,
            name=name,
            seed=seed,
            store=self._tiers_of_store(dim, dtype),
        )
        self.tiers = RowTiers(self.store)
        self.index: HkvIndex = HkvIndex(
            backend,
            self.key_dtype,
            name,
            init_capacity=max(self.options.init_capacity, self.options.bucket),
            max_capacity=self.options.max_capacity,
            bucket=self.options.bucket,
            max_load_factor=self.options.max_load_factor,
            strategy=self.options.evict_strategy,
        )
        self.sightings: SightingCounter | None = None
        if self.options.enter_threshold > 1:
            self.sightings = SightingCounter(
                backend, self.key_dtype, name, self.options.enter_threshold
            )
        self._has_warned = False
        # Of the call that is under way: new keys refused, and all of them.
        self._refused = (0, 0)

    @property
    def filter_ratio(self) -> float:
        return self.options.filter_ratio

    def options_of_all_ranks(self) -> dict[str, Any]:
        of_machine = ("device_id", "far_path")
        return {name: x for name, x in asdict(self.options).items() if name not in of_machine}

    # ---------------------------------------------------------------- scores and eviction

    @property
    def epoch(self) -> int:
        """The epoch that kEpochLru and kEpochLfu stamp: a later one outweighs every earlier."""
        return self.index.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        if not is_integer(epoch):
            raise TypeError(f"`epoch` must be an integer. Received: {epoch!r}.")
        if not 0 <= epoch <= 0xFFFFFFFF:
            raise ValueError(f"`epoch` must be in [0, 2**32). Received: {epoch}.")
        self._set_epoch(int(epoch))

    @changing
    def _set_epoch(self, epoch: int) -> None:
        self.index.epoch = epoch

    @property
    def num_evicted(self) -> int:
        """Keys that lost their row to another key since the counters began."""
        if self._unfinished is not None:
            self._settled()
        return self._counts["evicted"]

    @property
    def index_bytes(self) -> int:
        others = 0 if self.sightings is None else self.sightings.num_bytes
        return self.index.num_bytes + self.tiers.num_bytes + others

    @changing
    def lookup_and_evict(
        self, keys: Any, *, unique_keys: bool = False, out: Array | None = None
    ) -> tuple[Array, Evicted]:
        """Does what `lookup` does and returns, beside the rows, what was evicted for new keys.

        Returns:
          ((n, dim) of the storage dtype, the evicted entries in no order).
        """
        keys = self._keys(keys)
        out = self.store.output(int(keys.size), out=out)
        evicted: list[Evicted] = []
        rows, whole = self._row_numbers(keys), Output(out, 0, int(keys.size))
        asked = Asked(self, keys, rows, [whole], unique_keys=unique_keys, evicted=evicted)
        look_up(self.backend, [asked])
        self._report_refused(evicted)
        return out, self._gathered(evicted)

    @changing
    def insert_and_evict(self, keys: Any, values: Any, scores: Any = None) -> Evicted:
        """Does what `insert_or_assign` does and returns what was evicted for new keys."""
        evicted: list[Evicted] = []
        self._insert_or_assign(keys, values, scores, evicted)
        self._report_refused(evicted)
        return self._gathered(evicted)

    # ---------------------------------------------------------------- tiers

    def _tiers_of_store(self, dim: int, dtype: str) -> dict[str, Any]:
        """The arguments of RowStore that split it."""
        row_bytes = dim * row_dtype(dtype).storage.itemsize
        near_rows = self.options.max_hbm_for_vectors * 2**30 / max(1, row_bytes)
        if near_rows >= self.options.max_capacity:
            return {}  # the rows of the two reserved keys do not make a second tier worth it
        return {"near_rows": int(near_rows), "far_path": self.options.far_path}

    def _rebalance(self) -> None:
        self.tiers.rebalance(
            lambda moved: [
                *self.index.updating(moved.keys, rows=moved.rows),
                *self._renewing(),
            ]
        )

    def _before_lookup(self) -> None:
        if self.tiers.is_due:
            self._rebalance()

    def _warming(self) -> Warming | None:
        heat = self.tiers.heat()
        return None if heat is None else Warming(heat, self.tiers.is_counting)

    def _touching(self, num_seen: int, new_rows: Array | None) -> list[Action]:
        return self.tiers.touching(num_seen, new_rows)

    def _releasing(self, rows: Array) -> list[Action]:
        return [*self.tiers.releasing(rows), *super()._releasing(rows)]

    # ---------------------------------------------------------------- what the index decides

    def _may_refuse(self) -> bool:
        return True

    def _insert(
        self,
        new: NewKeys,
        before: list[Action],
        after: WithRows,
        evicted: list[Evicted] | None = None,
    ) -> None:
        n = int(new.keys.size)
        self.index.make_room(n)
        room = min(n, self.index.room)
        self.tiers.reserve(self.store.num_rows + room)
        claim = self._claim(room)
        if not self._insert_where_free(new, claim, before, after):
            self._insert_and_evict(new, claim, before, after, evicted)

    def _insert_where_free(
        self, new: NewKeys, claim: Claim, before: list[Action], after: WithRows
    ) -> bool:
        """Inserts new keys as long as the index can grow; returns whether all have found a slot.

        Both buckets of a key can be full before the table is: then it grows early rather than lose
        a key.
        """
        index, n = self.index, int(new.keys.size)
        while not index.is_full_size:
            placed = index.unplaced(n)
            place = index.placing(
                new.keys, new.stamp, new.scores, placed, given_is_score=new.are_scores
            )
            undo = [index.taking_back(new.keys, placed), *setting(self, _unfinished=None)]
            publish([*setting(self, _unfinished=partial(publish, undo)), place])
            if bool((placed.slots < 0).any()):
                publish(undo)
                index.double()
                continue
            rows = claim.rows
            self._content(new, rows)()
            done = (self.backend.xp.empty(n, np.uint32), self.backend.xp.zeros(3, np.int64))
            publish(
                [
                    *before,
                    *self.store.taking(claim),
                    index.giving_rows(placed, rows, *done, one_each=True),
                    *self.tiers.assigning(rows, new.keys),
                    *setting(index, size=index.size + n),
                    self._counting(inserted=n),
                    *after(rows),
                    *self._forgetting_next(new.keys),
                ]
            )
            self._finish()
            return True
        return False

    def _insert_and_evict(
        self,
        new: NewKeys,
        claim: Claim,
        before: list[Action],
        after: WithRows,
        evicted: list[Evicted] | None,
    ) -> None:
        """Inserts new keys into a table that grows no more.

        Which keys go is known when it has happened, so the counters follow in a second step.
        """
        xp, index, store, n = self.backend.xp, self.index, self.store, int(new.keys.size)
        placed, counts = index.unplaced(n), xp.zeros(3, np.int64)
        rows = xp.full(n, ABSENT, np.uint32)
        eviction = _Eviction(new.keys, rows, claim, counts, index.size, dict(self._counts))
        reading = []
        if evicted is not None:
            last_values = store.output(n)
            reading = [store.reading(placed.evicted_rows, last_values)]
        publish(
            [
                *setting(self, _unfinished=partial(self._settle, eviction)),
                *before,
                *store.taking(claim),
                index.placing(
                    new.keys, new.stamp, new.scores, placed, given_is_score=new.are_scores
                ),
                *reading,
                *(store.filling(state, placed.evicted_rows) for state in store.state_names),
                index.giving_rows(placed, claim.rows, rows, counts, one_each=False),
                self._content(new, rows),
                *self.tiers.assigning(rows, new.keys),
                *after(rows),
            ]
        )
        self._finish()
        if evicted is not None:
            has_evicted = placed.evicted_rows != np.uint32(ABSENT)
            evicted.append(
                Evicted(
                    placed.evicted_keys[has_evicted],
                    last_values[has_evicted],
                    placed.evicted_scores[has_evicted],
                )
            )

    def _settle(self, eviction: _Eviction) -> None:
        """Brings the counters to what the kernels have done. It can be done again."""
        used, num_placed, num_evicted = (int(x) for x in self.backend.to_host(eviction.counts))
        num_keys, before = int(eviction.keys.size), eviction.before
        num_refused = num_keys - num_placed
        counts = {
            "inserted": before["inserted"] + num_placed,
            "evicted": before["evicted"] + num_evicted,
            "refused": before["refused"] + num_refused,
        }
        publish(
            [
                *self.store.taking(eviction.claim, min(used, int(eviction.claim.rows.size))),
                *setting(self.index, size=eviction.size + num_placed - num_evicted),
                partial(self._counts.update, counts),
                *(self._renewing() if num_evicted else ()),
                *setting(self, _refused=(num_refused, num_keys)),
                *self._forgetting_next(eviction.keys, eviction.rows),
            ]
        )

    def _forgetting_next(self, keys: Array, rows: Array | None = None) -> list[Action]:
        """Prepares to forget the sightings of keys next, of those that have a row.

        Not before: a key that is refused, or finds no memory, need not be counted anew.
        """
        if self.sightings is None:
            return setting(self, _unfinished=None)
        return setting(self, _unfinished=partial(self._forget, keys, rows))

    def _forget(self, keys: Array, rows: Array | None) -> None:
        assert self.sightings is not None
        have_rows = keys if rows is None else keys[rows != np.uint32(ABSENT)]
        publish([*self.sightings.forgetting(have_rows), *setting(self, _unfinished=None)])

    def _begin(self) -> None:
        super()._begin()
        self._refused = (0, 0)

    def _report_refused(self, evicted: list[Evicted] | None = None) -> None:
        count, num_new = self._refused
        if not count or self.options.on_refused == "ignore":
            return
        text = (
            f"Table {self.name!r} had no room for {count:,} of {num_new:,} new keys of one lookup: "
            "their buckets are full of keys of the same lookup, or of higher scores. It holds "
            f"{self.size:,} keys in {self.capacity:,} slots. They get no row this time. Use a "
            "larger max_capacity or smaller batches."
        )
        if self.options.on_refused == "error":
            error = RefusedError(f"{text} The other keys of the lookup are in the table.")
            error.evicted = None if evicted is None else self._gathered(evicted)
            raise error
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{text} (Said once for a table.)", RuntimeWarning, stacklevel=2)

    def _scores(self, keys: Array) -> Array:
        return self.index.scores(keys)

    def _check_assignable(self, scores: Array) -> None:
        if not self.index.has_scores:
            super()._check_assignable(scores)

    def _scoring(self, keys: Array, scores: Array) -> list[Action]:
        return self.index.updating(keys, scores=scores)

    def _slot_scores(self, stamps: Array, slots: Array) -> Array:
        return self.index.slot_scores(stamps, slots)

    def _admission(self, keys: Array, filter_ratio: float) -> Admission:
        mask: Array | None = None
        actions: list[Action] = []
        if filter_ratio < 1.0:
            mask = drawn(keys, filter_ratio, self._table_seed, self.num_lookups)
        if self.sightings is not None:
            mask, actions = self.sightings.counting(keys, self.num_lookups, mask)
        return Admission(mask, actions)

    def _clearing(self) -> list[Action]:
        actions = [*super()._clearing(), *self.tiers.clearing()]
        if self.sightings is not None:
            actions += self.sightings.clearing()
        return actions

    def _forgetting(self, keys: Array) -> list[Action]:
        return [] if self.sightings is None else self.sightings.forgetting(keys)

    def _forgetting_before(self, stamp: int) -> list[Action]:
        return [] if self.sightings is None else self.sightings.forgetting_before(stamp)

    def _ageing(self) -> list[Action]:
        return [
            *super()._ageing(),
            *([] if self.sightings is None else self.sightings.ageing()),
        ]

    def _gathered(self, parts: list[Evicted]) -> Evicted:
        xp = self.backend.xp
        keys = xp.concatenate([xp.empty(0, np.int64), *(part.keys for part in parts)])
        empty = xp.empty((0, self.dim), self.row_dtype.storage)
        values = xp.concatenate([empty, *(part.values for part in parts)])
        scores = xp.concatenate([xp.empty(0, np.uint64), *(part.scores for part in parts)])
        return Evicted(self.key_dtype.from_int64(xp, keys), values, scores)

"""The "hybrid" table: up to a number of keys, then the lowest score goes; two tiers of rows."""

import contextlib
import warnings
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, plan_set, publish
from sok_lite.engine.dtypes import is_integer, row_dtype
from sok_lite.engine.owner import MOD, OwnerRule
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.rows.tiers import RowTiers
from sok_lite.engine.table.admission import PendingCounts, plan_draw
from sok_lite.engine.table.base import EmbeddingTable
from sok_lite.engine.table.counters import Count, counter
from sok_lite.engine.table.dumped import plan_forget
from sok_lite.engine.table.exclusive import changing
from sok_lite.engine.table.hkv_index import HkvIndex, Placed
from sok_lite.engine.table.hkv_options import HkvOptions
from sok_lite.engine.table.insertion import claim_rows, gather_evicted, plan_content
from sok_lite.engine.table.results import Evicted, GivesFirstRows
from sok_lite.engine.table.stages import (
    COMMIT,
    RESERVE,
    Admission,
    NewKeys,
    Stage,
    Stages,
    WithRows,
)
from sok_lite.engine.table.writes import insert_or_assign


class _Eviction(NamedTuple):
    """An insertion that has evicted, before the counters know of it.

    Attributes:
      num_keys: how many were to be inserted.
      are_updated: whether they came with an update, which leaves out those that are refused.
      claim: rows from which they took theirs where a slot was free.
      counters: (len(Count),) int64, what the kernels have counted.
      size: of the index before.
      before: the counters before.
    """

    num_keys: int
    are_updated: bool
    claim: Claim
    counters: Array
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
      backend, dim, initializer, key_type, dtype, name, seed, owner, rounds_gradients: as of
        DetTable.
      options: the fields of HkvOptions.

    Attributes:
      tiers: which rows are hot. A lookup that may insert counts its rows and, every so often,
        moves hot rows near first: then `row_epoch` changes.
    """

    var_type = "hybrid"
    keeps_every_key = False
    has_to_begin = True

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
        rounds_gradients: bool = False,
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
            owner=owner,
            rounds_gradients=rounds_gradients,
            store=self._tiers_of_store(dim, dtype),
        )
        self.tiers: RowTiers = RowTiers(self.store)
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
        if self.options.enter_threshold > 1:
            self.pending = PendingCounts(
                backend, self.key_dtype, name, self.options.enter_threshold
            )
        self.counts_repeats = self.options.count_repeats
        self._has_warned = False

    @property
    def filter_ratio(self) -> float:
        return self.options.filter_ratio

    def options_of_all_ranks(self) -> dict[str, Any]:
        # Of a rank: its devices, and with how many slots it begins, which changes no result.
        of_rank = ("device_id", "far_path", "init_capacity")
        return {name: x for name, x in asdict(self.options).items() if name not in of_rank}

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
    def evict_strategy(self) -> str:
        return self.options.evict_strategy

    @property
    def max_capacity(self) -> int:
        return self.options.max_capacity

    @changing
    def insert_and_evict(self, keys: Any, values: Any, scores: Any = None) -> Evicted:
        """Does what `insert_or_assign` does and returns what was evicted for new keys."""
        evicted: list[Evicted] = []
        insert_or_assign(self, keys, values, scores, evicted)
        self.report_refused(evicted)
        return gather_evicted(self, evicted)

    # ---------------------------------------------------------------- tiers

    def _tiers_of_store(self, dim: int, dtype: str) -> dict[str, Any]:
        """The arguments of RowStore that split it."""
        row_bytes = dim * row_dtype(dtype).storage.itemsize
        near_rows = self.options.max_hbm_for_vectors * 2**30 / max(1, row_bytes)
        if near_rows >= self.options.max_capacity:
            return {}  # the rows of the two reserved keys do not make a second tier worth it
        return {"near_rows": int(near_rows), "far_path": self.options.far_path}

    # ---------------------------------------------------------------- what the index decides

    def make_room(self, count: int) -> Claim:
        self.index.make_room(count)
        room = min(count, self.index.room)
        self.tiers.reserve(self.store.num_rows + room)
        return claim_rows(self, room)

    def insertion_stages(
        self,
        new: NewKeys,
        before: list[Action],
        after: WithRows,
        counters: Array,
        evicted: list[Evicted] | None = None,
    ) -> Stages:
        n = int(new.keys.size)
        new = self._with_pending_counts(new)
        claim = self.make_room(n)
        index, num_refused, has_new_seed = self.index, 0, False
        while not index.is_full_size or (index.is_sparse(n) and not has_new_seed):
            # Both buckets of a key can be full before the table is: then it grows early rather
            # than lose a key.
            placed = index.unplaced(n)
            undo = [index.plan_take_back(new.keys, placed), *plan_set(self, unfinished=None)]
            undoing = plan_set(self, unfinished=partial(publish, undo))
            place = self._plan_reserve(new, placed, counters, may_evict=False)
            counted = yield Stage(RESERVE, [place, *undoing], is_counted=True)
            if counted[Count.REFUSED] == num_refused:
                yield from self._giving_rows(new, claim, placed, before, after, counters)
                return
            num_refused = counted[Count.REFUSED]
            yield Stage(RESERVE, undo)
            if not index.is_sparse(n):
                index.double()
                continue
            if has_new_seed:
                raise index.error_of_chosen_keys()
            has_new_seed = True
            self._take_new_seed()
        yield from self._evicting(new, claim, before, after, counters, evicted)

    def _take_new_seed(self) -> None:
        """Gives the keys of a sparse index other places, if it can."""
        if self.index.is_full_size:
            with contextlib.suppress(MemoryError):  # then it evicts
                self.index.take_new_seed()
        elif not self.index.take_new_seed():
            raise self.index.error_of_chosen_keys()

    def _with_pending_counts(self, new: NewKeys) -> NewKeys:
        """Adds the pending counts of new keys to their scores: so no count ever falls."""
        has_scores = new.are_scores and new.scores is not None
        if self.pending is None or not self.counts_repeats or has_scores:
            return new
        xp = self.backend.xp
        added = np.uint64(1) if new.scores is None else new.scores
        scores = self.pending.of(new.keys).astype(np.uint64) + added
        scores = xp.where(scores < added, ~np.uint64(0), scores)
        return new._replace(scores=scores, are_scores=False)

    def _plan_reserve(
        self, new: NewKeys, placed: Placed, counters: Array, *, may_evict: bool
    ) -> Action:
        num_refused = counter(counters, Count.REFUSED)
        return self.index.plan_reserve(
            *(new.keys, new.lookup_number, new.scores, placed, num_refused),
            may_evict=may_evict,
            are_scores=new.are_scores,
        )

    def _giving_rows(
        self,
        new: NewKeys,
        claim: Claim,
        placed: Placed,
        before: list[Action],
        after: WithRows,
        counters: Array,
    ) -> Stages:
        """Gives rows to new keys all of which have found a free slot."""
        index, n, rows = self.index, int(new.keys.size), claim.rows
        done = (self.backend.xp.empty(n, np.uint32), counter(counters, Count.USED, Count.EVICTED))
        actions = [
            *before,
            *self.store.plan_list(claim),
            plan_content(self, new, rows),
            *self.store.plan_take(claim),
            index.plan_commit(placed, rows, *done, one_each=True),
            *self.tiers.plan_assign(rows, new.keys),
            *plan_set(index, size=index.size + n),
            self.plan_count(inserted=n),
            *after(rows),
        ]
        if self.pending is None:
            yield Stage(COMMIT, [*actions, *plan_set(self, unfinished=None)])
        else:
            num_forgotten = counter(counters, Count.FORGOTTEN)
            forget = self.pending.plan_forget_those(new.keys, rows, num_forgotten)
            settling = plan_set(self, unfinished=partial(self._settle_pending, num_forgotten))
            counted = yield Stage(COMMIT, [*actions, forget, *settling], is_counted=True)
            publish(self._forgot(counted[Count.FORGOTTEN]))
        self.finish()

    def _evicting(
        self,
        new: NewKeys,
        claim: Claim,
        before: list[Action],
        after: WithRows,
        counters: Array,
        evicted: list[Evicted] | None,
    ) -> Stages:
        """Inserts new keys into a table that grows no more.

        Which keys go is known when it has happened, so the counters follow in a second step.
        """
        xp, index, store, n = self.backend.xp, self.index, self.store, int(new.keys.size)
        placed, rows = index.unplaced(n), xp.empty(n, np.uint32)
        counts = counter(counters, Count.USED, Count.EVICTED)
        eviction = _Eviction(
            *(n, new.are_updated, claim, counters, index.size, dict(self.counters)),
        )
        reading, forgetting, logging = [], [], []
        if self.removals is not None:
            num_again = counter(counters, Count.LOGGED)
            those = (placed.evicted_keys, placed.evicted_rows, new.lookup_number)
            logging = self.removals.plan_note_evicted(*those, min(n, index.size), num_again)
        if evicted is not None:
            last_values = store.output(n)
            reading = [store.plan_read(placed.evicted_rows, last_values)]
        if self.pending is not None:
            num_forgotten = counter(counters, Count.FORGOTTEN)
            forgetting = [self.pending.plan_forget_those(new.keys, rows, num_forgotten)]
        actions = [
            *plan_set(self, unfinished=partial(self._settle, eviction)),
            *before,
            *store.plan_list(claim),
            *store.plan_take(claim),
            self._plan_reserve(new, placed, counters, may_evict=True),
            *logging,
            *reading,
            *(store.plan_fill(state, placed.evicted_rows) for state in store.state_names),
            index.plan_commit(placed, claim.rows, rows, counts, one_each=False),
            plan_content(self, new, rows),
            *self.tiers.plan_assign(rows, new.keys),
            *after(rows),
            *forgetting,
        ]
        self._settle(eviction, (yield Stage(COMMIT, actions, is_counted=True)))
        self.finish()
        if evicted is not None:
            has_evicted = placed.evicted_rows != np.uint32(NO_ROW)
            evicted.append(
                Evicted(
                    placed.evicted_keys[has_evicted],
                    last_values[has_evicted],
                    placed.evicted_scores[has_evicted],
                )
            )

    def _settle(self, eviction: _Eviction, counted: list[int] | None = None) -> None:
        """Brings the counters to what the kernels have done. It can be done again.

        Args:
          counted: what they have counted; None: it is read.
        """
        if counted is None:
            counted = self.backend.to_host(eviction.counters).tolist()
        num_placed, num_evicted = counted[Count.PLACED], counted[Count.EVICTED]
        num_keys, before = eviction.num_keys, eviction.before
        num_refused = num_keys - num_placed
        counts = {
            "inserted": before["inserted"] + num_placed,
            "evicted": before["evicted"] + num_evicted,
            "refused": before["refused"] + num_refused,
            "not_updated": before["not_updated"] + num_refused * eviction.are_updated,
        }
        used = min(counted[Count.USED], int(eviction.claim.rows.size))
        publish(
            [
                *self.store.plan_take(eviction.claim, used),
                *plan_set(self.index, size=eviction.size + num_placed - num_evicted),
                partial(self.counters.update, counts),
                *(self.plan_renew() if num_evicted else ()),
                *plan_set(self, refused=(num_refused, num_keys)),
                *(self.removals.noted(num_evicted, counted[Count.LOGGED]) if self.removals else ()),
                *self._forgot(counted[Count.FORGOTTEN]),
            ]
        )

    def _settle_pending(self, num_forgotten: Array) -> None:
        """Brings the number of pending keys to what the kernels have done."""
        publish(self._forgot(int(num_forgotten[0])))

    def _forgot(self, count: int) -> list[Action]:
        forgot = [] if self.pending is None else self.pending.forgot(count)
        return [*forgot, *plan_set(self, unfinished=None)]

    def begin(self) -> None:
        super().begin()
        self.refused = (0, 0)

    def report_refused(self, evicted: list[Evicted] | None = None) -> None:
        count, num_new = self.refused
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
            error.evicted = None if evicted is None else gather_evicted(self, evicted)
            raise error
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{text} (Said once for a table.)", RuntimeWarning, stacklevel=2)

    def scores_of(self, keys: Array) -> Array:
        return self.index.scores(keys)

    def plan_scores(self, keys: Array, scores: Array) -> list[Action]:
        forgotten = [] if self.index.has_scores else plan_forget(self)
        return [*self.index.plan_update(keys, scores=scores), *forgotten]

    def may_turn_away(self, filter_ratio: float) -> bool:
        return filter_ratio < 1.0 or self.pending is not None

    def plan_admission(
        self,
        keys: Array,
        filter_ratio: float,
        admitted: Array,
        counters: Array,
        occurrences: Array | None,
    ) -> Admission:
        pending, lookup, backend = self.pending, self.num_lookups, self.backend
        actions: list[Action] = []
        if filter_ratio < 1.0:
            count = counter(counters, Count.ADMITTED) if pending is None else None
            draw = (keys, filter_ratio, self.table_seed, lookup, admitted, count)
            actions.append(plan_draw(backend, *draw))
        if pending is None:
            return Admission(actions, lambda counted: [])
        counts = counter(counters, Count.ADMITTED, Count.FIRST_SEEN)
        occurrences = occurrences if self.counts_repeats else None
        seen, counting = pending.plan_count(keys, lookup, admitted, counts, occurrences)
        return Admission(
            [*actions, *counting],
            lambda counted: pending.plan_note(seen, counted[Count.FIRST_SEEN]),
        )

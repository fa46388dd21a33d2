"""Insertion: keys that a search has missed get rows, in several tables at once.

`insert_missing` goes through these steps:

 1. `_dedup_missing`: the missing keys of each table, without duplicates. `draw_launches` draws
    initial values for those that may get no row: they are what the lookup returns.
 2. `_admit`: tables that admit only some new keys decide which (admission.py).
 3. `new_insertion`: each table makes room: its index grows, and rows are claimed.
 4. `_reserve_slots`: keys get slots of the index, in which no search finds them yet. Where some
    find none the index grows, or takes another seed, and they try again. A full "hybrid" table
    skips this.
 5. `commit_launches`: rows are written and given to their keys; in a full "hybrid" table the same
    launch takes the slots of other keys. The results of the lookup follow.
 6. `settle`: the counters of the table follow what kernels have counted.

All tables take a step before the next one begins, so that launches are made, and a device is waited
for, as often for a thousand tables as for one. An error before the launches of step 5 leaves every
table as it was, but for its room. Signals wait until the end of all steps (find.py,
`look_up_batch`).

Where all tables of a call are "hbm" tables that have room and admit every key, their indexes remove
duplicates themselves, and steps 1, 2 and 4 are skipped: see `_can_skip_dedup` and `ItemInsertion`.
Native code (kernels/ops/insertion.cpp) inserts first, into tables that have room; what it leaves
comes here. Writes of new keys take steps 3 to 6: `insert_keys`.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import Launch, launch_all, packed_launches
from sok_lite.backend.ragged import split, split_offsets
from sok_lite.engine.dedup import Missing, dedup
from sok_lite.engine.pooling import COMBINERS
from sok_lite.engine.rows.access import NewRows
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.admission import CountUpdate
from sok_lite.engine.table.base import TableBase
from sok_lite.engine.table.counters import Count, counter, new_counters
from sok_lite.engine.table.results import Evicted

# A CPU removes the duplicates of more items faster in a scratch hash: it stays in the caches, and
# what then goes through the keys has no gaps.
_MOST_ITEMS_ON_CPU = 4096
_MOST_ITEMS = 1 << 30  # that `dedup` takes, too
# That each key takes where evicted ones are selected: key, score, index, mask.
_SELECTION_BYTES = 32

# Takes the rows (n,) uint32 of new keys, and returns the launches that follow when they have them.
WithRows = Callable[[Array], list[Launch]]


class Output(NamedTuple):
    """Memory for the rows of a lookup, of keys that lie one behind another.

    Attributes:
      out: (m, dim) of the storage dtype from `store.output`; pooled, (batch, dim) float32.
      first, end: which of the table's keys they belong to.
      row_splits: (batch + 1,) int64, from 0 to end - first, for pooled rows; None: no pooling.
      weights: (end - first,) float32, of pooled rows; None: all 1.
      combiner: "sum", "mean" or "sqrtn", of pooled rows.
    """

    out: Array
    first: int
    end: int
    row_splits: Array | None = None
    weights: Array | None = None
    combiner: str = "sum"

    def pooling(self) -> tuple[int, tuple[Any, ...]]:
        """Returns the number of pooled rows, and the arguments of kernels that say how to pool."""
        assert self.row_splits is not None
        how = (self.row_splits, self.weights, COMBINERS[self.combiner])
        return len(self.row_splits) - 1, how


class LookupRequest(NamedTuple):
    """A lookup in one table.

    Attributes:
      size: number of its keys.
      outputs: memory for rows: one for all keys, or pooled ones that have all keys together; none
        if row numbers are enough.
      insert: whether keys without a row get one.
      missing: the result of a key that has no row afterwards, "initial" or "zeros".
      filter_ratio: chance of a key without a row to get one this time.
      unique_keys: a promise that no key repeats.
      caller_scores: (size,) uint64. In a table that counts repeats: how often each item counts.
        Else scores or increments of the caller's, of keys that do not repeat.
      evicted: a list that is extended by the evicted keys; None: they are not wanted.
      then: of an update, returns the launches that take the step, once all keys have their rows.
    """

    table: TableBase
    size: int
    outputs: Sequence[Output] = ()
    insert: bool = True
    missing: str = "initial"
    filter_ratio: float = 1.0
    unique_keys: bool = False
    caller_scores: Array | None = None
    evicted: list[Any] | None = None
    then: Callable[[], list[Launch]] | None = None


# ---------------------------------------------------------------- missing keys of a lookup


def insert_missing(
    backend: Backend,
    keys: Array,
    rows: Array,
    requests: Sequence[LookupRequest],
    counters: Array,
    counted: list[list[int]],
    others: Sequence[Sequence[Launch]],
) -> list[int]:
    """Inserts the missing keys of requests that insert, and writes the results of all of them.

    Args:
      keys: (n,) int64, of all requests, one after the other.
      rows: (n,) uint32, their row numbers, NO_ROW where missing; gets those of new keys.
      requests: one for each table.
      counters: (num_tables, len(Count)) int64, by which the search has counted.
      counted: what is in them by now, on the host.
      others: lists of launches to be made when new keys get their rows.

    Returns:
      How many keys have no row afterwards, for each table.

    Raises:
      MemoryError: no memory for the new keys; the tables are as they were.
    """
    num_missing = [counts[Count.MISSING] for counts in counted]
    with_missing = [i for i, count in enumerate(num_missing) if count]
    can_skip_dedup = not others and all(
        _can_skip_dedup(requests[i], num_missing[i]) for i in with_missing
    )
    if can_skip_dedup and _insert_items(backend, keys, rows, requests, counters, num_missing):
        return [0] * len(num_missing)
    missing = _dedup_missing(backend, keys, rows, requests, counters, counted)
    launch_all(*(each.draw_launches() for each in missing.values()))
    _admit(backend, counters, missing)
    insertions = {i: each.new_insertion() for i, each in missing.items() if each.request.insert}
    reading = [each.result_launches(None) for each in missing.values() if not each.request.insert]
    counted_now = _insert_all(backend, counters, insertions, [*reading, *others])
    for i in insertions:
        num_missing[i] = counted_now[i][Count.NO_ROW] if counted_now else 0
    return num_missing


@dataclass
class _MissingKeys:
    """The distinct missing keys of one request, through steps 1 to 3.

    Attributes:
      rows: (request.size,) uint32, row numbers of the items of the request.
      inverse: (request.size,) int32, which of the missing keys each item has, counted from `first`;
        -1: it was found.
      keys: (u,) int64.
      counters: (len(Count),) int64, of the table.
      num_seen: how many keys the search has found.
      caller_scores: (u,) uint64, later (k,), scores or increments of the caller's; None: none.
      values: (u, dim) storage, the results of keys that get no row; None: zeros, or all get one.
      are_drawn: whether `values` are drawn before it is known which keys get a row.
      admitted: (k,) int64, the keys that may get a row; None: all, and so are the next two.
      admitted_index: (u,) int32, which of the admitted each key is.
      source: (k,) int32, which of `keys` each admitted one is.
      counted_keys: new pending counts, which the insertion stores; None: none.
      num_first: how many of those were not counted before.
    """

    request: LookupRequest
    rows: Array
    inverse: Array
    first: int
    keys: Array
    counters: Array
    num_seen: int = 0
    caller_scores: Array | None = None
    values: Array | None = None
    are_drawn: bool = False
    admitted: Array | None = None
    admitted_index: Array | None = None
    source: Array | None = None
    counted_keys: CountUpdate | None = None
    num_first: int = 0

    def draw_launches(self) -> list[Launch]:
        """Allocates `values` where keys may get no row; returns the launches that write them."""
        request, table = self.request, self.request.table
        if request.missing != "initial" or not request.outputs:
            return []
        if request.insert and table.keeps_every_key:
            return []
        # Now: there may be no memory for them when it is known which keys get no row.
        self.values = table.store.output(int(self.keys.size))
        if request.insert and not table.may_turn_away(request.filter_ratio):
            return []  # step 5 draws them, for keys that it refuses: `refused_values`
        self.are_drawn = True
        return [table.draw_launch(self.values, self.keys)]

    def new_insertion(self) -> "Insertion":
        """Makes room for the admitted keys; returns their insertion."""
        request, table = self.request, self.request.table
        keys = self.keys if self.admitted is None else self.admitted
        new = NewKeys(
            keys,
            table.clock.now,
            scores=self.caller_scores,
            values=self.values if self.are_drawn else None,
            source=self.source,
            refused_values=None if self.are_drawn else self.values,
            are_updated=request.then is not None,
            evicted=request.evicted,
            num_seen=self.num_seen,
            num_turned_away=int(self.keys.size - keys.size),
            num_first=self.num_first,
        )
        before: list[Launch] = []
        if self.counted_keys is not None and table.pending is not None:
            before = table.pending.store_launches(self.counted_keys, self.num_first)
        made: Insertion = table.new_insertion(new, self.counters, before, self.result_launches)
        return made

    def result_launches(self, new_rows: Array | None) -> list[Launch]:
        """Returns the launches that write the results of the request, when the admitted keys have
        their rows (k,) uint32; None: none get any."""
        table, all_rows, n = self.request.table, new_rows, int(self.keys.size)
        launches: list[Launch] = []
        if self.admitted_index is not None and new_rows is not None:
            all_rows = table.backend.xp.empty(n, np.uint32)
            spread = (self.admitted_index, new_rows, all_rows, n)
            launches.append(table.backend.prepared("admission_spread", n, *spread))
        got = NewRows(self.inverse, self.first, all_rows, self.values)
        num_without_row = counter(self.counters, Count.NO_ROW)
        is_pooled = False
        for output in self.request.outputs:
            if output.row_splits is not None:
                is_pooled = True
                launches.append(self._pool_again_launch(output, got, num_without_row))
        if not is_pooled:
            out = self.request.outputs[0].out if self.request.outputs else None
            launches.append(table.store.deliver_launch(got, self.rows, out, num_without_row))
        if self.request.then is not None:
            launches += self.request.then()
        if new_rows is not None:
            launches += table.count_launches(new_rows)
        return launches

    def _pool_again_launch(self, output: Output, got: NewRows, num_without_row: Array) -> Launch:
        """Returns the launch that pools anew the rows that have a key that was missing."""
        table, first, end = self.request.table, output.first, output.end
        *where, _ = table.store.place()
        batch, how = output.pooling()
        values = None if got.values is None else got.values.view(np.uint8).reshape(-1)
        arguments = (
            *(*where, got.number[first:end], got.first, got.rows, values),
            *(*how, self.rows[first:end], output.out, num_without_row, batch, 0),
        )
        return table.backend.prepared(f"pool_again_{table.row_dtype.suffix}", batch, *arguments)


def _dedup_missing(
    backend: Backend,
    keys: Array,
    rows: Array,
    requests: Sequence[LookupRequest],
    counters: Array,
    counted: list[list[int]],
) -> dict[int, _MissingKeys]:
    """Returns the distinct missing keys of each request that has any, by the number of its
    table."""
    num_missing = [counts[Count.MISSING] for counts in counted]
    with_missing = [i for i, count in enumerate(num_missing) if count]
    sizes = [each.size for each in requests]
    begin = split_offsets(sizes)
    repeat = not all(requests[i].unique_keys for i in with_missing)
    distinct = dedup(backend, keys, begin, Missing(rows, num_missing), repeat)
    its_rows, its_inverse = split(rows, sizes), split(distinct.inverse, sizes)
    its_keys, starts = split(distinct.keys, distinct.sizes), distinct.starts.tolist()
    missing = {}
    for i in with_missing:
        its = (its_rows[i], its_inverse[i], starts[i], its_keys[i], counters[i])
        missing[i] = _MissingKeys(requests[i], *its, num_seen=counted[i][Count.SEEN])
        caller_scores = requests[i].caller_scores
        if caller_scores is not None:
            items = distinct.first[starts[i] : starts[i + 1]] - np.int32(begin[i])
            missing[i].caller_scores = backend.xp.take(caller_scores, items)
    return missing


def _admit(backend: Backend, counters: Array, missing: dict[int, _MissingKeys]) -> None:
    """Decides which missing keys may get a row now, in tables that turn some away."""
    choosing = {
        i: each
        for i, each in missing.items()
        if each.request.insert and each.request.table.may_turn_away(each.request.filter_ratio)
    }
    if not choosing:
        return
    xp = backend.xp
    sizes = [int(each.keys.size) for each in choosing.values()]
    mask = xp.ones(sum(sizes), np.uint8)
    masks = split(mask, sizes)
    deciding = []
    for each, its_mask in zip(choosing.values(), masks, strict=True):
        launches, each.counted_keys = each.request.table.admission_launches(
            each.keys, each.request.filter_ratio, its_mask, each.counters, each.caller_scores
        )
        deciding.append(launches)
    launch_all(*deciding)
    sums = split(xp.cumsum(mask, dtype=np.int64), sizes)
    counted = backend.to_host(counters).tolist()
    before, listing = 0, []
    for (i, each), its_mask, its_sums in zip(choosing.items(), masks, sums, strict=True):
        n, count = int(each.keys.size), counted[i][Count.ADMITTED]
        each.num_first = counted[i][Count.FIRST_SEEN]
        each.admitted, each.source = xp.empty(count, np.int64), xp.empty(count, np.int32)
        each.admitted_index = xp.empty(n, np.int32)
        lists = (each.admitted_index, each.admitted, each.source)
        arguments = (each.keys, its_mask, its_sums, before, *lists, n)
        listing.append([each.request.table.backend.prepared("admission_list", n, *arguments)])
        before += count
    launch_all(*listing)
    for each in choosing.values():
        if each.caller_scores is not None:
            each.caller_scores = xp.take(each.caller_scores, each.source)


# ---------------------------------------------------------------- new keys of a lookup or a write


class NewKeys(NamedTuple):
    """Keys to insert into one table.

    Attributes:
      keys: (n,) int64, distinct and missing.
      lookup_number: number of the lookup that they come with.
      scores: (n,) uint64, what the caller gave for them; None: nothing.
      are_scores: whether those are the scores to have, whatever the strategy.
      values: (m, dim) storage, what their rows begin with; None: the initial values of the keys.
      source: (n,) int32, which of `values` each key has; None: key i the i-th.
      refused_values: (n, dim) storage, without `values`: gets the initial values of keys that are
        refused; None: they are not wanted.
      are_updated: whether they come with an update, which leaves out those that are refused.
      evicted: a list that is extended by the evicted keys; None: they are not wanted.
      num_seen: how many keys the lookup has found; None: it is no lookup.
      num_turned_away: how many other keys of the lookup were not admitted.
      num_first: how many keys have a pending count from now on.
    """

    keys: Array
    lookup_number: int
    scores: Array | None = None
    are_scores: bool = False
    values: Array | None = None
    source: Array | None = None
    refused_values: Array | None = None
    are_updated: bool = False
    evicted: list[Any] | None = None
    num_seen: int | None = None
    num_turned_away: int = 0
    num_first: int = 0


class Insertion:
    """The insertion of new keys into one table, steps 3 to 6. It makes room when it is made.

    Args:
      counters: (len(Count),) int64, of this table.
      before: launches that are made before those of step 5; none of the index, which may grow.
      after: returns the launches that follow when the keys have their rows; NO_ROW if refused.

    Attributes:
      reserves: whether keys still need slots before they get rows.
      has_slots: whether they have such slots, which `release_slots` gives back.
      needs_counts: whether keys may be left without a row, so that kernels' counts are needed.
      rows: (n,) uint32, gets the rows of the keys.
    """

    reserves = True
    has_slots = False
    needs_counts = False
    _placed: Any  # the slots of the keys: (n,) int64 addresses, or a `Placement`

    def __init__(
        self,
        table: TableBase,
        new: NewKeys,
        counters: Array,
        before: list[Launch],
        after: WithRows,
    ) -> None:
        self._table: TableBase = table
        self._index: Any = table.index
        self._new, self._counters, self._before, self._after = new, counters, before, after
        self._n = int(new.keys.size)
        self._claim: Claim = table.make_room(self._n)
        self._num_refused = 0
        self._has_new_seed = False
        self.rows = self._claim.rows

    def reserve_launch(self) -> Launch:
        """Returns the launch that gives slots to the keys, in which no search finds them."""
        raise NotImplementedError

    def check_slots(self, counted: list[int]) -> None:
        """Ends step 4 if all keys have slots. Else releases them, and grows or reseeds the index.

        Raises:
          MemoryError: no memory for another index; it is as it was.
          RuntimeError: the keys are chosen against the hash.
        """
        # It counts those of all attempts.
        if counted[Count.REFUSED] == self._num_refused:
            self.reserves = False
            return
        self._num_refused = counted[Count.REFUSED]
        self.release_slots()
        self._change_index()

    def _change_index(self) -> None:
        if self._has_new_seed:
            raise self._index.hash_flooding_error()
        self._has_new_seed = True
        self._index.reseed()

    def release_slots(self) -> None:
        """Gives back slots that keys have. It needs no memory."""
        if self.has_slots:
            self.has_slots = False
            self._index.take_back(self._new.keys, self._placed)

    def commit_launches(self) -> list[Launch]:
        """Returns the launches of step 5."""
        raise NotImplementedError

    def _content_launch(self) -> Launch:
        """Returns the launch that writes what the rows of the keys begin with."""
        table, new = self._table, self._new
        if new.values is not None:
            return table.store.write_launch(self.rows, new.values, source=new.source)
        where = (table.backend, table.store, self.rows, new.keys, table.table_seed)
        return table.initializer.fill_launch(*where, new.refused_values)

    def settle(self, counted: list[int]) -> None:
        """Updates the counters of a table all of whose new keys have got rows."""
        self._table.store.take(self._claim)
        self._index.record.size += self._n
        self._table.counters.inserted += self._n

    def finish(self) -> None:
        """Does what may still fail, when all tables are settled."""


class DetInsertion(Insertion):
    """New keys of an "hbm" table."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._placed = self._table.backend.xp.empty(self._n, np.int64)

    def reserve_launch(self) -> Launch:
        refused = counter(self._counters, Count.REFUSED)
        where = (self._new.keys, self._new.lookup_number, self._placed, refused)
        launch: Launch = self._index.reserve_launch(*where)
        return launch

    def commit_launches(self) -> list[Launch]:
        return [
            *self._before,
            *self._table.store.give_rows_launches(self._claim, self._placed),
            self._content_launch(),
            *self._after(self.rows),
        ]


class HkvInsertion(Insertion):
    """New keys of a "hybrid" table: it grows; at its full size it evicts other keys, or refuses
    new ones. Which keys go is known when it has happened."""

    def __init__(self, table: TableBase, new: NewKeys, *args: Any) -> None:
        super().__init__(table, _with_pending_counts(table, new), *args)
        self._placed = self._index.new_placement(self._n)
        self.needs_counts = new.num_turned_away > 0 or table.pending is not None
        self._evicts = False
        self._choose_eviction()

    def _choose_eviction(self) -> None:
        """Decides whether the keys evict others: at full size, unless the index is sparse. That
        buckets are full is then no accident, and another seed is tried first."""
        is_sparse = self._index.is_sparse(self._n) and not self._has_new_seed
        self._evicts = self._index.is_at_max_capacity and not is_sparse
        self.reserves = not self._evicts
        if self._evicts:
            self.needs_counts = True
            self.rows = self._table.backend.xp.empty(self._n, np.uint32)

    def reserve_launch(self) -> Launch:
        return self._place_launch(None, None)

    def _place_launch(self, claim: Claim | None, rows: Array | None) -> Launch:
        """Returns the launch that gives slots to the keys; with a claim rows as well, and by
        evicting others."""
        new = self._new
        counts = counter(self._counters, Count.REFUSED, Count.EVICTED)
        where = (new.keys, new.lookup_number, new.scores, self._placed, counts, claim, rows)
        launch: Launch = self._index.reserve_launch(
            *where, are_scores=new.are_scores, scores_follow=self._table.sees_updates
        )
        return launch

    def _change_index(self) -> None:
        index = self._index
        if not index.is_sparse(self._n):
            # Both buckets of a key can be full before the table is: then it grows early rather
            # than lose a key.
            index.double()
        elif self._has_new_seed:
            raise index.hash_flooding_error()
        else:
            self._has_new_seed = True
            if index.is_at_max_capacity:
                with contextlib.suppress(MemoryError):  # then it evicts
                    index.reseed()
            elif not index.reseed():
                raise index.hash_flooding_error()
        self._choose_eviction()

    def commit_launches(self) -> list[Launch]:
        table, keys = self._table, self._new.keys
        if self._evicts:
            giving = self._evict_launches()
        else:
            giving = table.store.give_rows_launches(self._claim, self._placed.slots)
        forgetting = []
        if table.pending is not None:
            num_forgotten = counter(self._counters, Count.FORGOTTEN)
            forgetting = [table.pending.erase_found_launch(keys, self.rows, num_forgotten)]
        return [
            *self._before,
            *giving,
            self._content_launch(),
            *([] if table.tiers is None else table.tiers.assign_launches(self.rows, keys)),
            *self._after(self.rows),
            *forgetting,
        ]

    def _evict_launches(self) -> list[Launch]:
        """Returns the launches that give slots and rows to the keys, log and read what they evict,
        and reset the optimizer states."""
        table, placed, n = self._table, self._placed, self._n
        launches = [self._place_launch(self._claim, self.rows)]
        if table.removals is not None:
            num_again = counter(self._counters, Count.LOGGED)
            those = (placed.evicted_keys, placed.evicted_rows, self._new.lookup_number)
            most = min(n, self._index.size)
            launches += table.removals.evicted_launches(*those, most, num_again)
        if self._new.evicted is not None:
            self._last_values = table.store.output(n)
            # When `finish` selects from them it is too late to run out of memory.
            spare = int(self._last_values.nbytes) + _SELECTION_BYTES * n
            self._spare = table.backend.xp.empty(spare, np.uint8)
            launches.append(table.store.read_launch(placed.evicted_rows, self._last_values))
        has_values = table.store.states_with_values  # others are zeros, as new memory is
        return launches + [
            table.store.fill_launch(
                state, self.rows if state in has_values else placed.evicted_rows
            )
            for state in table.store.state_names
        ]

    def settle(self, counted: list[int]) -> None:
        table, new = self._table, self._new
        if new.num_seen is not None:  # by the rows that were far before
            table.count_lookup(new.num_seen + self._n)
        table.counters.not_admitted += new.num_turned_away
        if table.pending is not None:
            table.pending.record.size += new.num_first
            table.pending.note_erased(counted[Count.FORGOTTEN])
        if not self._evicts:
            super().settle(counted)
            return
        num_placed, num_evicted = counted[Count.PLACED], counted[Count.EVICTED]
        num_refused = self._n - num_placed
        table.store.take(self._claim, min(counted[Count.USED], int(self._claim.rows.size)))
        self._index.record.size += num_placed - num_evicted
        table.counters.inserted += num_placed
        table.counters.evicted += num_evicted
        table.counters.refused += num_refused
        table.counters.not_updated += num_refused * new.are_updated
        if num_evicted:
            table.invalidate_row_numbers()
        table.refused = (num_refused, self._n)
        if table.removals is not None:
            table.removals.note_evicted(counted[Count.LOGGED], num_evicted)

    def finish(self) -> None:
        if self._table.store.has_far_file:
            self._table.store.trim()
        if self._evicts and self._new.evicted is not None:
            del self._spare
            placed = self._placed
            has_evicted = placed.evicted_rows != np.uint32(NO_ROW)
            keys, scores = placed.evicted_keys[has_evicted], placed.evicted_scores[has_evicted]
            self._new.evicted.append(Evicted(keys, self._last_values[has_evicted], scores))


def _with_pending_counts(table: TableBase, new: NewKeys) -> NewKeys:
    """Adds the pending counts of new keys to their scores: so no count ever falls."""
    has_scores = new.are_scores and new.scores is not None
    if table.pending is None or not table.scores_are_counts or has_scores:
        return new
    xp = table.backend.xp
    added = np.uint64(1) if new.scores is None else new.scores
    scores = table.pending.counts(new.keys).astype(np.uint64) + added
    scores = xp.where(scores < added, ~np.uint64(0), scores)
    return new._replace(scores=scores, are_scores=False)


def insert_keys(table: TableBase, new: NewKeys, before: list[Launch], after: WithRows) -> None:
    """Inserts keys of a write into one table; `before` and `after` as of `Insertion`."""
    counters = new_counters(table.backend, 1)
    made: Insertion = table.new_insertion(new, counters[0], before, after)
    _insert_all(table.backend, counters, {0: made}, ())


def _insert_all(
    backend: Backend,
    counters: Array,
    insertions: dict[int, Insertion],
    others: Sequence[Sequence[Launch]],
) -> list[list[int]] | None:
    """Takes steps 4 to 6.

    Args:
      counters: (num_tables, len(Count)) int64.
      insertions: by the number of the table.
      others: lists of launches to be made when new keys get their rows.

    Returns:
      What kernels have counted, for each table; None: no insertion needs it.

    Raises:
      What an insertion raises before step 5. Then nothing is inserted.
    """
    try:
        _reserve_slots(backend, counters, insertions)
        commits = packed_launches(
            *(each.commit_launches() for each in insertions.values()), *others
        )
    except BaseException:
        for each in insertions.values():
            each.release_slots()
        raise
    for launch in commits:
        launch()
    counted = None
    if any(each.needs_counts for each in insertions.values()):
        counted = backend.to_host(counters).tolist()
    for i, each in insertions.items():
        each.settle(counted[i] if counted else [])
    for each in insertions.values():
        each.finish()
    return counted


def _reserve_slots(backend: Backend, counters: Array, insertions: dict[int, Insertion]) -> None:
    waiting = {i: each for i, each in insertions.items() if each.reserves}
    while waiting:
        launch_all(*([each.reserve_launch()] for each in waiting.values()))
        for each in waiting.values():
            each.has_slots = True
        counted = backend.to_host(counters).tolist()
        for i, each in waiting.items():
            each.check_slots(counted[i])
        waiting = {i: each for i, each in waiting.items() if each.reserves}


def claim_rows(table: TableBase, count: int) -> Claim:
    """Claims rows for keys; a MemoryError names the table."""
    try:
        return table.store.claim(count)
    except MemoryError as error:
        raise MemoryError(
            f"No memory for {count:,} more rows of table {table.name!r}, "
            f"{table.store.row_bytes:,} bytes each. It is as it was, with {table.size:,} keys. "
            f"Use more ranks, fewer keys or shorter rows. ({error})"
        ) from error


def gather_evicted(table: TableBase, parts: list[Evicted]) -> Evicted:
    """Joins evicted entries, whose keys are still int64."""
    xp = table.backend.xp
    keys = xp.concatenate([xp.empty(0, np.int64), *(part.keys for part in parts)])
    empty = xp.empty((0, table.dim), table.row_dtype.storage)
    values = xp.concatenate([empty, *(part.values for part in parts)])
    scores = xp.concatenate([xp.empty(0, np.uint64), *(part.scores for part in parts)])
    return Evicted(table.key_dtype.from_int64(xp, keys), values, scores)


# ---------------------------------------------------------------- without dedup


class ItemInsertion:
    """The insertion of missing items into an "hbm" table, whose index removes duplicates itself.

    Args:
      items: `keys`, `rows` and `inverse` are of all items of the lookup.
      num_missing: how many of them are missing: room is made for as many keys.

    Attributes:
      taken: (n,) uint32, gets the row of one item of each new key, NO_ROW of the others.
    """

    def __init__(self, items: _MissingKeys, num_missing: int) -> None:
        self.items, self.table = items, items.request.table
        self.index: Any = self.table.index
        xp, n = self.table.backend.xp, int(items.keys.size)
        self.claim: Claim = self.table.make_room(num_missing)
        self.placed, self.taken = xp.empty(n, np.int64), xp.empty(n, np.uint32)

    def launches(self) -> list[Launch]:
        """Returns the launches of step 5."""
        table, items, store = self.table, self.items, self.table.store
        first = (table.backend, store, self.taken, items.keys, table.table_seed)
        return [
            *self.index.insert_items_launches(
                *(items.keys, items.rows, table.clock.now, self.claim),
                (self.placed, items.inverse, self.taken),
                counter(items.counters, Count.REFUSED, Count.USED),
            ),
            table.initializer.fill_launch(*first),
            *(store.fill_launch(state, self.taken) for state in store.states_with_values),
            *items.result_launches(items.rows),
        ]

    def settle(self, num_new: int) -> None:
        """Updates the counters of the table by its new keys."""
        self.table.store.take(self.claim, num_new)
        self.index.record.size += num_new
        self.table.counters.inserted += num_new


def _insert_items(
    backend: Backend,
    keys: Array,
    rows: Array,
    requests: Sequence[LookupRequest],
    counters: Array,
    num_missing: Sequence[int],
) -> bool:
    """Inserts missing keys without dedup; returns whether it did. If keys of one table found no
    slot, all tables are as they were."""
    sizes = [each.size for each in requests]
    inverse = backend.xp.empty(int(keys.size), np.int32)
    its_keys, its_rows, its_inverse = (split(each, sizes) for each in (keys, rows, inverse))
    insertions = {}
    for i, count in enumerate(num_missing):
        if count:
            items = (its_rows[i], its_inverse[i], 0, its_keys[i], counters[i])
            insertions[i] = ItemInsertion(_MissingKeys(requests[i], *items), count)
    launch_all(*[each.launches() for each in insertions.values()])
    counted = backend.to_host(counters).tolist()
    if not any(counted[i][Count.REFUSED] for i in insertions):
        for i, each in insertions.items():
            each.settle(counted[i][Count.USED])
        return True
    for each in insertions.values():  # of all tables, before anything needs memory
        each.index.take_back(each.items.keys, each.placed, each.taken)
    for each in insertions.values():
        each.items.rows[each.items.inverse >= 0] = NO_ROW
        each.items.counters[Count.REFUSED : Count.USED + 1] = 0
    return False


def _can_skip_dedup(request: LookupRequest, num_missing: int) -> bool:
    """Whether a request inserts all its missing keys, and the index may remove duplicates."""
    if not request.insert or request.then is not None:
        return False
    is_few = num_missing <= most_new_items(request.table.backend)
    return is_few and request.table.can_skip_dedup(num_missing)


def most_new_items(backend: Backend) -> int:
    """Returns up to how many missing items of a table are inserted without dedup."""
    return _MOST_ITEMS_ON_CPU if backend.name == "cpu" else _MOST_ITEMS

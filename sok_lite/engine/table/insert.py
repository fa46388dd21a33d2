"""New keys on their way into tables: from what a search has missed to rows.

 1. Keys are told apart (`dedup`), and values are drawn for those that may get no row.
 2. Where a table admits only some, it is decided which (admission.py).
 3. Each table makes room: the index grows and rows are claimed.
 4. Keys get slots, in which no search finds them yet. Where some find none the index grows, or
    takes another seed, and they try again. A full "hybrid" table leaves this out.
 5. Rows are written and given to their keys; in a full "hybrid" table a kernel says in the same
    launch who goes. The results of the lookup follow.
 6. The counters follow what kernels have counted.

Tables go through these steps together, so that launches are made, and a device is waited for, as
often for a thousand tables as for one. An error before the launches of 5 are made, for which
`commit_launches` still finds memory, leaves every table as it was, but for its room. Signals wait
until the end of all steps (find.py, `look_up_batch`).

Where an "hbm" table has room and no key is turned away, the index tells keys apart itself: see
`ItemInsertion`. Native code does the same for tables that have room (kernels/ops/insertion.cpp).
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import Launch, launch_all
from sok_lite.backend.ragged import split
from sok_lite.engine.dedup import Distinct, Missing, dedup
from sok_lite.engine.pooling import COMBINERS
from sok_lite.engine.rows.access import NewRows
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.rows.store import NO_ROW, RowStore
from sok_lite.engine.table.admission import CountedKeys
from sok_lite.engine.table.counters import Count, counter, new_counters
from sok_lite.engine.table.parts import TableParts
from sok_lite.engine.table.results import Evicted

# Of more, a CPU tells keys apart faster in a scratch hash: that stays in its caches, and what then
# goes through the keys has no gaps.
_MOST_ITEMS_ON_CPU = 4096
_MOST_ITEMS = 1 << 30  # that `dedup` takes, too
_SELECTION_BYTES = (
    32  # that each key takes where evicted ones are selected: key, score, index, mask
)

# Returns the launches that follow when new keys have their rows, (n,) uint32.
WithRows = Callable[[Array], list[Launch]]


class Output(NamedTuple):
    """Rows that a lookup gives, of keys that lie one behind another.

    Attributes:
      out: gets them: (m, dim) of the storage dtype from `store.output`; pooled, (batch, dim)
        float32.
      first, end: which of the table's keys they belong to.
      row_splits: (batch + 1,) int64, from 0 to end - first: the rows are pooled; None: they are
        given as they are.
      weights: (end - first,) float32, of pooled rows; None: all 1.
      combiner: "sum", "mean" or "sqrtn", of pooled rows.
    """

    out: Array
    first: int
    end: int
    row_splits: Array | None = None
    weights: Array | None = None
    combiner: str = "sum"


class LookupRequest(NamedTuple):
    """A lookup in one table.

    Attributes:
      table: the table.
      size: number of its keys.
      outputs: what is wanted beside row numbers: one that has all keys, or pooled ones that have
        all keys together.
      insert: whether keys without a row get one.
      missing: what a key gives that has no row afterwards, "initial" or "zeros".
      filter_ratio: chance of a key without a row to get one this time.
      unique_keys: a promise that no key repeats.
      caller_scores: (size,) uint64, scores or increments of the caller's, of keys that do not
        repeat. Of a table that counts repeats they may: it is how often each item counts.
      evicted: grows by what was evicted; None: it is not wanted.
      then: of an update, returns the launches that take the step, once all keys have their rows.
    """

    table: TableParts
    size: int
    outputs: Sequence[Output] = ()
    insert: bool = True
    missing: str = "initial"
    filter_ratio: float = 1.0
    unique_keys: bool = False
    caller_scores: Array | None = None
    evicted: list[Any] | None = None
    then: Callable[[], list[Launch]] | None = None


def pooling(output: Output) -> tuple[int, tuple[Any, ...]]:
    """Returns the rows of a pooled output, and how they are pooled, as kernels take it."""
    assert output.row_splits is not None
    how = (output.row_splits, output.weights, COMBINERS[output.combiner])
    return len(output.row_splits) - 1, how


class Incomplete(NamedTuple):
    """The counters after a search, by which the missing keys of each table are known.

    Attributes:
      counters: (num_tables, len(Count)) int64.
      counted: what they say by now, on the host.
      begin: (num_tables + 1,) int64, where the keys of each table start.
    """

    counters: Array
    counted: list[list[int]]
    begin: np.ndarray


def complete(
    backend: Backend,
    keys: Array,
    rows: Array,
    requests: Sequence[LookupRequest],
    found: Incomplete,
    others: Sequence[Sequence[Launch]],
) -> list[int]:
    """Inserts what is missing, or not, and writes what it belongs to.

    Args:
      keys: (n,) int64, of all requests, one after the other.
      rows: (n,) uint32, their row numbers, NO_ROW where missing; gets those of new keys.
      requests: one for each table.
      found: what a search has found.
      others: lists of launches to be made when new keys get their rows.

    Returns:
      How many keys have no row afterwards, for each table.

    Raises:
      MemoryError: no memory for the new keys; the tables are as they were.
    """
    num_missing = [counts[Count.MISSING] for counts in found.counted]
    tables = [i for i, count in enumerate(num_missing) if count]
    can_insert_items = not others and all(
        _inserts_items(requests[i], num_missing[i]) for i in tables
    )
    if can_insert_items and _insert_items(backend, keys, rows, requests, found, tables):
        return [0] * len(num_missing)
    repeat = not all(requests[i].unique_keys for i in tables)
    distinct = dedup(backend, keys, found.begin, Missing(rows, num_missing), repeat)
    new = _new_keys(tables, rows, requests, found, distinct)
    launch_all(*(each.draw_launches() for each in new.values()))
    _admit(backend, found.counters, new)
    inserting = {i: each.insertion() for i, each in new.items() if each.request.insert}
    reading = [each.delivery_launches(None) for each in new.values() if not each.request.insert]
    counted = insert_all(backend, found.counters, inserting, [*reading, *others])
    for i in inserting:
        num_missing[i] = counted[i][Count.NO_ROW] if counted else 0
    return num_missing


class _New:
    """The new keys of one table.

    Attributes:
      request: to its table.
      num_seen: how many keys the search has marked as seen.
      rows: (request.size,) uint32, the row numbers of its keys.
      number: (request.size,) int32, which new key each of them is, from `first` on; -1: it is none.
      keys: (u,) int64.
      values: (u, dim) storage, what a key gives that gets no row; None: zeros, or all get one.
      are_drawn: whether `values` are drawn before it is known which keys get a row.
      caller_scores: (u,) uint64, scores or increments of the caller's; None: there are none.
      place: (u,) int32, which of the admitted keys each one is; None: all are.
      admitted: (k,) int64, those.
      source: (k,) int32, which of `keys` each of them is; None: key i the i-th.
      counted_keys: new pending counts, which the insertion stores; None: there are none.
      num_first: how many of those were not counted before.
      counters: (len(Count),) int64.
    """

    def __init__(
        self, request: LookupRequest, rows: Array, number: Array, first: int, keys: Array
    ) -> None:
        self.request, self.rows = request, rows
        self.number, self.first, self.keys = number, first, keys
        self.values: Array | None = None
        self.are_drawn = False
        self.caller_scores: Array | None = None
        self.place: Array | None = None
        self.admitted, self.source = keys, None
        self.counted_keys: CountedKeys | None = None
        self.num_first = self.num_seen = 0
        self.counters: Array

    def draw_launches(self) -> list[Launch]:
        """Returns the launches that write `values`, where they are wanted and may be of many
        keys."""
        request, table = self.request, self.request.table
        if request.missing != "initial" or not request.outputs:
            return []
        if request.insert and table.keeps_every_key:
            return []
        # Now: there may be no memory for them when it is known which keys get no row.
        self.values = table.store.output(int(self.keys.size))
        if request.insert and not table.may_turn_away(request.filter_ratio):
            return []  # with the rows, of those that are refused
        self.are_drawn = True
        return [table.draw_launch(self.values, self.keys)]

    def insertion(self) -> "Insertion":
        """Returns the insertion of the keys, which has made room for them."""
        request, table = self.request, self.request.table
        new = NewKeys(
            self.admitted,
            table.clock.now,
            scores=self.caller_scores,
            values=self.values if self.are_drawn else None,
            source=self.source,
            refused_values=None if self.are_drawn else self.values,
            are_updated=request.then is not None,
        )
        made: Insertion = table.new_insertion(new, self.counters, self.delivery_launches)
        made.evicted, made.num_seen = request.evicted, self.num_seen
        if self.place is not None:
            made.num_turned_away = int(self.keys.size - self.admitted.size)
            made.is_counted = True  # these keys have no row, as the counters say
        if self.counted_keys is not None and table.pending is not None:
            made.before += table.pending.store_launches(self.counted_keys, self.num_first)
            made.num_first = self.num_first
        return made

    def delivery_launches(self, new_rows: Array | None) -> list[Launch]:
        """Returns the launches that follow when the admitted keys have their rows (k,) uint32;
        None: none get any."""
        table, all_rows, n = self.request.table, new_rows, int(self.keys.size)
        launches: list[Launch] = []
        if self.place is not None and new_rows is not None:
            all_rows = table.backend.xp.empty(n, np.uint32)
            spread = (self.place, new_rows, all_rows, n)
            launches.append(table.backend.prepared("admission_spread", n, *spread))
        got = NewRows(self.number, self.first, all_rows, self.values)
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
        batch, how = pooling(output)
        values = None if got.values is None else got.values.view(np.uint8).reshape(-1)
        arguments = (
            *(*where, got.number[first:end], got.first, got.rows, values),
            *(*how, self.rows[first:end], output.out, num_without_row, batch, 0),
        )
        return table.backend.prepared(f"pool_again_{table.row_dtype.suffix}", batch, *arguments)


def _new_keys(
    tables: Sequence[int],
    rows: Array,
    requests: Sequence[LookupRequest],
    found: Incomplete,
    distinct: Distinct,
) -> dict[int, _New]:
    """Returns the new keys of each of some tables."""
    sizes = np.diff(found.begin)
    its_rows, its_numbers = split(rows, sizes), split(distinct.inverse, sizes)
    new_keys = split(distinct.keys, distinct.sizes)
    starts = distinct.starts.tolist()
    new = {}
    for i in tables:
        each = _New(requests[i], its_rows[i], its_numbers[i], starts[i], new_keys[i])
        each.num_seen, each.counters = found.counted[i][Count.SEEN], found.counters[i]
        caller_scores = requests[i].caller_scores
        if caller_scores is not None:
            items = distinct.first[starts[i] : starts[i + 1]] - np.int32(found.begin[i])
            each.caller_scores = requests[i].table.backend.xp.take(caller_scores, items)
        new[i] = each
    return new


def _admit(backend: Backend, counters: Array, new: dict[int, _New]) -> None:
    """Decides which new keys get a row now, where that is not all of them."""
    choosing = {
        i: each
        for i, each in new.items()
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
        keys, each.admitted = each.keys, xp.empty(count, np.int64)
        each.place, each.source = xp.empty(n, np.int32), xp.empty(count, np.int32)
        each.num_first = counted[i][Count.FIRST_SEEN]
        admitted = (each.place, each.admitted, each.source)
        arguments = (keys, its_mask, its_sums, before, *admitted, n)
        listing.append([each.request.table.backend.prepared("admission_list", n, *arguments)])
        before += count
    launch_all(*listing)
    for each in choosing.values():
        if each.caller_scores is not None:
            each.caller_scores = xp.take(each.caller_scores, each.source)


# ---------------------------------------------------------------- insertion


class NewKeys(NamedTuple):
    """Keys that are to be inserted.

    Attributes:
      keys: (n,) int64, distinct and missing.
      lookup_number: number of the lookup that they come with.
      scores: (n,) uint64, what the caller gave for them; None: nothing.
      are_scores: whether those are the scores to have, whatever the strategy.
      values: (m, dim) storage, what their rows begin with; None: the initial values of the keys.
      source: (n,) int32, which of `values` each key has; None: key i the i-th.
      refused_values: (n, dim) storage, without `values`: gets the initial values of keys that are
        refused; None: nobody wants them.
      are_updated: whether they come with an update, which leaves out those that are refused.
    """

    keys: Array
    lookup_number: int
    scores: Array | None = None
    are_scores: bool = False
    values: Array | None = None
    source: Array | None = None
    refused_values: Array | None = None
    are_updated: bool = False


class Insertion:
    """The new keys of one table, from step 3 on. It makes room when it is made.

    Args:
      table: the table.
      new: its new keys.
      counters: (len(Count),) int64, of this table.
      after: returns the launches that follow when the keys have their rows; NO_ROW if refused.

    Attributes:
      before: launches that are made in front; none of the index, which may grow first.
      evicted: grows by what was evicted; None: it is not wanted.
      num_seen: how many keys its lookup has found; None: it is no lookup.
      num_first: of `before`, how many keys have a pending count from now on.
      num_turned_away: new keys of the call that were not admitted.
      reserves: whether keys are to be given slots before they get rows.
      has_slots: whether they have such slots, which `take_back` gives back.
      is_counted: whether `settle` needs what kernels have counted.
      rows: (n,) uint32, gets the rows of the keys.
    """

    reserves = True
    has_slots = False
    is_counted = False
    evicted: list[Any] | None = None
    num_seen: int | None = None
    num_first = num_turned_away = 0

    def __init__(self, table: TableParts, new: NewKeys, counters: Array, after: WithRows) -> None:
        self._table: TableParts = table
        self._index: Any = table.index
        self._new, self._counters, self._after = new, counters, after
        self._n = int(new.keys.size)
        self.before: list[Launch] = []
        self._claim: Claim = table.make_room(self._n)
        self._num_refused = 0
        self._has_new_seed = False
        self.rows = self._claim.rows

    def reserve_launch(self) -> Launch:
        """Returns the launch that gives slots to the keys, in which no search finds them."""
        raise NotImplementedError

    def look_at(self, counted: list[int]) -> None:
        """Goes on after `reserve_launch`: if keys were refused it takes the slots back, and gives
        the index another size or seed; then `reserves` says whether to try again.

        Args:
          counted: what kernels have counted.

        Raises:
          MemoryError: no memory for another index; it is as it was.
          RuntimeError: the keys are chosen against the hash.
        """
        if counted[Count.REFUSED] == self._num_refused:
            self.reserves = False
            return
        self._num_refused = counted[Count.REFUSED]
        self.take_back()
        self._change_index()

    def _change_index(self) -> None:
        raise NotImplementedError

    def take_back(self) -> None:
        """Takes slots back that keys have. It needs no memory."""
        if self.has_slots:
            self.has_slots = False
            self._take_back()

    def _take_back(self) -> None:
        raise NotImplementedError

    def commit_launches(self) -> list[Launch]:
        """Returns the launches of step 5."""
        raise NotImplementedError

    def settle(self, counted: list[int]) -> None:
        """Brings the counters to what kernels have done.

        Args:
          counted: what they have counted, where `is_counted`.
        """
        table = self._table
        if self.num_seen is not None:  # by the rows that were far before
            table.count_lookup(self.num_seen + self._n)
        if table.pending is not None:
            table.pending.record.size += self.num_first
        table.counters.not_admitted += self.num_turned_away
        self._settle(counted)

    def _settle(self, counted: list[int]) -> None:
        """Of keys all of which have got rows."""
        self._table.store.take(self._claim)
        self._index.record.size += self._n
        self._table.counters.inserted += self._n

    def finish(self) -> None:
        """Does what may still fail, when all of the call is in place."""
        if self._table.store.has_far_file:
            self._table.store.trim()

    def _content_launch(self) -> Launch:
        """Returns the launch that writes what the rows of the keys begin with."""
        table, new = self._table, self._new
        if new.values is not None:
            return table.store.write_launch(self.rows, new.values, source=new.source)
        where = (table.backend, table.store, self.rows, new.keys, table.table_seed)
        return table.initializer.fill_launch(*where, new.refused_values)


class DetInsertion(Insertion):
    """New keys of an "hbm" table."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._placed = self._table.backend.xp.empty(self._n, np.int64)

    def reserve_launch(self) -> Launch:
        num_refused = counter(self._counters, Count.REFUSED)
        new = self._new
        launch: Launch = self._index.reserve_launch(
            new.keys, new.lookup_number, self._placed, num_refused
        )
        return launch

    def _change_index(self) -> None:
        if self._has_new_seed:
            raise self._index.error_of_chosen_keys()
        self._has_new_seed = True
        self._index.take_new_seed()

    def _take_back(self) -> None:
        self._index.take_back(self._new.keys, self._placed)

    def commit_launches(self) -> list[Launch]:
        return [
            *self.before,
            *self._table.store.list_launches(self._claim, self._placed),
            self._content_launch(),
            *self._after(self.rows),
        ]


class HkvInsertion(Insertion):
    """New keys of a "hybrid" table: it grows, or they take the places of others, or are refused.

    Which keys go is known when it has happened.
    """

    def __init__(self, table: TableParts, new: NewKeys, *args: Any) -> None:
        super().__init__(table, _with_pending_counts(table, new), *args)
        self._placed = self._index.unplaced(self._n)
        self._evicts = False
        self._reserve_or_evict()

    def _reserve_or_evict(self) -> None:
        index = self._index
        is_sparse = index.is_sparse(self._n) and not self._has_new_seed
        self._evicts = index.is_full_size and not is_sparse
        self.reserves = not self._evicts
        if self._evicts:
            self.is_counted = True
            self.rows = self._table.backend.xp.empty(self._n, np.uint32)

    def reserve_launch(self) -> Launch:
        """With eviction all keys get rows by the same launch."""
        new, index = self._new, self._index
        claim, rows = (self._claim, self.rows) if self._evicts else (None, None)
        counts = counter(self._counters, Count.REFUSED, Count.EVICTED)
        where = (new.keys, new.lookup_number, new.scores, self._placed, counts, claim, rows)
        launch: Launch = index.reserve_launch(
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
            raise index.error_of_chosen_keys()
        else:
            self._has_new_seed = True
            self._take_new_seed()
        self._reserve_or_evict()

    def _take_new_seed(self) -> None:
        """Gives the keys of a sparse index other places, if it can."""
        if self._index.is_full_size:
            with contextlib.suppress(MemoryError):  # then it evicts
                self._index.take_new_seed()
        elif not self._index.take_new_seed():
            raise self._index.error_of_chosen_keys()

    def _take_back(self) -> None:
        self._index.take_back(self._new.keys, self._placed)

    def commit_launches(self) -> list[Launch]:
        table, keys = self._table, self._new.keys
        if self._evicts:
            giving = self._evicting_launches()
        else:
            giving = table.store.list_launches(self._claim, self._placed.slots)
        forgetting = []
        if table.pending is not None:
            self.is_counted = True
            num_forgotten = counter(self._counters, Count.FORGOTTEN)
            forgetting = [table.pending.erase_found_launch(keys, self.rows, num_forgotten)]
        return [
            *self.before,
            *giving,
            self._content_launch(),
            *([] if table.tiers is None else table.tiers.assign_launches(self.rows, keys)),
            *self._after(self.rows),
            *forgetting,
        ]

    def _evicting_launches(self) -> list[Launch]:
        table, placed, n = self._table, self._placed, self._n
        launches = [self.reserve_launch()]
        if table.removals is not None:
            num_again = counter(self._counters, Count.LOGGED)
            those = (placed.evicted_keys, placed.evicted_rows, self._new.lookup_number)
            most = min(n, self._index.size)
            launches += table.removals.evicted_launches(*those, most, num_again)
        if self.evicted is not None:
            self._last_values = table.store.output(n)
            # When `finish` selects from them it is too late to run out of memory.
            spare = int(self._last_values.nbytes) + _SELECTION_BYTES * n
            self._spare = table.backend.xp.empty(spare, np.uint8)
            launches.append(table.store.read_launch(placed.evicted_rows, self._last_values))
        return [*launches, *_first_states(table.store, self.rows, placed.evicted_rows)]

    def _settle(self, counted: list[int]) -> None:
        table = self._table
        if table.pending is not None:
            table.pending.note_erased(counted[Count.FORGOTTEN])
        if not self._evicts:
            super()._settle(counted)
            return
        num_placed, num_evicted = counted[Count.PLACED], counted[Count.EVICTED]
        num_refused = self._n - num_placed
        table.store.take(self._claim, min(counted[Count.USED], int(self._claim.rows.size)))
        self._index.record.size += num_placed - num_evicted
        table.counters.inserted += num_placed
        table.counters.evicted += num_evicted
        table.counters.refused += num_refused
        table.counters.not_updated += num_refused * self._new.are_updated
        if num_evicted:
            table.renew()
        table.refused = (num_refused, self._n)
        if table.removals is not None:
            table.removals.note_evicted(counted[Count.LOGGED], num_evicted)

    def finish(self) -> None:
        super().finish()
        if self._evicts and self.evicted is not None:
            del self._spare
            _, keys, rows, scores = self._placed
            has_evicted = rows != np.uint32(NO_ROW)
            evicted = (keys[has_evicted], self._last_values[has_evicted], scores[has_evicted])
            self.evicted.append(Evicted(*evicted))


def _with_pending_counts(table: TableParts, new: NewKeys) -> NewKeys:
    """Adds the pending counts of new keys to their scores: so no count ever falls."""
    has_scores = new.are_scores and new.scores is not None
    if table.pending is None or not table.counts_repeats or has_scores:
        return new
    xp = table.backend.xp
    added = np.uint64(1) if new.scores is None else new.scores
    scores = table.pending.of(new.keys).astype(np.uint64) + added
    scores = xp.where(scores < added, ~np.uint64(0), scores)
    return new._replace(scores=scores, are_scores=False)


def _first_states(store: RowStore, rows: Array, evicted_rows: Array) -> list[Launch]:
    """Returns the launches that give rows (n,) uint32 their first states; new memory has zeros."""
    has_values = store.states_with_values
    return [
        store.fill_launch(state, rows if state in has_values else evicted_rows)
        for state in store.state_names
    ]


def insert_all(
    backend: Backend,
    counters: Array,
    insertions: dict[int, Insertion],
    others: Iterable[Sequence[Launch]] = (),
) -> list[list[int]] | None:
    """Makes insertions into different tables, steps 4 to 6.

    Args:
      backend: of all of them.
      counters: (num_tables, len(Count)) int64.
      insertions: by the number of the table.
      others: lists of launches to be made when new keys get their rows.

    Returns:
      The counters, where an insertion `is_counted`.

    Raises:
      Whatever an insertion raises while it prepares. None of them is made then.
    """
    try:
        waiting = {i: each for i, each in insertions.items() if each.reserves}
        while waiting:
            launch_all(*([each.reserve_launch()] for each in waiting.values()))
            for each in waiting.values():
                each.has_slots = True
            counted = backend.to_host(counters).tolist()
            for i, each in waiting.items():
                each.look_at(counted[i])
            waiting = {i: each for i, each in waiting.items() if each.reserves}
        launches = [each.commit_launches() for each in insertions.values()]
    except BaseException:
        for each in insertions.values():
            each.take_back()
        raise
    launch_all(*launches, *others)
    counted = None
    if any(each.is_counted for each in insertions.values()):
        counted = backend.to_host(counters).tolist()
    for i, each in insertions.items():
        each.settle(counted[i] if counted else [])
    for each in insertions.values():
        each.finish()
    return counted


def insert(
    table: TableParts,
    new: NewKeys,
    before: list[Launch],
    after: WithRows,
    evicted: list[Any] | None = None,
) -> None:
    """Inserts keys into one table.

    Args:
      before: launches that are made in front; none of the index, which may grow first.
      after: returns those that follow when the keys have their rows; NO_ROW if refused.
      evicted: grows by what was evicted; None: it is not wanted.
    """
    counters = new_counters(table.backend, 1)
    made: Insertion = table.new_insertion(new, counters[0], after)
    made.before, made.evicted = before, evicted
    insert_all(table.backend, counters, {0: made})


def claim_rows(table: TableParts, count: int) -> Claim:
    """Chooses rows for keys.

    Raises:
      MemoryError: it names the table.
    """
    try:
        return table.store.claim(count)
    except MemoryError as error:
        raise MemoryError(
            f"No memory for {count:,} more rows of table {table.name!r}, "
            f"{table.store.row_bytes:,} bytes each. It is as it was, with {table.size:,} keys. "
            f"Use more ranks, fewer keys or shorter rows. ({error})"
        ) from error


def gather_evicted(table: TableParts, parts: list[Evicted]) -> Evicted:
    """Returns together what was evicted, whose keys are int64 as yet."""
    xp = table.backend.xp
    keys = xp.concatenate([xp.empty(0, np.int64), *(part.keys for part in parts)])
    empty = xp.empty((0, table.dim), table.row_dtype.storage)
    values = xp.concatenate([empty, *(part.values for part in parts)])
    scores = xp.concatenate([xp.empty(0, np.uint64), *(part.scores for part in parts)])
    return Evicted(table.key_dtype.from_int64(xp, keys), values, scores)


# ---------------------------------------------------------------- items as they come


class ItemInsertion:
    """Keys of an "hbm" table as a lookup has them, which the index tells apart itself.

    Room is made for as many keys as there are items without a row, with those that repeat.

    Args:
      table: the table.
      new: its items.
      most: how many of them are missing.
    """

    def __init__(self, table: TableParts, new: _New, most: int) -> None:
        self._table: TableParts = table
        self._index: Any = table.index
        self._new = new
        xp, n = table.backend.xp, int(new.keys.size)
        self._claim: Claim = table.make_room(most)
        self._placed, self._taken = xp.empty(n, np.int64), xp.empty(n, np.uint32)

    def launches(self) -> list[Launch]:
        """Returns the launches of step 5."""
        table, new, store = self._table, self._new, self._table.store
        first = (table.backend, store, self._taken, new.keys, table.table_seed)
        return [
            *self._index.insert_items_launches(
                *(new.keys, new.rows, table.clock.now, self._claim),
                (self._placed, new.number, self._taken),
                counter(new.counters, Count.REFUSED, Count.USED),
            ),
            table.initializer.fill_launch(*first),
            *(store.fill_launch(state, self._taken) for state in store.states_with_values),
            *new.delivery_launches(new.rows),
        ]

    def settle(self, counted: list[int]) -> None:
        """Brings the counters to what the kernels have done."""
        used = counted[Count.USED]
        self._table.store.take(self._claim, used)
        self._index.record.size += used
        self._table.counters.inserted += used

    def take_back(self) -> None:
        """Takes back what the kernels have done to the index. It needs no memory."""
        self._index.take_back(self._new.keys, self._placed, self._taken)

    def clear_results(self) -> None:
        """Clears the results of what was taken back, so that another insertion gives them."""
        new = self._new
        new.rows[new.number >= 0] = NO_ROW
        new.counters[Count.REFUSED : Count.USED + 1] = 0


def _insert_items(
    backend: Backend,
    keys: Array,
    rows: Array,
    requests: Sequence[LookupRequest],
    found: Incomplete,
    tables: Sequence[int],
) -> bool:
    """Inserts the missing keys of some tables as they come.

    Returns:
      Whether it did. If keys of one table found no slot, all are as they were.
    """
    sizes = np.diff(found.begin)
    number = backend.xp.empty(int(keys.size), np.int32)
    its_keys, its_rows, its_numbers = (split(each, sizes) for each in (keys, rows, number))
    items = {}
    for i in tables:
        new = _New(requests[i], its_rows[i], its_numbers[i], 0, its_keys[i])
        new.counters = found.counters[i]
        items[i] = ItemInsertion(requests[i].table, new, found.counted[i][Count.MISSING])
    launch_all(*[each.launches() for each in items.values()])
    counted = backend.to_host(found.counters).tolist()
    if not any(counted[i][Count.REFUSED] for i in tables):
        for i, each in items.items():
            each.settle(counted[i])
        return True
    for each in items.values():  # of all tables, before anything needs memory
        each.take_back()
    for each in items.values():
        each.clear_results()
    return False


def _inserts_items(request: LookupRequest, num_missing: int) -> bool:
    """Whether a request is to insert all missing keys, and its table can do so as they come."""
    if not request.insert or request.then is not None:
        return False
    is_few = num_missing <= most_new_items(request.table.backend)
    return is_few and request.table.inserts_items(num_missing)


def most_new_items(backend: Backend) -> int:
    """Returns how many items of a table without a row are inserted as they come, at most."""
    return _MOST_ITEMS_ON_CPU if backend.name == "cpu" else _MOST_ITEMS

"""The second half of a lookup, for the keys that are missing: of all tables at once.

They are deduplicated, admitted, given rows and inserted, and what they belong to is written: row
numbers, rows, and pooled rows that have such a key. The number of launches and of waits does not
depend on the number of tables.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import Work, joined_launches
from sok_lite.backend.publish import Action, publish
from sok_lite.backend.ragged import split
from sok_lite.engine.dedup import Distinct, Missing, dedup
from sok_lite.engine.pooling import COMBINERS
from sok_lite.engine.rows.access import NewRows
from sok_lite.engine.table.counters import Count, counter
from sok_lite.engine.table.parts import TableParts
from sok_lite.engine.table.stages import COMMIT, NewKeys, Stage, Stages, run
from sok_lite.engine.table.tiering import plan_score_update

# Of more, a CPU tells keys apart faster in a scratch hash: that stays in its caches, and what then
# goes through the keys has no gaps.
_MOST_ITEMS_ON_CPU = 4096
_MOST_ITEMS = 1 << 30  # that `dedup` takes, too


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
      then: of an update, prepares what is done with the rows as soon as all keys have theirs.
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
    then: Callable[[], list[Action]] | None = None


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
      noting: actions to be taken with the insertion.
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
        self.noting: list[Action] = []
        self.num_seen = 0
        self.counters: Array

    def plan_draw(self) -> list[Action]:
        """Prepares to write `values`, where they are wanted and may be of many keys."""
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
        return [table.plan_draw(self.values, self.keys)]

    def plan_insert(self) -> Stages:
        """Gives the keys rows, where `request.insert`, and writes what they belong to."""
        request, table = self.request, self.request.table
        if not request.insert:
            return _at_once(self.plan_after(None))
        new = NewKeys(
            self.admitted,
            table.clock.now,
            scores=self.caller_scores,
            values=self.values if self.are_drawn else None,
            source=self.source,
            refused_values=None if self.are_drawn else self.values,
            are_updated=request.then is not None,
        )
        return table.insertion_stages(
            new, self.noting, self.plan_after, self.counters, request.evicted
        )

    def plan_after(self, new_rows: Array | None) -> list[Action]:
        """Prepares what follows when the admitted keys have their rows (k,) uint32; None: none."""
        table, all_rows, n = self.request.table, new_rows, int(self.keys.size)
        actions: list[Action] = []
        if self.place is not None and new_rows is not None:
            all_rows = table.backend.xp.empty(n, np.uint32)
            spread = (self.place, new_rows, all_rows, n)
            actions.append(table.backend.prepared("admission_spread", n, *spread))
        got = NewRows(self.number, self.first, all_rows, self.values)
        num_without_row = counter(self.counters, Count.NO_ROW)
        is_pooled = False
        for output in self.request.outputs:
            if output.row_splits is not None:
                is_pooled = True
                actions.append(self._plan_pool_again(output, got, num_without_row))
        if not is_pooled:
            out = self.request.outputs[0].out if self.request.outputs else None
            actions.append(table.store.plan_deliver(got, self.rows, out, num_without_row))
        if self.request.then is not None:
            actions += self.request.then()
        if self.request.insert:
            actions += plan_score_update(table, self.num_seen, new_rows)
        return actions

    def _plan_pool_again(self, output: Output, got: NewRows, num_without_row: Array) -> Action:
        """Prepares to pool anew the rows that have a key that was missing."""
        table, first, end = self.request.table, output.first, output.end
        *where, _ = table.store.place()
        batch, how = pooling(output)
        values = None if got.values is None else got.values.view(np.uint8).reshape(-1)
        arguments = (
            *(*where, got.number[first:end], got.first, got.rows, values),
            *(*how, self.rows[first:end], output.out, num_without_row, batch, 0),
        )
        return table.backend.prepared(f"pool_again_{table.row_dtype.suffix}", batch, *arguments)


def _at_once(actions: list[Action]) -> Stages:
    yield Stage(COMMIT, actions)


def complete(
    backend: Backend,
    keys: Array,
    rows: Array,
    requests: Sequence[LookupRequest],
    found: Incomplete,
    extra_actions: Sequence[Sequence[Action]],
) -> list[int]:
    """Inserts what is missing, or not, and writes what it belongs to.

    Args:
      keys: (n,) int64, of all requests, one after the other.
      rows: (n,) uint32, their row numbers, NO_ROW where missing; gets those of new keys.
      requests: one for each table.
      found: what a search has found.
      extra_actions: lists of actions to be taken when new keys get their rows.

    Returns:
      How many keys have no row afterwards, for each table.

    Raises:
      MemoryError: no memory for the new keys; the tables are as they were.
    """
    num_missing = [counts[Count.MISSING] for counts in found.counted]
    tables = [i for i, count in enumerate(num_missing) if count]
    can_insert_items = not extra_actions and all(
        _inserts_items(requests[i], num_missing[i]) for i in tables
    )
    if can_insert_items and _insert_items(backend, keys, rows, requests, found, tables):
        return [0] * len(num_missing)
    repeat = not all(requests[i].unique_keys for i in tables)
    distinct = dedup(backend, keys, found.begin, Missing(rows, num_missing), repeat)
    new = _new_keys(tables, rows, requests, found, distinct)
    publish(*(each.plan_draw() for each in new.values()))
    _admit(backend, found.counters, new)
    inserting = {i: each.plan_insert() for i, each in new.items()}
    counted = run(backend, found.counters, inserting, extra_actions)
    # Where nobody has counted, none was refused: those not admitted are left.
    if any(each.place is not None and i not in counted for i, each in new.items()):
        counted = dict(enumerate(backend.to_host(found.counters).tolist()))
    for i, each in new.items():
        if each.request.insert:
            num_missing[i] = counted[i][Count.NO_ROW] if i in counted else 0
    return num_missing


def _inserts_items(request: LookupRequest, num_missing: int) -> bool:
    """Whether a request is to insert all missing keys, and its table can do so as they come."""
    if not request.insert or request.then is not None:
        return False
    is_few = num_missing <= most_new_items(request.table.backend)
    return is_few and request.table.inserts_items(num_missing)


def most_new_items(backend: Backend) -> int:
    """Returns how many items of a table without a row are inserted as they come, at most."""
    return _MOST_ITEMS_ON_CPU if backend.name == "cpu" else _MOST_ITEMS


def _insert_items(
    backend: Backend,
    keys: Array,
    rows: Array,
    requests: Sequence[LookupRequest],
    found: Incomplete,
    tables: Sequence[int],
) -> bool:
    """Inserts the missing keys of some tables as they come.

    They need not be told apart before: the index does. But room is made for all of them, as many
    as there are with those that repeat, so that it is for tables that have it.

    Returns:
      Whether it did. If keys of one table found no slot, all are as they were.
    """
    sizes = np.diff(found.begin)
    number = backend.xp.empty(int(keys.size), np.int32)
    its_keys, its_rows, its_numbers = (split(each, sizes) for each in (keys, rows, number))
    inserting, settling = [], []
    for i in tables:
        table, most = requests[i].table, found.counted[i][Count.MISSING]
        of_items = (its_keys[i], its_rows[i], its_numbers[i])
        actions, settle = table.plan_insert_items(*of_items, most, found.counters[i])
        each = _New(requests[i], its_rows[i], its_numbers[i], 0, its_keys[i])
        each.num_seen, each.counters = found.counted[i][Count.SEEN], found.counters[i]
        inserting.append([*actions, *each.plan_after(its_rows[i])])
        settling.append(settle)
    publish(*inserting)
    counted = backend.to_host(found.counters).tolist()
    has_inserted = not any(counted[i][Count.REFUSED] for i in tables)
    for i, settle in zip(tables, settling, strict=True):
        settle(counted[i], has_inserted)
    return has_inserted


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
    admissions = [
        each.request.table.plan_admission(
            each.keys, each.request.filter_ratio, its_mask, each.counters, each.caller_scores
        )
        for each, its_mask in zip(choosing.values(), masks, strict=True)
    ]
    publish(*(admission.actions for admission in admissions))
    sums = split(xp.cumsum(mask, dtype=np.int64), sizes)
    counted = backend.to_host(counters).tolist()
    before, listing = 0, []
    for (i, each), admission, its_mask, its_sums in zip(
        choosing.items(), admissions, masks, sums, strict=True
    ):
        n, count, table = int(each.keys.size), counted[i][Count.ADMITTED], each.request.table
        keys, each.admitted = each.keys, xp.empty(count, np.int64)
        each.place, each.source = xp.empty(n, np.int32), xp.empty(count, np.int32)
        admitted = (each.place, each.admitted, each.source)
        arguments = (keys, its_mask, its_sums, before, *admitted, n)
        listing.append((table.backend, "admission_list", Work(n, arguments)))
        each.noting = [*admission.plan_note(counted[i]), *table.plan_count(not_admitted=n - count)]
        before += count
    publish(joined_launches(listing))
    for each in choosing.values():
        if each.caller_scores is not None:
            each.caller_scores = xp.take(each.caller_scores, each.source)

"""What a lookup does where keys are missing, for all tables at once.

They are deduplicated, admitted, given rows and inserted, and what they belong to is written: row
numbers, rows, and pooled rows that have such a key. The number of launches and of waits does not
depend on the number of tables.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, publish
from sok_lite.engine.pooling import COMBINERS
from sok_lite.engine.rows.access import NewRows
from sok_lite.engine.segments import Distinct, Missing, cut, dedup
from sok_lite.engine.table.insertion import Admission, Inserts, NewKeys
from sok_lite.engine.table.stages import GIVE, Count, Stage, Stages, counter, new_counters, run


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


class Asked(NamedTuple):
    """What one table is asked.

    Attributes:
      table: the table.
      size: number of its keys.
      outputs: what is wanted beside row numbers: one that has all keys, or pooled ones that have
        all keys together.
      insert: whether keys without a row get one.
      missing: what a key gives that has no row afterwards, "initial" or "zeros".
      filter_ratio: chance of a key without a row to get one this time.
      unique_keys: a promise that no key repeats.
      given: (size,) uint64 of keys that do not repeat: scores or increments of the caller's.
      evicted: grows by what was evicted; None: it is not wanted.
    """

    table: Inserts
    size: int
    outputs: Sequence[Output] = ()
    insert: bool = True
    missing: str = "initial"
    filter_ratio: float = 1.0
    unique_keys: bool = False
    given: Array | None = None
    evicted: list[Any] | None = None


def pooling(output: Output) -> tuple[int, tuple[Any, ...]]:
    """Returns the rows of a pooled output, and how they are pooled, as kernels take it."""
    assert output.row_splits is not None
    return len(output.row_splits) - 1, (
        *(output.row_splits, output.weights, COMBINERS[output.combiner]),
    )


class Incomplete(NamedTuple):
    """What a search has left to be done.

    Attributes:
      begin: (num_tables + 1,) int64, where the keys of each table start.
      num_missing: of each table the keys without a row, one that repeats each time.
      num_seen: of each table, see `index.Search`.
    """

    begin: np.ndarray
    num_missing: list[int]
    num_seen: list[int]


class _New:
    """The new keys of one table.

    Attributes:
      asked: what the table was asked.
      num_seen: see `Incomplete`.
      rows: (asked.size,) uint32, the row numbers of its keys.
      number: (asked.size,) int32, which new key each of them is, from `first` on; -1: it is none.
      keys: (u,) int64.
      values: (u, dim) storage, what a key gives that gets no row; None: zeros, or all get one.
      given: (u,) uint64, scores or increments of the caller's; None: there are none.
      place: (u,) int32, which of the admitted keys each one is; None: all are.
      admitted: (k,) int64, those.
      source: (k,) int32, which of `keys` each of them is; None: key i the i-th.
      noting: actions to be taken with the insertion.
      counters: (len(Count),) int64.
    """

    def __init__(
        self, asked: Asked, num_seen: int, rows: Array, number: Array, first: int, keys: Array
    ) -> None:
        self.asked, self.num_seen, self.rows = asked, num_seen, rows
        self.number, self.first, self.keys = number, first, keys
        self.values: Array | None = None
        self.given: Array | None = None
        self.place: Array | None = None
        self.admitted, self.source = keys, None
        self.noting: list[Action] = []
        self.counters: Array

    def drawing(self) -> list[Action]:
        """Prepares to write `values`, where they are wanted."""
        asked, table = self.asked, self.asked.table
        if asked.missing != "initial" or not asked.outputs:
            return []
        if asked.insert and not table._may_refuse():
            return []
        # Now: there may be no memory for them when it is known which keys get no row.
        self.values = table.store.output(int(self.keys.size))
        return [table._drawing(self.values, self.keys)]

    def inserting(self) -> Stages:
        """Gives the keys rows, as far as that is asked, and writes what they belong to."""
        asked, table = self.asked, self.asked.table
        if not asked.insert:
            return _at_once(self._after(None))
        new = NewKeys(
            self.admitted, table.clock.now, self.given, values=self.values, source=self.source
        )
        return table._inserting(new, self.noting, self._after, self.counters, asked.evicted)

    def _after(self, new_rows: Array | None) -> list[Action]:
        """Prepares what follows when the admitted keys have their rows (k,) uint32; None: none."""
        table, all_rows, n = self.asked.table, new_rows, int(self.keys.size)
        actions: list[Action] = []
        if self.place is not None and new_rows is not None:
            all_rows = table.backend.xp.empty(n, np.uint32)
            spread = (self.place, new_rows, all_rows, n)
            actions.append(table.backend.prepared("admission_spread", n, *spread))
        got = NewRows(self.number, self.first, all_rows, self.values)
        num_absent = counter(self.counters, Count.ABSENT)
        is_pooled = False
        for output in self.asked.outputs:
            if output.row_splits is not None:
                is_pooled = True
                actions.append(self._pooling_again(output, got, num_absent))
        if not is_pooled:
            out = self.asked.outputs[0].out if self.asked.outputs else None
            actions.append(table.store.delivering(got, self.rows, out, num_absent))
        if self.asked.insert:
            actions += table._touching(self.num_seen, new_rows)
        return actions

    def _pooling_again(self, output: Output, got: NewRows, num_absent: Array) -> Action:
        """Prepares to pool anew the rows that have a key that was missing."""
        table, first, end = self.asked.table, output.first, output.end
        *where, _ = table.store.place()
        batch, how = pooling(output)
        values = None if got.values is None else got.values.view(np.uint8).reshape(-1)
        arguments = (
            *(*where, got.number[first:end], got.first, got.rows, values),
            *(*how, self.rows[first:end], output.out, num_absent, batch),
        )
        return table.backend.prepared(f"pool_again_{table.row_dtype.suffix}", batch, *arguments)


def _at_once(actions: list[Action]) -> Stages:
    yield Stage(GIVE, actions)


def complete(
    backend: Backend, keys: Array, rows: Array, asked: Sequence[Asked], found: Incomplete
) -> list[int]:
    """Inserts what is missing, or not, and writes what it belongs to.

    Args:
      keys, rows, asked: as of `look_up`.
      found: what a search has found.

    Returns:
      How many keys have no row afterwards, for each table.

    Raises:
      MemoryError: see `look_up`.
    """
    numbers = [i for i, count in enumerate(found.num_missing) if count]
    repeat = not all(asked[i].unique_keys for i in numbers)
    distinct = dedup(backend, keys, found.begin, Missing(rows, found.num_missing), repeat)
    tables = _new_keys(numbers, rows, asked, found, distinct)
    counters = new_counters(backend, len(tables))
    for each, its_counters in zip(tables, counters, strict=True):
        each.counters = its_counters
    publish(*(each.drawing() for each in tables))
    _admit(backend, counters, tables)
    run(backend, counters, [each.inserting() for each in tables])
    absent = list(found.num_missing)
    may_refuse = any(each.asked.insert and each.asked.table._may_refuse() for each in tables)
    counted = backend.to_host(counters).tolist() if may_refuse else None
    for i, each in enumerate(tables):
        if each.asked.insert:
            absent[numbers[i]] = 0 if counted is None else counted[i][Count.ABSENT]
    return absent


def _new_keys(
    numbers: Sequence[int],
    rows: Array,
    asked: Sequence[Asked],
    found: Incomplete,
    distinct: Distinct,
) -> list[_New]:
    """Returns the new keys of each table that lacks some."""
    sizes = np.diff(found.begin)
    its_rows, its_numbers = cut(rows, sizes), cut(distinct.inverse, sizes)
    new_keys = cut(distinct.keys, distinct.sizes)
    starts = distinct.starts.tolist()
    tables = []
    for i in numbers:
        each = _New(
            *(asked[i], found.num_seen[i], its_rows[i], its_numbers[i], starts[i], new_keys[i])
        )
        given = asked[i].given
        if given is not None:
            items = distinct.first[starts[i] : starts[i + 1]] - np.int32(found.begin[i])
            each.given = asked[i].table.backend.xp.take(given, items)
        tables.append(each)
    return tables


def _admit(backend: Backend, counters: Array, tables: Sequence[_New]) -> None:
    """Decides which new keys get a row now, where that is not all of them."""
    xp = backend.xp
    sizes = [int(each.keys.size) for each in tables]
    mask = xp.ones(sum(sizes), np.uint8)
    masks = cut(mask, sizes)
    admissions: list[Admission | None] = [
        each.asked.table._admission(each.keys, each.asked.filter_ratio, masks[i], counters[i])
        if each.asked.insert
        else None
        for i, each in enumerate(tables)
    ]
    if not any(admissions):
        return
    publish(*(admission.actions for admission in admissions if admission))
    sums = xp.cumsum(mask, dtype=np.int64)
    counted = backend.to_host(counters).tolist()
    before, listing = 0, []
    for each, admission, its_mask, its_sums, counts in zip(
        tables, admissions, masks, cut(sums, sizes), counted, strict=True
    ):
        n = count = int(each.keys.size)
        if admission is not None:
            count = counts[Count.ADMITTED]
            its_keys, each.admitted = each.keys, xp.empty(count, np.int64)
            each.place, each.source = xp.empty(n, np.int32), xp.empty(count, np.int32)
            admitted = (each.place, each.admitted, each.source)
            arguments = (its_keys, its_mask, its_sums, before, *admitted, n)
            listing.append([backend.prepared("admission_list", n, *arguments)])
            not_admitted = each.asked.table._counting(not_admitted=n - count)
            each.noting = [*admission.noting(counts), not_admitted]
        before += count
    publish(*listing)
    for each in tables:
        if each.given is not None and each.source is not None:
            each.given = xp.take(each.given, each.source)

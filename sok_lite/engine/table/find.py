"""Lookups: keys are found, and missing ones inserted, or not.

`find`, `contains`, `scores`, `read_state`, `mark_seen_search`, `find_or_insert`, `lookup` and
`lookup_and_evict` are methods of `EmbeddingTable`. `look_up_batch` looks up in several tables at
once: one launch searches all tables, and only missing keys take more (insert.py).
"""

from collections.abc import Sequence
from itertools import starmap
from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import Launch, launch_all
from sok_lite.backend.ragged import split, split_offsets
from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.dedup import dedup, last_of_each, unique
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.segments import group
from sok_lite.engine.table.arguments import checked_counts, checked_keys, checked_scores
from sok_lite.engine.table.base import TableBase
from sok_lite.engine.table.clock import Clock
from sok_lite.engine.table.counters import Count, new_counters
from sok_lite.engine.table.dump_mark import forget
from sok_lite.engine.table.index import Found, Search
from sok_lite.engine.table.insert import LookupRequest, Output, gather_evicted, insert_missing
from sok_lite.engine.table.locking import locked, mutating, with_locks
from sok_lite.engine.table.results import Evicted, Lookup


class WrongSplitsError(ValueError):
    """Row splits do not rise from 0 to the number of keys."""


# ---------------------------------------------------------------- one table, nothing inserted


@locked
def find(table: TableBase, keys: Any) -> Array:
    """Returns the row number of every key, (n,) uint32; NO_ROW where it has none.

    Nothing but the counters changes: no key is inserted, and none counts as seen.
    """
    keys = checked_keys(table, keys)
    found = table.index.find(keys)
    count_found(table, int(keys.size), found.num_missing)
    return found.rows


@locked
def contains(table: TableBase, keys: Any) -> Array:
    """Returns whether each key has a row, (n,) bool."""
    return table.index.find(checked_keys(table, keys)).rows != np.uint32(NO_ROW)


@locked
def scores(table: TableBase, keys: Any) -> Array:
    """Returns the score of every key, (n,) uint64; 0 where it has no row.

    In an "hbm" table it is that of kLru: the number of the lookup that last saw the key.
    """
    return table.scores_of(checked_keys(table, keys))


@locked
def read_state(table: TableBase, name: str, keys: Any) -> Array:
    """Returns an optimizer state of keys, (n, dim) float32; its initial value for a key without a
    row.

    Raises:
      KeyError: there is no such state.
    """
    rows = table.index.find(checked_keys(table, keys)).rows
    column = table.store.column(name)
    state = table.store.read(rows, name)
    if column.initial != 0:
        state[rows == np.uint32(NO_ROW)] = column.initial
    return state


# ---------------------------------------------------------------- one table, new keys inserted


@mutating
def find_or_insert(
    table: TableBase,
    keys: Any,
    *,
    unique_keys: bool = False,
    scores: Any = None,
    filter_ratio: float = 1.0,
) -> Array:
    """Returns the row number of every key; keys without one get a row and its initial value.

    Args:
      keys: (n,).
      unique_keys: a promise that no key repeats, which saves a pass when keys are new.
      scores: (n,) uint64, for a "hybrid" table whose strategy takes scores from the caller.
      filter_ratio: chance of a key without a row to get one this time.

    Returns:
      (n,) uint32; NO_ROW for a key that was refused or not admitted.

    Raises:
      MemoryError: no memory for the new keys.
      RuntimeError: new keys find no slot: they are chosen against the hash.
      The table is as it was.
    """
    keys = checked_keys(table, keys)
    if scores is None:
        size = int(keys.size)
        request = LookupRequest(table, size, filter_ratio=filter_ratio, unique_keys=unique_keys)
        rows, _ = _look_up(keys, request)
    else:
        rows = _find_or_insert_with_scores(table, keys, scores, filter_ratio)
    table.report_refused()
    return rows


def _find_or_insert_with_scores(
    table: TableBase, keys: Array, scores: Any, filter_ratio: float
) -> Array:
    """Looks up distinct keys, each with the last of its scores; returns the rows of all keys."""
    backend, n = table.backend, int(keys.size)
    result = backend.xp.empty(n, np.uint32)
    scores = checked_scores(table, keys, scores)
    distinct, inverse = unique(backend, keys)
    size = int(distinct.size)
    last_scores = backend.xp.take(scores, last_of_each(backend, inverse, size))
    request = LookupRequest(
        table, size, filter_ratio=filter_ratio, unique_keys=True, caller_scores=last_scores
    )
    rows, _ = _look_up(distinct, request)
    backend.launch("dense_gather_u32", n, rows, 1, inverse, result, n)
    return result


@mutating
def lookup(
    table: TableBase,
    keys: Any,
    *,
    unique_keys: bool = False,
    out: Array | None = None,
    insert: bool = True,
    missing: str = "initial",
    filter_ratio: float = 1.0,
    counts: Any = None,
) -> Lookup:
    """Returns the row of every key and its number; new keys are inserted.

    Args:
      keys: (n,).
      unique_keys: a promise that no key repeats, which saves a pass when keys are new.
      out: (n, dim) of the storage dtype, C-contiguous, to write into; None: a new array.
      insert: whether keys without a row get one; if not, nothing but the counters changes.
      missing: the result of a key that has no row afterwards: "initial", the value it would start
        with, or "zeros".
      filter_ratio: chance of a key without a row to get one this time.
      counts: (n,) integers from 1 to 2**32 - 1, how often each key counts in a table with
        `count_repeats`, for callers that have deduplicated them; those of a repeated key add up.
        None: once. A lookup that inserts nothing counts nothing.

    Raises:
      ValueError: `out` or `counts` are not such arrays, or the table does not count.
      MemoryError: no memory for the result or the new keys.
      RuntimeError: new keys find no slot: they are chosen against the hash.
      The table is as it was.
    """
    if missing not in ("initial", "zeros"):
        raise ValueError(f"`missing` must be 'initial' or 'zeros'. Received: {missing!r}.")
    keys = checked_keys(table, keys)
    item_counts = None if counts is None else checked_counts(table, keys, counts)
    request = _row_request(
        *(table, keys, out),
        insert=insert,
        missing=missing,
        filter_ratio=filter_ratio,
        unique_keys=unique_keys,
        caller_scores=item_counts,
    )
    rows, num_without_row = _look_up(keys, request)
    table.report_refused()
    return Lookup(request.outputs[0].out, rows, num_without_row)


def continue_lookup(
    table: TableBase, keys: Array, out: Array, begun: tuple[Array, Array], missing: str
) -> None:
    """Ends a `lookup` that inserts, whose search native code has made.

    Args:
      out: (n, dim) of the storage dtype, C-contiguous; it has the rows that were found.
      begun: the counters (1, len(Count)) of the search, see `look_up_batch`, and the row numbers
        (n,) uint32.
    """
    counters, rows = begun
    keys = checked_keys(table, keys)
    request = _row_request(table, keys, out, missing=missing)

    def found() -> None:
        look_up_batch(table.backend, keys, rows, [request], begun=counters)
        table.report_refused()

    with_locks([table], found, continues_native=True)


@mutating
def lookup_and_evict(
    table: TableBase, keys: Any, *, unique_keys: bool = False, out: Array | None = None
) -> tuple[Array, Evicted]:
    """Looks up as `lookup` does; returns the rows (n, dim) and the evicted entries, in no order."""
    keys = checked_keys(table, keys)
    evicted: list[Evicted] = []
    request = _row_request(table, keys, out, unique_keys=unique_keys, evicted=evicted)
    _look_up(keys, request)
    table.report_refused(evicted)
    return request.outputs[0].out, gather_evicted(table, evicted)


def _row_request(table: TableBase, keys: Array, out: Array | None, **options: Any) -> LookupRequest:
    """Returns the request for the rows of all keys, to write into `out`; None: a new array."""
    size = int(keys.size)
    return LookupRequest(
        table, size, [Output(table.store.output(size, out=out), 0, size)], **options
    )


def _look_up(keys: Array, request: LookupRequest) -> tuple[Array, int]:
    """Looks up keys in one table; returns row numbers, and how many keys have no row."""
    backend = request.table.backend
    rows = backend.xp.empty(request.size, np.uint32)
    return rows, look_up_batch(backend, keys, rows, [request])[0]


# ---------------------------------------------------------------- several tables at once


def look_up_batch(
    backend: Backend,
    keys: Array,
    rows: Array,
    requests: Sequence[LookupRequest],
    others: Sequence[Sequence[Launch]] = (),
    begun: Array | None = None,
    is_lookup: bool = True,
) -> list[int]:
    """Finds keys, inserts those that are missing, and writes row numbers and rows.

    Args:
      keys: (n,) int64, which may repeat; those of each table follow those of the table before.
      rows: (n,) uint32, gets the row numbers.
      requests: to tables, all of them different and each in a call that may change it.
      others: lists of launches to be made when new keys get their rows; there are such keys then.
      begun: the counters (num_tables, len(Count)), on the host, of a search that native code has
        made under the same locks, with the clocks' next numbers: `rows` and the results have what
        it has found. None: no search was made.
      is_lookup: whether found and missing keys count in the statistics.

    Returns:
      How many keys have no row afterwards, for each table.

    Raises:
      MemoryError: no memory for new keys. Each table is as it was or as it is to be.
      WrongSplitsError: row splits of an output do not fit its keys. Nothing was inserted.
    """
    with uninterrupted():
        if begun is None:
            requests = _with_key_counts(backend, keys, requests)
            counters = _search(backend, keys, rows, requests)
            found = backend.to_host(counters)
        else:
            counters, found = backend.from_host(begun), begun
        missing, seen, wrong_splits = found[:, : Count.WRONG_SPLITS + 1].T.tolist()
        if any(wrong_splits):
            raise WrongSplitsError("Row splits do not rise from 0 to the number of keys.")
        if is_lookup:
            for request, num_missing in zip(requests, missing, strict=True):
                if num_missing:
                    count_found(request.table, request.size, num_missing)
                else:
                    request.table.counters.found += request.size
        for request, num_missing, num_seen in zip(requests, missing, seen, strict=True):
            if request.insert and not num_missing and not request.table.keeps_every_key:
                request.table.count_lookup(num_seen)
        if not any(starmap(_has_work_left, zip(requests, missing, strict=True))):
            return missing
        return insert_missing(backend, keys, rows, requests, counters, found.tolist(), others)


def _has_work_left(request: LookupRequest, num_missing: int) -> bool:
    """Whether missing keys need more than zeros, which the search has written."""
    draws = request.missing == "initial" and bool(request.outputs)
    return num_missing > 0 and (request.insert or draws)


def _search(backend: Backend, keys: Array, rows: Array, requests: Sequence[LookupRequest]) -> Array:
    """Searches the keys of all requests; returns the counters of each table."""
    inserting = [each.table for each in requests if each.insert]
    for table in inserting:
        if table.tiers is not None and table.tiers.is_due:  # no row number is known yet
            rebalance(table)
    for table in inserting:
        if table.clock.is_full:
            age(table)
    counters, sizes = new_counters(backend, len(requests)), [each.size for each in requests]
    # The kernel that pools as it finds takes no scores of the caller.
    pools_at_once = backend.name == "cpu" and all(each.caller_scores is None for each in requests)
    launches = []
    for each, *arrays in zip(
        requests, split(keys, sizes), split(rows, sizes), counters, strict=True
    ):
        # 0: the lookup inserts nothing, and marks no key as seen.
        lookup_number = each.table.clock.now + 1 if each.insert else 0
        prepare = _find_and_pool_launches if pools_at_once and _is_pooled(each) else _find_launches
        launches.append(prepare(each, lookup_number, *arrays))
    if not Clock.tick_all([table.clock for table in inserting]):
        for table in inserting:
            table.clock.tick()
    launch_all(*launches)
    return counters


def _is_pooled(request: LookupRequest) -> bool:
    return bool(request.outputs) and request.outputs[0].row_splits is not None


def _find_and_pool_launches(
    request: LookupRequest, lookup_number: int, keys: Array, rows: Array, counts: Array
) -> list[Launch]:
    """Returns a search that pools rows as it finds them, on a CPU."""
    table = request.table
    accesses = table.access_counts() if lookup_number else None
    search = (*table.index.kernel_args(), *table.index.mark_seen_args(lookup_number, accesses))
    launches = []
    for output in request.outputs:
        batch, arguments = _pooled(output, rows, counts)
        its_keys = keys[output.first : output.end]
        of_rows = (*search, its_keys, *table.store.place(), *arguments)
        launches.append(table.backend.prepared("find_and_pool", batch, *of_rows))
    return launches


def _find_launches(
    request: LookupRequest, lookup_number: int, keys: Array, rows: Array, counts: Array
) -> list[Launch]:
    table, outputs, is_pooled = request.table, request.outputs, _is_pooled(request)
    backend = table.backend
    accesses = table.access_counts() if lookup_number else None
    copying = None
    if outputs and not is_pooled:
        gives_zeros = not request.insert and request.missing == "zeros"
        if gives_zeros and backend.name != "cpu":
            outputs[0].out.fill(0)  # a kernel has no registers for it
        copying = table.store.copying(outputs[0].out, gives_zeros)
    launches = [
        table.index.search(
            keys, lookup_number, request.caller_scores, accesses, copying, (rows, counts)
        ).launch
    ]
    if is_pooled:
        *where, _ = table.store.place()
        kernel = f"pool_{table.row_dtype.suffix}"
        for output in outputs:
            batch, arguments = _pooled(output, rows, counts)
            launches.append(backend.prepared(kernel, batch, *where, *arguments, 0))
    return launches


def _pooled(output: Output, rows: Array, counts: Array) -> tuple[int, tuple[Any, ...]]:
    """Returns the number of pooled rows, and the arguments of a kernel that pools them."""
    batch, how = output.pooling()
    num_items = output.end - output.first
    rows = rows[output.first : output.end]
    return batch, (rows, *how, output.out, counts, num_items, batch)


# ---------------------------------------------------------------- counts of repeated keys


def _with_key_counts(
    backend: Backend, keys: Array, requests: Sequence[LookupRequest]
) -> Sequence[LookupRequest]:
    """Returns requests with the count of each item's key, for tables that count repeats."""
    counting = [
        i
        for i, each in enumerate(requests)
        if each.insert and each.table.counts_repeats and not each.unique_keys
    ]
    if not counting:
        return requests
    its_keys = split(keys, [each.size for each in requests])
    item_counts = [requests[i].caller_scores for i in counting]
    key_counts = _key_counts(backend, [its_keys[i] for i in counting], item_counts)
    result = [*requests]
    for i, counts in zip(counting, key_counts, strict=True):
        result[i] = requests[i]._replace(caller_scores=counts)
    return result


def _key_counts(
    backend: Backend, keys: Sequence[Array], item_counts: Sequence[Array | None]
) -> Sequence[Array | None]:
    """Returns how often the key of each item comes in the batch of its table. It waits once.

    Args:
      keys: (n,) int64 of each table.
      item_counts: (n,) uint64 of each table, how often each item counts; None: once.

    Returns:
      (n,) uint64 of each table, the same for all items of a key; `item_counts` if no key repeats.
    """
    sizes = [int(each.size) for each in keys]
    if not sum(sizes):
        return item_counts
    xp, begin = backend.xp, split_offsets(sizes)
    distinct = dedup(backend, xp.concatenate(keys), begin)
    if int(distinct.keys.size) == sum(sizes):
        return item_counts
    groups = group(backend, distinct.inverse, begin, distinct.starts)
    first, end = groups.offsets[:-1], groups.offsets[1:]
    totals = end - first
    if any(each is not None for each in item_counts):
        counts = [
            xp.ones(n, np.int64) if each is None else each.view(np.int64)
            for n, each in zip(sizes, item_counts, strict=True)
        ]
        sums = xp.zeros(sum(sizes) + 1, np.int64)
        sums[1:] = xp.cumsum(xp.take(xp.concatenate(counts), groups.order))
        totals = xp.take(sums, end) - xp.take(sums, first)
    return split(xp.take(totals.astype(np.uint64), distinct.inverse), sizes)


# ---------------------------------------------------------------- time


def count_found(table: TableBase, num_items: int, num_missing: int) -> None:
    """Counts the keys of a lookup, and how many of them have no row."""
    table.counters.found += num_items - num_missing
    table.counters.missed += num_missing


def age(table: TableBase) -> None:
    """Halves all numbers of lookups, which have reached the largest."""
    with uninterrupted():
        table.clock.halve()  # the one that needs memory
        table.index.age()
        if table.removals is not None:
            table.removals.age()
        if table.pending is not None:
            table.pending.age()
        forget(table)


def find_and_mark_seen(table: TableBase, keys: Array) -> Found:
    """Finds keys and counts them as seen by a new lookup, which may insert."""
    if table.clock.is_full:
        age(table)
    search = table.index.search(keys, table.clock.now + 1, accesses=table.access_counts())
    with uninterrupted():
        table.clock.tick()
        search.launch()
    return search.found


def mark_seen_search(table: TableBase, keys: Array) -> Search:
    """Returns a search for keys to write to: they count as seen by the last lookup."""
    into = (table.backend.xp.empty(int(keys.size), np.uint32), None)
    return table.index.search(keys, table.clock.now, into=into, refreshes=False)


def rebalance(table: TableBase) -> None:
    """Moves hot rows near (rows/tiers.py). Row numbers from before are stale then."""
    assert table.tiers is not None
    with uninterrupted():
        moved = table.tiers.rebalance()
        if moved is not None:
            table.index.update(moved.keys, rows=moved.rows)
            table.invalidate_row_numbers()

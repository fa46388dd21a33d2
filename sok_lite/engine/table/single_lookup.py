"""Lookups in one table, as its users make them.

These are methods of `EmbeddingTable`.
"""

from typing import Any

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.dedup import last_of_each, unique
from sok_lite.engine.table.arguments import checked_counts, checked_keys, checked_scores
from sok_lite.engine.table.exclusive import changing, holding
from sok_lite.engine.table.insert import LookupRequest, Output, gather_evicted
from sok_lite.engine.table.lookups import look_up, look_up_batch
from sok_lite.engine.table.parts import TableParts
from sok_lite.engine.table.results import Evicted, Lookup


@changing
def find_or_insert(
    table: TableParts,
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
      MemoryError: no memory for the new keys; the table is as it was.
      RuntimeError: they are chosen against the hash, and fill some of its places; the table is
        as it was.
    """
    keys = checked_keys(table, keys)
    result = _row_numbers(table, keys)
    if scores is None:
        size = int(keys.size)
        request = LookupRequest(table, size, filter_ratio=filter_ratio, unique_keys=unique_keys)
        look_up(table.backend, keys, result, request)
    else:
        _find_or_insert_with_scores(table, keys, scores, result, filter_ratio)
    table.report_refused()
    return result


def _find_or_insert_with_scores(
    table: TableParts, keys: Array, scores: Any, result: Array, filter_ratio: float
) -> None:
    """Looks up each key once, with the last of its scores."""
    backend, n = table.backend, int(keys.size)
    scores = checked_scores(table, keys, scores)
    distinct, inverse = unique(backend, keys)
    size = int(distinct.size)
    last_scores = backend.xp.take(scores, last_of_each(backend, inverse, size))
    rows = _row_numbers(table, distinct)
    request = LookupRequest(
        table, size, filter_ratio=filter_ratio, unique_keys=True, caller_scores=last_scores
    )
    look_up(backend, distinct, rows, request)
    backend.launch("dense_gather_u32", n, rows, 1, inverse, result, n)


@changing
def lookup(
    table: TableParts,
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
      missing: what a key gives that has no row afterwards: "initial", the value it would start
        with, or "zeros".
      filter_ratio: chance of a key without a row to get one this time.
      counts: (n,) integers from 1 to 2**32 - 1, how often each key counts in a table with
        `count_repeats`, for who has deduplicated them; those of a repeated key add up. None:
        once. A lookup that inserts nothing counts nothing.

    Raises:
      ValueError: `out` or `counts` are not such arrays, or the table does not count.
      MemoryError: no memory for the result or the new keys.
      RuntimeError: new keys find no slot: they are chosen against the hash.
      The table is as it was.
    """
    if missing not in ("initial", "zeros"):
        raise ValueError(f"`missing` must be 'initial' or 'zeros'. Received: {missing!r}.")
    keys = checked_keys(table, keys)
    whole = Output(table.store.output(int(keys.size), out=out), 0, int(keys.size))
    item_counts = None if counts is None else checked_counts(table, keys, counts)
    rows = _row_numbers(table, keys)
    request = LookupRequest(
        table,
        whole.end,
        [whole],
        insert=insert,
        missing=missing,
        filter_ratio=filter_ratio,
        unique_keys=unique_keys,
        caller_scores=item_counts,
    )
    num_without_row = look_up(table.backend, keys, rows, request)
    table.report_refused()
    return Lookup(whole.out, rows, num_without_row)


def go_on(
    table: TableParts, keys: Array, out: Array, begun: tuple[Array, Array], missing: str
) -> None:
    """Does what is left of a lookup that inserts, of which all was found that is there.

    Args:
      keys: (n,) int64.
      out: (n, dim) of the storage dtype, C-contiguous; it has the rows that were found.
      begun: the counters (1, len(Count)) of the search, see `look_up_batch`, and the row numbers
        (n,) uint32.
      missing: as of `lookup`.

    Raises:
      As `lookup`.
    """
    counters, rows = begun
    keys = checked_keys(table, keys)
    whole = Output(table.store.output(int(keys.size), out=out), 0, int(keys.size))
    request = LookupRequest(table, whole.end, [whole], missing=missing)

    def found() -> None:
        look_up_batch(table.backend, keys, rows, [request], begun=counters)
        table.report_refused()

    holding([table], found, goes_on=True)


@changing
def lookup_and_evict(
    table: TableParts, keys: Any, *, unique_keys: bool = False, out: Array | None = None
) -> tuple[Array, Evicted]:
    """Does what `lookup` does and returns, beside the rows, what was evicted for new keys.

    Returns:
      ((n, dim) of the storage dtype, the evicted entries in no order).
    """
    keys = checked_keys(table, keys)
    out = table.store.output(int(keys.size), out=out)
    evicted: list[Evicted] = []
    rows, whole = _row_numbers(table, keys), Output(out, 0, int(keys.size))
    request = LookupRequest(table, whole.end, [whole], unique_keys=unique_keys, evicted=evicted)
    look_up(table.backend, keys, rows, request)
    table.report_refused(evicted)
    return out, gather_evicted(table, evicted)


def _row_numbers(table: TableParts, keys: Array) -> Array:
    """Returns memory for the row numbers of keys."""
    return table.backend.xp.empty(keys.size, np.uint32)

"""Methods of `EmbeddingTable` that write rows, optimizer states and scores of keys.

`assign_and_evict` is what two of them share.
"""

from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import as_words
from sok_lite.backend.launches import Launch, launch_all
from sok_lite.engine.dedup import dedup, last_of_each, unique
from sok_lite.engine.dtypes import check_integer, copy_error
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.segments import group, segment_sum
from sok_lite.engine.table.arguments import (
    check_assignable,
    check_rows,
    checked_deltas,
    checked_keys,
    checked_scores,
)
from sok_lite.engine.table.base import TableBase, checked_num_keys
from sok_lite.engine.table.find import find_and_mark_seen, mark_seen_search
from sok_lite.engine.table.insert import NewKeys, insert_keys
from sok_lite.engine.table.locking import mutating


@mutating
def insert_or_assign(table: TableBase, keys: Any, values: Any, scores: Any = None) -> None:
    """Sets the rows of keys, inserting new keys. The last of a repeated key wins.

    Args:
      values: (n, dim).
      scores: (n,) uint64, as `assign_scores` takes them; None: as a lookup sets them.

    Raises:
      ValueError, TypeError: shape, dtype or scores do not fit. MemoryError: no memory for new
        keys. RuntimeError: new keys find no slot: they are chosen against the hash. The table
        is as it was.
    """
    assign_and_evict(table, keys, values, scores, None)
    table.report_refused()


def assign_and_evict(
    table: TableBase, keys: Any, values: Any, scores: Any, evicted: list[Any] | None
) -> None:
    """`insert_or_assign` without the report of refused keys, for a call that has the lock.

    Args:
      evicted: a list that is extended by the evicted keys; None: they are not wanted.
    """
    keys, values = _keys_and_rows(table, keys, values)
    distinct, inverse = unique(table.backend, keys)
    last = last_of_each(table.backend, inverse, int(distinct.size))
    distinct_scores = None
    if scores is not None:
        checked = checked_scores(table, keys, scores)
        check_assignable(table, checked)
        distinct_scores = table.backend.xp.take(checked, last)
        if table.clock.is_full:
            # The caller's scores are lookup numbers from before these are halved.
            distinct_scores = table.index.age_scores(distinct_scores)
    rows, num_missing = find_and_mark_seen(table, distinct)
    write = table.store.write_launch(rows, values, source=last)

    def scoring(_: Array | None = None) -> list[Launch]:
        if distinct_scores is None:
            return []
        return [table.score_launch(distinct, distinct_scores)]

    if num_missing == 0:
        launch_all([write, *scoring()])
        if distinct_scores is not None:
            table.scores_were_set()
        return
    at = table.backend.xp.flatnonzero(rows == np.uint32(NO_ROW))
    new_scores = None if distinct_scores is None else distinct_scores[at]
    new = NewKeys(
        *(distinct[at], table.clock.now),
        scores=new_scores,
        are_scores=True,
        values=values,
        source=last[at],
        evicted=evicted,
    )
    insert_keys(table, new, [write], scoring)
    if distinct_scores is not None:
        table.scores_were_set()


def _keys_and_rows(table: TableBase, keys: Any, values: Any) -> tuple[Array, Array]:
    """Returns keys (n,) int64 and rows (n, dim) in the format of the table's rows.

    Raises:
      ValueError, TypeError: shape or dtype do not fit.
      MemoryError: no memory for a copy.
    """
    try:
        keys, values = checked_keys(table, keys), table.store.to_storage(values)
    except MemoryError as error:
        what, dtypes = f"Keys and rows of table {table.name!r}", f"int64 and {table.row_dtype.name}"
        raise copy_error(what, dtypes, error) from error
    check_rows(table, keys, values)
    return keys, values


@mutating
def assign(table: TableBase, keys: Any, values: Any) -> None:
    """Sets the rows of the keys that have one and skips the others. The last of a repeated key
    wins.

    As in every write, they count as seen by the last lookup; scores that are not numbers of lookups
    stay.
    """
    keys, values = _keys_and_rows(table, keys, values)
    distinct, inverse = unique(table.backend, keys)
    last = last_of_each(table.backend, inverse, int(distinct.size))
    search = mark_seen_search(table, distinct)
    launch_all([search.launch, table.store.write_launch(search.rows, values, source=last)])


@mutating
def assign_state(table: TableBase, name: str, keys: Any, values: Any) -> None:
    """Sets an optimizer state of keys that have a row. The last of a repeated key wins.

    Args:
      values: (n, dim) float32.

    Raises:
      KeyError: there is no such state. ValueError: a key has no row, or shapes do not fit.
        Nothing has changed.
    """
    keys = checked_keys(table, keys)
    xp, column = table.backend.xp, table.store.column(name)
    values = xp.ascontiguousarray(xp.asarray(values, np.float32))
    if values.shape != (keys.size, column.dim):
        raise ValueError(
            f"State {name!r} of table {table.name!r} takes values of shape "
            f"({keys.size}, {column.dim}), a row for each key. Received: shape {values.shape}."
        )
    distinct, inverse = unique(table.backend, keys)
    found = table.index.find(distinct)
    if found.num_missing:
        raise ValueError(
            f"State {name!r} of table {table.name!r} cannot be set for {found.num_missing} of "
            f"{distinct.size} keys, which have no row. Assign their rows first."
        )
    last = last_of_each(table.backend, inverse, int(distinct.size))
    write = table.store.write_launch(found.rows, values, name, source=last)
    launch_all([mark_seen_search(table, distinct).launch, write])


@mutating
def accumulate(table: TableBase, keys: Any, deltas: Any, scale: float = 1.0) -> None:
    """Adds `scale * deltas` to the rows of the keys that have one; a repeated key sums.

    Args:
      deltas: (n, dim) of a real floating dtype, summed in float32, for rows of float64 in
        float64; for rows of integers integers that fit, whose sums wrap around.
      scale: for rows of integers a whole number.

    Raises:
      ValueError, TypeError: shape, dtype or scale do not fit; the table is as it was.
    """
    if table.row_dtype.is_integer and not float(scale).is_integer():
        raise ValueError(
            f"`scale` must be a whole number for rows of {table.row_dtype.name}. "
            f"Received: scale={scale}."
        )
    keys = checked_keys(table, keys)
    distinct, summed = _sum_repeated(table, keys, checked_deltas(table, keys, deltas))
    add = table.store.add_launch(table.index.find(distinct).rows, summed, scale)
    launch_all([mark_seen_search(table, distinct).launch, add])


@mutating
def accum_or_assign(table: TableBase, keys: Any, values: Any, is_found: Any) -> None:
    """Adds to the rows of keys that the caller has found before, and inserts the others.

    A key whose flag is out of date is skipped: another caller has inserted or removed it since. Of
    a repeated key to insert only the first is, as if they came one after the other. The call counts
    as one lookup.

    Args:
      values: (n, dim): deltas, of the dtypes that `accumulate` takes, or new rows.
      is_found: (n,) bool, whether the caller has found each key.

    Raises:
      ValueError, TypeError: shape or dtype do not fit. MemoryError: no memory for new keys.
        RuntimeError: new keys find no slot: they are chosen against the hash. The table is
        as it was.
    """
    keys = checked_keys(table, keys)
    xp = table.backend.xp
    values = xp.asarray(values)
    flags = xp.asarray(is_found)
    deltas = checked_deltas(table, keys, values)
    if flags.shape != keys.shape or flags.dtype != np.bool_:
        raise ValueError(
            f"`is_found` must be bool of shape {keys.shape}. "
            f"Received: {flags.dtype} of shape {flags.shape}."
        )
    rows = table.store.to_storage(values)
    distinct, inverse = unique(table.backend, keys)
    # One lookup sees all keys, so that new keys evict none that deltas are for.
    found = find_and_mark_seen(table, distinct)
    is_present = xp.take(found.rows != np.uint32(NO_ROW), inverse)
    if bool((flags & is_present).all()):  # most often
        table.store.add_launch(found.rows, _sums(table, deltas, inverse, len(distinct)))()
        return
    add, put = xp.flatnonzero(flags & is_present), xp.flatnonzero(~flags & ~is_present)
    add_keys, summed = _sum_repeated(table, keys[add], deltas[add])
    adding = table.store.add_launch(table.index.find(add_keys).rows, summed)
    if put.size == 0:
        adding()
        return
    new_keys = dedup(table.backend, keys[put], (0, put.size))
    source = xp.take(put, new_keys.first).astype(np.int32)
    new = NewKeys(new_keys.keys, table.clock.now, values=rows, source=source)
    insert_keys(table, new, [adding], lambda rows: [])
    table.report_refused()


@mutating
def assign_scores(table: TableBase, keys: Any, scores: Any) -> None:
    """Sets the scores of the keys that have a row. The last of a repeated key wins.

    Args:
      scores: (n,) non-negative integers. In an "hbm" table and under kLru they are numbers of
        lookups, at most `num_lookups`.

    Raises:
      ValueError: shapes do not fit, or a score is negative or too large. Nothing has changed.
    """
    keys = checked_keys(table, keys)
    scores = checked_scores(table, keys, scores)
    distinct, inverse = unique(table.backend, keys)
    last = last_of_each(table.backend, inverse, int(distinct.size))
    check_assignable(table, scores)
    table.score_launch(distinct, table.backend.xp.take(scores, last))()
    table.scores_were_set()


@mutating
def decay_scores(table: TableBase, factor: float) -> None:
    """Multiplies the counts of kLfu and kEpochLfu by a factor, rounded down: a key that was popular
    once has to be seen again to stay.

    Args:
      factor: from 0 to 1.

    Raises:
      TypeError, ValueError: `factor` is no such number, or the table evicts by something else.
        Nothing has changed.
    """
    is_number = isinstance(factor, (int, float, np.integer, np.floating))
    if not is_number or isinstance(factor, bool):
        raise TypeError(f"`factor` must be a number. Received: factor={factor!r}.")
    if not 0 <= factor <= 1:
        raise ValueError(f"`factor` must be from 0 to 1. Received: factor={factor!r}.")
    if not table.scores_are_counts:
        strategy = None if table.keeps_every_key else table.evict_strategy
        by = "evicts nothing" if strategy is None else f"evicts by {strategy}"
        raise ValueError(
            "Only tables that evict by counts have some that can decay. Received: table "
            f"{table.name!r}, which {by}. Make it with var_type='hybrid' and evict_strategy='kLfu'."
        )
    table.index.decay(float(factor))


@mutating
def reserve(table: TableBase, num_keys: int) -> None:
    """Makes the index large enough for `num_keys` keys in all.

    Raises:
      TypeError, ValueError: `num_keys` is no integer from 0 on. MemoryError: no memory; the
        table is as it was.
    """
    check_integer("num_keys", num_keys)
    if num_keys < 0:
        raise ValueError(f"`num_keys` must not be negative. Received: num_keys={num_keys}.")
    table.index.reserve(checked_num_keys(table.name, "num_keys", num_keys))


def _sum_repeated(table: TableBase, keys: Array, deltas: Array) -> tuple[Array, Array]:
    """Returns distinct keys and the sums of their deltas."""
    distinct, inverse = unique(table.backend, keys)
    return distinct, _sums(table, deltas, inverse, int(distinct.size))


def _sums(table: TableBase, deltas: Array, inverse: Array, num_distinct: int) -> Array:
    """Returns the sums of deltas, in the order of distinct keys."""
    if num_distinct == len(deltas):
        return deltas  # none repeats
    sum_rows = segment_sum if deltas.dtype == np.float32 else _sum_of_each
    return sum_rows(table.backend, deltas, inverse, num_distinct)


def _sum_of_each(backend: Backend, rows: Array, inverse: Array, num_unique: int) -> Array:
    """`segment_sum` for formats that float32 does not hold. It sums the items of a key in ascending
    order, and is slower where one key has most items.

    Args:
      rows: (n, dim) float64, int64, int32 or int8, C-contiguous.
      inverse: (n,) int32, each in [0, num_unique).

    Returns:
      (num_unique, dim) of the dtype of the rows. Integers wrap around, as NumPy's do.
    """
    out = backend.xp.empty((num_unique, rows.shape[1]), rows.dtype)
    groups = group(backend, inverse, (0, len(inverse)), (0, num_unique))
    suffix, source, target = "f64", rows, out
    if rows.dtype != np.float64:
        # As unsigned integers: the same bits, and no signed overflow, which C++ leaves undefined.
        (suffix, source), (_, target) = as_words(rows), as_words(out)
    arguments = (source, rows.shape[1], groups.offsets, groups.order, target, num_unique)
    backend.launch(f"sum_groups_{suffix}", num_unique, *arguments)
    return out

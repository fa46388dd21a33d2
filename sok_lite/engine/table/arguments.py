"""Checks arguments of a table's methods and converts them, before anything has changed."""

from typing import Any

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.dtypes import check_integer
from sok_lite.engine.table.base import TableBase

# Sums of so many counts over a batch fit 63 bits.
_MOST_COUNT = 2**32 - 1


def checked_keys(table: TableBase, keys: Any) -> Array:
    """Returns keys (n,) as int64, or raises TypeError or ValueError."""
    keys = table.engine_keys(keys)
    if keys.ndim != 1:
        raise ValueError(f"keys must have shape (n,). Received: shape {keys.shape}.")
    return keys


def check_rows(table: TableBase, keys: Array, values: Array) -> None:
    """Raises ValueError unless values have a row for each key."""
    if values.shape != (keys.size, table.dim):
        raise ValueError(
            f"values must have shape ({keys.size}, {table.dim}): one row of dimension "
            f"{table.dim} for each of {keys.size} keys. Received: shape {values.shape}."
        )


def checked_deltas(table: TableBase, keys: Array, deltas: Any) -> Array:
    """Returns deltas (n, dim) in the dtype in which rows are summed, or raises TypeError or
    ValueError."""
    xp = table.backend.xp
    deltas = xp.asarray(deltas)
    if table.row_dtype.is_integer:
        deltas = table.row_dtype.to_storage(xp, deltas)
    elif deltas.dtype.kind != "f" and deltas.dtype.name != "bfloat16":
        # So integers with the bits of bfloat16 rows, as `export` gives them, are no deltas.
        raise TypeError(
            f"deltas must be real floating-point numbers. Received: dtype {deltas.dtype}. "
            "Cast them first."
        )
    deltas = xp.ascontiguousarray(deltas, dtype=table.row_dtype.delta_dtype)
    check_rows(table, keys, deltas)
    return deltas


def checked_scores(table: TableBase, keys: Array, scores: Any) -> Array:
    """Returns scores (n,) uint64, or raises ValueError."""
    xp = table.backend.xp
    scores = xp.asarray(scores)
    if scores.shape != keys.shape or scores.dtype.kind not in "iu":
        raise ValueError(
            f"scores must be integers of shape {keys.shape}, one for each key. "
            f"Received: {scores.dtype} of shape {scores.shape}."
        )
    if scores.dtype.kind == "i" and bool((scores < 0).any()):
        raise ValueError(f"scores must not be negative. Received: {int(scores.min())}.")
    return xp.ascontiguousarray(scores, dtype=np.uint64)


def check_assignable(table: TableBase, scores: Array) -> None:
    """Raises ValueError if scores (n,) uint64 are lookup numbers of the future."""
    if table.index.has_scores:
        return
    highest = int(scores.max()) if scores.size else 0
    if highest > table.num_lookups:
        raise ValueError(
            f"The scores of table {table.name!r} are numbers of lookups, at most "
            f"{table.num_lookups:,} by now. Received: {highest:,}. Make a hybrid table with "
            "evict_strategy='kCustomized' for scores of your own."
        )


def checked_counts(table: TableBase, keys: Array, counts: Any) -> Array:
    """Returns how often keys count, (n,) uint64, or raises ValueError."""
    check_counts_repeats(table, "`counts`")
    xp = table.backend.xp
    counts = xp.asarray(counts)
    if counts.shape != keys.shape or counts.dtype.kind not in "iu":
        raise ValueError(
            f"`counts` must be integers of shape {keys.shape}, one for each key. "
            f"Received: {counts.dtype} of shape {counts.shape}."
        )
    if counts.size and not 1 <= int(counts.min()) <= int(counts.max()) <= _MOST_COUNT:
        raise ValueError(
            f"`counts` must be from 1 to {_MOST_COUNT}. Received: from {int(counts.min())} to "
            f"{int(counts.max())}."
        )
    return xp.ascontiguousarray(counts, dtype=np.uint64)


def check_counts_repeats(table: TableBase, what: str) -> None:
    """Raises ValueError for a table that does not count how often keys come."""
    if not table.counts_repeats:
        raise ValueError(
            f"{what} is for tables that count how often keys come, and {table.name!r} does not. "
            "Make a hybrid table with evict_strategy='kLfu' and count_repeats=True."
        )


def checked_number(table: TableBase, name: str, number: int) -> int:
    """Returns the number of a lookup, or raises TypeError or ValueError."""
    check_integer(name, number)
    if not 0 <= number <= table.num_lookups:
        raise ValueError(
            f"`{name}` must be the number of a lookup of table {table.name!r}, from 0 to "
            f"{table.num_lookups:,}. Received: {name}={number:,}. If it is from before numbers "
            "were halved, or from another table, take all keys instead."
        )
    return int(number)

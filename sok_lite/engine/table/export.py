"""Reads a table as arrays: in chunks, all of it, or the entries of a predicate.

All but `is_below` and `filter_entries` are methods of `EmbeddingTable`. They change nothing.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.table.base import TableBase
from sok_lite.engine.table.index import CHUNK_SLOTS
from sok_lite.engine.table.locking import locked
from sok_lite.engine.table.results import Entries, Predicate


@locked
def export_chunk(table: TableBase, first_slot: int, num_slots: int) -> Entries:
    """Returns the entries of the slots [first_slot, first_slot + num_slots), in their order."""
    entries = table.index.entries(first_slot, num_slots)
    keys = table.key_dtype.from_int64(table.backend.xp, entries.keys)
    return Entries(keys, entries.rows, entries.scores, table.store.for_reading())


def chunks(table: TableBase, num_slots: int = CHUNK_SLOTS) -> Iterator[Entries]:
    """Yields the whole table in chunks. Hold `lock` if it may change meanwhile."""
    first = 0
    while first < table.index.num_slots:  # it may grow
        yield export_chunk(table, first, num_slots)
        first += num_slots


@locked
def export_rows(table: TableBase) -> tuple[Array, Array]:
    """Returns all keys, ascending, and their row numbers: (size,) key type, (size,) uint32."""
    entries = export_chunk(table, 0, table.index.num_slots)
    order = table.backend.xp.argsort(entries.keys)
    return entries.keys[order], entries.rows[order]


@locked
def export(
    table: TableBase,
    column: str = "value",
    out: Callable[[int], Array] | None = None,
    cutoff: float | None = None,
) -> tuple[Array, Array]:
    """Returns all keys, ascending, and their rows: (n,) key type, (n, dim) storage.

    Args:
      column: "value", or the name of an optimizer state, whose rows are float32.
      out: allocates the result, for a number of rows; None: the backend does.
      cutoff: leaves out the keys whose row, whatever the column, has only |element| < cutoff;
        None: none.

    Raises:
      ValueError: the cutoff is not above 0.
    """
    if cutoff is None:
        keys, rows = export_rows(table)
    else:
        is_small = is_below(table, cutoff)
        keys, rows = _sorted_of(table, filter_entries(table, lambda entries: ~is_small(entries)))
    rows = table.backend.xp.ascontiguousarray(rows)
    memory = None if out is None else out(int(keys.size))
    return keys, table.store.read(rows, column, memory)


@locked
def export_if(table: TableBase, predicate: Predicate) -> tuple[Array, Array]:
    """Returns the keys and rows of a predicate, as `export` does all.

    Args:
      predicate: such as `lambda entries: entries.scores >= 100`; called chunk by chunk.
    """
    keys, rows = _sorted_of(table, filter_entries(table, predicate))
    return keys, table.store.read(rows)


@locked
def num_zero_rows(table: TableBase) -> int:
    """Returns the number of keys whose row is all 0. It reads every row."""
    return sum(
        int(table.row_dtype.is_zero(table.backend.xp, entries.values).all(axis=1).sum())
        for entries in chunks(table)
    )


@locked
def shrunk_keys(table: TableBase) -> Array:
    """Returns the keys that an optimizer has set to 0, (n,) of the key type, ascending.

    Their rows are all 0, and an optimizer state is not its initial value: group lasso does so. It
    reads every row, chunk by chunk.
    """
    keys, _ = _sorted_of(table, filter_entries(table, partial(_is_shrunk, table)))
    return keys


def _is_shrunk(table: TableBase, entries: Entries) -> Array:
    """Returns whether each entry has a row of 0 and a changed state, (n,) bool."""
    xp, store = table.backend.xp, entries.store
    is_shrunk = table.row_dtype.is_zero(xp, entries.values).all(axis=1)
    # Most rows are not 0: of them no state is read.
    at = xp.flatnonzero(is_shrunk)
    rows = xp.take(entries.rows, at)
    has_changed = xp.zeros(int(rows.size), bool)
    for name in store.state_names:
        initial = np.float32(store.column(name).initial)
        has_changed |= (store.read(rows, name) != initial).any(axis=1)
    is_shrunk[at] = has_changed
    return is_shrunk


def is_below(table: TableBase, cutoff: float) -> Predicate:
    """Returns the predicate of rows with only |element| < cutoff.

    Raises:
      ValueError: the cutoff is not above 0.
    """
    if not cutoff > 0:
        raise ValueError(f"`cutoff` must be above 0. Received: {cutoff}.")
    return lambda entries: table.row_dtype.is_below(table.backend.xp, entries.values, cutoff).all(
        axis=1
    )


def filter_entries(table: TableBase, predicate: Predicate) -> Iterator[Entries]:
    """Yields the entries of a predicate, in chunks. Raises ValueError if it does not return a bool
    for each key."""
    for entries in chunks(table):
        # Copies: a predicate may work in place.
        keys, rows, scores = (each.copy() for each in (entries.keys, entries.rows, entries.scores))
        mask = table.backend.xp.asarray(predicate(Entries(keys, rows, scores, entries.store)))
        if mask.shape != entries.keys.shape or mask.dtype != np.bool_:
            raise ValueError(
                f"A predicate must return one bool per key, shape {entries.keys.shape}. "
                f"Received: {mask.dtype} of shape {mask.shape}."
            )
        those = (entries.keys[mask], entries.rows[mask], entries.scores[mask])
        yield Entries(*those, entries.store)


def _sorted_of(table: TableBase, some: Iterator[Entries]) -> tuple[Array, Array]:
    """Returns the keys and row numbers of several chunks together, by key."""
    xp, all_entries = table.backend.xp, list(some)
    keys = xp.concatenate([entries.keys for entries in all_entries])
    rows = xp.concatenate([entries.rows for entries in all_entries])
    order = xp.argsort(keys)
    return keys[order], rows[order]

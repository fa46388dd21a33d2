"""The history of a table's keys: counts, times of lookups, changes and removals.

All but `keys_where` and `sorted_keys` are methods of `EmbeddingTable`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.arguments import check_counts_repeats, checked_keys, checked_number
from sok_lite.engine.table.base import TableBase
from sok_lite.engine.table.index import CHUNK_SLOTS
from sok_lite.engine.table.locking import locked, mutating
from sok_lite.engine.table.removal_log import RemovalLog


@locked
def counts(table: TableBase, keys: Any) -> Array:
    """Returns how often lookups that insert have asked for each key, (n,) int64.

    For a key without a row this is its pending count, or 0.

    Raises:
      ValueError: the table was not made with `count_repeats`.
    """
    check_counts_repeats(table, "counts()")
    keys = checked_keys(table, keys)
    # A key has a row or a pending count, never both.
    found = table.scores_of(keys)
    if table.pending is not None:
        found |= table.pending.counts(keys)
    return table.backend.xp.minimum(found, np.uint64(2**63 - 1)).astype(np.int64)


@locked
def times(table: TableBase, keys: Any) -> Array:
    """Returns when a lookup that inserts last saw each key, (n,) float64 in seconds since 1970.

    It is 0 for a key that none has seen. A write counts as of the last lookup before it. Times are
    never too early, and too late by at most a second, or 1/128 of how long ago they were.
    Checkpoints keep them.
    """
    backend, keys = table.backend, checked_keys(table, keys)
    last_seen = table.index.last_seen(keys)
    if table.pending is not None:
        last_seen |= table.pending.last_seen(keys)
    return backend.from_host(table.clock.times_of(backend.to_host(last_seen)))


@locked
def pending_keys(table: TableBase) -> Array:
    """Returns the keys with a pending count and no row, (n,) of the key type, ascending.

    There are none in a table that gives keys a row when they are first seen.
    """
    pending, xp = table.pending, table.backend.xp
    return sorted_keys(table, xp.empty(0, np.int64) if pending is None else pending.entries().keys)


@locked
def changed_since(table: TableBase, number: int) -> Array:
    """Returns the keys whose rows or states may have changed, (n,) of the key type, ascending.

    These are the keys that were inserted, seen by a lookup that inserts, written, or updated by an
    optimizer, in lookup `number` or later. A write or an update counts as of the last lookup before
    it. Keys to which a caller has given scores of earlier lookups are left out, in tables whose
    scores are lookup numbers. A restored table has the history of the saved one.

    Args:
      number: `num_lookups` at some time.

    Raises:
      TypeError, ValueError: it is no number of a lookup. Numbers are halved after 2**32 - 1
        lookups: one from before may then be above `num_lookups`.
    """
    number = checked_number(table, "number", number)
    return sorted_keys(table, keys_where(table, lambda last_seen: last_seen >= number))


@locked
def export_since(table: TableBase, at: float) -> tuple[Array, Array]:
    """Returns the keys whose rows may have changed since a time, and their rows, as `export` does.

    These are the keys of `changed_since` for the first lookup since then, or for one earlier by up
    to a second, or up to 1/128 of how long ago that was.

    Args:
      at: in seconds since 1970.
    """
    number = table.clock.first_since(at)
    keys = keys_where(table, lambda last_seen: last_seen >= np.uint64(number))
    ordered = sorted_keys(table, keys)
    return ordered, table.store.read(table.index.find(checked_keys(table, ordered)).rows)


@mutating
def log_removals(table: TableBase) -> None:
    """Begins a log of removed keys, for `removed_since`, if there is none.

    The log takes 23 to 34 bytes a key. A restored table begins a new one.

    Raises:
      MemoryError: no memory for the log; the table has none then.
    """
    if table.removals is None:
        name = f"{table.name} (removals)"
        table.removals = RemovalLog(table.backend, table.key_dtype, name, table.num_lookups)


@locked
def removed_since(table: TableBase, number: int) -> Array:
    """Returns the keys that were removed and have no row now, (n,) of the key type, ascending.

    They were removed by `erase` and its like, `expire`, `clear` or eviction.

    Args:
      number: `num_lookups` at some time since `log_removals`. Removals between the lookup of
        that number and the next one count as well.

    Raises:
      TypeError, ValueError: it is no number of a lookup, or the log does not reach back so far.
    """
    log = _log(table)
    number = checked_number(table, "number", number)
    if number < log.since:
        raise ValueError(
            f"The log of table {table.name!r} has the removals since lookup {log.since:,}. "
            f"Received: number={number:,}. What is there now, `export` tells."
        )
    keys = log.keys_since(number)
    return sorted_keys(table, keys[table.index.find(keys).rows == np.uint32(NO_ROW)])


def first_removal_since(table: TableBase, at: float) -> int:
    """Returns the `number` with which `removed_since` has all removals since a time.

    A removal counts as of the lookup before it: so that is the one before the first since then.

    Args:
      at: in seconds since 1970.
    """
    return max(table.clock.first_since(at) - 1, 0)


@mutating
def forget_removals(table: TableBase, *, before: int) -> None:
    """Drops the removals before a lookup from the log, and frees their memory.

    Args:
      before: number of the lookup, at most `num_lookups`.

    Raises:
      TypeError, ValueError: it is no number of a lookup, or there is no log.
    """
    _log(table).forget(checked_number(table, "before", before))


def _log(table: TableBase) -> RemovalLog:
    """Returns the removal log, or raises ValueError."""
    if table.removals is None:
        raise ValueError(
            f"Table {table.name!r} does not note which keys are removed. Call log_removals() "
            "before the first is."
        )
    return table.removals


def keys_where(table: TableBase, choose: Callable[[Array], Array]) -> Array:
    """Returns the keys (n,) int64, in no order, for which `choose` is true: it takes `last_seen` of
    keys, (m,) uint32, and returns (m,) bool."""
    found = []
    for first in range(0, table.index.num_slots, CHUNK_SLOTS):
        entries = table.index.entries(first, CHUNK_SLOTS)
        found.append(entries.keys[choose(entries.last_seen)])
    return table.backend.xp.concatenate(found)


def sorted_keys(table: TableBase, keys: Array) -> Array:
    """Returns keys (n,) int64 in the key type, ascending."""
    keys = table.key_dtype.from_int64(table.backend.xp, keys)
    return keys[table.backend.xp.argsort(keys)]

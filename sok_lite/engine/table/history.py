"""The past of a table's keys: how often and when they were seen, and which have lost their rows.

The methods of `EmbeddingTable` of the same names say what arguments are, and what is raised.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.publish import plan_set, publish
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.arguments import check_counts_repeats, checked_keys, checked_number
from sok_lite.engine.table.index import CHUNK_SLOTS
from sok_lite.engine.table.parts import TableParts
from sok_lite.engine.table.removal_log import RemovalLog


def counts(table: TableParts, keys: Any) -> Array:
    """Returns how often lookups that insert have asked for each key, (n,) int64."""
    check_counts_repeats(table, "counts()")
    keys = checked_keys(table, keys)
    # A key has a row or a pending count, never both.
    found = table.scores_of(keys)
    if table.pending is not None:
        found |= table.pending.of(keys)
    return table.backend.xp.minimum(found, np.uint64(2**63 - 1)).astype(np.int64)


def times(table: TableParts, keys: Any) -> Array:
    """Returns when a lookup that inserts last saw each key, (n,) float64 in seconds since 1970."""
    backend, keys = table.backend, checked_keys(table, keys)
    last_seen = table.index.last_seen(keys)
    if table.pending is not None:
        last_seen |= table.pending.last_seen(keys)
    return backend.from_host(table.clock.times_of(backend.to_host(last_seen)))


def pending_keys(table: TableParts) -> Array:
    """Returns the keys that have no row yet and were seen, (n,) of the key type, ascending."""
    if table.pending is None:
        return sorted_keys(table, table.backend.xp.empty(0, np.int64))
    return sorted_keys(table, table.pending.export()[0])


def changed_since(table: TableParts, number: int) -> Array:
    """Returns the keys whose rows or states may have changed, (n,) of the key type, ascending."""
    number = checked_number(table, "number", number)
    return sorted_keys(table, keys_where(table, lambda last_seen: last_seen >= number))


def export_since(table: TableParts, at: float) -> tuple[Array, Array]:
    """Returns the keys whose rows may have changed since a time, and their rows, as `export`
    gives all."""
    number = table.clock.first_since(at)
    keys = keys_where(table, lambda last_seen: last_seen >= np.uint64(number))
    ordered = sorted_keys(table, keys)
    return ordered, table.store.read(table.index.find(checked_keys(table, ordered)).rows)


def log_removals(table: TableParts) -> None:
    """Begins to note which keys lose their rows, for `removed_since`."""
    if table.removals is None:
        log = RemovalLog(table.backend, table.key_dtype, table.name, table.num_lookups)
        publish(plan_set(table, removals=log))


def removed_since(table: TableParts, number: int) -> Array:
    """Returns the keys that have lost their rows and have none now, (n,) of the key type,
    ascending: by `erase` and its like, `expire`, `clear` or eviction."""
    log = _log(table)
    number = checked_number(table, "number", number)
    if number < log.since:
        raise ValueError(
            f"The log of table {table.name!r} has the removals since lookup {log.since:,}. "
            f"Received: number={number:,}. What is there now, `export` tells."
        )
    keys = log.keys_since(number)
    return sorted_keys(table, keys[table.index.find(keys).rows == np.uint32(NO_ROW)])


def forget_removals(table: TableParts, *, before: int) -> None:
    """Forgets which keys were removed before a lookup began, and gives the memory back."""
    _log(table).forget(checked_number(table, "before", before))


def _log(table: TableParts) -> RemovalLog:
    """Returns the log of removals, or raises ValueError."""
    if table.removals is None:
        raise ValueError(
            f"Table {table.name!r} does not note which keys are removed. Call log_removals() "
            "before the first is."
        )
    return table.removals


def keys_where(table: TableParts, choose: Callable[[Array], Array]) -> Array:
    """Returns the keys (n,) int64, in no order, that a function chooses by the lookup that last saw
    them: it takes the numbers of those, (m,) uint32, and returns (m,) bool."""
    found = []
    for first in range(0, table.index.num_slots, CHUNK_SLOTS):
        entries = table.index.entries(first, CHUNK_SLOTS)
        found.append(entries.keys[choose(entries.last_seen)])
    return table.backend.xp.concatenate(found)


def sorted_keys(table: TableParts, keys: Array) -> Array:
    """Returns keys (n,) int64 in the key type, ascending."""
    keys = table.key_dtype.from_int64(table.backend.xp, keys)
    return keys[table.backend.xp.argsort(keys)]

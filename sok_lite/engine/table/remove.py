"""Methods of `EmbeddingTable` that remove keys, with their rows and optimizer states."""

import numbers
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.launches import launch_all
from sok_lite.engine.dedup import unique
from sok_lite.engine.dtypes import as_float
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.arguments import checked_keys
from sok_lite.engine.table.base import TableBase
from sok_lite.engine.table.export import filter_entries, is_below
from sok_lite.engine.table.history import keys_where
from sok_lite.engine.table.locking import locked, mutating
from sok_lite.engine.table.results import Predicate

# Other units that programs pass to `expire`.
_SECONDS = {"minutes": 60, "hours": 3600, "days": 86_400, "weeks": 604_800}


@mutating
def erase(table: TableBase, keys: Any) -> int:
    """Removes keys with their rows and optimizer states; returns how many were there."""
    distinct, _ = unique(table.backend, checked_keys(table, keys))
    pending = None if table.pending is None else table.pending.select_counted(distinct)
    return _erase(table, distinct, pending)


@locked
def erase_if(table: TableBase, predicate: Predicate) -> int:
    """Removes the entries for which a predicate is true; returns how many.

    Args:
      predicate: called with some entries at a time, for all of them before the first is removed.
        It must not wait for another thread that uses the table, such as a tf.function that looks
        it up.
    """
    xp = table.backend.xp
    doomed = [checked_keys(table, entries.keys) for entries in filter_entries(table, predicate)]
    return _erase_chosen(table, xp.concatenate([xp.empty(0, np.int64), *doomed]))


@mutating
def _erase_chosen(table: TableBase, keys: Array) -> int:
    """Erases distinct keys. A change of its own: the predicate before may use the table."""
    return _erase(table, keys, None)


@mutating
def expire(
    table: TableBase, *, num_lookups: int | None = None, seconds: float | None = None
) -> int:
    """Removes keys that were not seen lately; returns how many.

    A key that is written to counts as seen by the last lookup before.

    Args:
      num_lookups: removes keys that none of the last `num_lookups` lookups asked for. A training
        step is one lookup of a table that is looked up once a step.
      seconds: removes keys that no lookup asked for within that time, exact to a second or to 1/128
        of it. Checkpoints have the times; keys from an old one without count as seen when it was
        restored.

    Raises:
      TypeError, ValueError: not exactly one of the two is passed, or it is no number, negative,
        or a fraction of a lookup.
    """
    check_limits(num_lookups, seconds)
    if seconds is not None:
        oldest = table.clock.first_since(table.clock.read() - as_float(seconds))
    else:
        oldest = max(0, table.clock.now - int(num_lookups or 0) + 1)
    doomed = keys_where(table, lambda last_seen: last_seen < oldest)
    pending = None if table.pending is None else table.pending.last_seen_before(oldest)
    return _erase(table, doomed, pending)


def check_limits(
    num_lookups: int | None, seconds: float | None, others: Mapping[str, Any] | None = None
) -> None:
    """Raises TypeError or ValueError if arguments of `expire` are wrong; `others`, such as days,
    by name, always are."""
    for name, value in (others or {}).items():
        times = f"{_SECONDS[name]:_}" if name in _SECONDS else None
        instead = "one of the two" if times is None else f"seconds={value!r} * {times}"
        raise TypeError(
            "`expire` takes `num_lookups` or `seconds`. "
            f"Received: {name}={value!r}. Give {instead}."
        )
    if (num_lookups is None) == (seconds is None):
        raise ValueError(
            "Give `num_lookups` or `seconds`, one of them. "
            f"Received: num_lookups={num_lookups}, seconds={seconds}."
        )
    name, limit = ("seconds", seconds) if num_lookups is None else ("num_lookups", num_lookups)
    if isinstance(limit, (bool, np.bool_)) or not isinstance(limit, numbers.Real):
        advice = " Give its total_seconds()." if isinstance(limit, timedelta) else ""
        raise TypeError(f"`{name}` must be a number. Received: {name}={limit!r}.{advice}")
    if not limit >= 0 or (name == "num_lookups" and limit % 1 != 0):
        kind = "a whole number, 0 or more" if name == "num_lookups" else "0 or more"
        raise ValueError(f"`{name}` must be {kind}. Received: {name}={limit}.")


def erase_below(table: TableBase, cutoff: float) -> int:
    """Removes the keys whose rows are nearly zero: every |element| < cutoff; returns how many.

    Raises:
      ValueError: the cutoff is not above 0.
    """
    return erase_if(table, is_below(table, cutoff))


@mutating
def clear(table: TableBase) -> None:
    """Removes all keys, releases their memory and resets the counters.

    Raises:
      MemoryError: no memory for the empty index; the table is as it was.
    """
    place = table.index.allocate_empty()
    pending_place = None if table.pending is None else table.pending.allocate_empty()
    note = None
    if table.removals is not None:
        note = table.removals.prepare_note(table.index.entries().keys, table.clock.now)
    table.store.clear()  # the last that needs memory
    if note is not None:
        note()
    table.index.clear(place)
    if table.pending is not None:
        table.pending.clear(pending_place)
    table.counters.reset()
    table.invalidate_row_numbers()
    if table.tiers is not None:
        table.tiers.clear()


def _erase(table: TableBase, keys: Array, pending: Array | None) -> int:
    """Erases distinct keys that have a row; returns how many.

    Args:
      pending: keys whose pending counts are dropped, all of which have one; None: no keys.
    """
    found = table.index.find(keys).rows
    present = table.backend.xp.flatnonzero(found != np.uint32(NO_ROW))
    keys, rows = keys[present], found[present]
    if len(keys):
        note = (
            None if table.removals is None else table.removals.prepare_note(keys, table.clock.now)
        )
        table.store.release(rows)  # the last that needs memory
        if note is not None:
            note()
        table.index.erase(keys)
        if table.tiers is not None:
            launch_all(table.tiers.assign_launches(rows, None))
        table.counters.erased += len(keys)
        table.invalidate_row_numbers()
    if table.pending is not None and pending is not None:
        table.pending.erase(pending)
    if len(keys):
        table.index.clean()
        table.store.give_back()
    return len(keys)

"""What a table holds together with what was saved, for it to hold all of that."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.rows.column import Column
from sok_lite.engine.table.base import EmbeddingTable
from sok_lite.engine.table.hkv import HkvTable
from sok_lite.engine.table.lazy_rows import LazyRows
from sok_lite.engine.table.snapshot import Held, Snapshot, State, numbered_states, take_held

# Strategies whose scores do not say when a key was looked up: they mean the same in all tables.
_TIMELESS = ("kLfu", "kCustomized")


class _Places(NamedTuple):
    """Where keys are among all of them together.

    Attributes:
      kept: (k,) int64, which of the table's own keys stay as they are.
      own: (k,) int64, the places of those.
      saved: (n,) int64, the places of the keys that were saved.
    """

    kept: Array
    own: Array
    saved: Array


def merged(table: EmbeddingTable, saved: Snapshot, num_bytes: int) -> Snapshot:
    """Returns what a table holds once the keys of a snapshot are assigned to it. Nothing changes.

    A key of both has the row and the states that were saved; a state that was not saved begins
    anew. The saved keys count as seen by the last lookup of this table. Their scores are those of
    new keys, or, between tables with the same strategy "kLfu" or "kCustomized", the saved ones.
    Sightings stay as they are; those of other keys are added.

    Args:
      table: held by the caller, until the result has been restored.
      num_bytes: of the table's own rows that are read together.
    """
    xp, own = table.backend.xp, take_held(table)
    keys = xp.concatenate([own.keys, saved.held.keys])
    keys = keys[xp.argsort(keys)]
    is_first = xp.ones(keys.size, bool)
    is_first[1:] = keys[1:] != keys[:-1]
    keys = keys[is_first]
    own_places = xp.searchsorted(keys, own.keys)
    saved_places = xp.searchsorted(keys, saved.held.keys)
    stays = xp.ones(keys.size, bool)
    stays[saved_places] = False
    kept = xp.flatnonzero(stays[own_places])
    places = _Places(kept, own_places[kept], saved_places)
    n, rows = int(keys.size), own.rows[kept]
    values = _joined(table, rows, places, n, num_bytes, table.store.column(), saved.values)
    held = _held(table, own, saved.held, keys, places)
    return Snapshot(held, values, _states(table, rows, places, n, num_bytes, saved.states))


def _held(table: EmbeddingTable, own: Held, saved: Held, keys: Array, places: _Places) -> Held:
    xp, now = table.backend.xp, np.uint32(table.num_lookups)
    stamps = xp.full(keys.size, now, np.uint32)
    stamps[places.own] = own.stamps[places.kept]
    scores = xp.empty(0, np.uint64)
    if isinstance(table, HkvTable) and table.index.has_scores:
        strategy = table.index.strategy
        is_same = strategy in _TIMELESS and saved.facts.get("strategy") == strategy
        scores = table.index.initial_scores(stamps)
        scores[places.own] = own.scores[places.kept]
        if is_same and saved.scores.size == saved.keys.size:
            scores[places.saved] = saved.scores
    left_out = ("segment", "num_slots", "hash_seed")  # of slots, which are new
    facts = {name: fact for name, fact in own.facts.items() if name not in left_out}
    none = xp.empty(0, np.int64)
    sighted = _sighted(table, own, saved, keys, now)
    return Held(keys, xp.empty(0, np.uint32), stamps, scores, none, *sighted, facts)


def _sighted(
    table: EmbeddingTable, own: Held, saved: Held, keys: Array, now: np.uint32
) -> tuple[Array, Array, Array]:
    xp = table.backend.xp
    held = table.key_dtype.to_int64(xp, keys)
    mine = ~_is_in(xp, own.sighted_keys, held)
    theirs = ~_is_in(xp, saved.sighted_keys, xp.concatenate([held, own.sighted_keys]))
    stamps = xp.full(int(theirs.sum()), now, np.uint32)
    return (
        xp.concatenate([own.sighted_keys[mine], saved.sighted_keys[theirs]]),
        xp.concatenate([own.sightings[mine], saved.sightings[theirs]]),
        xp.concatenate([own.sighting_stamps[mine], stamps]),
    )


def _is_in(xp: Any, keys: Array, others: Array) -> Array:
    """Returns of each key whether it is among others."""
    if others.size == 0:
        return xp.zeros(keys.size, bool)
    others = others[xp.argsort(others)]
    at = xp.minimum(xp.searchsorted(others, keys), others.size - 1)
    return others[at] == keys


def _states(
    table: EmbeddingTable,
    rows: Array,
    places: _Places,
    n: int,
    num_bytes: int,
    saved: Sequence[State],
) -> list[State]:
    """Returns all states of the table, then those of groups that it does not have.

    A saved group goes on in the first of the table's that has the same kinds of states, and a state
    that no optimizer keeps together with others in one like it.
    """
    own: dict[int | None, dict[str, Column]] = {}
    for group, name, column in numbered_states(table.store):
        # Those of an optimizer that is gone are not to be free, for another of its kind.
        if column.owner is None or not column.owner.is_gone:
            own.setdefault(group, {})[name] = column
    others: dict[int | None, dict[str, State]] = {}
    for state in saved:
        others.setdefault(state.group, {})[state.name] = state
    states = []
    for group, columns in own.items():
        match = _match(group, columns, others)
        for name, column in columns.items():
            rest = match[name].rows if name in match else None
            pieces = _joined(table, rows, places, n, num_bytes, column, rest)
            states.append(State(name, column.dim, column.initial, pieces, group))
    first = max((group or 0 for group in own), default=0) + 1
    for number, (group, its_states) in enumerate(others.items(), start=first):
        for state in its_states.values():
            pieces = _joined(table, rows, places, n, num_bytes, None, state.rows, state.dim)
            states.append(state._replace(rows=pieces, group=number if group else None))
    return states


def _match(
    group: int | None, columns: Mapping[str, Column], others: dict[int | None, dict[str, State]]
) -> dict[str, State]:
    """Takes the saved states that are those of a group out of `others` and returns them."""
    if group is None:  # of these no two belong together
        free = others.get(None, {})
        alike = [name for name in columns if name in free and _is_like(columns[name], free[name])]
        return {name: free.pop(name) for name in alike}
    for number, states in others.items():
        has_these = number is not None and states.keys() == columns.keys()
        if has_these and all(_is_like(columns[name], state) for name, state in states.items()):
            return others.pop(number)
    return {}


def _is_like(column: Column, state: State) -> bool:
    return (column.dim, column.initial) == (state.dim, state.initial)


def _joined(
    table: EmbeddingTable,
    rows: Array,
    places: _Places,
    n: int,
    num_bytes: int,
    column: Column | None,
    saved: Array | LazyRows | None,
    dim: int = 0,
) -> LazyRows:
    """Returns rows of the table, those with numbers `rows`, and saved ones; None: there are none.

    Args:
      column: of the table.
      dim: of a row, where there is no column.
    """
    xp, store = table.backend.xp, table.store

    def read() -> Iterator[tuple[Array, Array]]:
        if column is not None:
            step = max(1, num_bytes // column.row_bytes)
            for first in range(0, int(rows.size), step):
                part = xp.ascontiguousarray(rows[first : first + step])
                yield places.own[first : first + step], store.read(part, column.name)
        if isinstance(saved, LazyRows):
            for at, piece in saved.read():
                yield places.saved[at], piece
        elif saved is not None:
            yield places.saved, xp.ascontiguousarray(saved)

    return LazyRows((n, dim if column is None else column.dim), read)

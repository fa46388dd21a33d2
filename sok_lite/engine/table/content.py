"""All that a table holds, on the host: taken out, chosen from, put together and put back.

Formats of checkpoints that have the whole in memory are codecs over it: what a key has that comes
in several parts, which states are one, and whose keys are whose is decided here for all of them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.batch import ShardedTable
from sok_lite.engine.optimizer_states import drop_orphaned_states
from sok_lite.engine.rows.store import RowStore
from sok_lite.engine.table import snapshot
from sok_lite.engine.table.base import EmbeddingTable
from sok_lite.engine.table.exclusive import alone
from sok_lite.engine.table.joined import joined_facts, joined_states, without_slots
from sok_lite.engine.table.snapshot import (
    Held,
    LazyRows,
    Snapshot,
    State,
    numbered_states,
    take_held,
)
from sok_lite.engine.table.state_columns import columns_of, states_of

# What is known of each key in a table, and of each that was seen and has no row; see `Held`.
_COLUMNS = ("stamps", "scores", "slots")
_SIGHTED = ("sightings", "sighting_stamps")

_CHUNK_BYTES = 8 << 20  # of rows that are read from a GPU together

# Which of a key counts that several parts have.
Counts: TypeAlias = Literal["first", "last"]


class Content(NamedTuple):
    """All that a table holds: n keys with a row, and m that were seen and have none.

    Attributes:
      keys: (n,) of the table's key type, distinct, ascending.
      values: (n, dim) of the row's storage dtype.
      states: of all optimizers, rows (n, dim) float32.
      columns: what is known of each key, (n,) by name.
      sighted_keys: (m,) int64, distinct, ascending.
      sighted: what is known of each of those, (m,) by name.
      facts: of the table, as of `snapshot.Held`; {}: a codec knows none.
    """

    keys: np.ndarray
    values: np.ndarray
    states: Sequence[State]
    columns: Mapping[str, np.ndarray]
    sighted_keys: np.ndarray
    sighted: Mapping[str, np.ndarray]
    facts: Mapping[str, Any]


def take(table: EmbeddingTable) -> Content:
    """Returns a copy of all that a table holds, less the states of optimizers that are gone.

    Raises:
      MemoryError: there is no memory for it.
    """
    return alone(table, lambda: _taken(table))


def _taken(table: EmbeddingTable) -> Content:
    drop_orphaned_states(table)
    store, held, host = table.store, take_held(table), table.backend.to_host
    rows = table.backend.xp.ascontiguousarray(held.rows)
    columns = {name: host(getattr(held, name)) for name in _COLUMNS}
    sighted_keys = host(held.sighted_keys)
    order = np.argsort(sighted_keys)
    return Content(
        host(held.keys),
        _on_host(store, rows, "value"),
        [
            State(name, column.dim, column.initial, _on_host(store, rows, column.name), number)
            for number, name, column in numbered_states(store)
        ],
        # Scores and slots are empty where there are none.
        {name: column for name, column in columns.items() if column.size or name == "stamps"},
        sighted_keys[order],
        {name: host(getattr(held, name))[order] for name in _SIGHTED},
        held.facts,
    )


def _on_host(store: RowStore, rows: Array, column: str) -> np.ndarray:
    """Returns rows of a column; on a GPU there may be no memory for all of them together."""
    backend = store.backend
    if backend.name == "cpu":
        return store.read(rows, column)
    whole = backend.to_host(store.read(rows[:0], column))
    whole = np.empty((len(rows), *whole.shape[1:]), whole.dtype)
    step = max(1, _CHUNK_BYTES // max(1, store.column(column).row_bytes))
    for first in range(0, len(rows), step):
        whole[first : first + step] = backend.to_host(
            store.read(rows[first : first + step], column)
        )
    return whole


def restore(table: EmbeddingTable, content: Content) -> None:
    """Makes a table hold a content and nothing else; see `snapshot.restore`.

    Args:
      content: arrays of the host or of the table's backend.

    Raises: as of `snapshot.restore`.
    """
    snapshot.restore(table, as_snapshot(table, content))


def as_snapshot(table: EmbeddingTable, content: Content) -> Snapshot:
    """Returns a content as `snapshot.restore` takes it for a table."""
    device, columns = table.backend.from_host, content.columns
    held = Held(
        keys=device(content.keys),
        rows=device(np.empty(0, np.uint32)),
        stamps=device(columns["stamps"]),
        scores=device(columns.get("scores", np.empty(0, np.uint64))),
        slots=device(columns.get("slots", np.empty(0, np.int64))),
        sighted_keys=device(content.sighted_keys),
        sightings=device(content.sighted["sightings"]),
        sighting_stamps=device(content.sighted["sighting_stamps"]),
        facts=dict(content.facts),
    )
    backend = table.backend
    states = [state._replace(rows=_rows_for(backend, state.rows)) for state in content.states]
    return Snapshot(held, _rows_for(backend, content.values), states)


def _rows_for(backend: Backend, rows: Array) -> Any:
    """Returns rows of the host as a table takes them; on a GPU it has some at a time."""
    if backend.name == "cpu" or not isinstance(rows, np.ndarray):
        return rows

    def read() -> Iterator[tuple[Array, Array]]:
        step = max(1, _CHUNK_BYTES // max(1, rows.itemsize * rows.shape[1]))
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            places = np.arange(first, first + len(some))
            yield backend.from_host(places), backend.from_host(some)

    return LazyRows((len(rows), rows.shape[1]), read)


# ---------------------------------------------------------------- choosing and putting together


def select(content: Content, chosen: np.ndarray, sighted: np.ndarray) -> Content:
    """Returns some of the keys of a content, with what is known of them.

    Args:
      chosen: (n,) bool, or places of keys with a row.
      sighted: (m,) bool, or places of those without one.
    """
    if _are_all(chosen) and _are_all(sighted):
        return content
    return Content(
        content.keys[chosen],
        content.values[chosen],
        [state._replace(rows=state.rows[chosen]) for state in content.states],
        {name: column[chosen] for name, column in content.columns.items() if name != "slots"},
        content.sighted_keys[sighted],
        {name: column[sighted] for name, column in content.sighted.items()},
        without_slots(dict(content.facts)),
    )


def _are_all(chosen: np.ndarray) -> bool:
    return chosen.dtype == bool and bool(chosen.all())


Owns: TypeAlias = Callable[[np.ndarray], np.ndarray]


def owns(table: ShardedTable, rank: int, size: int) -> Owns:
    """Returns what says which of some keys, (k,) of the table's key type, a rank of several owns.

    Raises:
      ValueError: when it is called: the table's rule has no owner for a key among so many ranks.
    """

    def are_own(keys: np.ndarray) -> np.ndarray:
        if size == 1:
            return np.ones(keys.size, bool)
        kind = table.key_dtype
        return np.asarray(table.owner.owners(kind.to_int64(np, keys), size, kind, np) == rank)

    return are_own


def owned_by(content: Content, are_own: Owns) -> Content:
    """Returns the keys of a rank; see `owns`."""
    sighted = content.sighted_keys.astype(content.keys.dtype)
    return select(content, are_own(content.keys), are_own(sighted))


def in_order(content: Content) -> Content:
    """Returns a content whose keys are distinct, in any order, with ascending ones."""
    return select(content, _order(content.keys), _order(content.sighted_keys))


def _order(keys: np.ndarray) -> np.ndarray:
    if bool((keys[1:] > keys[:-1]).all()):
        return np.ones(keys.size, bool)
    return np.argsort(keys)


def concatenate(
    parts: Sequence[Content], whose: str, counts: Counts | None = None
) -> tuple[Content, int]:
    """Returns what several parts of a table hold together, and how often a key came again.

    A state that a part does not have is what it begins with there. What is known of the keys of
    some parts only is left out, and so is where they had their slots. Facts are those of the part
    with most lookups.

    Args:
      parts: at least one.
      whose: names the table in errors.
      counts: which part counts for a key that several have; None: none may.

    Raises:
      ValueError: a key comes in several parts, and none of them counts.
    """
    if len(parts) == 1:
        return parts[0], 0
    keys = np.concatenate([part.keys for part in parts])
    kept, num_repeated = one_of_each(keys, counts)
    if num_repeated and counts is None:
        raise ValueError(
            f"What was saved of {whose} is corrupt: its parts have {num_repeated:,} keys in common."
        )
    sighted_keys = np.concatenate([part.sighted_keys for part in parts])
    sighted, _ = one_of_each(sighted_keys, counts)
    facts = [dict(part.facts) for part in parts if part.facts]
    joined = Content(
        keys[kept],
        np.concatenate([part.values for part in parts])[kept],
        [state._replace(rows=state.rows[kept]) for state in _joined_states(parts)],
        _joined_columns([(part.keys, part.columns) for part in parts], kept),
        sighted_keys[sighted],
        _joined_columns([(part.sighted_keys, part.sighted) for part in parts], sighted),
        without_slots(joined_facts(facts)) if facts else {},
    )
    return joined, num_repeated


def one_of_each(keys: np.ndarray, counts: Counts | None) -> tuple[np.ndarray, int]:
    """Returns the place of one of each distinct key, in ascending order, and how many are more.

    Args:
      keys: of several parts, one part after the other.
      counts: which is taken of a key that comes more than once; None is as "first".
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_new = np.ones(keys.size, bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    num_repeated = int(keys.size - np.count_nonzero(is_new))
    if counts == "last":
        is_new = np.append(is_new[1:], True)[: keys.size]
    return order[is_new], num_repeated


def _joined_columns(
    parts: Sequence[tuple[np.ndarray, Mapping[str, np.ndarray]]], kept: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns what is known of the keys of all parts; a part without keys does not count."""
    first, *others = [columns for keys, columns in parts if keys.size] or [parts[0][1]]
    names = [name for name in first if name != "slots" and all(name in each for each in others)]
    return {
        name: np.concatenate([first[name], *(each[name] for each in others)])[kept]
        for name in names
    }


class _Place(NamedTuple):
    """A state of a part, by its place there."""

    tensor: int
    name: str
    dim: int
    initial: float
    group: int | None


def _joined_states(parts: Sequence[Content]) -> list[State]:
    """Returns the states of parts, one part after the other, group by group."""
    places = [
        [_Place(i, s.name, s.dim, s.initial, s.group) for i, s in enumerate(part.states)]
        for part in parts
    ]
    joined = []
    for name, dim, initial, group, tensors in joined_states(places):
        rows = [
            part.states[tensors[i]].rows
            if i in tensors
            else np.full((part.keys.size, dim), initial, np.float32)
            for i, part in enumerate(parts)
        ]
        joined.append(State(name, dim, initial, np.concatenate(rows), group))
    return sorted(joined, key=lambda state: state.group or 0)


# ---------------------------------------------------------------- as named arrays


def named_arrays(content: Content) -> dict[str, Any]:
    """Returns a content as what bridge/checkpoint.py lists: arrays and texts by name."""
    none = np.empty((content.keys.size, 0), np.float32)
    sightings = content.sighted["sighting_stamps"].astype(np.int64) << 32
    return {
        "keys": content.keys,
        "values": content.values,
        "states": np.concatenate([none, *(state.rows for state in content.states)], axis=1),
        "state_columns": json.dumps(columns_of(content.states)),
        "stamps": content.columns["stamps"].astype(np.int64),
        "scores": content.columns.get("scores", np.empty(0, np.uint64)),
        "slots": content.columns.get("slots", np.empty(0, np.int64)),
        "sighted_keys": content.sighted_keys,
        "sightings": sightings | content.sighted["sightings"],
        "facts": json.dumps(content.facts),
    }


def from_named_arrays(arrays: Mapping[str, Any], whose: str) -> Content:
    """Returns the content of which `named_arrays` gave these.

    Args:
      arrays: texts may be bytes.
      whose: names the table in errors.

    Raises:
      ValueError: they are not equally long, or the states are others than their text says.
    """
    keys, sightings = arrays["keys"], arrays["sightings"]
    columns = {name: arrays[name] for name in ("scores", "slots") if arrays[name].size}
    columns["stamps"] = arrays["stamps"].astype(np.uint32)
    content = Content(
        keys,
        arrays["values"],
        states_of(arrays["states"], json.loads(arrays["state_columns"]), whose),
        columns,
        arrays["sighted_keys"],
        {
            "sightings": sightings.astype(np.uint32),
            "sighting_stamps": (sightings >> 32).astype(np.uint32),
        },
        json.loads(arrays["facts"]),
    )
    _check_sizes(content, whose)
    return content


def _check_sizes(content: Content, whose: str) -> None:
    n, m = content.keys.size, content.sighted_keys.size
    sizes = [(name, n, len(column)) for name, column in content.columns.items()]
    sizes += [(name, m, len(column)) for name, column in content.sighted.items()]
    sizes += [("values", n, len(content.values))]
    sizes += [(f"rows of state {state.name!r}", n, len(state.rows)) for state in content.states]
    for name, expected, size in sizes:
        if size != expected:
            raise ValueError(
                f"What was saved of {whose} is corrupt: {size:,} {name} for {expected:,} keys."
            )

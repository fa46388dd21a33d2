"""All that a table holds, on the host: taken out, chosen from, put together and put back.

Formats of checkpoints are codecs over it: what a key has that comes in several parts, which states
are one, and whose keys are whose is decided here for all of them. Rows may stay in files.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.aligned import aligned_empty
from sok_lite.engine.batch import ShardedTable
from sok_lite.engine.optimizer_states import drop_orphaned_states
from sok_lite.engine.rows.store import RowStore
from sok_lite.engine.table import snapshot
from sok_lite.engine.table.base import EmbeddingTable
from sok_lite.engine.table.exclusive import alone
from sok_lite.engine.table.joined import joined_facts, joined_states, without_slots
from sok_lite.engine.table.lazy_rows import LazyRows, chained, in_pieces, moved
from sok_lite.engine.table.snapshot import Held, Snapshot, State, numbered_states, take_held
from sok_lite.engine.table.state_columns import columns_of, side_by_side, states_of

_log = logging.getLogger("sok_lite")

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
      values: (n, dim) of the row's storage dtype, or LazyRows of such on the host.
      states: of all optimizers, rows (n, dim) float32, or LazyRows of such on the host.
      columns: what is known of each key, (n,) by name.
      sighted_keys: (m,) int64, distinct, ascending.
      sighted: what is known of each of those, (m,) by name.
      facts: of the table, as of `snapshot.Held`; {}: a codec knows none.
    """

    keys: np.ndarray
    values: Any
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
    values = aligned_empty((rows.size, table.dim), store.column().dtype)
    _copy(store, rows, "value", values)
    numbered = numbered_states(store)
    width = sum(column.dim for *_, column in numbered)
    all_states = aligned_empty((rows.size, width), np.dtype(np.float32))
    states, end = [], 0
    for number, name, column in numbered:
        begin, end = end, end + column.dim
        its_rows = all_states[:, begin:end]
        _copy(store, rows, column.name, its_rows)
        states.append(State(name, column.dim, column.initial, its_rows, number))
    columns = {name: host(getattr(held, name)) for name in _COLUMNS}
    sighted_keys = host(held.sighted_keys)
    order = np.argsort(sighted_keys)
    return Content(
        host(held.keys),
        values,
        states,
        # Scores and slots are empty where there are none.
        {name: column for name, column in columns.items() if column.size or name == "stamps"},
        sighted_keys[order],
        {name: host(getattr(held, name))[order] for name in _SIGHTED},
        held.facts,
    )


def _copy(store: RowStore, rows: Array, column: str, out: np.ndarray) -> None:
    """Copies rows of a column to the host; on a GPU there may be no memory for all of them."""
    backend = store.backend
    if backend.name == "cpu" and out.flags.c_contiguous:
        store.read(rows, column, out)
        return
    step = max(1, _CHUNK_BYTES // max(1, store.column(column).row_bytes))
    for first in range(0, len(rows), step):
        some = store.read(rows[first : first + step], column)
        out[first : first + step] = backend.to_host(some)


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


def _rows_for(backend: Backend, rows: Any) -> Any:
    """Returns rows of the host as a table takes them; what it must copy it has a piece of."""
    if not isinstance(rows, np.ndarray | LazyRows):
        return rows
    if backend.name == "cpu" and (isinstance(rows, LazyRows) or rows.flags.c_contiguous):
        return rows
    pieces = in_pieces(rows, _CHUNK_BYTES) if isinstance(rows, np.ndarray) else rows
    device = backend.from_host
    return pieces._replace(read=lambda: ((device(at), device(some)) for at, some in pieces.read()))


# ---------------------------------------------------------------- choosing and putting together


def select(content: Content, chosen: np.ndarray, sighted: np.ndarray) -> Content:
    """Returns some of the keys of a content, with what is known of them.

    Where they had their slots is known of all keys together only.

    Args:
      chosen: (n,) bool, or distinct places of keys with a row, in the order that they are to have.
      sighted: (m,) bool, or such places of those without one.
    """
    if _are_in_place(chosen) and _are_in_place(sighted):
        return content
    columns, facts = dict(content.columns), dict(content.facts)
    num_chosen = np.count_nonzero(chosen) if chosen.dtype == bool else chosen.size
    if num_chosen < content.keys.size:
        columns.pop("slots", None)
        facts = without_slots(facts)
    values, states = _selected(content.values, content.states, chosen)
    return Content(
        content.keys[chosen],
        values,
        states,
        {name: column[chosen] for name, column in columns.items()},
        content.sighted_keys[sighted],
        {name: column[sighted] for name, column in content.sighted.items()},
        facts,
    )


def _selected(
    values: Any, states: Sequence[State], chosen: np.ndarray
) -> tuple[Any, Sequence[State]]:
    """Returns the chosen rows of values and states, which are arrays or LazyRows."""
    if not isinstance(values, LazyRows):
        return values[chosen], [state._replace(rows=state.rows[chosen]) for state in states]
    at = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
    places = np.full(values.shape[0], -1)
    places[at] = np.arange(at.size)
    return moved(values, places, at.size), [
        state._replace(rows=moved(state.rows, places, at.size)) for state in states
    ]


def _are_in_place(chosen: np.ndarray) -> bool:
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


def concatenate(parts: Sequence[Content], whose: str, counts: Counts | None = None) -> Content:
    """Returns what several parts of a table hold together; see `one_of_each` for repeated keys.

    A state that a part does not have is what it begins with there. What is known of the keys of
    some parts only is left out, and so is where they had their slots. Facts are those of the part
    with most lookups.

    Args:
      parts: at least one; the rows of all are arrays, or of all LazyRows.
      whose: names the table in what is said.
      counts: which part counts for a key that several have; None: none may.

    Raises:
      ValueError: a key comes in several parts, and none of them counts.
    """
    if len(parts) == 1:
        return parts[0]
    keys = np.concatenate([part.keys for part in parts])
    kept = one_of_each(keys, counts, whose)
    sighted_keys = np.concatenate([part.sighted_keys for part in parts])
    sighted = _places(sighted_keys, counts)
    values = _one_after_the_other([part.values for part in parts])
    values, states = _selected(values, _joined_states(parts), kept)
    facts = [dict(part.facts) for part in parts if part.facts]
    return Content(
        keys[kept],
        values,
        states,
        _joined_columns([(part.keys, part.columns) for part in parts], kept),
        sighted_keys[sighted],
        _joined_columns([(part.sighted_keys, part.sighted) for part in parts], sighted),
        without_slots(joined_facts(facts)) if facts else {},
    )


def one_of_each(keys: np.ndarray, counts: Counts | None, whose: str) -> np.ndarray:
    """Returns the place of one of each distinct key, (k,) int64, in the order of the keys.

    Keys that come again are counted, and the logger "sok_lite" warns of them.

    Args:
      keys: (n,) of several parts, one part after the other.
      counts: which is taken of a key that comes more than once; None: none may.
      whose: names the table in what is said.

    Raises:
      ValueError: a key comes more than once, and none counts.
    """
    places = _places(keys, counts)
    num_repeated = keys.size - places.size
    if num_repeated and counts is None:
        raise ValueError(
            f"What was saved of {whose} is corrupt: its parts have {num_repeated:,} keys in common."
        )
    if num_repeated:
        _log.warning(
            "What was saved of %s has %s keys more than once: of each the %s one counts.",
            *(whose, f"{num_repeated:,}", counts),
        )
    return places


def _places(keys: np.ndarray, counts: Counts | None) -> np.ndarray:
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_new = np.ones(keys.size, bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    if counts == "last":
        is_new = np.append(is_new[1:], True)[: keys.size]
    return order[is_new]


def _one_after_the_other(rows: Sequence[Any]) -> Any:
    return chained(rows) if isinstance(rows[0], LazyRows) else np.concatenate(rows)


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
            part.states[tensors[i]].rows if i in tensors else _begun(part, dim, initial)
            for i, part in enumerate(parts)
        ]
        joined.append(State(name, dim, initial, _one_after_the_other(rows), group))
    return sorted(joined, key=lambda state: state.group or 0)


def _begun(part: Content, dim: int, initial: float) -> Any:
    """Returns the rows of a state that a part does not have."""
    shape = part.keys.size, dim
    is_lazy = isinstance(part.values, LazyRows)
    return LazyRows(shape, lambda: iter(())) if is_lazy else np.full(shape, initial, np.float32)


# ---------------------------------------------------------------- as named arrays


def named_arrays(content: Content) -> dict[str, Any]:
    """Returns a content as what bridge/checkpoint.py lists: arrays and texts by name."""
    sightings = content.sighted["sighting_stamps"].astype(np.int64) << 32
    return {
        "keys": content.keys,
        "values": content.values,
        "states": side_by_side(content.states, content.keys.size),
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

"""All that a table holds, on the host: taken out, chosen from, put together and put back.

Formats of checkpoints are codecs over it: what a key has that comes in several parts, which states
are one, and whose keys are whose is decided here for all of them.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.aligned import aligned_empty
from sok_lite.engine.batch import ShardedTable
from sok_lite.engine.optimizer_states import drop_orphaned_states
from sok_lite.engine.rows.store import RowStore
from sok_lite.engine.table import restoring
from sok_lite.engine.table.base import EmbeddingTable
from sok_lite.engine.table.exclusive import alone
from sok_lite.engine.table.joined import joined_facts, joined_states, without_slots
from sok_lite.engine.table.pieces import outline
from sok_lite.engine.table.saved import Owns, Saved, SavedPart
from sok_lite.engine.table.state_columns import State

_log = logging.getLogger("sok_lite")

_CHUNK_BYTES = 8 << 20  # of rows that are read from a GPU together

# Which of a key counts that several parts have.
Counts: TypeAlias = Literal["first", "last"]


class Content(NamedTuple):
    """All that a table holds: n keys with a row, and m that were seen and have none.

    Attributes:
      keys: (n,) of the table's key type, distinct, ascending.
      values: (n, dim) of the row's storage dtype.
      states: of all optimizers, rows (n, dim) float32.
      columns: what is known of each key, (n,) by name. Of a table "stamps", uint32, the lookup that
        last saw it, and "scores", uint64, and "slots", int64, where there are any.
      pending_keys: (m,) int64, distinct, ascending.
      pending: what is known of each of those, (m,) by name. Of a table "sightings", uint32, how
        often it was seen, and "sighting_stamps", uint32, the lookup that last saw it.
      facts: number of lookups, their times and, of a "hybrid" table, what its index needs;
        `saved.SavedPart` lists them. {}: a codec knows none.
    """

    keys: np.ndarray
    values: Any
    states: Sequence[State]
    columns: Mapping[str, np.ndarray]
    pending_keys: np.ndarray
    pending: Mapping[str, np.ndarray]
    facts: Mapping[str, Any]


def take(table: EmbeddingTable) -> Content:
    """Returns a copy of all that a table holds, less the states of optimizers that are gone.

    Raises:
      MemoryError: there is no memory for it.
    """
    return alone(table, lambda: _taken(table))


def _taken(table: EmbeddingTable) -> Content:
    drop_orphaned_states(table)
    store, xp, host = table.store, table.backend.xp, table.backend.to_host
    entries, what = table.index.entries(), outline(table)
    keys = table.key_dtype.from_int64(xp, entries.keys)
    order = xp.argsort(keys)
    rows = xp.ascontiguousarray(entries.rows[order])
    values = aligned_empty((rows.size, table.dim), store.column().dtype)
    _copy(store, rows, "value", values)
    width = sum(column.dim for *_, column in what.states)
    all_states = aligned_empty((rows.size, width), np.dtype(np.float32))
    states, end = [], 0
    for number, name, column in what.states:
        begin, end = end, end + column.dim
        its_rows = all_states[:, begin:end]
        _copy(store, rows, column.name, its_rows)
        states.append(State(name, column.dim, column.initial, its_rows, number))
    names = ["stamps", *["scores"] * what.has_scores, *["slots"] * what.has_slots]
    columns = {name: host(entries.column(name)[order]) for name in names}
    pending: list[Any] = [np.empty(0, dtype) for dtype in (np.int64, np.uint32, np.uint32)]
    if table.pending is not None:
        pending = [host(array) for array in table.pending.export()]
    pending_keys, counts, last_seen = (array[np.argsort(pending[0])] for array in pending)
    return Content(
        host(keys[order]),
        values,
        states,
        columns,
        pending_keys,
        {"sightings": counts, "sighting_stamps": last_seen},
        what.facts,
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
    """Makes a table hold a content and nothing else. Counters begin anew.

    Args:
      content: arrays of the host or of the table's backend.

    Raises:
      ValueError: the keys do not fit the key type or `max_capacity`, or the content contradicts
        itself. The table is as it was.
      MemoryError: no memory for it beside what the table holds; the table is as it was.
    """
    restoring.restore(table, as_saved(table, [content]))


def as_saved(table: EmbeddingTable, contents: Sequence[Content]) -> Saved:
    """Returns contents as parts that a table is to hold; of a key that several have the first
    counts.

    Raises:
      ValueError: one contradicts itself.
    """
    return Saved.of([_SavedContent(table, content) for content in contents])


class _SavedContent(SavedPart):
    """A content, read in pieces."""

    def __init__(self, table: EmbeddingTable, content: Content) -> None:
        whose = f"table {table.name!r}"
        check_sizes(content, whose)
        rows = {"value": (table.dim, content.values)}
        rows |= {f"state {s.name!r}": (s.dim, s.rows) for s in content.states}
        for what, (dim, its_rows) in rows.items():
            if its_rows.shape[1:] != (dim,):
                raise ValueError(
                    f"What was saved of {whose} is corrupt: rows of {what} must have shape "
                    f"({content.keys.size}, {dim}). Received: shape {tuple(its_rows.shape)}."
                )
        if bool((content.keys[1:] <= content.keys[:-1]).any()):
            raise ValueError(f"What was saved of {whose} is corrupt: its keys repeat.")
        self.num_keys, self.facts = int(content.keys.size), content.facts
        self.states = _placed_states(content)
        self.columns = [name for name, column in content.columns.items() if column.size]
        pending_keys = content.pending_keys.astype(content.keys.dtype, copy=False)
        self._arrays = {"keys": content.keys, "value": content.values}
        self._arrays |= {**content.columns, "sighted_keys": pending_keys, **content.pending}
        self._states = content.states
        widest = max(8, *(its_rows.dtype.itemsize * dim for dim, its_rows in rows.values()))
        self._step = max(1, _CHUNK_BYTES // widest)

    def read(self, name: Any, wanted: Collection[int] | None = None) -> Iterator[Array]:
        array = self._states[name].rows if isinstance(name, int) else self._arrays[name]
        step = self._step
        for i in range(-(-len(array) // step)) if wanted is None else wanted:
            yield array[i * step : (i + 1) * step]


def check_sizes(content: Content, whose: str) -> None:
    """Raises ValueError where a column of a content is not as long as its keys.

    Args:
      whose: names the table in errors.
    """
    n, m = content.keys.size, content.pending_keys.size
    sizes = [(name, n, len(column)) for name, column in content.columns.items()]
    sizes += [(name, m, len(column)) for name, column in content.pending.items()]
    sizes += [("values", n, len(content.values))]
    sizes += [(f"rows of state {state.name!r}", n, len(state.rows)) for state in content.states]
    for name, expected, size in sizes:
        if size != expected:
            raise ValueError(
                f"What was saved of {whose} is corrupt: {size:,} {name} for {expected:,} keys."
            )


# ---------------------------------------------------------------- choosing and putting together


def select(content: Content, chosen: np.ndarray, pending: np.ndarray) -> Content:
    """Returns some of the keys of a content, with what is known of them.

    Where they had their slots is known of all keys together only.

    Args:
      chosen: (n,) bool, or distinct places of keys with a row, in the order that they are to have.
      pending: (m,) bool, or such places of those without one.
    """
    if _are_in_place(chosen) and _are_in_place(pending):
        return content
    columns, facts = dict(content.columns), dict(content.facts)
    num_chosen = np.count_nonzero(chosen) if chosen.dtype == bool else chosen.size
    if num_chosen < content.keys.size:
        columns.pop("slots", None)
        facts = without_slots(facts)
    return Content(
        content.keys[chosen],
        content.values[chosen],
        [state._replace(rows=state.rows[chosen]) for state in content.states],
        {name: column[chosen] for name, column in columns.items()},
        content.pending_keys[pending],
        {name: column[pending] for name, column in content.pending.items()},
        facts,
    )


def _are_in_place(chosen: np.ndarray) -> bool:
    return chosen.dtype == bool and bool(chosen.all())


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
    """Returns the keys of a content that a rank owns, with what is known of them."""
    pending = content.pending_keys.astype(content.keys.dtype)
    return select(content, are_own(content.keys), are_own(pending))


def in_order(content: Content) -> Content:
    """Returns a content whose keys are distinct, in any order, with ascending ones."""
    return select(content, _order(content.keys), _order(content.pending_keys))


def _order(keys: np.ndarray) -> np.ndarray:
    if bool((keys[1:] > keys[:-1]).all()):
        return np.ones(keys.size, bool)
    return np.argsort(keys)


def concatenate(parts: Sequence[Content], whose: str, counts: Counts | None = None) -> Content:
    """Returns the content that several parts of a table have together.

    A state that a part does not have is what it begins with there. What is known of the keys of
    some parts only is left out, and so is where they had their slots. Facts are those of the part
    with most lookups.

    Args:
      parts: at least one.
      whose: names the table in what is said.
      counts: which part counts for a key that several have; None: none may.

    Raises:
      ValueError: a key comes in several parts, and none of them counts.
    """
    if len(parts) == 1:
        return parts[0]
    keys = np.concatenate([part.keys for part in parts])
    kept = one_of_each(keys, counts, whose)
    pending_keys = np.concatenate([part.pending_keys for part in parts])
    pending = _places(pending_keys, counts)
    facts = [dict(part.facts) for part in parts if part.facts]
    return Content(
        keys[kept],
        np.concatenate([part.values for part in parts])[kept],
        _joined_states(parts, kept),
        _joined_columns([(part.keys, part.columns) for part in parts], kept),
        pending_keys[pending],
        _joined_columns([(part.pending_keys, part.pending) for part in parts], pending),
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


class _NumberedState(NamedTuple):
    """A state of a part, by its place there."""

    tensor: int
    name: str
    dim: int
    initial: float
    group: int | None


def _placed_states(content: Content) -> list[_NumberedState]:
    states = enumerate(content.states)
    return [_NumberedState(i, s.name, s.dim, s.initial, s.group) for i, s in states]


def _joined_states(parts: Sequence[Content], kept: np.ndarray) -> list[State]:
    """Returns the states of parts, one part after the other, group by group."""
    joined = []
    for name, dim, initial, group, tensors in joined_states(list(map(_placed_states, parts))):
        rows = [
            part.states[tensors[i]].rows
            if i in tensors
            else np.full((part.keys.size, dim), initial, np.float32)
            for i, part in enumerate(parts)
        ]
        joined.append(State(name, dim, initial, np.concatenate(rows)[kept], group))
    return sorted(joined, key=lambda state: state.group or 0)

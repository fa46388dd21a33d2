"""All that a table holds, on the host: taken out and put back.

Formats of checkpoints are codecs over it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.aligned import aligned_empty
from sok_lite.engine.optimizer_states import State, drop_orphaned_states
from sok_lite.engine.rows.store import RowStore
from sok_lite.engine.table import restoring
from sok_lite.engine.table.exclusive import alone
from sok_lite.engine.table.joined import checked_facts
from sok_lite.engine.table.pieces import outline
from sok_lite.engine.table.saved import Saved, SavedPart
from sok_lite.engine.table.table import EmbeddingTable

_CHUNK_BYTES = 8 << 20  # of rows that are read from a GPU together


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
    width = sum(state.dim for state in what.states)
    all_states = aligned_empty((rows.size, width), np.dtype(np.float32))
    states, end = [], 0
    for state in what.states:
        begin, end = end, end + state.dim
        its_rows = all_states[:, begin:end]
        _copy(store, rows, state.rows.name, its_rows)
        states.append(state._replace(rows=its_rows))
    names = ["stamps", *["scores"] * what.has_scores, *["slots"] * what.has_slots]
    columns = {name: host(entries.column(name)[order]) for name in names}
    pending: list[Any] = [np.empty(0, dtype) for dtype in (np.int64, np.uint32, np.uint32)]
    if table.pending is not None:
        pending = [host(array) for array in table.pending.entries()[:3]]
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
        self._table = table.name
        check_sizes(content, f"table {table.name!r}")
        try:
            checked_facts(content.facts)
        except ValueError as error:
            raise self.corrupt(f"{error}") from error
        rows = {"value": (table.dim, content.values)}
        rows |= {f"state {s.name!r}": (s.dim, s.rows) for s in content.states}
        for what, (dim, its_rows) in rows.items():
            if its_rows.shape[1:] != (dim,):
                raise self.corrupt(
                    f"rows of {what} must have shape ({content.keys.size}, {dim}). Received: shape "
                    f"{tuple(its_rows.shape)}"
                )
        if bool((content.keys[1:] <= content.keys[:-1]).any()):
            raise self.corrupt("its keys repeat")
        self.num_keys, self.facts = int(content.keys.size), content.facts
        self.states = placed_states(content)
        self.columns = [name for name, column in content.columns.items() if column.size]
        pending_keys = content.pending_keys.astype(content.keys.dtype, copy=False)
        self._arrays = {"keys": content.keys, "value": content.values}
        self._arrays |= {**content.columns, "sighted_keys": pending_keys, **content.pending}
        self._states = content.states
        widest = max(8, *(its_rows.dtype.itemsize * dim for dim, its_rows in rows.values()))
        self._step = max(1, _CHUNK_BYTES // widest)

    def corrupt(self, reason: str) -> ValueError:
        return ValueError(f"What was saved of table {self._table!r} is corrupt: {reason}.")

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


class NumberedState(NamedTuple):
    """A state of a part, by its place there."""

    tensor: int
    name: str
    dim: int
    initial: float
    group: int | None


def placed_states(content: Content) -> list[NumberedState]:
    """Returns the states of a content, each with its place there."""
    states = enumerate(content.states)
    return [NumberedState(i, s.name, s.dim, s.initial, s.group) for i, s in states]

"""A table's content: keys, rows, optimizer states, scores and the lookups that last saw the keys.

All formats share it. A `SavedPart` is a stream that yields columns in chunks, so that not all of
the content is in memory. A `Content` is arrays on the host. `restore.py` fills a table from parts.
This file also joins parts: which of several rows of a key counts, and which states are the same.
"""

import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, KeysView, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.aligned import aligned_empty
from sok_lite.engine.batch import ShardedTable
from sok_lite.engine.hashing import is_seed
from sok_lite.engine.optimizer_states import State, drop_orphaned_states, numbered_states
from sok_lite.engine.rows.store import RowStore
from sok_lite.engine.table.clock import Spans
from sok_lite.engine.table.hkv import HkvTable
from sok_lite.engine.table.index import IndexEntries
from sok_lite.engine.table.locking import with_lock
from sok_lite.engine.table.record import LAST_LOOKUP_NUMBER
from sok_lite.engine.table.table import EmbeddingTable

_log = logging.getLogger("sok_lite")

_CHUNK_BYTES = 8 << 20  # the most bytes of rows read from a GPU at once
_ENTRY_BYTES = 32  # of the index, for each key
_LAST_EPOCH = 0xFFFFFFFF
# Columns of pending keys, which were seen and have no row yet: the field of `IndexEntries` of each.
PENDING = {"sighted_keys": "keys", "sightings": "rows", "sighting_stamps": "last_seen"}

# Maps keys (k,) of a table's key type, on the host, to whether a rank owns each, (k,) bool.
Owns: TypeAlias = Callable[[np.ndarray], np.ndarray]
ArrayOf: TypeAlias = Callable[[Any], Any]


# ---- streams -------------------------------------------------------------------------------------


class SavedRows(ABC):
    """Keys and their rows, in chunks."""

    @abstractmethod
    def read(self, name: str | int, wanted: Collection[int] | None = None) -> Iterator[Array]:
        """Yields a column in chunks, of the same lengths for every column.

        Args:
          name: "keys", (k,) of the table's key type, which may repeat; "value", (k, dim) of the
            row's storage dtype; or the position of a state in the part, (k, its dim) float32.
          wanted: numbers of the chunks to yield, ascending; None: all.

        Raises:
          OSError: a file cannot be read. ValueError: it is corrupt.
        """


class SavedPart(SavedRows):
    """A part of a saved table: all of its keys, and the rows of all or of the first chunks.

    Attributes:
      num_keys: the most keys it can bring.
      states: its optimizer states.
      columns: those it has of "stamps", "scores" and "slots".
      facts: num_lookups, and spans, the times of those lookups, which old checkpoints lack; of a
        "hybrid" table also capacity, strategy, epoch and the layout of its slots: bucket, segment,
        num_slots, hash_seed.
      num_with_rows: number of chunks, from the first, whose rows are here; None: all.
      older: the files with the rows of the other keys, newest first.
      owns: which keys count; None: all.
      is_own: whether it is the table that is restored, in a merge: its keys may be among the saved
        ones, and its pending counts come first.
    """

    num_keys: int
    states: Sequence["AnyState"]
    columns: Collection[str]
    facts: Mapping[str, Any]
    num_with_rows: int | None = None
    older: Sequence[SavedRows] = ()
    owns: Owns | None = None
    is_own: bool = False

    @abstractmethod
    def read(self, name: str | int, wanted: Collection[int] | None = None) -> Iterator[Array]:
        """Yields a column in chunks.

        Args:
          name: as in `SavedRows.read`; or one of `columns`: "stamps", (k,) uint32, the lookup that
            last saw each key, "scores", (k,) uint64, "slots", (k,) int64, slot numbers; or, in
            chunks of their own, "sighted_keys", (m,) of the table's key type, the pending keys,
            "sightings", (m,) uint32, how often each was seen, "sighting_stamps", (m,) uint32, the
            lookup that last saw each, 0 if unknown, as in old checkpoints.
        """

    def corrupt(self, reason: str) -> ValueError:
        """Returns the error of a corrupt part."""
        return ValueError(f"What was saved is corrupt: {reason}.")


class SavedParts(NamedTuple):
    """All parts of a saved table, as one.

    Attributes:
      parts: if several have a key the first counts; each is on the host or the table's device.
      states: of all parts.
      facts: of all parts together, as in `SavedPart`.
    """

    parts: Sequence[SavedPart]
    states: Sequence["JoinedState"]
    facts: dict[str, Any]

    @staticmethod
    def of(parts: Sequence[SavedPart]) -> "SavedParts":
        """Joins parts, one at least."""
        facts = join_facts([dict(part.facts) for part in parts])
        facts = facts if len(parts) == 1 else without_slots(facts)
        return SavedParts(parts, join_states([part.states for part in parts]), facts)

    @property
    def num_keys(self) -> int:
        """The most keys it can bring."""
        return sum(part.num_keys for part in self.parts)

    @property
    def has_scores(self) -> bool:
        """Whether every key has a saved score."""
        return all("scores" in part.columns for part in self.parts if part.num_keys)


# ---- a table -------------------------------------------------------------------------------------


class TablePart(SavedPart):
    """A live table, read in the order of its slots. Lock it until the last chunk, as
    `mutate` does.

    Args:
      num_bytes: the most bytes of a chunk.

    Attributes:
      num_pending: number of pending keys.
      states: with their columns.
      num_slots: slots scanned together, so the most keys of a chunk.
      since: keys that this lookup or a later one has seen come first, and only they have rows;
        None: all keys have rows, in the order of their slots.
    """

    is_own = True

    def __init__(self, table: EmbeddingTable, num_bytes: int = _CHUNK_BYTES) -> None:
        self.table, self.num_keys, self.num_pending = table, table.size, 0
        self.since: int | None = None
        has_scores = has_slots = False
        if isinstance(table, HkvTable):
            # After a growth that failed half-way, slot numbers do not lead back to the slots.
            has_scores, has_slots = table.index.has_scores, table.index.is_regular
            self.num_pending = 0 if table.pending is None else table.pending.size
        self.columns = ["stamps", *["scores"] * has_scores, *["slots"] * has_slots]
        self.facts: dict[str, Any] = _facts_of(table)
        self.states: list[State] = numbered_states(table.store)
        widest = max(column.row_bytes for column in table.store.columns.values())
        self.num_slots = max(1, num_bytes // max(widest, _ENTRY_BYTES))

    def read(self, name: str | int, wanted: Collection[int] | None = None) -> Iterator[Array]:
        table = self.table
        if name in PENDING:
            if table.pending is not None:
                for piece in pieces(table, self.num_slots, table.pending):
                    yield getattr(piece, PENDING[str(name)])
            return
        is_of_keys = name == "keys" or name in self.columns
        for i, piece in enumerate(self._pieces(with_rest=is_of_keys)):
            if wanted is not None and i not in wanted:
                continue
            if is_of_keys:
                yield piece.column(str(name))
            else:
                column = self.states[name].rows.name if isinstance(name, int) else name
                yield table.store.read(table.backend.xp.ascontiguousarray(piece.rows), column)

    def _pieces(self, with_rest: bool) -> Iterator[IndexEntries]:
        if self.since is None:
            yield from pieces(self.table, self.num_slots)
            return
        for is_first in (True, False) if with_rest else (True,):
            for piece in pieces(self.table, self.num_slots):
                is_wanted = (piece.last_seen >= np.uint32(self.since)) == is_first
                yield IndexEntries(*(array[is_wanted] for array in piece))


def pieces(table: EmbeddingTable, num_slots: int, index: Any = None) -> Iterator[IndexEntries]:
    """Yields the entries of an index in chunks, with keys of the table's key type.

    Args:
      num_slots: slots scanned together, so the most keys of a chunk.
      index: the table's index, or its pending counts, whose `rows` are the counts; None: the index.
    """
    index = table.index if index is None else index
    for first in range(0, index.num_slots, num_slots):
        entries = index.entries(first, num_slots)
        yield entries._replace(keys=table.key_dtype.from_int64(table.backend.xp, entries.keys))


def _facts_of(table: EmbeddingTable) -> dict[str, Any]:
    """Returns the facts of a table, as `SavedPart` lists them, for JSON."""
    facts: dict[str, Any] = {"num_lookups": table.num_lookups, "spans": table.clock.spans._asdict()}
    if isinstance(table, HkvTable):
        index = table.index
        facts |= {
            "capacity": index.capacity,
            "bucket": index.bucket,
            "segment": index.sizes.unit,
            "num_slots": index.num_slots - 2,
            "hash_seed": index.seed,
            "strategy": index.strategy,
            "epoch": index.epoch,
        }
    return facts


# ---- whole arrays --------------------------------------------------------------------------------


class Content(NamedTuple):
    """A table's content as arrays: n keys with a row, and m pending keys.

    Attributes:
      keys: (n,) of the table's key type, distinct, ascending.
      values: (n, dim) of the row's storage dtype.
      states: of all optimizers, with rows (n, its dim) float32.
      columns: by name, (n,) each: "stamps", uint32, the lookup that last saw each key; "scores",
        uint64, and "slots", int64, where the table has them. A codec may add others.
      pending_keys: (m,) int64, distinct, ascending.
      pending: by name, (m,) each: "sightings", uint32, how often each was seen, and
        "sighting_stamps", uint32, the lookup that last saw it.
      facts: as in `SavedPart`; empty if unknown.
    """

    keys: np.ndarray
    values: Any
    states: Sequence[State]
    columns: Mapping[str, np.ndarray]
    pending_keys: np.ndarray
    pending: Mapping[str, np.ndarray]
    facts: Mapping[str, Any]


def take(table: EmbeddingTable) -> Content:
    """Copies a table's content, without the states of optimizers that are gone.

    Raises:
      MemoryError: there is no memory for the copy.
    """
    return with_lock(table, lambda: _take(table))


def _take(table: EmbeddingTable) -> Content:
    drop_orphaned_states(table)
    part, xp, host = TablePart(table), table.backend.xp, table.backend.to_host
    entries = table.index.entries()
    keys = table.key_dtype.from_int64(xp, entries.keys)
    order = xp.argsort(keys)
    rows = xp.ascontiguousarray(entries.rows[order])
    values = aligned_empty((rows.size, table.dim), table.store.column().dtype)
    _copy(table.store, rows, "value", values)
    # Side by side, so that TensorFlow's formats need no other copy.
    width = sum(state.dim for state in part.states)
    all_states = aligned_empty((rows.size, width), np.dtype(np.float32))
    states, end = [], 0
    for state in part.states:
        begin, end = end, end + state.dim
        _copy(table.store, rows, state.rows.name, all_states[:, begin:end])
        states.append(state._replace(rows=all_states[:, begin:end]))
    columns = {name: host(entries.column(name)[order]) for name in part.columns}
    pending: list[Any] = [np.empty(0, dtype) for dtype in (np.int64, np.uint32, np.uint32)]
    if table.pending is not None:
        pending = [host(array) for array in table.pending.entries()[:3]]
    pending_keys, counts, last_seen = (array[np.argsort(pending[0])] for array in pending)
    known = {"sightings": counts, "sighting_stamps": last_seen}
    return Content(host(keys[order]), values, states, columns, pending_keys, known, part.facts)


def _copy(store: RowStore, rows: Array, column: str, out: np.ndarray) -> None:
    """Copies rows of a column to the host, in chunks: a GPU may lack memory for all of them."""
    backend = store.backend
    if backend.name == "cpu" and out.flags.c_contiguous:
        store.read(rows, column, out)
        return
    step = max(1, _CHUNK_BYTES // max(1, store.column(column).row_bytes))
    for first in range(0, len(rows), step):
        some = store.read(rows[first : first + step], column)
        out[first : first + step] = backend.to_host(some)


def as_saved(table: EmbeddingTable, contents: Sequence[Content]) -> SavedParts:
    """Returns contents as parts; if several have a key the first counts.

    Args:
      contents: on the host or the table's device.

    Raises:
      ValueError: one contradicts itself.
    """
    return SavedParts.of([_ContentPart(table, content) for content in contents])


class _ContentPart(SavedPart):
    """A content, read in chunks."""

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
        self.num_keys, self.states = int(content.keys.size), content.states
        self.facts = content.facts
        self.columns = [name for name, column in content.columns.items() if column.size]
        pending_keys = content.pending_keys.astype(content.keys.dtype, copy=False)
        self._arrays: dict[Any, Any] = {"keys": content.keys, "value": content.values}
        self._arrays |= content.columns
        self._arrays |= {"sighted_keys": pending_keys, **content.pending}
        self._arrays |= {i: state.rows for i, state in enumerate(content.states)}
        widest = max(8, *(its_rows.dtype.itemsize * dim for dim, its_rows in rows.values()))
        self._step = max(1, _CHUNK_BYTES // widest)

    def corrupt(self, reason: str) -> ValueError:
        return ValueError(f"What was saved of table {self._table!r} is corrupt: {reason}.")

    def read(self, name: str | int, wanted: Collection[int] | None = None) -> Iterator[Array]:
        array, step = self._arrays[name], self._step
        for i in range(-(-len(array) // step)) if wanted is None else wanted:
            yield array[i * step : (i + 1) * step]


def check_sizes(content: Content, whose: str) -> None:
    """Raises ValueError if a column is not as long as its keys; `whose` names the table."""
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


def select(content: Content, chosen: np.ndarray, pending: np.ndarray) -> Content:
    """Selects keys of a content. Slots are kept only if all keys are.

    Args:
      chosen: of keys with a row, (n,) bool, or distinct positions in their new order.
      pending: the same of pending keys.
    """
    if all(each.dtype == bool and bool(each.all()) for each in (chosen, pending)):
        return content
    some = with_arrays(content, lambda array: array[chosen], lambda array: array[pending])
    if some.keys.size == content.keys.size:
        return some
    columns = {name: column for name, column in some.columns.items() if name != "slots"}
    return some._replace(columns=columns, facts=without_slots(dict(some.facts)))


def with_arrays(content: Content, of_keys: ArrayOf, of_pending: ArrayOf) -> Content:
    """Maps the arrays of a content: `of_keys` those of keys with a row, `of_pending` the others."""
    return Content(
        of_keys(content.keys),
        of_keys(content.values),
        [s._replace(rows=of_keys(s.rows)) for s in map(State._make, content.states)],
        {name: of_keys(column) for name, column in content.columns.items()},
        of_pending(content.pending_keys),
        {name: of_pending(column) for name, column in content.pending.items()},
        content.facts,
    )


def owns(table: ShardedTable, rank: int, size: int) -> Owns:
    """Returns the predicate of the keys that a rank of several owns.

    It raises ValueError if the table's rule has no owner for a key among so many ranks.
    """

    def are_own(keys: np.ndarray) -> np.ndarray:
        if size == 1:
            return np.ones(keys.size, bool)
        kind = table.key_dtype
        return np.asarray(table.owner.owners(kind.to_int64(np, keys), size, kind, np) == rank)

    return are_own


def owned_by(content: Content, are_own: Owns) -> Content:
    """Selects the keys of a content that a rank owns."""
    pending = content.pending_keys.astype(content.keys.dtype)
    return select(content, are_own(content.keys), are_own(pending))


def in_order(content: Content) -> Content:
    """Sorts a content of distinct keys by key."""
    return select(content, _order(content.keys), _order(content.pending_keys))


def _order(keys: np.ndarray) -> np.ndarray:
    if bool((keys[1:] > keys[:-1]).all()):
        return np.ones(keys.size, bool)
    return np.argsort(keys)


def concatenate(parts: Sequence[Content], whose: str, last_counts: bool = False) -> Content:
    """Joins the contents of several parts of a table, one at least.

    A part without a state has its initial value there. Columns that some parts lack are left out,
    and so are slots. The facts are those of the part with the most lookups.

    Args:
      whose: names the table in errors and warnings.
      last_counts: whether the last part counts for a key that several have; else it is an error.

    Raises:
      ValueError: parts have keys in common, and not `last_counts`.
    """
    if len(parts) == 1:
        return parts[0]
    keys = np.concatenate([part.keys for part in parts])
    kept = last_occurrences(keys, whose) if last_counts else _one_of_each(keys, is_last=False)
    num_repeated = keys.size - kept.size
    if num_repeated and not last_counts:
        raise ValueError(
            f"What was saved of {whose} is corrupt: its parts have {num_repeated:,} keys in common."
        )
    pending_keys = np.concatenate([part.pending_keys for part in parts])
    pending = _one_of_each(pending_keys, last_counts)
    states = [
        State(s.name, s.dim, s.initial, np.concatenate(_rows_of(parts, s))[kept], s.group)
        for s in join_states([part.states for part in parts])
    ]
    facts = [dict(part.facts) for part in parts if part.facts]
    return Content(
        keys[kept],
        np.concatenate([part.values for part in parts])[kept],
        states,
        _joined_columns([(part.keys, part.columns) for part in parts], kept),
        pending_keys[pending],
        _joined_columns([(part.pending_keys, part.pending) for part in parts], pending),
        without_slots(join_facts(facts)) if facts else {},
    )


def _rows_of(parts: Sequence[Content], state: "JoinedState") -> list[np.ndarray]:
    """Returns the rows of a state in each part."""
    return [
        part.states[state.places[i]].rows
        if i in state.places
        else np.full((part.keys.size, state.dim), state.initial, np.float32)
        for i, part in enumerate(parts)
    ]


def _joined_columns(
    parts: Sequence[tuple[np.ndarray, Mapping[str, np.ndarray]]], kept: np.ndarray
) -> dict[str, np.ndarray]:
    """Joins the columns that all parts have; those without keys do not matter."""
    first, *others = [columns for keys, columns in parts if keys.size] or [parts[0][1]]
    names = [name for name in first if name != "slots" and all(name in each for each in others)]
    return {
        name: np.concatenate([first[name], *(each[name] for each in others)])[kept]
        for name in names
    }


def last_occurrences(keys: np.ndarray, whose: str) -> np.ndarray:
    """Returns the position of the last occurrence of each key, (k,) int64, ordered by key.

    The logger "sok_lite" warns of repeated keys, with their number.

    Args:
      keys: (n,) of several parts, one after the other.
      whose: names the table in the warning.
    """
    positions = _one_of_each(keys, is_last=True)
    warn_of_repeated(whose, keys.size - positions.size, "last")
    return positions


def _one_of_each(keys: np.ndarray, is_last: bool) -> np.ndarray:
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_taken = np.ones(keys.size, bool)
    (is_taken[:-1] if is_last else is_taken[1:])[:] = ordered[1:] != ordered[:-1]
    return order[is_taken]


def warn_of_repeated(whose: str, num_repeated: int, counting: str = "first") -> None:
    """Warns of repeated keys, if there are any."""
    if num_repeated:
        _log.warning(
            "What was saved of %s has %s keys more than once: of each the %s one counts.",
            *(whose, f"{num_repeated:,}", counting),
        )


# ---- states and facts of several parts -----------------------------------------------------------


class AnyState(Protocol):
    """An optimizer state of a part: a `State` or a `StateFacts`."""

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def initial(self) -> float: ...
    @property
    def group(self) -> int | None: ...


class JoinedState(NamedTuple):
    """An optimizer state of several parts.

    Attributes:
      name, dim, initial: as in `State`.
      group: number of its optimizer, among those of all parts; None: unknown.
      places: its position among the states of a part, by the part's number, for parts that have it.
    """

    name: str
    dim: int
    initial: float
    group: int | None
    places: dict[int, int]


# Name, dim and initial value of a state; and by these, the `places` of an optimizer's states.
_Kind = tuple[str, int, float]
_Group = dict[_Kind, dict[int, int]]


def join_states(
    parts: Sequence[Sequence[AnyState]], are_nested_one: bool = True
) -> list[JoinedState]:
    """Joins the states of parts, group by group, first those without a group.

    Group numbers are each part's own. The n-th group with some set of states is the same in every
    part. Other groups are the same if one has all states of the other: an optimizer may get one
    more between two saves. A state without a group joins the first group of other parts that has
    it.

    Args:
      parts: the states of each part.
      are_nested_one: False: only groups with equal states are the same.
    """
    groups: list[_Group] = []
    free: _Group = {}
    for i, states in enumerate(parts):
        own: dict[int | None, dict[_Kind, int]] = {}
        for place, state in enumerate(states):
            own.setdefault(state.group, {})[state.name, state.dim, state.initial] = place
        for kind, place in own.pop(None, {}).items():
            free.setdefault(kind, {})[i] = place
        matches = _matches(list(own.values()), groups, are_nested_one)
        for kinds, group in zip(own.values(), matches, strict=True):
            for kind, place in kinds.items():
                group.setdefault(kind, {})[i] = place
    for kind, places in list(free.items()):
        for group in groups:
            if kind in group and not group[kind].keys() & places.keys():
                group[kind] |= free.pop(kind)
                break
    numbered = [(None, free), *enumerate(groups, start=1)]
    return [
        JoinedState(*kind, number, places)
        for number, group in numbered
        for kind, places in group.items()
    ]


def _matches(
    own: Sequence[Mapping[_Kind, Any]], groups: list[_Group], are_nested_one: bool
) -> list[_Group]:
    """Returns the joined group of each of a part's groups; new ones are appended."""
    found: dict[int, _Group] = {}
    free = list(groups)
    for is_like in (operator.eq, *[_are_nested] * are_nested_one):
        for i, kinds in enumerate(own):
            like = (k for k, each in enumerate(free) if is_like(each.keys(), kinds.keys()))
            at = None if i in found else next(like, None)
            if at is not None:
                found[i] = free.pop(at)
    for i in range(len(own)):
        if i not in found:
            groups.append({})
            found[i] = groups[-1]
    return [found[i] for i in range(len(own))]


def _are_nested(one: KeysView[Any], other: KeysView[Any]) -> bool:
    return one <= other or one >= other


def checked_facts(facts: Any) -> Any:
    """Returns the facts of a part, once they are checked.

    Raises:
      ValueError: one is missing or out of range: a later lookup, epoch or dump would fail.
    """
    if not isinstance(facts, Mapping):
        raise ValueError(f"{facts!r} are no facts")
    number_of(facts.get("num_lookups"), 0, LAST_LOOKUP_NUMBER)
    if "spans" in facts:
        Spans.of(facts["spans"], facts["num_lookups"])
    if "strategy" in facts:
        if type(facts["strategy"]) is not str:
            raise ValueError(f"{facts['strategy']!r} is no strategy")
        number_of(facts.get("epoch"), 0, _LAST_EPOCH)
    if "capacity" in facts:
        number_of(facts.get("bucket"), 1)
    for name in ("capacity", "bucket", "segment", "num_slots"):
        number_of(facts.get(name, 0))
    number_of(facts.get("epoch", 0), 0, _LAST_EPOCH)
    if not is_seed(facts.get("hash_seed", 0)):
        raise ValueError(f"{facts['hash_seed']!r} is no seed of a hash")
    return facts


def number_of(value: Any, least: int = 0, most: int = 1 << 62) -> int:
    """Returns an integer from `least` to `most`, or raises ValueError."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r} is no number from {least} to {most}")
    return value


def join_facts(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the facts of the part with the most lookups, so that no key was seen after them."""
    newest = max(parts, key=lambda facts: facts["num_lookups"])
    epochs = [facts["epoch"] for facts in parts if "epoch" in facts]
    return newest | ({"epoch": max(epochs)} if epochs else {})


def without_slots(facts: dict[str, Any]) -> dict[str, Any]:
    """Drops the facts on the layout of slots."""
    of_slots = ("segment", "num_slots", "hash_seed")
    return {name: fact for name, fact in facts.items() if name not in of_slots}

"""Stored tables as streams of columns, for tools, without TensorFlow or a GPU.

A `Source` reads a table of a checkpoint (`checkpoint_sources`), of another system's file, or
several as one (`JoinedSource`). `source_writer.write_checkpoint` writes sources to a checkpoint.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from sok_lite.engine.dtypes import key_dtype, row_dtype
from sok_lite.engine.files import manifest
from sok_lite.engine.files.key_search import entries_at, first_positions
from sok_lite.engine.files.manifest import Shard, StateFacts, TableFacts
from sok_lite.engine.files.saved_file import SavedFile
from sok_lite.engine.files.table_file import open_shard
from sok_lite.engine.files.text_file import find_texts, read_texts
from sok_lite.engine.table.content import PENDING, join_facts, join_states, without_slots

# Columns of the pending keys, which were seen but have no row yet.
PENDING_COLUMNS = tuple(PENDING)
_NUMBERS = {
    "stamps": "uint32",
    "scores": "uint64",
    "sightings": "uint32",
    "sighting_stamps": "uint32",
}

_NewestRows = Callable[[SavedFile], list[tuple[np.ndarray, np.ndarray]]]
# By key, then by column.
Entries = dict[int, dict[str, np.ndarray]]


class Column(NamedTuple):
    """A column of a source, and the type of the arrays that `Source.read` yields for it.

    Attributes:
      name: as in docs/checkpoint_format.md, such as "keys", "values" or "states.0.m".
      dtype: of the arrays; bfloat16 rows are uint16 bits.
      dim: the arrays are (k, dim); None: (k,).
    """

    name: str
    dtype: np.dtype
    dim: int | None

    @property
    def row_bytes(self) -> int:
        return (1 if self.dim is None else self.dim) * self.dtype.itemsize


class TableInfo(NamedTuple):
    """Metadata of a table.

    Attributes:
      owner: name of the rule that assigns keys to ranks.
      options: other arguments of the table, for people.
      facts: num_lookups and other facts of `manifest.Shard`, of all ranks together, without those
        of slots.
      num_pending: keys that were seen but have no row. Unless 0, `read` takes `PENDING_COLUMNS`.
    """

    var_type: str = "hbm"
    owner: str = "key mod ranks"
    options: Mapping[str, Any] = MappingProxyType({})
    facts: Mapping[str, Any] = MappingProxyType({"num_lookups": 0})
    num_pending: int = 0


class Source(Protocol):
    """A table that can be read column by column.

    Attributes:
      dtype: such as "float32" or "bfloat16".
      key_type: "int64", "int32" or "uint64".
      states: optimizer states; the `tensor` of each is its column.
      columns: which of "stamps" and "scores" it has.
    """

    name: str
    dim: int
    dtype: str
    key_type: str
    num_keys: int
    states: tuple[StateFacts, ...] = ()
    columns: tuple[str, ...] = ()
    about: TableInfo = TableInfo()

    def read(self, column: str) -> Iterator[np.ndarray]:
        """Yields a column in pieces. May be called repeatedly.

        Args:
          column: "keys", "values", one of `columns`, or the tensor of a state, which all come in
            pieces of the same lengths; or one of `PENDING_COLUMNS`.

        Raises:
          OSError: a file cannot be read. ValueError: it is corrupt.
        """
        ...

    def find(self, keys: Collection[int], columns: Sequence[str]) -> Entries:
        """Returns the entries of some keys, without missing keys.

        Reads keys until all are found. Of a repeated key the first counts, as in a load.

        Args:
          keys: distinct, of the key type.
          columns: as of `read`.

        Raises:
          OSError: a file cannot be read. ValueError: it is corrupt.
        """
        places = first_positions(self.read("keys"), keys)
        found: Entries = {key: {} for key in places}
        for column in columns:
            entries = entries_at(self.read(column), places.values())
            for key, entry in zip(places, entries, strict=True):
                found[key][column] = entry
        return found

    def texts(self) -> dict[int, bytes]:
        """Returns all texts by key. OSError: a file cannot be read. ValueError: it is corrupt."""
        return {}

    def texts_of(self, keys: Collection[int]) -> dict[int, bytes]:
        """Returns the texts of some keys, as `texts` does, without unknown ones."""
        texts = self.texts()
        return {key: texts[key] for key in keys if key in texts}


def column_of(source: Source, name: str) -> Column:
    """Returns the column of a name. ValueError: there is none."""
    if name in ("keys", "sighted_keys"):
        return Column(name, key_dtype(source.key_type).dtype, None)
    if name == "values":
        return Column(name, row_dtype(source.dtype).storage, source.dim)
    for state in source.states:
        if state.tensor == name:
            return Column(name, np.dtype(np.float32), state.dim)
    if name in _NUMBERS:
        return Column(name, np.dtype(_NUMBERS[name]), None)
    raise ValueError(f"Table {source.name!r} has no column {name!r}.")


def columns_of(source: Source) -> list[Column]:
    """Returns all columns with an entry per key, the keys first."""
    names = ["keys", "values", *source.columns, *(state.tensor for state in source.states)]
    return [column_of(source, name) for name in names]


class JoinedSource(Source):
    """Several sources concatenated.

    It has the states of all sources; rows of sources that lack one have its initial value. Stamps
    and scores are kept if all sources have them, scores only if their strategies agree. Clocks are
    those of the source with the most lookups, options those of the last source.

    Args:
      sources: at least one, of one dim, dtype and key type, with different keys.

    Attributes:
      keys_of_parts: number of keys of each source.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        last = sources[-1]
        self._sources = list(sources)
        self.name, self.dim, self.dtype = last.name, last.dim, last.dtype
        self.key_type = last.key_type
        self._states = {
            f"states.{i}.{state.name}": state
            for i, state in enumerate(join_states([source.states for source in sources]))
        }
        self.states = tuple(
            StateFacts(tensor, state.name, state.dim, state.initial, state.group)
            for tensor, state in self._states.items()
        )
        strategies = {source.about.facts.get("strategy") for source in sources}
        kept = ("stamps", "scores") if len(strategies) == 1 else ("stamps",)
        self.columns = tuple(
            name for name in kept if all(name in source.columns for source in sources)
        )
        self.keys_of_parts = tuple(source.num_keys for source in sources)
        self.num_keys = sum(self.keys_of_parts)
        facts = join_facts([dict(source.about.facts) for source in sources])
        num_pending = sum(source.about.num_pending for source in sources)
        self.about = last.about._replace(facts=facts, num_pending=num_pending)

    def read(self, column: str) -> Iterator[np.ndarray]:
        for i, source in enumerate(self._sources):
            if column not in PENDING_COLUMNS or source.about.num_pending:
                yield from self._read(i, source, column)

    def find(self, keys: Collection[int], columns: Sequence[str]) -> Entries:
        found: Entries = {}
        for i, source in enumerate(self._sources):
            left = [key for key in keys if key not in found]
            names = {column: self._name_in(i, column) for column in columns}
            some = source.find(left, [name for name in names.values() if name is not None])
            for key, entries in some.items():
                found[key] = {
                    column: self._initial(column, 1)[0] if name is None else entries[name]
                    for column, name in names.items()
                }
        return found

    def texts(self) -> dict[int, bytes]:
        return {key: text for source in self._sources for key, text in source.texts().items()}

    def texts_of(self, keys: Collection[int]) -> dict[int, bytes]:
        return {key: text for s in self._sources for key, text in s.texts_of(keys).items()}

    def _read(self, i: int, source: Source, column: str) -> Iterator[np.ndarray]:
        name = self._name_in(i, column)
        if name is not None:
            yield from source.read(name)
        else:
            yield from (self._initial(column, keys.size) for keys in source.read("keys"))

    def _initial(self, column: str, num_rows: int) -> np.ndarray:
        state = self._states[column]
        return np.full((num_rows, state.dim), state.initial, np.float32)

    def _name_in(self, i: int, column: str) -> str | None:
        """Returns the name of a column in the i-th source; None for a state that it lacks."""
        state = self._states.get(column)
        if state is None:
            return column
        place = state.places.get(i)
        return None if place is None else self._sources[i].states[place].tensor


class _ShardSource(Source):
    """A rank's part of a table.

    If it consists of increments, keys come in the order of the files that have their rows, newest
    first, and are all in memory while it is read.

    Args:
      newest_rows: `SavedFile.newest_rows`, perhaps cached.

    Raises:
      OSError: a file cannot be read. ValueError: it is corrupt.
    """

    def __init__(
        self, facts: TableFacts, shard: Shard, folder: str, newest_rows: _NewestRows
    ) -> None:
        self.name, self.dim, self.dtype = facts.name, facts.dim, facts.dtype
        self.key_type, self.num_keys, self.states = facts.key_type, shard.rows, shard.states
        self.columns = ("stamps", *["scores"] * shard.scores)
        about = without_slots(shard.facts)
        self.about = TableInfo(facts.var_type, facts.owner, facts.options, about, shard.sighted)
        self._file = SavedFile(shard, partial(open_shard, facts, folder=folder))
        self._texts, self._folder, self._newest_rows = shard.texts, folder, newest_rows

    def texts(self) -> dict[int, bytes]:
        file = self._texts
        return {} if file is None else read_texts(file, self.name, self._folder).as_dict()

    def texts_of(self, keys: Collection[int]) -> dict[int, bytes]:
        file = self._texts
        return {} if file is None else find_texts(file, self.name, self._folder, keys)

    def find(self, keys: Collection[int], columns: Sequence[str]) -> Entries:
        places = first_positions(self._file.read("keys"), keys)
        rows = self._file.places_of_rows(places)
        found: Entries = {key: {} for key in places}
        for column in columns:
            name = "value" if column == "values" else column
            is_of_keys = name == "keys" or name in self.columns
            for file, at in [(self._file.files[0], places)] if is_of_keys else rows:
                spans = [(place, place + 1) for place in at.values()]
                is_there = is_of_keys or file.has(name)
                entries = file.ranges(name, spans) if is_there else self._initial(name, spans)
                for key, (entry,) in zip(at, entries, strict=True):
                    found[key][column] = entry
        return found

    def read(self, column: str) -> Iterator[np.ndarray]:
        name = "value" if column == "values" else column
        if column in PENDING_COLUMNS or not self._file.older:
            return self._file.read(name)
        return self._read_increments(name)

    def _read_increments(self, name: str) -> Iterator[np.ndarray]:
        is_of_keys = name == "keys" or name in self.columns
        whole = self._file.whole(name) if is_of_keys else None
        for file, (at, places) in zip(self._file.files, self._newest_rows(self._file), strict=True):
            cuts = [np.searchsorted(at, span).tolist() for span in file.spans]
            cuts = [(a, b) for a, b in cuts if a < b]
            if whole is not None:
                yield from (whole[places[a:b]] for a, b in cuts)
            elif file.has(name):
                ranges = [(int(at[a]), int(at[b - 1]) + 1) for a, b in cuts]
                for (a, b), rows in zip(cuts, file.ranges(name, ranges), strict=True):
                    yield rows[at[a:b] - at[a]]
            else:
                yield from self._initial(name, cuts)

    def _initial(self, name: str, spans: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]:
        """Yields the rows of a state in a file that was written before the state existed."""
        (state,) = (state for state in self.states if state.tensor == name)
        for first, end in spans:
            yield np.full((end - first, state.dim), state.initial, np.float32)


def checkpoint_sources(folder: str | os.PathLike[str]) -> list[Source]:
    """Returns the tables of a checkpoint, with the keys of rank 0 first.

    Raises:
      OSError: there is none, or a file cannot be read. ValueError: a file is corrupt. Reading a
        source may raise the same.
    """
    found, path = manifest.read(folder), os.path.abspath(folder)
    # Cached for one file only: 16 bytes a key.
    newest_rows = lru_cache(maxsize=1)(SavedFile.newest_rows)
    return [
        JoinedSource([_ShardSource(facts, shard, path, newest_rows) for shard in facts.shards])
        for facts in found.tables.values()
    ]

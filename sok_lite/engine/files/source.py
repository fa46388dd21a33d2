"""Tables as streams of columns, for tools that have no tables, TensorFlow or GPU.

A `Source` is a table that can be read: of a checkpoint of this package (`checkpoint_sources`), of a
file of another system, or several as one. `rewriting.write_checkpoint` writes a checkpoint from
sources.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from sok_lite.engine.dtypes import key_dtype, row_dtype
from sok_lite.engine.files import manifest
from sok_lite.engine.files.key_search import entries_at, first_places
from sok_lite.engine.files.manifest import Shard, StateFacts, TableFacts
from sok_lite.engine.files.saved_file import SavedFile
from sok_lite.engine.files.table_file import open_shard
from sok_lite.engine.files.text_file import find_texts, read_texts
from sok_lite.engine.table.content import PENDING, join_facts, join_states, without_slots

# What goes with the keys that were seen and have no row, by column.
PENDING_COLUMNS = tuple(PENDING)
_NUMBERS = {"stamps": "uint32", "scores": "uint64", "sightings": "uint32"}
_NUMBERS["sighting_stamps"] = "uint32"

_NewestRows = Callable[[SavedFile], list[tuple[np.ndarray, np.ndarray]]]
# What columns have of keys: entries by column, by key.
Entries = dict[int, dict[str, np.ndarray]]


class Column(NamedTuple):
    """A column of a source: the type of the arrays that `Source.read` yields for its name.

    Attributes:
      name: one of docs/checkpoint_format.md, such as "keys", "values" or "states.0.m".
      dtype: of the arrays; rows of bfloat16 are uint16 arrays of its bits.
      dim: elements of a row; None: a number for each key, arrays of shape (k,).
    """

    name: str
    dtype: np.dtype
    dim: int | None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return (1 if self.dim is None else self.dim) * self.dtype.itemsize


class About(NamedTuple):
    """Facts of a table beside its columns.

    Attributes:
      var_type: kind of the table.
      owner: name of the rule for the owner ranks of keys.
      options: other arguments of the table, for people.
      facts: num_lookups and other facts of `manifest.Shard`, of all ranks together, without
        those that belong to slots.
      num_pending: keys that were seen and have no row; `read` then knows `PENDING_COLUMNS` too.
    """

    var_type: str = "hbm"
    owner: str = "key mod ranks"
    options: Mapping[str, Any] = MappingProxyType({})
    facts: Mapping[str, Any] = MappingProxyType({"num_lookups": 0})
    num_pending: int = 0


class Source(Protocol):
    """A table that can be read column by column. Subclasses may keep these defaults.

    Attributes:
      name, dim, dtype, key_type: of the table, such as "float32" or "bfloat16", and "int64",
        "int32" or "uint64".
      num_keys: number of keys.
      states: optimizer states; the `tensor` of each is its column.
      columns: further columns with an entry for each key: of "stamps" and "scores" those it has.
      about: further facts.
    """

    name: str
    dim: int
    dtype: str
    key_type: str
    num_keys: int
    states: tuple[StateFacts, ...] = ()
    columns: tuple[str, ...] = ()
    about: About = About()

    def read(self, column: str) -> Iterator[np.ndarray]:
        """Yields a column in pieces, of the same lengths for every column. It may be called again.

        Args:
          column: "keys", "values", one of `columns`, the tensor of a state, or one of
            `PENDING_COLUMNS`, whose pieces have lengths of their own.

        Raises:
          OSError: a file cannot be read. ValueError: it is corrupt.
        """
        ...

    def find(self, keys: Collection[int], columns: Sequence[str]) -> Entries:
        """Returns what columns have of some keys; keys that are missing are left out.

        Keys are read until all are found, and of the columns what has them. Of a key that is there
        twice the first counts, as for a load.

        Args:
          keys: distinct numbers of the key type.
          columns: as `read` takes them.

        Raises:
          OSError: a file cannot be read. ValueError: it is corrupt.
        """
        places = first_places(self.read("keys"), keys)
        found: Entries = {key: {} for key in places}
        for column in columns:
            entries = entries_at(self.read(column), places.values())
            for key, entry in zip(places, entries, strict=True):
                found[key][column] = entry
        return found

    def texts(self) -> dict[int, bytes]:
        """Returns the texts of keys by key, all in memory; {}: it has none.

        Raises:
          OSError: a file cannot be read. ValueError: it is corrupt.
        """
        return {}

    def texts_of(self, keys: Collection[int]) -> dict[int, bytes]:
        """Returns the texts of some keys, as `texts` does; unknown ones are left out."""
        texts = self.texts()
        return {key: texts[key] for key in keys if key in texts}


def column_of(source: Source, name: str) -> Column:
    """Returns the column of a name, with the type of the arrays that `source.read(name)` yields.

    Raises:
      ValueError: it has no such column.
    """
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
    """Returns all columns that have an entry for each key, the keys first."""
    names = ["keys", "values", *source.columns, *(state.tensor for state in source.states)]
    return [column_of(source, name) for name in names]


class JoinedSource(Source):
    """Several sources as one: the keys of the first come first, and so on.

    It has the states of all; a row of a source without one has its initial value. Stamps and scores
    are kept where all have them, scores only of one strategy: those of two cannot be compared.
    Times are those of the source with most lookups, options those of the last one.

    Args:
      sources: of one dim, dtype and key type, at least one. Their keys differ.

    Attributes:
      keys_of_parts: keys of each source.
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
            states = {name: self._states[name] for name in columns if name in self._states}
            # Of each column its name there; None: a state that this source does not have.
            names = {c: self._name_in(i, c) for c in columns}
            some = source.find(left, [name for name in names.values() if name is not None])
            for key, entries in some.items():
                found[key] = {
                    column: np.full(states[column].dim, states[column].initial, np.float32)
                    if name is None
                    else entries[name]
                    for column, name in names.items()
                }
        return found

    def texts(self) -> dict[int, bytes]:
        return {key: text for source in self._sources for key, text in source.texts().items()}

    def texts_of(self, keys: Collection[int]) -> dict[int, bytes]:
        # No key is in two files.
        return {key: text for s in self._sources for key, text in s.texts_of(keys).items()}

    def _read(self, i: int, source: Source, column: str) -> Iterator[np.ndarray]:
        name = self._name_in(i, column)
        if name is not None:
            yield from source.read(name)
        else:
            state = self._states[column]
            for keys in source.read("keys"):
                yield np.full((keys.size, state.dim), state.initial, np.float32)

    def _name_in(self, i: int, column: str) -> str | None:
        """Returns the name of a column in a source; None: it is a state that is not there."""
        state = self._states.get(column)
        if state is None:
            return column
        place = state.places.get(i)
        return None if place is None else self._sources[i].states[place].tensor


class _ShardSource(Source):
    """The part of a table that one rank wrote.

    Where it is made of increments, its keys come in the order of the files that have their rows,
    the newest first, and are in memory while it is read.

    Args:
      facts: the manifest's entry of the table.
      shard: the file of the rank.
      folder: of the checkpoint.
      newest_rows: `SavedFile.newest_rows`, or what keeps some results of it.

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
        self.about = About(facts.var_type, facts.owner, facts.options, about, shard.sighted)
        self._file = SavedFile(shard, partial(open_shard, facts, folder=folder))
        self._texts, self._folder, self._newest_rows = shard.texts, folder, newest_rows

    def texts(self) -> dict[int, bytes]:
        file = self._texts
        return {} if file is None else read_texts(file, self.name, self._folder).as_dict()

    def texts_of(self, keys: Collection[int]) -> dict[int, bytes]:
        file = self._texts
        return {} if file is None else find_texts(file, self.name, self._folder, keys)

    def find(self, keys: Collection[int], columns: Sequence[str]) -> Entries:
        places = first_places(self._file.read("keys"), keys)
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
        """Yields rows of a state, in spans of a file that was written before there was one."""
        (state,) = (state for state in self.states if state.tensor == name)
        for first, end in spans:
            yield np.full((end - first, state.dim), state.initial, np.float32)


def checkpoint_sources(folder: str | os.PathLike[str]) -> list[Source]:
    """Returns the tables of a checkpoint. The keys of the first rank come first, and so on.

    Raises:
      OSError: there is none, or a file of it cannot be read. ValueError: a file is corrupt. Reading
        a source may raise the same.
    """
    found, path = manifest.read(folder), os.path.abspath(folder)
    # Where the rows are is known of one file at a time: 16 bytes a key.
    newest_rows = lru_cache(maxsize=1)(SavedFile.newest_rows)
    return [
        JoinedSource([_ShardSource(facts, shard, path, newest_rows) for shard in facts.shards])
        for facts in found.tables.values()
    ]

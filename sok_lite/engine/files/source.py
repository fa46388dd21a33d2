"""Tables as streams of columns, for tools that have no tables, TensorFlow or GPU.

A `Source` is a table that can be read: of a checkpoint of this package, of a file of another
system, or combined from others. `rewriting.write_checkpoint` writes a checkpoint from sources.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from sok_lite.engine.dtypes import key_dtype, row_dtype
from sok_lite.engine.files import manifest
from sok_lite.engine.files.chain import FileRows, rows_of, tensors_of_chain, whole_tensor
from sok_lite.engine.files.manifest import Shard, StateFacts, TableFacts
from sok_lite.engine.files.shard import CHUNK_BYTES, ShardReader
from sok_lite.engine.files.table_file import open_shard
from sok_lite.engine.files.text_file import texts_in
from sok_lite.engine.table.joined import (
    JoinedState,
    joined_facts,
    joined_states,
    without_slots,
)

# What goes with the keys that were seen and have no row, by column.
PENDING_COLUMNS = ("sighted_keys", "sightings", "sighting_stamps")
_NUMBERS = {"stamps": "uint32", "scores": "uint64", "sightings": "uint32"}
_NUMBERS["sighting_stamps"] = "uint32"


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
      facts: num_lookups and other facts of `manifest.Shard`, of all ranks together, without those
        that belong to slots.
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

    def texts(self) -> dict[int, bytes]:
        """Returns the texts of keys by key, all in memory; {}: it has none.

        Raises:
          OSError: a file cannot be read. ValueError: it is corrupt.
        """
        return {}


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


class CheckpointSource(Source):
    """A table of a checkpoint. The keys of the first rank come first, and so on.

    Where a rank's part is made of increments, its keys come in the order of the files that have
    their rows, the newest first. The keys of such a part are in memory while it is read.

    Args:
      folder: of the checkpoint.
      facts: the manifest's entry of the table.

    Raises:
      OSError: a file cannot be read. ValueError: it is corrupt.
    """

    def __init__(self, folder: str, facts: TableFacts) -> None:
        shards = facts.shards
        self._folder, self._facts = folder, facts
        self.name, self.dim, self.dtype = facts.name, facts.dim, facts.dtype
        self.key_type = facts.key_type
        self.num_keys = sum(shard.rows for shard in shards)
        self._states = {
            f"states.{i}.{state.name}": state
            for i, state in enumerate(joined_states([shard.states for shard in shards]))
        }
        self.states = tuple(
            StateFacts(tensor, state.name, state.dim, state.initial, state.group)
            for tensor, state in self._states.items()
        )
        has_scores = all(shard.scores for shard in shards)
        self.columns = ("stamps", "scores") if has_scores else ("stamps",)
        self.about = About(
            facts.var_type,
            facts.owner,
            facts.options,
            without_slots(joined_facts([shard.facts for shard in shards])),
            sum(shard.sighted for shard in shards),
        )
        widest = max(column.row_bytes for column in columns_of(self))
        self._piece_rows = max(1, CHUNK_BYTES // widest)
        self._found: tuple[int, np.ndarray, list[FileRows]] | None = None
        for shard in shards:
            for part in shard.chain:
                open_shard(facts, part, folder)

    def texts(self) -> dict[int, bytes]:
        return texts_in(self._facts, self._folder)

    def read(self, column: str) -> Iterator[np.ndarray]:
        state = self._states.get(column)
        for i, shard in enumerate(self._facts.shards):
            tensor = column if state is None else state.tensors.get(i)
            if shard.changed is not None and column not in PENDING_COLUMNS:
                yield from self._read_increments(i, shard, column, state, tensor)
            elif state is not None and tensor is None:
                for first, last in self._spans(shard.rows):
                    yield _begun(state, last - first)
            elif tensor is not None:
                # A reader keeps the chunk that it read last: columns that are read together need
                # one each.
                reader = open_shard(self._facts, shard, self._folder)
                yield from reader.rows(tensor, self._spans(_length(reader, tensor)))

    def _read_increments(
        self, i: int, shard: Shard, column: str, state: JoinedState | None, tensor: str | None
    ) -> Iterator[np.ndarray]:
        keys, found = self._rows(i, shard)
        whole = keys
        if column in ("stamps", "scores"):
            whole = whole_tensor(open_shard(self._facts, shard, self._folder), column)
        is_of_keys = column in ("keys", "stamps", "scores")
        tensors: Sequence[str | None] = [None] * len(found)
        if tensor is not None and not is_of_keys:
            tensors = tensors_of_chain(shard, tensor)[::-1]
        for (part, _, at, places), tensor in zip(found, tensors, strict=True):
            cuts = np.searchsorted(at, [first for first, _ in self._spans(part.num_rows)])
            spans = [(a, b) for a, b in pairwise([*cuts.tolist(), at.size]) if a < b]
            if is_of_keys:
                yield from (whole[places[a:b]] for a, b in spans)
            elif state is not None and tensor is None:
                yield from (_begun(state, b - a) for a, b in spans)
            elif tensor is not None:
                reader = open_shard(self._facts, part, self._folder)
                ranges = ((int(at[a]), int(at[b - 1]) + 1) for a, b in spans)
                for (a, b), rows in zip(spans, reader.rows(tensor, ranges), strict=True):
                    yield rows[at[a:b] - at[a]]

    def _rows(self, i: int, shard: Shard) -> tuple[np.ndarray, list[FileRows]]:
        """Returns the keys of a rank's part, and the files and positions of their rows."""
        if self._found is None or self._found[0] != i:
            readers = [open_shard(self._facts, part, self._folder) for part in shard.chain]
            keys = whole_tensor(readers[-1], "keys")
            self._found = i, keys, rows_of(shard, readers, keys, np.arange(keys.size))
        return self._found[1:]

    def _spans(self, num_rows: int) -> Iterator[tuple[int, int]]:
        for first in range(0, num_rows, self._piece_rows):
            yield first, min(first + self._piece_rows, num_rows)


def _begun(state: JoinedState, num_rows: int) -> np.ndarray:
    return np.full((num_rows, state.dim), state.initial, np.float32)


def _length(reader: ShardReader, tensor: str) -> int:
    return reader.tensors[tensor].shape[0]


def checkpoint_sources(folder: str | os.PathLike[str]) -> list[Source]:
    """Returns the tables of a checkpoint.

    Raises:
      OSError: there is none, or a file of it cannot be read. ValueError: a file is corrupt. Reading
        a source may raise the same.
    """
    found, path = manifest.read(folder), os.path.abspath(folder)
    return [CheckpointSource(path, facts) for facts in found.tables.values()]

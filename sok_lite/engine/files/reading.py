"""Reads from the files of a checkpoint, piece by piece, the content of a table on this rank.

If as many ranks wrote the checkpoint as read it, and keys have the same owners, each rank reads
only the file of its own number; otherwise the keys of all files and the rows of its own keys.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial

import numpy as np

from sok_lite.comm.protocol import Communicator
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.files.chain import tensors_of_chain
from sok_lite.engine.files.manifest import Shard, TableFacts
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.files.shard import CHUNK_BYTES, ShardReader
from sok_lite.engine.files.table_file import open_shard
from sok_lite.engine.static_table import AnyTable
from sok_lite.engine.table.content import owns
from sok_lite.engine.table.saved import Owns, Saved, SavedPart, SavedRows

Convert = Callable[[np.ndarray], np.ndarray]


def shards_of(table: AnyTable, facts: TableFacts, comm: Communicator) -> Sequence[Shard]:
    """Returns the files that have keys of this rank: its own alone, or all."""
    return [facts.shards[comm.rank]] if _is_own(table, facts, comm) else facts.shards


def _is_own(table: AnyTable, facts: TableFacts, comm: Communicator) -> bool:
    """Returns whether each rank has a file with exactly its own keys."""
    return len(facts.shards) == comm.size and facts.owner == table.owner.name


def saved_in(
    table: AnyTable,
    facts: TableFacts,
    folder: str,
    comm: Communicator,
    progress: Progress | None = None,
) -> Saved:
    """Returns the content of a checkpoint for this rank's part of a table.

    Args:
      facts: the manifest's entry of the table; dim, key type and dtype fit it.
      folder: of the checkpoint.
      progress: told of every chunk when it is read for the first time.

    Raises:
      OSError: a file cannot be read. ValueError: a file is corrupt. Reading may raise the same.
    """

    def opened(shard: Shard) -> ShardReader:
        return open_shard(facts, shard, folder, progress)

    # A file of its own is to a rank as that of one rank alone.
    are_own = None if _is_own(table, facts, comm) or comm.size == 1 else owns(table, *_place(comm))
    convert = _conversion(table, facts.dtype)
    # A key that several have is that of the lowest rank.
    return Saved.of(
        [_SavedFile(shard, opened, are_own, convert) for shard in shards_of(table, facts, comm)]
    )


def _place(comm: Communicator) -> tuple[int, int]:
    return comm.rank, comm.size


class _SavedFileRows(SavedRows):
    """The keys of a file that have a row in it, and these rows.

    Args:
      reader: of the file.
      num_rows: number of such keys.
      tensors: by name the tensor in this file; None: it has none yet.
      convert: converts rows of the file to the dtype of the table.
    """

    def __init__(
        self,
        reader: ShardReader,
        num_rows: int,
        tensors: Mapping[str, str | None],
        convert: Convert,
    ) -> None:
        self._reader, self._tensors, self._convert = reader, tensors, convert
        names = [name for name in ("keys", "values", *tensors.values()) if name is not None]
        widest = max(reader.tensors[name].row_bytes for name in names)
        self._step = max(1, CHUNK_BYTES // widest)
        self._spans = self._cut(0, num_rows)

    def _cut(self, first: int, end: int) -> list[tuple[int, int]]:
        step = self._step
        return [(begin, min(begin + step, end)) for begin in range(first, end, step)]

    def read(self, name: str, wanted: Collection[int] | None = None) -> Iterator[np.ndarray]:
        if name == "value":
            return map(self._convert, self._ranges("values", self._spans, wanted))
        tensor = "keys" if name == "keys" else self._tensors[name]
        return iter(()) if tensor is None else self._ranges(tensor, self._spans, wanted)

    def _ranges(
        self, tensor: str, spans: Sequence[tuple[int, int]], wanted: Collection[int] | None
    ) -> Iterator[np.ndarray]:
        spans = spans if wanted is None else [spans[i] for i in wanted]
        # A reader keeps the chunk that it read last: columns that are read together need one each.
        return self._reader.apart().rows(tensor, iter(spans))


class _SavedFile(SavedPart):
    """A file, and the files that it continues."""

    def __init__(
        self,
        shard: Shard,
        opened: Callable[[Shard], ShardReader],
        are_own: Owns | None,
        convert: Convert,
    ) -> None:
        self.states, self.facts, self.owns = shard.states, shard.facts, are_own
        self.columns = ["stamps", *["scores"] * shard.scores, *["slots"] * shard.slots]
        self._num_keys, self._num_pending = shard.rows, shard.sighted
        chains = {state.tensor: tensors_of_chain(shard, state.tensor) for state in shard.states}
        *older, self._rows = [
            _SavedFileRows(
                *(opened(part), part.num_rows),
                {tensor: names[i] for tensor, names in chains.items()},
                convert,
            )
            for i, part in enumerate(shard.chain)
        ]
        self.older = older[::-1]
        if shard.changed is not None:
            self.num_with_rows = len(self._rows._spans)
        # In an increment keys that have changed come first.
        self._spans = [*self._rows._spans, *self._rows._cut(shard.num_rows, shard.rows)]

    @cached_property
    def num_keys(self) -> int:  # type: ignore[override]
        """The number of keys of this rank."""
        if self.owns is None:
            return self._num_keys
        return sum(int(np.count_nonzero(self.owns(keys))) for keys in self.read("keys"))

    def corrupt(self, reason: str) -> ValueError:
        return self._rows._reader.corrupt(reason)

    def read(self, name: str, wanted: Collection[int] | None = None) -> Iterator[np.ndarray]:
        if name in ("sighted_keys", "sightings", "sighting_stamps"):
            return self._rows._ranges(name, self._rows._cut(0, self._num_pending), wanted)
        if name == "keys" or name in self.columns:
            return self._rows._ranges(name, self._spans, wanted)
        return self._rows.read(name, wanted)


def _conversion(table: AnyTable, dtype: str) -> Convert:
    """Returns the function that converts rows of a dtype to that of the table."""
    if dtype == table.row_dtype.name:
        return lambda rows: rows
    source, target = row_dtype(dtype), table.row_dtype
    if source.name == "bfloat16":
        return lambda rows: target.to_storage(np, source.to_float32(np, rows))
    return partial(target.to_storage, np)

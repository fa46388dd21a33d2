"""Files of a checkpoint as the content of a table on this rank, read piece by piece.

An increment has the rows that have changed; the files that it continues have those of the other
keys. If as many ranks wrote the checkpoint as read it, and keys have the same owners, each rank
reads only the file of its own number; otherwise it reads the keys of all files and the rows of its
own keys.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np

from sok_lite.comm.protocol import Communicator
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.files.key_search import first_positions
from sok_lite.engine.files.manifest import Shard, TableFacts
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.files.shard import CHUNK_BYTES, ShardReader
from sok_lite.engine.files.table_file import open_shard
from sok_lite.engine.static_table import AnyTable
from sok_lite.engine.table.content import PENDING, Owns, SavedPart, SavedParts, SavedRows, owns

_Convert: TypeAlias = Callable[[np.ndarray], np.ndarray]
# [first, last) of keys or rows of a file.
_Span: TypeAlias = tuple[int, int]


def shards_of(table: AnyTable, facts: TableFacts, comm: Communicator) -> Sequence[Shard]:
    """Returns the files that this rank reads: its own alone, or all."""
    return [facts.shards[comm.rank]] if _is_own(table, facts, comm) else facts.shards


def _is_own(table: AnyTable, facts: TableFacts, comm: Communicator) -> bool:
    """Whether each rank has a file with exactly its own keys."""
    return len(facts.shards) == comm.size and facts.owner == table.owner.name


def saved_in(
    table: AnyTable, facts: TableFacts, folder: str, comm: Communicator, progress: Progress | None
) -> SavedParts:
    """Returns the content of a checkpoint for this rank's part of a table.

    Args:
      facts: the manifest's entry of the table, which fits it.
      folder: of the checkpoint.

    Raises:
      OSError: a file cannot be read. ValueError: a file is corrupt. Reading may raise the same.
    """
    # If one rank reads all, or only its own file, all keys are its own.
    is_alone = comm.size == 1 or _is_own(table, facts, comm)
    are_own = None if is_alone else owns(table, comm.rank, comm.size)
    convert = _conversion(table, facts.dtype)

    def open_part(shard: Shard) -> ShardReader:
        return open_shard(facts, shard, folder, progress)

    # Of a key in several files the row of the lowest rank counts.
    return SavedParts.of(
        [SavedFile(shard, open_part, are_own, convert) for shard in shards_of(table, facts, comm)]
    )


def _conversion(table: AnyTable, dtype: str) -> _Convert:
    """Returns the conversion of rows of a dtype to that of the table."""
    if dtype == table.row_dtype.name:
        return lambda rows: rows
    source, target = row_dtype(dtype), table.row_dtype
    if source.name == "bfloat16":
        return lambda rows: target.to_storage(np, source.to_float32(np, rows))
    return partial(target.to_storage, np)


class SavedFileRows(SavedRows):
    """The keys of one file that have a row in it, and these rows.

    Args:
      num_rows: number of such keys.
      tensors: of each state, by its tensor in the newest file, that in this one; None: the state is
        newer than this file.
      convert: rows of the file to the dtype of the table.

    Attributes:
      spans: of each piece.
    """

    def __init__(
        self,
        reader: ShardReader,
        num_rows: int,
        tensors: Mapping[str, str | None],
        convert: _Convert,
    ) -> None:
        self._reader, self._tensors, self._convert = reader, tensors, convert
        self._names = list(tensors)
        names = [name for name in ("keys", "values", *tensors.values()) if name is not None]
        widest = max(reader.tensors[name].row_bytes for name in names)
        self._step = max(1, CHUNK_BYTES // widest)
        self.num_rows, self.spans = num_rows, self.pieces(0, num_rows)

    def pieces(self, first: int, end: int) -> list[_Span]:
        """Returns the spans of pieces that cover [first, end)."""
        step = self._step
        return [(begin, min(begin + step, end)) for begin in range(first, end, step)]

    def has(self, name: str) -> bool:
        """Whether the file has a column: a state may be newer than the file."""
        return name in ("keys", "value") or self._tensors[name] is not None

    def read(self, name: str | int, wanted: Collection[int] | None = None) -> Iterator[np.ndarray]:
        name = self._names[name] if isinstance(name, int) else name
        spans = self.spans if wanted is None else [self.spans[i] for i in wanted]
        return self.ranges(name, spans) if self.has(name) else iter(())

    def ranges(self, name: str, spans: Sequence[_Span]) -> Iterator[np.ndarray]:
        """Yields spans of any column that the file has."""
        # A reader keeps its last chunk: columns that are read together need one each.
        reader = self._reader.clone()
        if name == "value":
            return map(self._convert, reader.rows("values", iter(spans)))
        return reader.rows(self._tensors.get(name) or name, iter(spans))

    def corrupt(self, reason: str) -> ValueError:
        """Returns the error of a corrupt file."""
        return self._reader.corrupt(reason)


class SavedFile(SavedPart):
    """A file, and the files that it continues.

    Args:
      shard: the file.
      open_part: opens a file of its chain.
      are_own: says which keys count; None: all.
      convert: rows of the files to the dtype of the table; None: they stay as they are.

    Attributes:
      files: this file and those that it continues, the newest first.
    """

    def __init__(
        self,
        shard: Shard,
        open_part: Callable[[Shard], ShardReader],
        are_own: Owns | None = None,
        convert: _Convert | None = None,
    ) -> None:
        self.states, self.facts, self.owns = shard.states, shard.facts, are_own
        self.columns = ["stamps", *["scores"] * shard.scores, *["slots"] * shard.slots]
        self._num_keys, self._num_pending = shard.rows, shard.sighted
        chains = {state.tensor: _tensors_of_chain(shard, state.tensor) for state in shard.states}
        self.files = [
            SavedFileRows(
                open_part(part),
                part.num_rows,
                {tensor: names[i] for tensor, names in chains.items()},
                convert or (lambda rows: rows),
            )
            for i, part in enumerate(shard.chain)
        ][::-1]
        self._rows, *self.older = self.files
        if shard.changed is not None:
            self.num_with_rows = len(self._rows.spans)
        # In an increment changed keys come first.
        self._spans = [*self._rows.spans, *self._rows.pieces(shard.num_rows, shard.rows)]

    @cached_property
    def num_keys(self) -> int:  # type: ignore[override]
        """The number of keys of this rank, which may read them all."""
        if self.owns is None:
            return self._num_keys
        return sum(int(np.count_nonzero(self.owns(keys))) for keys in self.read("keys"))

    def corrupt(self, reason: str) -> ValueError:
        return self._rows.corrupt(reason)

    def read(self, name: str | int, wanted: Collection[int] | None = None) -> Iterator[np.ndarray]:
        if name in PENDING:
            spans = self._rows.pieces(0, self._num_pending)
        elif name == "keys" or name in self.columns:
            spans = self._spans
        else:
            return self._rows.read(name, wanted)
        return self._rows.ranges(str(name), spans if wanted is None else [spans[i] for i in wanted])

    def whole(self, name: str) -> np.ndarray:
        """Returns "keys" or one of `columns`, all in memory."""
        (array,) = self._rows.ranges(name, [(0, self._num_keys)])
        return array

    def newest_rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns, for each of `files`, the rows of `newest_rows`. All keys are in memory for it.

        Raises:
          OSError: a file cannot be read. ValueError: it is corrupt; a key has no row.
        """
        keys_with_rows = (next(file.ranges("keys", [(0, file.num_rows)])) for file in self.files)
        return newest_rows(self.whole("keys"), keys_with_rows, self.corrupt)

    def places_of_rows(
        self, places: Mapping[int, int]
    ) -> list[tuple[SavedFileRows, dict[int, int]]]:
        """Returns where the newest rows of some keys are: for each of `files`, row numbers by key.

        Args:
          places: of the keys, by key, among all keys of this file.

        Raises:
          OSError: a file cannot be read. ValueError: it is corrupt; a key has no row.
        """
        first = {key: place for key, place in places.items() if place < self._rows.num_rows}
        found, left = [(self._rows, first)], places.keys() - first
        for file in self.files[1:]:
            found.append((file, first_positions(file.ranges("keys", file.spans), left)))
            left.difference_update(found[-1][1])
        if left:
            raise self.corrupt(missing_rows(len(left)))
        return found


def newest_rows(
    keys: np.ndarray, keys_with_rows: Iterable[np.ndarray], corrupt: Callable[[str], ValueError]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Finds the file that has the newest row of each key.

    Args:
      keys: (n,) distinct.
      keys_with_rows: for each file, the newest first, the keys that have a row there.
      corrupt: makes an error from a reason.

    Returns:
      For each file, the numbers of these rows in it, (k,) int64, ascending, and the positions of
      their keys in `keys`, (k,) int64.

    Raises:
      ValueError: a key has no row.
    """
    found = []
    order = np.argsort(keys)
    left = keys[order], order  # keys without a row so far, ascending, and their positions
    for some in keys_with_rows:
        by_key = np.argsort(some)  # the search is many times faster in this order
        at_left = np.empty(some.size, np.int64)
        at_left[by_key] = np.searchsorted(left[0], some[by_key])
        at_left[at_left == left[0].size] = 0
        is_wanted = left[0][at_left] == some if left[0].size else np.zeros(some.size, bool)
        taken = at_left[is_wanted]
        found.append((np.flatnonzero(is_wanted), left[1][taken]))
        rest = np.ones(left[0].size, bool)
        rest[taken] = False
        left = left[0][rest], left[1][rest]
    if left[0].size:
        raise corrupt(missing_rows(left[0].size))
    return found


def missing_rows(count: int) -> str:
    """Returns the reason of an error: keys of a file have no row."""
    return f"{count:,} of its keys have no row there, nor in the files that it continues"


def _tensors_of_chain(shard: Shard, tensor: str) -> list[str | None]:
    """Returns the name of a tensor of rows in each file of a chain, oldest first, or None."""
    names: list[str | None] = []
    name: str | None = tensor
    for part in reversed(shard.chain):
        names.append(name)
        before = {state.tensor: state.before for state in part.states}
        name = name if name is None or name == "values" else before[name]
    return names[::-1]

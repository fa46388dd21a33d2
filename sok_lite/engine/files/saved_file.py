"""A file of a checkpoint and the files that it continues, as a part of a table's content."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from sok_lite.engine.files.chain import newest_rows, tensors_of_chain
from sok_lite.engine.files.manifest_facts import Shard
from sok_lite.engine.files.shard import CHUNK_BYTES, ShardReader
from sok_lite.engine.table.saved import Owns, SavedPart, SavedRows

Convert = Callable[[np.ndarray], np.ndarray]


class SavedFileRows(SavedRows):
    """The keys of a file that have a row in it, and these rows.

    Args:
      reader: of the file.
      num_rows: number of such keys.
      tensors: by name the tensor in this file; None: it has none yet.
      convert: converts rows of the file to the dtype of the table.

    Attributes:
      num_rows: as given.
      spans: [first, last) of each piece.
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
        self.num_rows, self.spans = num_rows, self.cut(0, num_rows)

    def cut(self, first: int, end: int) -> list[tuple[int, int]]:
        """Returns the spans of pieces that cover [first, end)."""
        step = self._step
        return [(begin, min(begin + step, end)) for begin in range(first, end, step)]

    def has(self, name: str) -> bool:
        """Returns whether `read` knows a column here: a state may have come after an older file."""
        return name in ("keys", "value") or self._tensors[name] is not None

    def read(self, name: str, wanted: Collection[int] | None = None) -> Iterator[np.ndarray]:
        spans = self.spans if wanted is None else [self.spans[i] for i in wanted]
        return self.ranges(name, spans) if self.has(name) else iter(())

    def ranges(self, name: str, spans: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]:
        """Yields ranges of any column that the file has."""
        # A reader keeps the chunk that it read last: columns that are read together need one each.
        reader = self._reader.apart()
        if name == "value":
            return map(self._convert, reader.rows("values", iter(spans)))
        return reader.rows(self._tensors.get(name) or name, iter(spans))

    def corrupt(self, reason: str) -> ValueError:
        """Returns the error that says so."""
        return self._reader.corrupt(reason)


class SavedFile(SavedPart):
    """A file, and the files that it continues.

    Args:
      shard: the file.
      opened: opens a file of its chain.
      are_own: says which keys count; None: all.
      convert: converts rows of the files to the dtype of the table; None: they stay as they are.

    Attributes:
      files: this file and those that it continues, the newest first.
    """

    def __init__(
        self,
        shard: Shard,
        opened: Callable[[Shard], ShardReader],
        are_own: Owns | None = None,
        convert: Convert | None = None,
    ) -> None:
        self.states, self.facts, self.owns = shard.states, shard.facts, are_own
        self.columns = ["stamps", *["scores"] * shard.scores, *["slots"] * shard.slots]
        self._num_keys, self._num_pending = shard.rows, shard.sighted
        chains = {state.tensor: tensors_of_chain(shard, state.tensor) for state in shard.states}
        self.files = [
            SavedFileRows(
                opened(part),
                part.num_rows,
                {tensor: names[i] for tensor, names in chains.items()},
                convert or (lambda rows: rows),
            )
            for i, part in enumerate(shard.chain)
        ][::-1]
        self._rows, *self.older = self.files
        if shard.changed is not None:
            self.num_with_rows = len(self._rows.spans)
        # In an increment keys that have changed come first.
        self._spans = [*self._rows.spans, *self._rows.cut(shard.num_rows, shard.rows)]

    @cached_property
    def num_keys(self) -> int:  # type: ignore[override]
        """The number of keys of this rank."""
        if self.owns is None:
            return self._num_keys
        return sum(int(np.count_nonzero(self.owns(keys))) for keys in self.read("keys"))

    def corrupt(self, reason: str) -> ValueError:
        return self._rows.corrupt(reason)

    def read(self, name: str, wanted: Collection[int] | None = None) -> Iterator[np.ndarray]:
        if name in ("sighted_keys", "sightings", "sighting_stamps"):
            spans = self._rows.cut(0, self._num_pending)
        elif name == "keys" or name in self.columns:
            spans = self._spans
        else:
            return self._rows.read(name, wanted)
        return self._rows.ranges(name, spans if wanted is None else [spans[i] for i in wanted])

    def whole(self, name: str) -> np.ndarray:
        """Returns "keys" or one of `columns` of all keys."""
        (array,) = self._rows.ranges(name, [(0, self._num_keys)])
        return array

    def newest_rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns of each of `files` which of its rows are the newest of a key.

        All keys of the file are in memory for it.

        Returns:
          Of each the positions of the rows in it, (k,) int64, ascending, and those of their keys
          among all keys of this file, (k,) int64.

        Raises:
          OSError: a file cannot be read. ValueError: it is corrupt; a key has no row.
        """
        keys_with_rows = (next(file.ranges("keys", [(0, file.num_rows)])) for file in self.files)
        return newest_rows(self.whole("keys"), keys_with_rows, self.corrupt)

"""A file of a checkpoint whose keys and rows are in memory as far as they are read, no further."""

import mmap
import os
import weakref

import numpy as np

from sok_lite.engine.files.manifest import Shard, TableFacts, path_of
from sok_lite.engine.files.shard import ShardReader
from sok_lite.engine.files.table_file import tensors_of


class MappedShard:
    """The keys and rows of a table in one file. They stay readable when the file is removed.

    What the file says of itself is checked when it is opened, keys and rows when that is asked for.

    Args:
      facts: of the table.
      shard: the part of it.
      folder: of the checkpoint.

    Attributes:
      keys: (n,) of the key type.
      rows: (n, dim) in the format in which they are kept.

    Raises:
      OSError: the file cannot be read. ValueError: it is corrupt.
    """

    def __init__(self, facts: TableFacts, shard: Shard, folder: str) -> None:
        path, self._chunk_bytes = path_of(folder, shard), shard.written.chunk_bytes
        self._reader = ShardReader(path, shard.written, facts.name)
        for tensor in tensors_of(facts.dim, facts.dtype, facts.key_type, shard):
            self._reader.expect(tensor)
        self._reader.forget()
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._map = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):
            # Else the system reads 128 KiB or more around each row.
            self._map.madvise(mmap.MADV_RANDOM)
        self.keys, self.rows = self._tensor("keys"), self._tensor("values")
        self._is_checked = np.zeros(len(shard.written.crcs), bool)

    def _tensor(self, name: str) -> np.ndarray:
        tensor, begin = self._reader.tensors[name], self._reader.place(name)
        data = np.frombuffer(self._map, np.uint8)[begin : begin + tensor.num_bytes]
        return data.view(tensor.storage).reshape(tensor.shape)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the rows of some keys, (k, dim).

        Args:
          numbers: (k,) int64, of the keys.
        """
        rows: np.ndarray = self.rows[numbers]
        return rows

    def check_keys(self) -> None:
        """Raises ValueError if the chunks of the keys are not what was written. It reads them."""
        begin, size = self._reader.place("keys"), self._chunk_bytes
        self._check(np.arange(begin // size, -(-(begin + self.keys.nbytes) // size)))

    def corrupt(self, reason: str) -> ValueError:
        """Returns the error that says so."""
        return self._reader.corrupt(reason)

    def check_rows(self, numbers: np.ndarray) -> None:
        """Raises ValueError if the chunks of some rows are not what was written.

        Each chunk is read as a whole, once.

        Args:
          numbers: (k,) int64, of the rows.
        """
        width, size = self._reader.tensors["values"].row_bytes, self._chunk_bytes
        first = self._reader.place("values") + numbers * width
        reached = np.zeros(self._is_checked.size, bool)
        reached[first // size] = True
        # A row may end in the chunk behind, or be longer than a chunk.
        for further in range(size, width + size, size):
            reached[(first + min(further, width - 1)) // size] = True
        self._check(np.flatnonzero(reached))

    def _check(self, numbers: np.ndarray) -> None:
        # Two threads that come here together may check a chunk twice, which does no harm.
        size = self._chunk_bytes
        for number in numbers[~self._is_checked[numbers]].tolist():
            # The file that is mapped, read in one piece where the map would come page by page.
            self._reader.check(number, os.pread(self._file, size, number * size))
            self._is_checked[number] = True


class MappedChain:
    """The keys and newest rows of a table in an increment and the files that it continues.

    Everything is as of a `MappedShard`, but that it takes 12 bytes a key more.
    """

    def __init__(self, facts: TableFacts, shard: Shard, folder: str) -> None:
        self._chain = shard.chain
        self._files = [MappedShard(facts, part, folder) for part in shard.chain]
        self.keys = self._files[-1].keys

    def check_keys(self) -> None:
        """Raises ValueError if keys are not what was written, or one has no row. It reads them."""
        for file in self._files:
            file.check_keys()
        order = np.argsort(self.keys)
        ordered = self.keys[order]
        self._file_of = np.full(self.keys.size, -1, np.int32)
        self._row_of = np.zeros(self.keys.size, np.int64)
        if self.keys.size:
            for number, (part, file) in enumerate(zip(self._chain, self._files, strict=True)):
                held = file.keys[: part.num_rows]
                at = np.minimum(np.searchsorted(ordered, held), ordered.size - 1)
                is_there = ordered[at] == held
                places = order[at[is_there]]
                self._file_of[places] = number  # a newer one after an older one
                self._row_of[places] = np.flatnonzero(is_there)
        if (self._file_of < 0).any():
            raise self._files[-1].corrupt("some of its keys have no row in any file")

    def check_rows(self, numbers: np.ndarray) -> None:
        """Raises ValueError if the chunks of the rows of some keys are not what was written."""
        for number, file in enumerate(self._files):
            file.check_rows(self._row_of[numbers[self._file_of[numbers] == number]])

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the rows of some keys, (k, dim)."""
        rows = np.empty((numbers.size, *self._files[-1].rows.shape[1:]), self._files[-1].rows.dtype)
        for number, file in enumerate(self._files):
            which = np.flatnonzero(self._file_of[numbers] == number)
            rows[which] = file.read(self._row_of[numbers[which]])
        return rows

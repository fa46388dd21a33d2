"""A file of a checkpoint, memory-mapped: only keys and rows that are read take memory."""

import mmap
import os
import weakref

import numpy as np

from sok_lite.engine.files.manifest_facts import Shard, TableFacts, path_of
from sok_lite.engine.files.table_file import open_shard


class MappedShard:
    """The keys and rows of a table in one file. They stay readable when the file is removed.

    The header of the file is checked when it is opened, keys and rows by `check_keys` and
    `check_rows`.

    Args:
      facts: of the table.
      shard: the part of it.
      folder: of the checkpoint.

    Attributes:
      keys: (n,) of the key type.
      rows: (k, dim) in storage format, of the first k keys.
      reader: of the file, which may have been removed.

    Raises:
      OSError: the file cannot be read. ValueError: it is corrupt.
    """

    def __init__(self, facts: TableFacts, shard: Shard, folder: str) -> None:
        path, self._chunk_bytes = path_of(folder, shard), shard.written.chunk_bytes
        self.reader = open_shard(facts, shard, folder)
        self.reader.forget()
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        try:
            self._map = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ)
        except OSError as error:  # its own names no file
            raise OSError(error.errno, error.strerror, path) from error
        if hasattr(mmap, "MADV_RANDOM"):
            # Else the system reads 128 KiB or more around each row.
            self._map.madvise(mmap.MADV_RANDOM)
        self.keys, self.rows = self._tensor("keys"), self._tensor("values")
        self._is_checked = np.zeros(len(shard.written.crcs), bool)

    def _tensor(self, name: str) -> np.ndarray:
        tensor, begin = self.reader.tensors[name], self.reader.place(name)
        data = np.frombuffer(self._map, np.uint8)[begin : begin + tensor.num_bytes]
        return data.view(tensor.storage).reshape(tensor.shape)

    def check_keys(self) -> None:
        """Raises ValueError if the chunks of the keys are not what was written. It reads them."""
        begin, size = self.reader.place("keys"), self._chunk_bytes
        self._check(np.arange(begin // size, -(-(begin + self.keys.nbytes) // size)))

    def check_rows(self, numbers: np.ndarray) -> None:
        """Raises ValueError if the chunks of some rows are not what was written.

        Each chunk is read as a whole, once.

        Args:
          numbers: (k,) int64, of the rows.
        """
        width, size = self.reader.tensors["values"].row_bytes, self._chunk_bytes
        first = self.reader.place("values") + numbers * width
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
            self.reader.check(number, os.pread(self._file, size, number * size))
            self._is_checked[number] = True

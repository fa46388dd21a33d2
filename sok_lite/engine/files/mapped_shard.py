"""A file of a checkpoint, memory-mapped: pages are read when they are touched."""

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np

from sok_lite.engine.files.disk import open_file
from sok_lite.engine.files.manifest import Shard, TableFacts, path_of
from sok_lite.engine.files.table_file import REMOVED, open_shard

_system = ctypes.CDLL(None, use_errno=True)
_system.mmap.restype = ctypes.c_void_p
_system.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int64),
]
_system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_system.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class MappedShard:
    """The keys and rows of a table in one file, which stay readable after the file is removed.

    No file descriptor stays open. The header is checked here, checksums of keys and rows by
    `check_keys` and `check_rows`.

    Attributes:
      keys: (n,) of the key type.
      rows: (k, dim) in storage format, of the first k keys.
      removed: (m,) of the key type, keys that this increment removed; None if it does not say.

    Raises:
      OSError: the file cannot be read. ValueError: it is corrupt.
    """

    def __init__(self, facts: TableFacts, shard: Shard, folder: str) -> None:
        path, self._chunk_bytes = path_of(folder, shard), shard.written.chunk_bytes
        self.reader = open_shard(facts, shard, folder)
        self.reader.free_chunk()
        with open_file(path) as file:
            self._bytes = _map(file.fileno(), shard.written.num_bytes, path)
        self.keys, self.rows = self._tensor("keys"), self._tensor("values")
        # A copy, because the last tensor may be unaligned.
        self.removed = None if shard.removed is None else self._tensor(REMOVED).copy()
        self._is_checked = np.zeros(len(shard.written.crcs), bool)

    def _tensor(self, name: str) -> np.ndarray:
        tensor, begin = self.reader.tensors[name], self.reader.offset_of(name)
        data = self._bytes[begin : begin + tensor.num_bytes]
        return data.view(tensor.storage).reshape(tensor.shape)

    def check_keys(self, count: int | None = None) -> None:
        """Reads the chunks of the first `count` keys, or of all, and of the removed keys.

        Raises:
          ValueError: a checksum is wrong.
        """
        sizes, size = {"keys": self.keys[:count].nbytes}, self._chunk_bytes
        if self.removed is not None:
            sizes[REMOVED] = self.removed.nbytes
        for name, num_bytes in sizes.items():
            begin = self.reader.offset_of(name)
            self._check_chunks(np.arange(begin // size, -(-(begin + num_bytes) // size)))

    def check_rows(self, numbers: np.ndarray) -> None:
        """Reads the chunks of some rows, each once.

        Args:
          numbers: (k,) int64, positions of the rows.

        Raises:
          ValueError: a checksum is wrong.
        """
        width, size = self.reader.tensors["values"].row_bytes, self._chunk_bytes
        first = self.reader.offset_of("values") + numbers * width
        reached = np.zeros(self._is_checked.size, bool)
        reached[first // size] = True
        # A row may end in the next chunk, or be longer than a chunk.
        for further in range(size, width + size, size):
            reached[(first + min(further, width - 1)) // size] = True
        self._check_chunks(np.flatnonzero(reached))

    def _check_chunks(self, numbers: np.ndarray) -> None:
        # Two threads may check the same chunk at the same time, which does no harm.
        size = self._chunk_bytes
        for number in numbers[~self._is_checked[numbers]].tolist():
            chunk = self._bytes[number * size : (number + 1) * size]
            _advise(chunk, mmap.MADV_WILLNEED)  # one read instead of one a page
            self.reader.check_chunk(number, chunk.data)
            self._is_checked[number] = True


def _map(file: int, size: int, path: str) -> np.ndarray:
    """Maps a file; returns its bytes, (size,) uint8, read-only."""
    address: Any = _system.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    memory = (ctypes.c_uint8 * size).from_address(address)
    # Unmapped with the last array of it, not at exit: threads may still read then.
    weakref.finalize(memory, _system.munmap, address, size).atexit = False
    data: np.ndarray = np.frombuffer(memory, np.uint8)  # type: ignore[call-overload]
    data.flags.writeable = False
    # Otherwise the system reads 128 KiB or more around each row.
    _advise(data, mmap.MADV_RANDOM)
    return data


def _advise(data: np.ndarray, advice: int) -> None:
    # Its result is ignored: advice that fails only costs time.
    begin = data.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    _system.madvise(begin, data.ctypes.data + data.nbytes - begin, advice)

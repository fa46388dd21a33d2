"""A file of a checkpoint, mapped into memory: pages are read when they are touched."""

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
for _name in ("munmap", "madvise"):
    getattr(_system, _name).argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t),
        *[ctypes.c_int] * (_name == "madvise"),
    ]
_FAILED = ctypes.c_void_p(-1).value
_PAGE = mmap.PAGESIZE


class MappedShard:
    """The keys and rows of a table in one file. They stay readable when the file is removed.

    No file stays open. The header of the file is checked here, keys and rows by `check_keys` and
    `check_rows`.

    Args:
      facts: of the table.
      shard: the part of it.
      folder: of the checkpoint.

    Attributes:
      keys: (n,) of the key type.
      rows: (k, dim) in storage format, of the first k keys.
      removed: (m,) of the key type, the keys that an increment says were removed; None: it does not
        say.
      reader: of the file, which may have been removed.

    Raises:
      OSError: the file cannot be read. ValueError: it is corrupt.
    """

    def __init__(self, facts: TableFacts, shard: Shard, folder: str) -> None:
        path, self._chunk_bytes = path_of(folder, shard), shard.written.chunk_bytes
        self.reader = open_shard(facts, shard, folder)
        self.reader.free_chunk()
        with open_file(path) as file:
            self._bytes = _mapped(file.fileno(), shard.written.num_bytes, path)
        self.keys, self.rows = self._tensor("keys"), self._tensor("values")
        # A copy: behind the others it may begin anywhere.
        self.removed = None if shard.removed is None else self._tensor(REMOVED).copy()
        self._is_checked = np.zeros(len(shard.written.crcs), bool)

    def _tensor(self, name: str) -> np.ndarray:
        tensor, begin = self.reader.tensors[name], self.reader.offset_of(name)
        data = self._bytes[begin : begin + tensor.num_bytes]
        return data.view(tensor.storage).reshape(tensor.shape)

    def check_keys(self, count: int | None = None) -> None:
        """Raises ValueError if the chunks of keys are not what was written. It reads them.

        Args:
          count: of the first keys, and of those that were removed; None: all keys.
        """
        self._check_bytes("keys", self.keys[:count].nbytes)
        if self.removed is not None:
            self._check_bytes(REMOVED, self.removed.nbytes)

    def _check_bytes(self, name: str, num_bytes: int) -> None:
        begin, size = self.reader.offset_of(name), self._chunk_bytes
        self._check(np.arange(begin // size, -(-(begin + num_bytes) // size)))

    def check_rows(self, numbers: np.ndarray) -> None:
        """Raises ValueError if the chunks of some rows are not what was written.

        Each chunk is read as a whole, once.

        Args:
          numbers: (k,) int64, of the rows.
        """
        width, size = self.reader.tensors["values"].row_bytes, self._chunk_bytes
        first = self.reader.offset_of("values") + numbers * width
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
            chunk = self._bytes[number * size : (number + 1) * size]
            _advise(chunk, mmap.MADV_WILLNEED)  # in one piece, and not page by page
            self.reader.check_chunk(number, chunk.data)
            self._is_checked[number] = True


def _mapped(file: int, size: int, path: str) -> np.ndarray:
    """Returns the bytes of a file, which is read where they are touched, (size,) uint8."""
    address: Any = _system.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    memory = (ctypes.c_uint8 * size).from_address(address)
    # As long as an array of it lives.
    weakref.finalize(memory, _system.munmap, address, size).atexit = False
    data: np.ndarray = np.frombuffer(memory, np.uint8)  # type: ignore[call-overload]
    data.flags.writeable = False
    # Else the system reads 128 KiB or more around each row.
    _advise(data, mmap.MADV_RANDOM)
    return data


def _advise(data: np.ndarray, advice: int) -> None:
    # What it returns says whether it could, and nothing hangs on that.
    begin = data.ctypes.data // _PAGE * _PAGE
    _system.madvise(begin, data.ctypes.data + data.nbytes - begin, advice)

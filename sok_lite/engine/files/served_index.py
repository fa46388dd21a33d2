"""The index of a checkpoint that is served: from keys to the addresses of rows in mapped files.

Bindings of kernels/cpu_served.cpp, whose table has 16 bytes a slot and three slots for two keys.
`make_delta` indexes increments beside a base index, `merge` compacts that delta into the base.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from sok_lite.backend import get_backend
from sok_lite.backend.arguments import address_of
from sok_lite.backend.build import find_library
from sok_lite.engine.hashing import new_seed

_SLOT_BYTES = 16
# A slot has 16 bits for the rank.
MAX_RANKS = 1 << 16


class _Record(ctypes.Structure):
    """SokServed of kernels/cpu_served.cpp."""

    _fields_ = [
        ("slots", ctypes.c_void_p),
        ("num_slots", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
    ]


@functools.cache
def _library() -> Any:
    """Returns the library of kernels. Its functions release the GIL."""
    library = ctypes.CDLL(str(find_library()))
    number, word, pointer = ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
    keys = [pointer, number, number, word, number]
    for name, arguments in {
        "begin": [pointer, *keys, number, word, pointer],
        "continue": [pointer, *keys, word],
        "note": [pointer, pointer, *keys, word, pointer],
        "merge": [pointer, pointer, number],
        "read": [pointer, pointer, pointer, number, pointer, number, pointer, pointer, pointer],
    }.items():
        function = getattr(library, f"sok_served_{name}")
        function.argtypes = arguments
        function.restype = number if name in ("continue", "merge") else None
    return library


class FileKeys:
    """Keys of a file with the addresses of their rows, as arguments of the library.

    Args:
      keys: (n,) of the key type, kept alive by this object.
      rows: (k, dim) of the first k keys; None: these keys were removed. The caller keeps the rows
        alive as long as the index.
      rank: that wrote the file.
    """

    def __init__(self, keys: np.ndarray, rows: np.ndarray | None, rank: int) -> None:
        self._keys, self.rank, self.num_keys = keys, rank, keys.size
        self.num_rows = 0 if rows is None else len(rows)
        # An array without rows may have no address, and 0 would say that the keys were removed.
        first = 0 if rows is None else address_of(rows) or _SLOT_BYTES
        row_bytes = 0 if rows is None else rows.shape[1] * rows.itemsize
        self.words = (address_of(keys), keys.itemsize, self.num_keys, first, row_bytes)


class ServedIndex:
    """An index with room for `num_keys` keys.

    Any number of threads may read it while one writes keys that nobody looks up.

    Attributes:
      num_used: slots in use; of a delta an upper bound.
      num_new: of a delta, an upper bound of the keys that its base lacks.
    """

    def __init__(self, num_keys: int) -> None:
        self._num_slots = max(8, num_keys + num_keys // 2)
        self._slots = get_backend("cpu").zeros_chunk((self._num_slots + 1) * _SLOT_BYTES)
        self._record = _Record(address_of(self._slots), self._num_slots, new_seed())
        self._at = ctypes.addressof(self._record)
        self._read = _library().sok_served_read
        self.num_used = self.num_new = 0

    @property
    def num_free(self) -> int:
        """How many more keys fit, at a load factor of 0.8."""
        return self._num_slots * 4 // 5 - self.num_used

    def add_newest(self, keys: FileKeys) -> tuple[int, int, int]:
        """Adds all keys of a rank, from its newest file. For a key that is there, the first counts.

        Returns:
          (keys of other ranks too, keys that were there twice, keys without a row yet).
        """
        counts = (ctypes.c_int64 * 3)()
        _library().sok_served_begin(self._at, *keys.words, keys.num_rows, keys.rank, counts)
        self.num_used += keys.num_keys - counts[0] - counts[1]
        return counts[0], counts[1], counts[2]

    def add_older_rows(self, keys: FileKeys) -> int:
        """Sets the rows of a rank's keys that have none yet, from an older file.

        Returns:
          How many rows were set.
        """
        return int(_library().sok_served_continue(self._at, *keys.words, keys.rank))

    def make_delta(
        self, parts: Sequence[FileKeys], before: "ServedIndex | None"
    ) -> "tuple[ServedIndex, list[tuple[int, int]]]":
        """Returns a delta index of increments to this index, which stays as it is.

        Args:
          parts: of the increments, oldest first.
          before: the delta index of earlier increments, if any.

        Returns:
          (the delta; for each part how many keys had a row: of its rank, of other ranks).
        """
        earlier = 0 if before is None else before.num_used
        delta = ServedIndex(earlier + sum(part.num_keys for part in parts))
        if before is not None:
            delta.merge(before, keep_gone=True)
            delta.num_new = before.num_new
        known = []
        for part in parts:
            counts = (ctypes.c_int64 * 2)()
            _library().sok_served_note(delta._at, self._at, *part.words, part.rank, counts)
            delta.num_used += part.num_keys
            if part.num_rows:
                delta.num_new += part.num_keys - counts[0] - counts[1]
            known.append((counts[0], counts[1]))
        return delta, known

    def merge(self, delta: "ServedIndex", keep_gone: bool = False) -> None:
        """Writes a delta into this index, which has room for it.

        Args:
          keep_gone: whether to add removed keys that this index does not have.
        """
        self.num_used += _library().sok_served_merge(self._at, delta._at, keep_gone)

    def grown(self, delta: "ServedIndex") -> "ServedIndex":
        """Returns a larger index with the content of this one and a delta; both stay."""
        made = ServedIndex(self.num_used + delta.num_new)
        made.merge(self)
        made.merge(delta)
        return made

    def find_rows(self, keys: np.ndarray, delta: "ServedIndex | None") -> np.ndarray:
        """Returns the address of each row, (n,) uint64; 0 for a missing key.

        Args:
          keys: (n,) int64.
        """
        rows = np.empty(keys.size, np.uint64)
        more = None if delta is None else delta._at
        self._read(
            *(self._at, more, address_of(keys), keys.size, None, 0, None, address_of(rows), None)
        )
        return rows

    def read(
        self,
        keys: np.ndarray,
        delta: "ServedIndex | None",
        missing: np.ndarray,
        rows: np.ndarray,
        found: np.ndarray | None,
    ) -> None:
        """Reads rows, by one call that releases the GIL.

        Args:
          keys: (n,) int64.
          missing: (dim,) the row of a missing key.
          rows: (n, dim) output.
          found: (n,) bool output: which keys exist; None: not wanted.
        """
        self._read(
            self._at,
            None if delta is None else delta._at,
            address_of(keys),
            keys.size,
            address_of(missing),
            missing.nbytes,
            address_of(rows),
            None,
            None if found is None else address_of(found),
        )

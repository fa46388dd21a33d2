"""Where the rows of keys are in mapped files: the index of kernels/cpu_served.cpp.

It takes 16 bytes for each slot, and two keys have three slots. What an increment changes lies in a
small index beside the large one at first: `noted` makes it, `merged` puts it into the large one.
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
# Ranks are told apart by 16 bits.
MAX_RANKS = 1 << 16


class _Index(ctypes.Structure):
    """SokServed of kernels/cpu_served.cpp."""

    _fields_ = [
        ("slots", ctypes.c_void_p),
        ("num_slots", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
    ]


@functools.cache
def _library() -> Any:
    """Returns the library of kernels, whose functions let go of Python's lock."""
    library = ctypes.CDLL(str(find_library()))
    number, word, pointer = ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
    part = [pointer, number, number, word, number]
    for name, arguments in {
        "begin": [pointer, *part, number, word, pointer],
        "continue": [pointer, *part, word],
        "note": [pointer, pointer, *part, word, pointer],
        "merge": [pointer, pointer, number],
        "read": [pointer, pointer, pointer, number, pointer, number, pointer, pointer, pointer],
    }.items():
        function = getattr(library, f"sok_served_{name}")
        function.argtypes = arguments
        function.restype = number if name in ("continue", "merge") else None
    return library


class KeysOfFile:
    """Keys of a file, and where their rows are.

    Args:
      keys: (n,) of the key type, which have to live until a call that takes this is over.
      rows: (k, dim) of the first k keys; None: these were removed. The index has the address only:
        who looks up has to keep the rows.
      rank: which of the newest files of a table they are of, or continued by.
    """

    def __init__(self, keys: np.ndarray, rows: np.ndarray | None, rank: int) -> None:
        self._keys, self.rank, self.num_keys = keys, rank, keys.size
        self.num_rows = 0 if rows is None else len(rows)
        # Of no rows there may be no address.
        first = 0 if rows is None else address_of(rows) or _SLOT_BYTES
        row_bytes = 0 if rows is None else rows.shape[1] * rows.itemsize
        self.words = (address_of(keys), keys.itemsize, self.num_keys, first, row_bytes)


class ServedIndex:
    """An index of keys. Any number of threads may read it, while one writes what nobody asks for.

    Args:
      num_keys: that it has room for.

    Attributes:
      num_used: slots that are not open; of a small index at most.
      num_new: of a small index, how many of its keys the large one may lack.
    """

    def __init__(self, num_keys: int) -> None:
        self._num_slots = max(8, num_keys + num_keys // 2)
        self._slots = get_backend("cpu").zeros_chunk((self._num_slots + 1) * _SLOT_BYTES)
        self._index = _Index(address_of(self._slots), self._num_slots, new_seed())
        self._at = ctypes.addressof(self._index)
        self._read = _library().sok_served_read
        self.num_used = self.num_new = 0

    @property
    def has_room_for(self) -> int:
        """How many more keys it takes. Four of five slots are in use then."""
        return self._num_slots * 4 // 5 - self.num_used

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return self._slots.nbytes

    def begin(self, some: KeysOfFile) -> tuple[int, int, int]:
        """Adds the keys of the newest file of a rank. Of a key that is there the first row counts.

        Returns:
          (keys that another rank had before, keys that were there twice, keys without a row yet).
        """
        again = (ctypes.c_int64 * 3)()
        _library().sok_served_begin(self._at, *some.words, some.num_rows, some.rank, again)
        self.num_used += some.num_keys - again[0] - again[1]
        return again[0], again[1], again[2]

    def go_on(self, some: KeysOfFile) -> int:
        """Gives keys of a rank that have no row yet that of an older file; returns how many."""
        return int(_library().sok_served_continue(self._at, *some.words, some.rank))

    def noted(
        self, parts: Sequence[KeysOfFile], before: "ServedIndex | None"
    ) -> "tuple[ServedIndex, list[tuple[int, int]]]":
        """Returns a small index of what has changed, and leaves this one as it is.

        Args:
          parts: of new increments, the oldest first.
          before: the small index of earlier ones that is beside this one, if any.

        Returns:
          (the small index, of each part how many keys had a row before, of its rank and of others).
        """
        earlier = 0 if before is None else before.num_used
        made = ServedIndex(earlier + sum(part.num_keys for part in parts))
        if before is not None:
            made.merge(before, keep_gone=True)
            made.num_new = before.num_new
        counts = []
        for part in parts:
            found = (ctypes.c_int64 * 2)()
            _library().sok_served_note(made._at, self._at, *part.words, part.rank, found)
            made.num_used += part.num_keys
            if part.num_rows:
                made.num_new += part.num_keys - found[0] - found[1]
            counts.append((found[0], found[1]))
        return made, counts

    def merge(self, small: "ServedIndex", keep_gone: bool = False) -> None:
        """Writes what a small index has into this one, which has room for it.

        Args:
          keep_gone: whether it notes keys without a row that it does not know.
        """
        self.num_used += _library().sok_served_merge(self._at, small._at, keep_gone)

    def grown(self, small: "ServedIndex") -> "ServedIndex":
        """Returns a larger index of what this one and a small one have, and leaves both."""
        made = ServedIndex(self.num_used + small.num_new)
        made.merge(self)
        made.merge(small)
        return made

    def places(self, keys: np.ndarray, small: "ServedIndex | None") -> np.ndarray:
        """Returns the address of the row of each key, (n,) uint64; 0: it has none.

        Args:
          keys: (n,) int64.
          small: what is beside this index, if anything.
        """
        places = np.empty(keys.size, np.uint64)
        more = None if small is None else small._at
        self._read(
            *(self._at, more, address_of(keys), keys.size, None, 0, None, address_of(places), None)
        )
        return places

    def read(
        self,
        keys: np.ndarray,
        small: "ServedIndex | None",
        missing: np.ndarray,
        rows: np.ndarray,
        found: np.ndarray | None,
    ) -> None:
        """Reads rows, by one call that lets go of Python's lock.

        Args:
          keys: (n,) int64.
          small: what is beside this index, if anything.
          missing: (dim,) the row of a key that has none.
          rows: (n, dim) to write into.
          found: (n,) bool to write into: which keys have a row; None: nobody asks.
        """
        self._read(
            self._at,
            None if small is None else small._at,
            address_of(keys),
            keys.size,
            address_of(missing),
            missing.nbytes,
            address_of(rows),
            None,
            None if found is None else address_of(found),
        )

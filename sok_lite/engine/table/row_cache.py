"""A cache of row numbers: the keys of a table's last gradient, and their rows.

They are most likely those of the update that follows, which then needs no search. The table's
record has their addresses. Native code copies them to memory that `make_room` allocates; Python
notes the arrays that it has.
"""

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.table.locking import unless_in_use
from sok_lite.engine.table.record import GradientRecord, TableRecord

_MIN_ROOM = 1024  # keys


class CachedRows(NamedTuple):
    """Distinct keys whose row numbers are known.

    Attributes:
      keys: address of (size,) int64.
      rows: address of (size,) uint32, their row numbers, or NO_ROW.
      size: how many they are; -1: nothing is known.
      row_version: of the table, when the row numbers were found.
      is_complete: 1: all keys had a row; 0: some may have had none.
      lookup_number: of the lookup that has marked them as seen; 0: it has not.
    """

    keys: int
    rows: int
    size: int
    row_version: int
    is_complete: int
    lookup_number: int


_WORDS, _ROOM = struct.Struct("=6q"), struct.Struct("=3q")
_FIRST = TableRecord.gradient.offset
_FIRST_OF_ROOM = _FIRST + GradientRecord.room_keys.offset


class RowCache:
    """The row numbers known from the last gradient of a table. Hold the table's lock in its
    methods."""

    __slots__ = ("_kept", "_record", "_room")

    def __init__(self, record: TableRecord) -> None:
        self._record = record
        self._kept: Any = None  # keys and rows that Python has noted
        self._room: Any = None  # memory for those of native code

    def read(self) -> CachedRows:
        """Returns addresses, which are valid as long as the table's lock is held."""
        return CachedRows._make(_WORDS.unpack_from(self._record, _FIRST))

    def arrays(self, known: CachedRows) -> tuple[Array, Array]:
        """Returns the keys (size,) int64 and rows (size,) uint32 at the addresses of `read`."""
        is_in_room = known.keys == self._record.gradient.room_keys
        keys, rows = self._room if is_in_room else self._kept
        return keys[: known.size], rows[: known.size]

    def note(
        self, backend: Backend, known: CachedRows, arrays: tuple[Array, Array], room: int
    ) -> None:
        """Notes keys and rows, which `known` has the addresses of, and makes room."""
        self.make_room(backend, room)
        before, self._kept = self._kept, arrays
        _WORDS.pack_into(self._record, _FIRST, *known)
        del before  # the words pointed there until now

    def make_room(self, backend: Backend, size: int) -> None:
        """Allocates memory for native code to write so many keys, if there is less."""
        if size <= self._record.gradient.room:
            return
        room = max(_MIN_ROOM, 1 << (size - 1).bit_length())
        arrays = backend.xp.empty(room, np.int64), backend.xp.empty(room, np.uint32)
        words = (*map(backend.address, arrays), room)
        # What was noted may lie in the memory that there was before.
        _WORDS.pack_into(self._record, _FIRST, *_NOTHING)
        _ROOM.pack_into(self._record, _FIRST_OF_ROOM, *words)
        self._room = arrays


_NOTHING = CachedRows(0, 0, -1, 0, 0, 0)


def cache_rows(
    backend: Backend,
    tables: Sequence[Any],
    keys: Sequence[Array],
    rows: Sequence[Array],
    found: np.ndarray,
    num_items: Sequence[int] | None = None,
) -> None:
    """Notes keys and rows of gradients; those of the last one where a table comes several times.

    Args:
      keys: (u,) int64 of each table, distinct, not to be written any more.
      rows: (u,) uint32 of each table, their row numbers, or NO_ROW.
      found: (3, num_tables) int64 on the host, see `BackwardContext`.
      num_items: for how many keys of each table native code is to have room; None: for none.
    """
    rooms = [0] * len(tables) if num_items is None else num_items
    of_tables = zip(tables, keys, rows, *found.tolist(), rooms, strict=True)
    for table, its_keys, its_rows, row_version, num_without_row, lookup_number, room in of_tables:
        known = CachedRows(
            backend.address(its_keys),
            backend.address(its_rows),
            len(its_keys),
            row_version,
            int(num_without_row == 0),
            lookup_number,
        )
        note = partial(table.row_cache.note, backend, known, (its_keys, its_rows), room)
        unless_in_use(table, note)

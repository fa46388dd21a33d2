"""The index of the "hbm" table: open addressing (kernels/det), growing without bound."""

import contextlib

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.hashing import hash_keys
from sok_lite.engine.row_store import ABSENT, Copying
from sok_lite.engine.table.index import LINE, Found, Index, IndexEntries

_MIN_CAPACITY = 64
# Lines of 4 slots stay short up to here (1.2 lines a hit), and an index that has just doubled
# still costs less than 48 bytes a key.
_MAX_LOAD_FACTOR = 0.7
# Erased slots lengthen every probe until the index is rebuilt: at once where there are many, and
# where keys crowd the index from a few on. Never for one or two, for a rebuild walks all slots.
_MAX_RECLAIM_FACTOR = 0.15
_MIN_RECLAIM_FACTOR = 0.05


def _capacity_for(num_keys: int) -> int:
    least = max(_MIN_CAPACITY, int(num_keys / _MAX_LOAD_FACTOR) + 1)
    return 1 << (least - 1).bit_length()


class DetIndex(Index):
    """Row numbers by key. Keys are int64 arrays (n,), the engine's form of every key type."""

    def __init__(
        self, backend: Backend, key_dtype: KeyDtype, name: str = "table", init_capacity: int = 0
    ) -> None:
        self._num_reclaimed = 0
        super().__init__(backend, key_dtype, name, _capacity_for(init_capacity))

    def emptied(self) -> "DetIndex":
        """Returns an index like this one as it was at first."""
        index = DetIndex(self.backend, self.key_dtype, self.name)
        index._init_capacity = self._init_capacity
        index.clear()
        return index

    def find(self, keys: Array, stamp: int = 0, copying: Copying | None = None) -> Found:
        """Finds keys, which may repeat.

        Args:
          stamp: number of this lookup, kept with each key that is found; 0: nothing is written.
          copying: copies the rows that are found; None: does not.
        """
        if copying is None:
            return self._search("det_find", keys, stamp)
        *place, out = copying
        return self._search("det_lookup", keys, stamp, *place, out=out)

    def make_room(self, count: int) -> None:
        """Grows so that `count` keys can be inserted, or drops erased slots.

        Raises:
          MemoryError: no memory; the index is as it was.
        """
        most = _MAX_LOAD_FACTOR * self.capacity
        if self.size + count > most:
            self._rehash(_capacity_for(self.size + count))
        elif self.size + self._num_reclaimed + count > most:
            self._rebuild_above(_MIN_RECLAIM_FACTOR)

    def insert(self, keys: Array, rows: Array, stamp: int) -> None:
        """Inserts distinct keys that are not there, after `make_room`, with their row numbers."""
        n = int(keys.size)
        reclaimed = self.backend.xp.zeros(1, np.int64)
        self._launch("det_insert", n, stamp, keys, rows, reclaimed, n)
        self.size += n
        if self._num_reclaimed:
            self._num_reclaimed -= int(reclaimed[0])

    def update(self, keys: Array, rows: Array | None = None, stamps: Array | None = None) -> None:
        """Writes row numbers or stamps (n,) uint32 of distinct keys; a missing one is skipped."""
        n = int(keys.size)
        self._launch("det_update", n, keys, rows, stamps, n)

    def stamps(self, keys: Array) -> Array:
        """Returns the number of the lookup that last saw each key, (n,) uint32; missing: 0."""
        n = int(keys.size)
        stamps = self.backend.xp.zeros(n, np.uint32)
        self._launch("det_stamps", n, keys, stamps, n)
        return stamps

    def erase(self, keys: Array) -> Array:
        """Erases distinct keys; returns the row numbers they had, (n,) uint32, or ABSENT."""
        n = int(keys.size)
        freed = self.backend.xp.empty(n, np.uint32)
        self._launch("det_erase", n, keys, freed, n)
        held = freed != np.uint32(ABSENT)
        self.size -= int(held.sum())
        marks = (keys == self.key_dtype.empty_key) | (keys == self.key_dtype.reclaim_key)
        self._num_reclaimed += int((held & ~marks).sum())
        self._rebuild_above(_MAX_RECLAIM_FACTOR)
        return freed

    def clear(self) -> None:
        self._slots = self._new_slots(self._init_capacity)
        self.capacity = self._init_capacity
        self.size = self._num_reclaimed = 0

    def reserve(self, num_keys: int) -> None:
        capacity = _capacity_for(num_keys)
        if capacity > self.capacity:
            self._rehash(capacity)

    def _lines_read(self, held: IndexEntries) -> Array:
        mask = np.uint64(self.capacity // LINE - 1)
        home = (hash_keys(held.keys) & np.uint64(self.capacity - 1)) // np.uint64(LINE)
        return ((held.slots.astype(np.uint64) // np.uint64(LINE) - home) & mask) + np.uint64(1)

    # ---------------------------------------------------------------- inside

    def _launch(self, kernel: str, num_items: int, *args: object) -> None:
        self.backend.launch(kernel, num_items, self._slots, self.capacity, *self._reserved(), *args)

    def _rebuild_above(self, reclaim_factor: float) -> None:
        """Rids the index of erased slots if there are many and there is memory to do so."""
        if self._num_reclaimed > reclaim_factor * self.capacity:
            # Erased slots cost time only: the index works on without the memory to be rebuilt.
            with contextlib.suppress(MemoryError):
                self._rehash(self.capacity)

    def _rehash(self, capacity: int) -> None:
        slots = self._new_slots(capacity)
        self._launch("det_rehash", self.capacity, slots, capacity)
        slots[-2:] = self._slots[-2:]
        self._slots = slots
        self.capacity = capacity
        self._num_reclaimed = 0
        self.num_rehashes += 1

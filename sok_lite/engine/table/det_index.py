"""The index of the "hbm" table: open addressing (kernels/det), growing without bound."""

import contextlib

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, publish, setting
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.hashing import hash_keys
from sok_lite.engine.rows.store import ABSENT
from sok_lite.engine.table.index import LINE, Index, IndexEntries, Place

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
        self._num_erased = 0
        # Erased slots used again, and keys that found no slot. Kernels count them, so that they
        # are never behind what the slots hold.
        self._counts = backend.xp.zeros(2, np.int64)
        super().__init__(backend, key_dtype, name, _capacity_for(init_capacity))

    def emptied(self) -> "DetIndex":
        """Returns an index like this one as it was at first."""
        index = DetIndex(self.backend, self.key_dtype, self.name)
        index._init_capacity = self._init_capacity
        index.clear()
        return index

    def place(self) -> Place:
        return Place(self._slots, None, self.capacity, 0, *self._reserved())

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

    def inserting(self, keys: Array, rows: Array, stamp: int) -> list[Action]:
        """Prepares to insert distinct keys that are not there, after `make_room`."""
        n = int(keys.size)
        insert = self._prepared("det_insert", n, stamp, keys, rows, self._counts, n)
        return [insert, *setting(self, size=self.size + n)]

    def insert(self, keys: Array, rows: Array, stamp: int) -> None:
        """Inserts distinct keys that are not there, after `make_room`, with their row numbers."""
        publish(self.inserting(keys, rows, stamp))
        self.check()

    def check(self) -> None:
        """Raises RuntimeError if keys have found the index full, which has room by its counters."""
        failed = int(self._counts[1])
        if failed:
            raise RuntimeError(
                f"The index of table {self.name!r} is corrupt: {failed:,} keys found no free slot, "
                f"where {self.size:,} keys in {self.capacity:,} slots were counted. Restore the "
                "table from a checkpoint, and please report this."
            )

    def updating(
        self, keys: Array, rows: Array | None = None, stamps: Array | None = None
    ) -> list[Action]:
        """Prepares to write row numbers or stamps (n,) uint32 of distinct keys; a missing key is
        skipped."""
        n = int(keys.size)
        return [self._prepared("det_update", n, keys, rows, stamps, n)]

    def stamps(self, keys: Array) -> Array:
        """Returns the number of the lookup that last saw each key, (n,) uint32; missing: 0."""
        n = int(keys.size)
        stamps = self.backend.xp.zeros(n, np.uint32)
        self._launch("det_stamps", n, keys, stamps, n)
        return stamps

    def erasing(self, keys: Array) -> list[Action]:
        """Prepares to erase distinct keys that are all there."""
        n = int(keys.size)
        marks = (keys == self.key_dtype.empty_key) | (keys == self.key_dtype.reclaim_key)
        num_erased = self._num_erased + n - int(marks.sum())
        return [
            self._prepared("det_erase", n, keys, n),
            *setting(self, size=self.size - n, _num_erased=num_erased),
        ]

    def erase(self, keys: Array) -> None:
        """Erases distinct keys; a missing one is skipped."""
        held = self.find(keys).rows != np.uint32(ABSENT)
        publish(self.erasing(keys[held]))
        self.clean()

    def clean(self) -> None:
        """Rids the index of erased slots where there are many."""
        self._rebuild_above(_MAX_RECLAIM_FACTOR)

    def clearing(self) -> list[Action]:
        return self._replacing(self._new_slots(self._init_capacity), self._init_capacity, size=0)

    def reserve(self, num_keys: int) -> None:
        capacity = _capacity_for(num_keys)
        if capacity > self.capacity:
            self._rehash(capacity)

    def _lines_read(self, held: IndexEntries) -> Array:
        mask = np.uint64(self.capacity // LINE - 1)
        home = (hash_keys(held.keys) & np.uint64(self.capacity - 1)) // np.uint64(LINE)
        return ((held.slots.astype(np.uint64) // np.uint64(LINE) - home) & mask) + np.uint64(1)

    # ---------------------------------------------------------------- inside

    @property
    def _num_reclaimed(self) -> int:
        """Erased slots. On a GPU it waits where there are any."""
        if not self._num_erased:
            return 0
        self.check()
        return self._num_erased - int(self._counts[0])

    def _prepared(self, kernel: str, num_items: int, *args: object) -> Action:
        return self.backend.prepared(
            kernel, num_items, self._slots, self.capacity, *self._reserved(), *args
        )

    def _rebuild_above(self, reclaim_factor: float) -> None:
        """Rids the index of erased slots if there are many and there is memory to do so."""
        if self._num_reclaimed > reclaim_factor * self.capacity:
            # Erased slots cost time only: the index works on without the memory to be rebuilt.
            with contextlib.suppress(MemoryError):
                self._rehash(self.capacity)

    def _rehash(self, capacity: int) -> None:
        self.check()
        slots = self._new_slots(capacity)
        self._launch("det_rehash", self.capacity, slots, capacity)
        slots[-2:] = self._slots[-2:]
        publish(self._replacing(slots, capacity, num_rehashes=self.num_rehashes + 1))

    def _replacing(self, slots: Array, capacity: int, **others: int) -> list[Action]:
        """Returns the actions that put slots without erased ones in the place of those there."""
        counts = self.backend.xp.zeros(2, np.int64)
        return setting(
            self, _slots=slots, capacity=capacity, _num_erased=0, _counts=counts, **others
        )

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
        # At most so many slots were erased, and at least so many of them used again: what is
        # certain without a look at the device.
        self._num_erased = self._num_reused = 0
        # Erased slots used again, keys that found no slot, and slots erased. Kernels count them,
        # so that they are never behind what the slots hold.
        self._counts = backend.xp.zeros(3, np.int64)
        super().__init__(backend, key_dtype, name, _capacity_for(init_capacity))

    def emptied(self) -> "DetIndex":
        """Returns an index like this one as it was at first."""
        index = DetIndex(self.backend, self.key_dtype, self.name)
        index._init_capacity = self._init_capacity
        index.clear()
        return index

    def place(self) -> Place:
        return self._placed(None, 0)

    def make_room(self, count: int) -> None:
        """Grows so that `count` keys can be inserted, or drops erased slots.

        Raises:
          MemoryError: no memory; the index is as it was.
        """
        most = _MAX_LOAD_FACTOR * self.capacity
        if self.size + count > most:
            self._rehash(_capacity_for(self.size + count))
        elif self._has_reclaimed_above(most - self.size - count):
            self._rebuild_above(_MIN_RECLAIM_FACTOR)

    def inserting(
        self, keys: Array, rows: Array, stamp: int, count: int | None = None
    ) -> list[Action]:
        """Prepares to insert distinct keys that are not there, after `make_room`.

        Args:
          keys: (n,) int64.
          rows: (n,) uint32, their row numbers; a key whose row is absent is skipped.
          stamp: number of the lookup that they come with.
          count: how many are not skipped; None: all.
        """
        n = int(keys.size)
        insert = self._prepared("det_insert", n, stamp, keys, rows, self._counts, n)
        return [insert, *setting(self, size=self.size + (n if count is None else count))]

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
        skipped, and one whose new row is absent."""
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
        erase = self._prepared("det_erase", n, keys, None, self._counts, None, n)
        return [erase, *self.erased(n)]

    def erasing_held(self, keys: Array, rows: Array, num_erased: Array) -> Action:
        """Prepares to erase distinct keys. `erased` must follow, when it is known how many.

        Args:
          keys: (n,) int64; one that is not there is skipped.
          rows: (n,) uint32; a key whose row is absent here is skipped.
          num_erased: (1,) int64, grows by those that are erased.
        """
        n = int(keys.size)
        return self._prepared("det_erase", n, keys, rows, self._counts, num_erased, n)

    def erased(self, count: int) -> list[Action]:
        """Returns the actions that note how many keys were erased."""
        return setting(self, size=self.size - count, _num_erased=self._num_erased + count)

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

    def _has_reclaimed_above(self, count: float) -> bool:
        """Whether more slots than that were erased and not used again. On a GPU it waits where
        that is not certain."""
        if self._num_erased - self._num_reused <= count:
            return False
        self.check()
        num_reused, _, num_erased = self.backend.to_host(self._counts).tolist()
        self._num_erased, self._num_reused = num_erased, num_reused
        return num_erased - num_reused > count

    def _prepared(self, kernel: str, num_items: int, *args: object) -> Action:
        return self.backend.prepared(
            kernel, num_items, self._slots, self.capacity, *self._reserved(), *args
        )

    def _rebuild_above(self, reclaim_factor: float) -> None:
        """Rids the index of erased slots if there are many and there is memory to do so."""
        if self._has_reclaimed_above(reclaim_factor * self.capacity):
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
        counts = self.backend.xp.zeros(3, np.int64)
        none = {"_num_erased": 0, "_num_reused": 0, "_counts": counts}
        return setting(self, _slots=slots, capacity=capacity, **none, **others)

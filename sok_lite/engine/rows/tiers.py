"""Promotes hot rows of a store to the near tier, by access counts.

Every lookup counts an access of each of its rows, and each rebalancing pass halves all counts: a
count is an exponentially decayed number of lookups. In a pass the far rows with the most accesses,
the hot ones, are exchanged with the near rows with the fewest.

* A far row must have more accesses than the near one by more than chance explains. Counts are about
  Poisson distributed, so the difference of two equal rows has the standard deviation of the root of
  their sum. Without this, rows that are all alike would move forever.
* A pass walks through all rows once half as many were looked up: its share of a lookup is the same
  however large the table is.
* After passes that move few rows, counting rests. So uniform keys, and hot keys that stay the same,
  cost little. New hot keys are noticed after the rest; then pass follows pass until few rows move.

Nothing here knows an index: `rebalance` returns the keys that have moved, with their new rows.
"""

from ctypes import addressof
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import Launch, launch_all
from sok_lite.engine.rows.record import AccessRecord
from sok_lite.engine.rows.store import RowStore

_NOT_HELD = 255  # the count of a row that nobody holds; SOK_NOT_HELD in kernels/rows.cu
# Between two passes. In a table that is small beside a batch every key is seen once a lookup: hot
# keys differ from cold ones only after a few.
_MIN_LOOKUPS = 8
_LOOKED_UP_PER_ROW = 0.5
# A pass has moved little if it promoted fewer than this part of the rows looked up: chance alone
# promotes up to 0.004, a changed hot set 0.02 and more. After the n-th such pass in a row, n times
# as many rows as were counted are looked up uncounted, up to the most. Without rests, counting and
# passes took 20 % of a lookup on the CPU.
_LITTLE = 0.006
_MOST_REST = 4
# In standard deviations. For 1M rows of which 10 % are near, Zipf(1.05), 65,536 keys a lookup:
# 1.0 moves 5 % of the rows looked up when all keys are alike, 1.5 moves 0.4 % and 2.0 hardly any,
# at 0.993, 0.991 and 0.974 of the best share of lookups served near.
_MARGIN = 1.5
# The least count that exceeds 0 by the margin: far rows with less need not be looked at.
_LEAST_COUNT = 4
_SCAN = 1 << 22  # rows whose positions are listed at a time
ACCESS_COUNT_BYTES = 9  # of a row: its count, and the key that holds it
ACCESS_COUNT_GROWTH = 2  # room for rows grows by this part of what there is


class Moved(NamedTuple):
    """Keys (m,) int64, distinct, that have moved, and their new row numbers (m,) uint32."""

    keys: Array
    rows: Array


class RowTiers:
    """The access counts and the keys of the rows of a store with two tiers.

    Hold the table's lock around every method.

    Attributes:
      num_moved: rows that have moved so far.
      num_passes: passes so far.
      record: the counts, to which native code adds in a lookup that moves no row.
    """

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self._backend: Backend = store.backend
        self.num_moved = self.num_passes = 0
        self._counts: Array
        self._keys: Array
        self._calm_passes = 0  # in a row that moved little
        self.record = store.accesses = AccessRecord()
        store.record.accesses = addressof(self.record)
        xp = self._backend.xp
        self._none = xp.empty(0, np.uint8), xp.empty(0, np.int64)
        self.clear()

    def clear(self) -> None:
        """Forgets all counts and keys."""
        self._set_room(*self._none)
        self._calm_passes = 0
        self.record.lookups = self.record.looked_up = self.record.rest = 0

    def _set_room(self, counts: Array, keys: Array) -> None:
        self.record.room = int(counts.size)
        self.record.counts = self._backend.address(counts) if counts.size else None
        self._counts, self._keys = counts, keys

    @property
    def num_bytes(self) -> int:
        """Memory of counts and keys."""
        return int(self._counts.nbytes + self._keys.nbytes)

    # ---------------------------------------------------------------- counting

    def reserve(self, num_rows: int) -> None:
        """Allocates counts for rows below `num_rows`.

        Raises:
          MemoryError: nothing has changed.
        """
        if self._store.near_rows is None or num_rows <= self._counts.size:
            return
        xp = self._backend.xp
        size = max(num_rows, self._counts.size + self._counts.size // ACCESS_COUNT_GROWTH)
        counts = xp.full(size, _NOT_HELD, np.uint8)
        keys = xp.zeros(size, np.int64)
        counts[: self._counts.size] = self._counts
        keys[: self._keys.size] = self._keys
        self._set_room(counts, keys)

    def assign_launches(self, rows: Array, keys: Array | None) -> list[Launch]:
        """Returns the launches that note the keys of rows, after `reserve`.

        Args:
          rows: (n,) uint32, distinct; NO_ROW is skipped.
          keys: (n,) int64; None: the rows are free.
        """
        if self._store.near_rows is None:
            return []
        n = int(rows.size)
        return [self._backend.prepared("rows_assign", n, self._counts, self._keys, rows, keys, n)]

    def assigned(self, rows: Array, keys: Array) -> None:
        """Notes the keys (n,) int64 of rows (n,) uint32, distinct.

        Raises:
          MemoryError: nothing has changed.
        """
        self.reserve(self._store.num_rows)
        launch_all(self.assign_launches(rows, keys))

    def access_counts(self) -> Array | None:
        """Returns the counts, (num_rows or more,) uint8; None: accesses are not counted."""
        if not self._store.num_far_rows:
            return None
        self.reserve(self._store.num_rows)
        return self._counts

    @property
    def is_counting(self) -> bool:
        """Whether lookups count their rows: no rest goes on."""
        return self.record.rest <= 0

    def count_launches(self, new_rows: Array) -> list[Launch]:
        """Returns the launches that count new rows (n,) uint32 of a lookup, after `reserve`.

        They are distinct; NO_ROW is skipped. `count_lookup` must follow.
        """
        if not self.is_counting or not self._store.num_far_rows:
            return []
        n = int(new_rows.size)
        return [self._backend.prepared("rows_count_access", n, self._counts, new_rows, n)]

    def count_lookup(self, num_rows: int) -> None:
        """Counts a lookup that has found or inserted `num_rows` distinct rows."""
        record = self.record
        if record.rest > 0:
            record.rest -= num_rows
        elif self._store.num_far_rows:
            record.lookups += 1
            record.looked_up += num_rows

    # ---------------------------------------------------------------- rebalancing

    def seen_lately(self) -> tuple[int, int] | None:
        """Returns the sum of the counts of near rows, and of all rows; None: all are near."""
        num_near = self._store.near_rows
        if num_near is None or not self._store.num_far_rows:
            return None
        num_rows = min(self._store.num_rows, int(self._counts.size))
        near = total = 0
        for first in range(0, num_rows, _SCAN):
            counts = self._counts[first : min(first + _SCAN, num_rows)]
            counts = counts * (counts != np.uint8(_NOT_HELD))
            total += int(counts.sum(dtype=np.int64))
            near += int(counts[: max(0, num_near - first)].sum(dtype=np.int64))
        return near, total

    @property
    def is_due(self) -> bool:
        """Whether enough rows were looked up since the last pass for another one."""
        return (
            self.record.lookups >= _MIN_LOOKUPS
            and self.record.looked_up >= _LOOKED_UP_PER_ROW * self._store.num_rows
        )

    def rebalance(self) -> Moved | None:
        """Moves hot rows near and cold ones far, and halves all counts.

        No kernel may use near rows meanwhile. Call it under `uninterrupted`, until the index knows
        the new rows.

        Returns:
          The keys that have moved; None: none has.

        Raises:
          MemoryError: nothing has moved.
        """
        moved = self._promote() if self._store.near_rows else None
        self.num_passes += 1
        num_rows = min(self._store.num_rows, self._counts.size)
        looked_up = self.record.looked_up
        moved_little = moved is None or moved.rows.size < 2 * _LITTLE * looked_up
        self._calm_passes = min(self._calm_passes + 1, _MOST_REST) if moved_little else 0
        self._backend.launch("rows_halve_accesses", num_rows, self._counts, num_rows)
        self.record.lookups = self.record.looked_up = 0
        self.record.rest = self._calm_passes * looked_up
        return moved

    def _promote(self) -> Moved | None:
        store, xp = self._store, self._backend.xp
        num_near = store.near_rows
        assert num_near is not None
        # A row that is not held wraps round to 255 in uint8: it is the last to be moved.
        coldness = np.uint8(_NOT_HELD - 1) - self._counts[num_near : store.num_rows]
        hot = xp.flatnonzero(coldness <= np.uint8(_NOT_HELD - 1 - _LEAST_COUNT))
        count = min(int(hot.size), num_near)
        if count == 0:
            return None
        far = (hot[lowest(xp, coldness[hot], count)] + num_near).astype(np.uint32)
        free = store.free_near(count)
        num_free = int(free.size)
        near = lowest(xp, self._counts[:num_near], count - num_free).astype(np.uint32)
        # Free near rows need no comparison: no other row loses its place.
        pays = self._exceeds(xp.take(self._counts, far[num_free:]), xp.take(self._counts, near))
        near = xp.concatenate([free, near[pays]])
        far, freed = xp.concatenate([far[:num_free], far[num_free:][pays]]), far[:num_free]
        n = int(far.size)
        if n == 0:
            return None
        moved = Moved(
            xp.concatenate([xp.take(self._keys, far), xp.take(self._keys, near[num_free:])]),
            xp.concatenate([near, far[num_free:]]),
        )
        store.exchange_free(free, freed)  # the last that needs memory
        store.swap(near, far)
        self._backend.launch("rows_swap_accesses", n, self._counts, self._keys, near, far, n)
        self.num_moved += int(moved.rows.size)
        return moved

    @staticmethod
    def _exceeds(far_accesses: Array, near_accesses: Array) -> Array:
        """Returns where far rows are hotter than near ones by the margin; never for free rows."""
        far_accesses, near_accesses = far_accesses.astype(np.int32), near_accesses.astype(np.int32)
        more = far_accesses - near_accesses
        return (more > 0) & (more * more > _MARGIN**2 * (far_accesses + near_accesses + 1))


def lowest(xp: Any, values: Array, count: int) -> Array:
    """Returns the positions of the `count` lowest of `values` (n,) uint8, (min(count, n),) int64.

    They are sorted by value, ties by position. It sorts no more than what it returns.
    """
    count = min(count, int(values.size))
    if count == 0:
        return xp.empty(0, np.int64)
    low, high = 0, 255  # bounds of the `count`-th lowest value
    while low < high:
        middle = (low + high) // 2
        if int(xp.count_nonzero(values <= np.uint8(middle))) >= count:
            high = middle
        else:
            low = middle + 1
    parts = [xp.flatnonzero(values < np.uint8(low))]
    count -= int(parts[0].size)
    for first in range(0, int(values.size), _SCAN):
        if count == 0:
            break
        equal = xp.flatnonzero(values[first : first + _SCAN] == np.uint8(low))[:count] + first
        parts.append(equal)
        count -= int(equal.size)
    at = xp.concatenate(parts)
    return at[xp.argsort(values[at], kind="stable")]

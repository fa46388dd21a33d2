"""The row allocator of a store: a high-water mark, and a free list for each tier."""

from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import Launch

# Free rows keep their memory up to this part of the rows that are in use.
_KEPT = 8
# A search for empty blocks pays once this part of the free rows, and this part of a block, were
# freed since the last one.
_LOOK = 8
_LEAST_OF_BLOCK = 16
_SCAN = 1 << 22  # rows that are counted at a time


class RowAllocator(NamedTuple):
    """An immutable row allocator: a change makes a new one.

    Attributes:
      num_rows: rows handed out so far, free ones included: every row number is below it.
      free_near, free_far: (m,) uint32, free rows that have memory, by tier.
      first_far: rows below this number are near.
      returned: ranges of free rows whose memory was returned to the system; not in the lists.
      num_freed: rows freed since the last search for empty blocks.
    """

    num_rows: int
    free_near: Array
    free_far: Array
    first_far: int
    returned: tuple[range, ...] = ()
    num_freed: int = 0

    @staticmethod
    def none(xp: Any, first_far: int) -> "RowAllocator":
        """Returns the allocator of an empty store."""
        empty = xp.empty(0, np.uint32)
        return RowAllocator(0, empty, empty, first_far)

    @property
    def num_free(self) -> int:
        """Free rows, with and without memory."""
        return self.num_listed + self.num_returned

    @property
    def num_listed(self) -> int:
        """Free rows that have memory."""
        return int(self.free_near.size + self.free_far.size)

    @property
    def num_returned(self) -> int:
        """Free rows whose memory was returned to the system."""
        return sum(self.returned_by_tier)

    @property
    def returned_by_tier(self) -> tuple[int, int]:
        """Near and far free rows whose memory was returned."""
        near, far = self._by_tier(self.returned)
        return sum(map(len, near)), sum(map(len, far))

    @property
    def num_far(self) -> int:
        """Far rows handed out so far, free ones included."""
        return max(0, self.num_rows - self.first_far)

    def _by_tier(self, blocks: tuple[range, ...] | list[range]) -> tuple[list[range], list[range]]:
        near = [rows for rows in blocks if rows.start < self.first_far]
        return near, [rows for rows in blocks if rows.start >= self.first_far]

    # ---------------------------------------------------------------- claim and free

    def claim(self, xp: Any, count: int) -> "Claim":
        """Chooses `count` rows: near ones as long as there are any, freed ones before new ones."""
        near = min(count, int(self.free_near.size))
        new_near = min(count - near, max(0, self.first_far - self.num_rows))
        far = min(count - near - new_near, int(self.free_far.size))
        return Claim(xp.empty(count, np.uint32), self, near, count - near - far)

    def after_free(self, xp: Any, rows: Array) -> "RowAllocator":
        """Returns the allocator after rows (n,) uint32, distinct, none NO_ROW, become free."""
        num_freed = self.num_freed + int(rows.size)
        if not self.num_far:
            free_near = xp.concatenate([self.free_near, rows])
            return self._replace(free_near=free_near, num_freed=num_freed)
        is_far = rows >= np.uint32(self.first_far)
        return self._replace(
            free_near=xp.concatenate([self.free_near, rows[~is_far]]),
            free_far=xp.concatenate([self.free_far, rows[is_far]]),
            num_freed=num_freed,
        )

    # ---------------------------------------------------------------- memory of free rows

    @property
    def _num_idle(self) -> int:
        """Free rows with memory, without those that keep it for the next keys."""
        return self.num_listed - (self.num_rows - self.num_free) // _KEPT

    def is_worth_a_search(self, block_shift: int) -> bool:
        """Returns whether `empty_blocks` may find enough to pay for its time."""
        least = max((1 << block_shift) // _LEAST_OF_BLOCK, self.num_listed // _LOOK)
        return self.num_freed >= least and self._num_idle > 0

    def empty_blocks(self, block_shift: int, with_far: bool) -> list[range]:
        """Returns ranges of free rows whose memory can be returned; the lists are on the host.

        Args:
          block_shift: a range has 2**block_shift rows, or those of them that are of one tier and
            handed out.
          with_far: whether to search among far rows too.
        """
        idle, blocks = self._num_idle, []
        tiers = [(self.free_near, 0, min(self.first_far, self.num_rows))]
        if with_far and self.num_far:
            tiers.append((self.free_far, self.first_far, self.num_rows))
        for free, low, high in tiers:
            firsts = np.arange(0, high, 1 << block_shift)
            counts = np.zeros(firsts.size, np.int64)
            for first in range(0, int(free.size), _SCAN):
                numbers = free[first : first + _SCAN] >> block_shift
                counts += np.bincount(numbers, minlength=firsts.size)
            starts = np.maximum(firsts, low)
            stops = np.minimum(firsts + (1 << block_shift), high)
            for block in np.flatnonzero((counts > 0) & (counts == stops - starts)):
                if counts[block] <= idle:
                    idle -= int(counts[block])
                    blocks.append(range(int(starts[block]), int(stops[block])))
        return blocks

    def after_return(self, blocks: list[range], block_shift: int) -> "RowAllocator":
        """Returns the allocator after free rows lose their memory; the lists are on the host.

        Args:
          blocks: the result of `empty_blocks(block_shift, ...)`.
        """
        if not blocks:
            return self._replace(num_freed=0)
        near, far = self._by_tier(blocks)

        def kept(free: Array, gone: list[range]) -> Array:
            is_gone = np.zeros((self.num_rows >> block_shift) + 1, np.bool_)
            is_gone[[rows.start >> block_shift for rows in gone]] = True
            # By `take`: NumPy's index by numbers that are not int64 crashes where memory runs out.
            return free[~is_gone.take(free >> block_shift)]

        return self._replace(
            free_near=kept(self.free_near, near),
            free_far=kept(self.free_far, far),
            returned=(*self.returned, *blocks),
            num_freed=0,
        )

    def blocks_to_regain(self, count: int) -> list[range]:
        """Returns the ranges of `returned` that need memory before `count` rows are claimed."""
        missing = count - int(self.free_near.size)
        if missing <= 0 or not self.returned:
            return []
        near, far = self._by_tier(self.returned)
        needed = []
        while near and missing > 0:
            needed.append(near.pop())
            missing -= len(needed[-1])
        missing -= max(0, self.first_far - self.num_rows) + int(self.free_far.size)
        while far and missing > 0:
            needed.append(far.pop())
            missing -= len(needed[-1])
        return needed

    def after_regain(self, xp: Any, blocks: list[range], listed: list[Array]) -> "RowAllocator":
        """Returns the allocator after some ranges of `returned` have memory again.

        Args:
          listed: the rows of each block, uint32.
        """
        pairs, regained = list(zip(blocks, listed, strict=True)), set(blocks)
        near = [rows for block, rows in pairs if block.start < self.first_far]
        far = [rows for block, rows in pairs if block.start >= self.first_far]
        return self._replace(
            # In front: the last ones are claimed first, and have their memory.
            free_near=xp.concatenate([*near, self.free_near]),
            free_far=xp.concatenate([*far, self.free_far]),
            returned=tuple(rows for rows in self.returned if rows not in regained),
        )


class Claim(NamedTuple):
    """Rows reserved for new keys. They stay free until the store takes `after()`.

    Attributes:
      rows: (count,) uint32, which `list_launch` writes: freed near rows, new rows, freed far rows.
      before: the allocator that they were chosen from.
      near: how many of them are freed near rows.
      fresh: how many of them are new rows.
    """

    rows: Array
    before: RowAllocator
    near: int
    fresh: int

    @property
    def fresh_rows(self) -> Array:
        """The rows of the claim that were never handed out before."""
        return self.rows[self.near : self.near + self.fresh]

    @property
    def words(self) -> tuple[Any, ...]:
        """The claim as kernels take it; see ClaimedRows in kernels/rows.cuh."""
        before = self.before
        near, far = before.free_near, before.free_far
        num_far = int(self.rows.size) - self.near - self.fresh
        return (
            *(near[near.size - self.near :], self.near, before.num_rows, self.fresh),
            *(far[far.size - num_far :], num_far),
        )

    def list_launch(self, backend: Backend, placed: Array | None = None) -> Launch:
        """Returns the launch that writes `rows`.

        Args:
          placed: (count,) int64, addresses of the slots of the keys that get the rows; None: there
            are no keys yet.
        """
        n = int(self.rows.size)
        return backend.prepared("slots_claim_rows", n, *self.words, placed, self.rows, n)

    def after(self, count: int | None = None) -> RowAllocator:
        """Returns the allocator after the first `count` rows are taken; None: all."""
        count = int(self.rows.size) if count is None else count
        near, far = min(count, self.near), max(0, count - self.near - self.fresh)
        before = self.before
        return before._replace(
            num_rows=before.num_rows + count - near - far,
            free_near=before.free_near[: before.free_near.size - near],
            free_far=before.free_far[: before.free_far.size - far],
        )

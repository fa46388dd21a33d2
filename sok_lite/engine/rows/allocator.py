"""Which rows of a store are handed out, and which of those nobody holds."""

from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action


class RowNumbers(NamedTuple):
    """Rows handed out and free ones. It is never changed, only replaced.

    Attributes:
      num_rows: rows handed out so far, free ones included: every row number is below it.
      free_near, free_far: (m,) uint32, rows that were freed, by tier.
      first_far: rows below this number are near.
    """

    num_rows: int
    free_near: Array
    free_far: Array
    first_far: int

    @staticmethod
    def none(xp: Any, first_far: int) -> "RowNumbers":
        """Returns what a store begins with."""
        empty = xp.empty(0, np.uint32)
        return RowNumbers(0, empty, empty, first_far)

    @property
    def num_free(self) -> int:
        """How many rows were handed out and are held by nobody."""
        return int(self.free_near.size + self.free_far.size)

    @property
    def num_far(self) -> int:
        """How many of the rows handed out are far."""
        return max(0, self.num_rows - self.first_far)

    def claim(self, xp: Any, count: int) -> "Claim":
        """Chooses `count` rows: near ones as long as there are any, freed ones before new ones."""
        near = min(count, int(self.free_near.size))
        new_near = min(count - near, max(0, self.first_far - self.num_rows))
        far = min(count - near - new_near, int(self.free_far.size))
        return Claim(xp.empty(count, np.uint32), self, near, count - near - far)

    def releasing(self, xp: Any, rows: Array) -> "RowNumbers":
        """Returns what is left when rows (n,) uint32 are given back, distinct and none absent."""
        if not self.num_far:
            return self._replace(free_near=xp.concatenate([self.free_near, rows]))
        is_far = rows >= np.uint32(self.first_far)
        return self._replace(
            free_near=xp.concatenate([self.free_near, rows[~is_far]]),
            free_far=xp.concatenate([self.free_far, rows[is_far]]),
        )

    def exchanging(self, xp: Any, num_near: int, far: Array) -> "RowNumbers":
        """Returns what is left when far rows (m,) are freed in place of the last near ones."""
        if num_near == 0:
            return self
        return self._replace(
            free_near=self.free_near[: self.free_near.size - num_near],
            free_far=xp.concatenate([self.free_far, far]),
        )


class Claim(NamedTuple):
    """Rows that are chosen, and are nobody's until `taking` says what is left.

    Attributes:
      rows: (count,) uint32, memory for them, which `listing` writes: freed near ones, new ones,
        freed far ones.
      before: what they were chosen from.
      near, fresh: how many of them are freed near ones and new ones.
    """

    rows: Array
    before: RowNumbers
    near: int
    fresh: int

    @property
    def fresh_rows(self) -> Array:
        """Those that were never handed out before."""
        return self.rows[self.near : self.near + self.fresh]

    def listing(self, backend: Backend) -> Action:
        """Prepares to write `rows`."""
        before, count = self.before, int(self.rows.size)
        return backend.prepared(
            *("rows_claim", count, before.free_near, int(before.free_near.size), self.near),
            *(before.num_rows, self.fresh, before.free_far, int(before.free_far.size)),
            *(count - self.near - self.fresh, self.rows),
        )

    def taking(self, count: int | None = None) -> RowNumbers:
        """Returns what is left when the first `count` of the rows are taken; None: all."""
        count = int(self.rows.size) if count is None else count
        near, far = min(count, self.near), max(0, count - self.near - self.fresh)
        before = self.before
        return RowNumbers(
            before.num_rows + count - near - far,
            before.free_near[: before.free_near.size - near],
            before.free_far[: before.free_far.size - far],
            before.first_far,
        )

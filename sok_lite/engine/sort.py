"""A stable radix sort of items by small labels, on a GPU; see kernels/sort.cu."""

from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend

_MOST_DIGIT_BITS = 9
# Each tile looks back at others for every digit: many tiles look back far, large ones leave few to
# run at a time.
_LEAST_TILE_ITEMS, _MOST_TILE_ITEMS, _TILES = 512, 4096, 128


class Tiles(NamedTuple):
    """The tiles of items."""

    items: int  # of a tile
    number: int

    @staticmethod
    def of(n: int) -> "Tiles":
        """Returns the tiles of n items, at least one."""
        items = min(max(1 << (n // _TILES).bit_length(), _LEAST_TILE_ITEMS), _MOST_TILE_ITEMS)
        return Tiles(items, -(-n // items))


class Sort:
    """A radix sort in two steps: `count`, then `sorted`.

    Args:
      n: number of items, at least one.
      num_labels: labels are in [0, num_labels), at most 2**31 of them.
      num_more: so many words at the front of `work` are zeros for the caller.

    Attributes:
      counting: arguments of a kernel that counts digits: passes, bits, and the counters.
      tiles: of the items.
      work: (num_more + what the sort needs,) uint32.
    """

    def __init__(self, backend: Backend, n: int, num_labels: int, num_more: int = 0) -> None:
        self._backend, self._n, self.tiles = backend, n, Tiles.of(n)
        label_bits = max(1, (num_labels - 1).bit_length())
        self._passes = -(-label_bits // _MOST_DIGIT_BITS)
        self._bits = -(-label_bits // self._passes)
        # Zeros: per pass the number of items with each digit, per pass the number of tiles taken,
        # and what each tile of a pass publishes for the others.
        self._taken = num_more + (self._passes << self._bits)
        self._published = self._taken + self._passes
        num_words = self._published + (self._passes * self.tiles.number << self._bits)
        self.work = backend.xp.zeros(num_words, np.uint32)
        self._counts = self.work[num_more:]
        self.counting = (self._passes, self._bits, self._counts)

    def count(self, labels: Array) -> None:
        """Counts the digits of labels, (n,) int32; other kernels may do so, see `counting`."""
        self._backend.launch("sort_count", self.tiles.number, labels, *self.counting, self._n)

    def sorted(self, labels: Array) -> tuple[Array, Array]:
        """Sorts items whose digits were counted: (items (n,), their labels (n,)), both int32.

        Items of a label are ascending. It does not wait for the device.
        """
        backend, n = self._backend, self._n
        labels_in: Array = labels
        items_in: Array | None = None
        to = [backend.xp.empty((2, n), np.int32) for _ in range(min(self._passes, 2))]
        for i in range(self._passes):
            labels_out, items_out = to[i % 2][0], to[i % 2][1]
            arguments = (
                *(labels_in, items_in, labels_out, items_out),
                self._counts[i << self._bits :],
                self.work[self._taken + i :],
                self.work[self._published + (i * self.tiles.number << self._bits) :],
                *(i * self._bits, self._bits, *self.tiles, n),
            )
            backend.launch("sort_pass", self.tiles.number, *arguments)
            labels_in, items_in = labels_out, items_out
        return items_in, labels_in


def sort_items(backend: Backend, labels: Array, num_labels: int) -> tuple[Array, Array]:
    """Sorts at least one item by labels (n,) int32 in [0, num_labels), as `Sort.sorted` does."""
    sort = Sort(backend, labels.size, num_labels)
    sort.count(labels)
    return sort.sorted(labels)

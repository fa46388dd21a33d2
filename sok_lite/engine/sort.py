"""A stable sort of items by small labels, on a GPU; see kernels/sort.cu."""

from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend

_MOST_BITS = 9  # of a digit
# A tile is a few hundred items at least: it looks back for every digit. More than so many tiles
# look back farther than they need, and larger ones than the largest leave less to run at a time.
_SMALLEST, _LARGEST, _TILES = 512, 4096, 128


class Tiles(NamedTuple):
    """The tiles of items.

    Attributes:
      items: of a tile.
      number: of tiles.
    """

    items: int
    number: int

    @staticmethod
    def of(n: int) -> "Tiles":
        """Returns the tiles of n items, at least one."""
        items = min(max(1 << (n // _TILES).bit_length(), _SMALLEST), _LARGEST)
        return Tiles(items, -(-n // items))


class Sort:
    """A sort that is under way.

    Args:
      n: how many items there are, at least one.
      num_labels: labels are in [0, num_labels), at most 2**31 of them.
      num_more: so many words more are set to 0 for the caller.

    Attributes:
      counting: what a launch that counts digits is told: passes, bits, and an array.
      tiles: of the items.
      work: (num_more + what the sort needs,) uint32.
    """

    def __init__(self, backend: Backend, n: int, num_labels: int, num_more: int = 0) -> None:
        self._backend, self._n, self.tiles = backend, n, Tiles.of(n)
        label_bits = max(1, (num_labels - 1).bit_length())
        self._passes = -(-label_bits // _MOST_BITS)
        self._bits = -(-label_bits // self._passes)
        # Of each pass how many items have each digit, and how many tiles were taken; then what each
        # tile tells the others. All of it begins as zeros.
        self._taken = num_more + (self._passes << self._bits)
        self._told = self._taken + self._passes
        num_words = self._told + (self._passes * self.tiles.number << self._bits)
        self.work = backend.xp.zeros(num_words, np.uint32)
        self._counts = self.work[num_more:]
        self.counting = (self._passes, self._bits, self._counts)

    def count(self, labels: Array) -> None:
        """Counts the digits of labels, (n,) int32. A launch that does it by the way is told
        `counting`."""
        self._backend.launch("sort_count", self.tiles.number, labels, *self.counting, self._n)

    def sorted(self, labels: Array) -> tuple[Array, Array]:
        """Sorts the items whose digits were counted. It waits for nothing.

        Args:
          labels: (n,) int32.

        Returns:
          (the items by their labels, those of a label ascending, (n,) int32; the label of each of
          these, (n,) int32).
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
                self.work[self._told + (i * self.tiles.number << self._bits) :],
                *(i * self._bits, self._bits, *self.tiles, n),
            )
            backend.launch("sort_pass", self.tiles.number, *arguments)
            labels_in, items_in = labels_out, items_out
        return items_in, labels_in


def sort_items(backend: Backend, labels: Array, num_labels: int) -> tuple[Array, Array]:
    """Sorts items by their labels, on a GPU. It waits for nothing.

    Args:
      labels: (n,) int32, each in [0, num_labels); at least one, and at most 2**30.

    Returns:
      (the items by their labels, those of a label ascending, (n,) int32; the label of each of
      these, (n,) int32).
    """
    sort = Sort(backend, labels.size, num_labels)
    sort.count(labels)
    return sort.sorted(labels)

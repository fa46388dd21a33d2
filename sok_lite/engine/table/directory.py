"""The segments of an index, and the directory by which a kernel finds that of a key.

kernels/slots.cuh says what they are. Nothing here is ever changed, only replaced: whoever makes
another directory publishes it with the launch that moves the keys.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.tunables import kernel_defines
from sok_lite.engine.hashing import hash_keys

# SOK_LINE of kernels/platform.cuh: slots that a search reads at a time.
LINE = kernel_defines().get("SOK_LINE", 4)
_TURN = np.uint64(0x9E3779B1)  # as in kernels/slots.cuh
_HALF = np.uint64(0xFFFFFFFF)


def scaled(bits: Array, count: Array) -> Array:
    """Returns the numbers (n,) int64 below `count`, uint64, that the low halves of bits name."""
    return (((bits & _HALF) * count) >> np.uint64(32)).astype(np.int64)


class Shape(NamedTuple):
    """A segment: it has the keys whose hashes share their first `depth` bits, in `slots` slots."""

    depth: int
    slots: int


class Sizes(NamedTuple):
    """Which numbers of slots an index can have, and how they are dealt to its segments.

    Segments grow in turn, by a unit each: at any time they have two sizes that are neighbours, and
    how large each of them is follows from the number of all slots.

    Attributes:
      granule: slots of a line or a bucket; all sizes are multiples of it.
      first: a segment has from `first` to 2 * `first` - 1 units; in place of one more it is split
        in two of `first` units.
      unit: slots.
    """

    granule: int
    first: int
    unit: int

    @staticmethod
    def of(backend: Backend | type[Backend], granule: int, first: int) -> "Sizes":
        """Returns the sizes for segments of a backend; granule and first are powers of two."""
        return Sizes(granule, first, max(backend.segment_slots // first, granule))

    def rounded(self, num_slots: int) -> int:
        """Returns the least number of slots from `num_slots` on that an index can have.

        Of one segment they grow by 1 / (2 * first) to 1 / first at least, so not slot by slot.
        """
        step = self.granule
        while 2 * step <= min(self.unit, num_slots // self.first):
            step *= 2
        return -(-num_slots // step) * step

    def shapes(self, num_slots: int) -> list[Shape]:
        """Returns the segments of an index of `num_slots` slots, in the order of the hashes."""
        num_units = num_slots // self.unit
        if num_units < self.first:
            return [Shape(0, num_slots)]
        depth = (num_units // self.first).bit_length() - 1
        units, num_grown = num_units >> depth, num_units & ((1 << depth) - 1)
        grown = [Shape(depth, (units + 1) * self.unit)]
        if units + 1 == 2 * self.first:
            grown = 2 * [Shape(depth + 1, self.first * self.unit)]
        return [*num_grown * grown, *((1 << depth) - num_grown) * [Shape(depth, units * self.unit)]]


def paired(before: Sequence[Shape], after: Sequence[Shape]) -> Iterator[tuple[int, list[Shape]]]:
    """Yields the smallest groups of segments that take each other's place, in order: how many there
    are before, and those to come, which have the same keys."""
    left, coming = list(reversed(before)), list(reversed(after))
    while left:
        count, shapes, ahead = 0, list[Shape](), 0
        while count == 0 or ahead:
            # Whose part of the hashes is behind goes on.
            if ahead <= 0:
                ahead += _width(left.pop())
                count += 1
            else:
                shapes.append(coming.pop())
                ahead -= _width(shapes[-1])
        yield count, shapes


def _width(shape: Shape) -> int:
    """The part of all hashes that a segment has, in 2 ** -32."""
    return 1 << (32 - shape.depth)


class Segment(NamedTuple):
    """A segment on a backend.

    Attributes:
      shape: what it has.
      slots: (shape.slots, 2) int64, see kernels/slots.cuh.
      scores: (shape.slots,) uint64, behind the slots; None: there are none.
      overflows: (shape.slots // LINE,) uint8, backwards before the slots, see kernels/hkv/hkv.cuh;
        None: of an "hbm" index.
      digests: (shape.slots,) uint8, before these; None: of an "hbm" index.
      address: of the slots.
    """

    shape: Shape
    slots: Array
    scores: Array | None
    overflows: Array | None
    digests: Array | None
    address: int

    @staticmethod
    def new(
        backend: Backend, shape: Shape, empty_key: int, is_scored: bool, has_buckets: bool
    ) -> "Segment":
        """Returns a segment without keys.

        Raises:
          MemoryError: there is not that much.
        """
        n = shape.slots
        memory = backend.zeros_chunk(segment_bytes(n, is_scored, has_buckets))
        begin = _bytes_before(n) if has_buckets else 0
        end = begin + 16 * n
        slots = memory[begin:end].view(np.int64).reshape(-1, 2)
        slots[:, 0] = empty_key
        scores = memory[end:].view(np.uint64) if is_scored else None
        overflows = digests = None
        if has_buckets:
            of_lines = begin - _on_cache_lines(n // LINE)
            overflows = memory[of_lines:begin][::-1][: n // LINE]
            digests = memory[of_lines - n : of_lines]
        return Segment(shape, slots, scores, overflows, digests, backend.address(memory) + begin)

    @property
    def num_bytes(self) -> int:
        """Memory of all of it."""
        has_buckets = self.digests is not None
        return segment_bytes(self.shape.slots, self.scores is not None, has_buckets)


def segment_bytes(num_slots: int, is_scored: bool, has_buckets: bool) -> int:
    """Returns the memory of a segment; see `Segment`."""
    of_slots = num_slots * (24 if is_scored else 16)
    return of_slots + (_bytes_before(num_slots) if has_buckets else 0)


def _bytes_before(num_slots: int) -> int:
    """Returns the memory of the digests and of the bytes of all lines."""
    return _on_cache_lines(num_slots) + _on_cache_lines(num_slots // LINE)


def _on_cache_lines(count: int) -> int:
    return -(-count // 64) * 64


class Directory:
    """All segments of an index.

    Attributes:
      segments: in the order of the hashes.
      starts: (len(segments) + 1,) int64, the numbers of the first slots, and of all.
      num_slots: of all segments.
      densest: the number of slots there would be if all segments had as few as the one with the
        fewest for its part of the hashes: those that decide whether keys find room.
      num_bytes: memory of the segments.
      seed: of the hash of its keys.
      table: (2 ** depth, 2) uint64, as kernels take it.
      hashing: the seed and 31 - depth, as kernels take them.
    """

    def __init__(
        self, backend: Backend, segments: Sequence[Segment], granule: int, seed: int
    ) -> None:
        self.segments = tuple(segments)
        self.seed = seed
        self._backend = backend
        self._granule = granule
        shapes = self.shapes
        depth = max((shape.depth for shape in shapes), default=0)
        self._shift = 31 - depth
        self.hashing = seed | self._shift
        self.starts = np.cumsum([0, *(shape.slots for shape in shapes)])
        self.num_slots = int(self.starts[-1])
        self.densest = min((shape.slots << shape.depth for shape in shapes), default=0)
        self.num_bytes = sum(segment.num_bytes for segment in segments)
        sizes = [(segment.address, segment.shape.slots // granule) for segment in segments]
        self._repeats = [1 << (depth - shape.depth) for shape in shapes]
        self.table = backend.from_host(
            np.repeat(np.array(sizes, np.uint64).reshape(-1, 2), self._repeats, axis=0)
        )

    @property
    def shapes(self) -> list[Shape]:
        """Those of the segments."""
        return [segment.shape for segment in self.segments]

    def homes(self, keys: Array) -> tuple[Array, Array, Array]:
        """Returns hash (n,) uint64, first slot (n,) int64 and size (n,) uint64 of keys' segments.

        A size counts lines or buckets. The same rule as in kernels/slots.cuh.
        """
        xp, host = self._backend.xp, self._backend.from_host
        hashes = hash_keys(keys, self.seed)
        turned = ((hashes >> np.uint64(32)) * _TURN) & _HALF
        at = (turned >> np.uint64(1 + self._shift)).astype(np.int64)
        starts = host(np.repeat(self.starts[:-1], self._repeats))
        sizes = np.array([shape.slots // self._granule for shape in self.shapes], np.uint64)
        return hashes, xp.take(starts, at), xp.take(host(np.repeat(sizes, self._repeats)), at)

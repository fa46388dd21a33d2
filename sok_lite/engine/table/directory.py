"""The segments of an index, and their directory: extendible hashing.

kernels/slots.cuh has the layout. Directories are never changed, only replaced: the launch that
moves keys commits a new one.
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


def fast_range(bits: Array, count: Array) -> Array:
    """Maps the low halves of bits (n,) uint64 to numbers (n,) int64 below `count`, uint64, as
    `sok_scaled` of kernels/slots.cuh does."""
    return (((bits & _HALF) * count) >> np.uint64(32)).astype(np.int64)


class SegmentShape(NamedTuple):
    """A segment of `slots` slots, for the keys whose hashes share their first `depth` bits."""

    depth: int
    slots: int


class SizePolicy(NamedTuple):
    """The numbers of slots that an index can have, and how they are divided into segments.

    Segments grow in turn by one unit each, so that at any time they have two neighboring sizes,
    which follow from the number of all slots.

    Attributes:
      granule: slots of a line or bucket; all sizes are multiples of it.
      min_units: a segment has from `min_units` to 2 * `min_units` - 1 units; instead of growing
        further it is split into two of `min_units`.
      unit: slots.
    """

    granule: int
    min_units: int
    unit: int

    @staticmethod
    def of(backend: Backend | type[Backend], granule: int, min_units: int) -> "SizePolicy":
        """Returns the policy of a backend; granule and min_units are powers of two."""
        return SizePolicy(granule, min_units, max(backend.segment_slots // min_units, granule))

    def round_up(self, num_slots: int) -> int:
        """Returns the smallest possible number of slots that is at least `num_slots`.

        Below one unit steps grow with the size, as slots would else be added one by one.
        """
        step = self.granule
        while 2 * step <= min(self.unit, num_slots // self.min_units):
            step *= 2
        return -(-num_slots // step) * step

    def shapes(self, num_slots: int) -> list[SegmentShape]:
        """Returns the segments of an index of `num_slots` slots, in hash order."""
        num_units = num_slots // self.unit
        if num_units < self.min_units:
            return [SegmentShape(0, num_slots)]
        depth = (num_units // self.min_units).bit_length() - 1
        units, num_grown = num_units >> depth, num_units & ((1 << depth) - 1)
        grown = [SegmentShape(depth, (units + 1) * self.unit)]
        if units + 1 == 2 * self.min_units:
            grown = 2 * [SegmentShape(depth + 1, self.min_units * self.unit)]
        small = [SegmentShape(depth, units * self.unit)]
        return [*num_grown * grown, *((1 << depth) - num_grown) * small]


def matching_groups(
    before: Sequence[SegmentShape], after: Sequence[SegmentShape]
) -> Iterator[tuple[int, list[SegmentShape]]]:
    """Yields the smallest groups of segments that cover the same hashes before and after a resize,
    in order: the number of segments before, and the segments after."""
    left, coming = list(reversed(before)), list(reversed(after))
    while left:
        # By how many of 2 ** 32 hashes the group's old segments are ahead of its new ones.
        count, shapes, ahead = 0, list[SegmentShape](), 0
        while count == 0 or ahead:
            if ahead <= 0:
                ahead += 1 << (32 - left.pop().depth)
                count += 1
            else:
                shapes.append(coming.pop())
                ahead -= 1 << (32 - shapes[-1].depth)
        yield count, shapes


class Segment(NamedTuple):
    """A segment on a backend: views of one allocation, in the order digests, overflows (reversed),
    slots, scores.

    Attributes:
      slots: (shape.slots, 2) int64, see kernels/slots.cuh.
      scores: (shape.slots,) uint64; None: an index without scores.
      overflows: (shape.slots // LINE,) uint8, see kernels/hkv/hkv.cuh; None: an "hbm" index.
      digests: (shape.slots,) uint8; None: an "hbm" index.
      address: of the slots.
    """

    shape: SegmentShape
    slots: Array
    scores: Array | None
    overflows: Array | None
    digests: Array | None
    address: int

    @staticmethod
    def new(
        backend: Backend, shape: SegmentShape, empty_key: int, is_scored: bool, has_buckets: bool
    ) -> "Segment":
        """Returns an empty segment, or raises MemoryError."""
        n = shape.slots
        memory = backend.zeros_chunk(segment_bytes(n, is_scored, has_buckets))
        begin = _bytes_before(n) if has_buckets else 0
        end = begin + 16 * n
        slots = memory[begin:end].view(np.int64).reshape(-1, 2)
        slots[:, 0] = empty_key
        scores = memory[end:].view(np.uint64) if is_scored else None
        overflows = digests = None
        if has_buckets:
            middle = begin - _whole_cache_lines(n // LINE)
            overflows = memory[middle:begin][::-1][: n // LINE]
            digests = memory[middle - n : middle]
        return Segment(shape, slots, scores, overflows, digests, backend.address(memory) + begin)

    @property
    def num_bytes(self) -> int:
        """Memory of the segment."""
        return segment_bytes(self.shape.slots, self.scores is not None, self.digests is not None)


def segment_bytes(num_slots: int, is_scored: bool, has_buckets: bool) -> int:
    """Returns the memory of a segment, in bytes."""
    slot_bytes = num_slots * (24 if is_scored else 16)
    return slot_bytes + (_bytes_before(num_slots) if has_buckets else 0)


def _bytes_before(num_slots: int) -> int:
    """Returns the memory of digests and overflows."""
    return _whole_cache_lines(num_slots) + _whole_cache_lines(num_slots // LINE)


def _whole_cache_lines(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


class Directory:
    """All segments of an index, found by the first bits of a hash.

    Attributes:
      segments: in hash order.
      starts: (len(segments) + 1,) int64, the number of the first slot of each, and of all slots.
      effective_slots: slots if all segments were as small as the smallest, relative to their share
        of the hashes: the measure for the load factor.
      num_bytes: memory of the segments.
      seed: of the hash of keys.
      table, hashing: (2 ** depth, 2) uint64, and seed | 31 - depth; see kernels/slots.cuh.
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
        self.effective_slots = min((shape.slots << shape.depth for shape in shapes), default=0)
        self.num_bytes = sum(segment.num_bytes for segment in segments)
        sizes = [(segment.address, segment.shape.slots // granule) for segment in segments]
        self._repeats = [1 << (depth - shape.depth) for shape in shapes]
        self.table = backend.from_host(
            np.repeat(np.array(sizes, np.uint64).reshape(-1, 2), self._repeats, axis=0)
        )

    @property
    def shapes(self) -> list[SegmentShape]:
        """Shapes of the segments."""
        return [segment.shape for segment in self.segments]

    def homes(self, keys: Array) -> tuple[Array, Array, Array]:
        """Returns the hashes of keys, (n,) uint64, and the first slots, (n,) int64, and numbers of
        lines or buckets, (n,) uint64, of their segments; as kernels/slots.cuh."""
        xp, host = self._backend.xp, self._backend.from_host
        hashes = hash_keys(keys, self.seed)
        turned = ((hashes >> np.uint64(32)) * _TURN) & _HALF
        at = (turned >> np.uint64(1 + self._shift)).astype(np.int64)
        starts = host(np.repeat(self.starts[:-1], self._repeats))
        sizes = np.array([shape.slots // self._granule for shape in self.shapes], np.uint64)
        return hashes, xp.take(starts, at), xp.take(host(np.repeat(sizes, self._repeats)), at)

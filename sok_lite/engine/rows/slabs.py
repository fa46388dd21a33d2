"""How much memory a store allocates at a time.

Most stores stay small: the first slab of a tier is small, and the next ones grow with it. A slab
costs a system call or a call of the GPU's driver, and Linux allows 65,530 mappings: so memory comes
in few slabs, each of many chunks.
"""

from typing import NamedTuple

from sok_lite.backend import Backend

# Rows are near in whole chunks: at most one chunk fewer than requested, 1/32.
_MIN_NEAR_CHUNKS = 32
# A slab is at least this part of its tier, which is then the most that is allocated and not in use.
NEAR_GROWTH = 32
FAR_GROWTH = 8
# The first far slab; the tier then doubles until a slab has `far_chunk_bytes`. Pinned memory and
# disk space cost their whole size, used or not.
_FIRST_FAR_BYTES = 1 << 16


class Chunks(NamedTuple):
    """Numbers of chunks by tier. Chunks of a tier that are allocated together are one slab."""

    near: int
    far: int

    @property
    def total(self) -> int:
        return self.near + self.far


class TierBytes(NamedTuple):
    """Memory of a store by tier, without memory that was returned to the system.

    Attributes:
      near_used, far_used: of rows and states that were handed out so far, free ones included.
      near, far: allocated.
    """

    near_used: int
    far_used: int
    near: int
    far: int


class Slabs(NamedTuple):
    """Sizes of chunks and slabs of a store.

    Attributes:
      chunk_shift: a chunk holds 2**chunk_shift rows.
      near_rows: rows below this number are near, in whole chunks; None: all are.
      block_shift: the memory of 2**block_shift rows is returned to the system at once.
      near: chunks of the smallest near slab.
      first_far: chunks of the first far slab.
      far: chunks of the largest far slab, while 1/8 of the tier is less.
    """

    chunk_shift: int
    near_rows: int | None
    block_shift: int
    near: int
    first_far: int
    far: int

    @staticmethod
    def of(backend: Backend, dim: int, near_rows: int | None) -> "Slabs":
        """Returns the sizes for a store; `near_rows` as requested, not yet whole chunks."""

        def shift(num_bytes: int) -> int:
            return max(1, num_bytes // (4 * dim)).bit_length() - 1

        block_shift = shift(backend.chunk_bytes)
        first_far_shift = shift(min(backend.far_chunk_bytes, _FIRST_FAR_BYTES))
        if near_rows is None:
            chunk_shift = block_shift
        elif near_rows == 0:
            chunk_shift = min(block_shift, first_far_shift)
        else:
            few = max(1, near_rows // _MIN_NEAR_CHUNKS).bit_length() - 1
            chunk_shift = min(block_shift, few)
            near_rows = near_rows >> chunk_shift << chunk_shift
        first_far_shift = max(first_far_shift, chunk_shift)
        far_shift = max(shift(backend.far_chunk_bytes), chunk_shift)
        return Slabs(
            chunk_shift,
            near_rows,
            block_shift,
            1 << (block_shift - chunk_shift),
            1 << (first_far_shift - chunk_shift),
            1 << (far_shift - chunk_shift),
        )

    def more(self, before: Chunks, least: int, max_near: int, spare: bool) -> Chunks:
        """Returns the numbers of chunks to add to a store.

        Args:
          before: the chunks that it has.
          least: chunks needed, of both tiers together.
          max_near: how many of them can be near.
          spare: whether to add more than needed, as a slab that grows with the tier.
        """
        near, far = min(least, max_near), max(0, least - max_near)
        if spare and near:
            near = min(max_near, max(near, self.near, before.near // NEAR_GROWTH))
        if spare and far:
            doubling = max(self.first_far, min(before.far, self.far))
            far = max(far, doubling, before.far // FAR_GROWTH)
        return Chunks(near, far)

"""What an index is made of, and how that grows and shrinks: one segment after another."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, publish, setting
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.rows.store import ABSENT
from sok_lite.engine.table.directory import (
    Directory,
    Segment,
    Shape,
    Sizes,
    paired,
    segment_bytes,
)


class Segmented(ABC):
    """Segments of slots on a backend, and the two slots of the reserved keys.

    Attributes:
      backend: where they are.
      key_dtype: key type of the table; it names the two reserved keys.
      name: of the table, for errors.
      size: keys held.
      num_rehashes: how many segments were written anew.
    """

    def __init__(
        self,
        backend: Backend,
        key_dtype: KeyDtype,
        name: str,
        sizes: Sizes,
        num_slots: int,
        is_scored: bool = False,
    ) -> None:
        self.backend = backend
        self.key_dtype = key_dtype
        self.name = name
        self._sizes = sizes
        self._is_scored = is_scored
        self.size = self.num_rehashes = 0
        # It shrinks no further than what was asked for at first, or by `reserve`.
        self._init_slots = self._least_slots = num_slots
        self._side = self._new_side()
        self._directory = Directory(backend, [], sizes.granule)
        self._directory = self._new_directory(num_slots)

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Number of slots as users count them, the two reserved ones not counted."""

    @property
    def num_bytes(self) -> int:
        """Memory of the index."""
        return self._directory.num_bytes + int(self._side.nbytes)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Those that it is made of, in the order of the hashes of their keys."""
        return self._directory.segments

    def _reserved(self) -> tuple[int, int]:
        """The two reserved keys, for kernels."""
        return self.key_dtype.empty_key, self.key_dtype.reclaim_key

    # ---------------------------------------------------------------- changes

    @abstractmethod
    def _moving(self, segments: Sequence[Segment], directory: Directory) -> Action:
        """Prepares to move the keys of segments to those that a directory has in their place."""

    def _resize(self, num_slots: int, *, grows: bool = True) -> None:
        """Gives the segments that are too small, or too large, the sizes that they are to have.

        One group after the other: never more than one segment is there twice.

        Raises:
          MemoryError: no memory; all keys are as they were.
        """
        left, done = deque(self._directory.segments), list[Segment]()
        for count, shapes in list(paired(self._directory.shapes, self._sizes.shapes(num_slots))):
            some = [left.popleft() for _ in range(count)]
            before = sum(segment.shape.slots for segment in some)
            after = sum(shape.slots for shape in shapes)
            if after > before if grows else after < before:
                some = self._replace(done, some, shapes, left, num_slots)
            done += some

    def _replace(
        self,
        before: Sequence[Segment],
        segments: Sequence[Segment],
        shapes: Sequence[Shape],
        after: Sequence[Segment],
        num_slots: int,
    ) -> list[Segment]:
        """Writes segments anew and returns the new ones.

        Args:
          before, after: the others.
          shapes: of the new ones.
          num_slots: of the index when all are as they are to be, for errors.
        """
        made = self._new_segments(shapes, num_slots)
        granule = self._sizes.granule
        directory = Directory(self.backend, [*before, *made, *after], granule)
        num_rehashes = self.num_rehashes + len(segments)
        changed = setting(self, _directory=directory, num_rehashes=num_rehashes)
        publish([self._moving(segments, directory), *changed])
        return made

    def _new_directory(self, num_slots: int) -> Directory:
        """Returns one without keys."""
        segments = self._new_segments(self._sizes.shapes(num_slots), num_slots)
        return Directory(self.backend, segments, self._sizes.granule)

    def _new_segments(self, shapes: Sequence[Shape], num_slots: int) -> list[Segment]:
        empty_key, is_scored = self.key_dtype.empty_key, self._is_scored
        try:
            return [Segment.new(self.backend, shape, empty_key, is_scored) for shape in shapes]
        except MemoryError as error:
            num_bytes = segment_bytes(sum(shape.slots for shape in shapes), is_scored)
            raise MemoryError(
                f"No memory for the index of table {self.name!r} to grow from {self.capacity:,} "
                f"to {num_slots:,} slots ({num_bytes:,} bytes). It is as it was, with "
                f"{self.size:,} keys."
            ) from error

    def _new_side(self) -> Array:
        """Returns the slots of the reserved keys, and their scores, which hold nothing."""
        side = self.backend.xp.zeros(6 if self._is_scored else 4, np.int64)
        side[1:4:2] = ABSENT  # and stamp 0
        return side

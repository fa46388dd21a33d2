"""The segments of an index, and how it grows and shrinks: one segment after another."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.hashing import new_seed, seed_after
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.directory import Directory, Segment, Shape, Sizes, paired, segment_bytes
from sok_lite.engine.table.record import IndexRecord


class Segmented(ABC):
    """Segments of slots on a backend, and the two slots of the reserved keys.

    Attributes:
      backend: where they are.
      key_dtype: key type of the table; it names the two reserved keys.
      name: of the table, for errors.
      has_scores: whether scores are kept beside `last_seen`.
      bucket: slots of a bucket; 0: it has none. With buckets there are bytes for lines and
        slots; see kernels/hkv/hkv.cuh.
      directory: the segments, in the order of the hashes of their keys, as kernels find them.
      sizes: which sizes segments may have.
      side: (4 or 6,) int64, the slots of the reserved keys, and their scores.
      init_slots, least_slots: slots that were asked for at first; those that it keeps at least,
        since `reserve` asked for more, say.
      size: keys in it.
      num_rehashes: how many segments were written anew.
      record: where it is, as native code sees it: the addresses of `directory` and `side`.
    """

    bucket = 0

    def __init__(
        self,
        backend: Backend,
        key_dtype: KeyDtype,
        name: str,
        sizes: Sizes,
        num_slots: int,
        is_scored: bool = False,
        seed: int | None = None,
    ) -> None:
        self.backend = backend
        self.key_dtype = key_dtype
        self.name = name
        self.sizes = sizes
        self.has_scores = is_scored
        self.num_rehashes = 0
        self.init_slots = self.least_slots = num_slots
        self.record = IndexRecord(is_scored=int(is_scored), bucket=self.bucket)
        self.record.empty_key, self.record.reclaim_key = self.reserved_keys()
        seed = new_seed() if seed is None else seed
        self.side: Array
        self.directory = Directory(backend, [], sizes.granule, seed)
        self.set_place(self.new_directory(num_slots), self.new_side())

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Number of slots as users count them, the two reserved ones not counted."""

    # By code of C's: a step may have a thousand tables.
    size = property(attrgetter("record.size"))

    @property
    def seed(self) -> int:
        """Seed of the hash of its keys (engine/hashing.py)."""
        return self.directory.seed

    @property
    def num_bytes(self) -> int:
        """Memory of the index."""
        return self.directory.num_bytes + int(self.side.nbytes)

    def reserved_keys(self) -> tuple[int, int]:
        """The two reserved keys, for kernels."""
        return self.key_dtype.empty_key, self.key_dtype.reclaim_key

    # ---------------------------------------------------------------- changes

    def set_place(self, directory: Directory, side: Array | None = None) -> None:
        """Is elsewhere from now on.

        Args:
          directory: other segments.
          side: other slots of the reserved keys; None: they stay.
        """
        if side is not None:
            self.side = side
        self.directory = directory
        self.record.hashing = directory.hashing
        self.record.directory = self.backend.address(directory.table)
        self.record.side = self.backend.address(self.side)

    @abstractmethod
    def move(self, segments: Sequence[Segment], directory: Directory) -> bool:
        """Copies the keys of segments to those that a directory has in their place; `set_place`
        follows.

        Returns:
          Whether all have found slots there. If not, nothing has changed.
        """

    def resize(self, num_slots: int, *, grows: bool = True) -> None:
        """Gives the segments that are too small, or too large, the sizes that they are to have.

        One group after the other: never more than one segment is there twice. Where keys find no
        slot, a larger index takes a new seed, and a smaller one stays as it is.

        Raises:
          MemoryError: no memory; all keys are as they were.
          RuntimeError: keys find no slot whatever the seed of the hash: they are chosen against it.
        """
        left, done = deque(self.directory.segments), list[Segment]()
        for count, shapes in list(paired(self.directory.shapes, self.sizes.shapes(num_slots))):
            some = [left.popleft() for _ in range(count)]
            before = sum(segment.shape.slots for segment in some)
            after = sum(shape.slots for shape in shapes)
            if after > before if grows else after < before:
                made = self._replace(done, some, shapes, left, num_slots)
                if made is None:
                    if grows:
                        self.hash_anew(num_slots)
                    return
                some = made
            done += some

    def hash_anew(self, num_slots: int) -> None:
        """Gives every key another place, by another seed.

        Raises:
          MemoryError: no memory for all of the index beside what it is; it is as it was.
          RuntimeError: keys find no slot whatever the seed of the hash: they are chosen against it.
        """
        old, shapes = self.directory.segments, self.sizes.shapes(num_slots)
        if self._replace([], old, shapes, [], num_slots, seed_after(self.seed)) is None:
            raise self.error_of_chosen_keys()

    def error_of_chosen_keys(self) -> RuntimeError:
        """Returns the error for keys that find no slot, whatever the seed of the hash."""
        return RuntimeError(
            f"Keys of table {self.name!r} find no slot, though only {self.size:,} of "
            f"{self.capacity:,} are in use, and with another seed of the hash they find none "
            "either. Nothing was changed. Somebody knows the seeds and has chosen these keys: do "
            "not fix the seed of the hash where keys come from strangers (hash_seed of sok.init, "
            "SOK_LITE_HASH_SEED). Or keys repeat that were promised to be distinct."
        )

    def _replace(
        self,
        before: Sequence[Segment],
        segments: Sequence[Segment],
        shapes: Sequence[Shape],
        after: Sequence[Segment],
        num_slots: int,
        seed: int | None = None,
    ) -> list[Segment] | None:
        """Writes segments anew and returns the new ones; None: keys found no slot there, and
        nothing has changed.

        Args:
          before, after: the others.
          shapes: of the new ones.
          num_slots: of the index when all are as they are to be, for errors.
          seed: another one, where there are no other segments; None: it stays.
        """
        made = self._new_segments(shapes, num_slots)
        granule = self.sizes.granule
        seed = self.seed if seed is None else seed
        directory = Directory(self.backend, [*before, *made, *after], granule, seed)
        with uninterrupted():
            if not self.move(segments, directory):
                return None
            self.set_place(directory)
            self.num_rehashes += len(segments)
        return made

    def new_directory(self, num_slots: int) -> Directory:
        """Returns one without keys."""
        segments = self._new_segments(self.sizes.shapes(num_slots), num_slots)
        return Directory(self.backend, segments, self.sizes.granule, self.seed)

    def _new_segments(self, shapes: Sequence[Shape], num_slots: int) -> list[Segment]:
        empty_key, kind = self.key_dtype.empty_key, (self.has_scores, self.bucket > 0)
        try:
            return [Segment.new(self.backend, shape, empty_key, *kind) for shape in shapes]
        except MemoryError as error:
            num_bytes = segment_bytes(sum(shape.slots for shape in shapes), *kind)
            change = f"to grow from {self.capacity:,} to {num_slots:,} slots"
            if num_slots == self.capacity:
                change = f"to be written anew, with {num_slots:,} slots"
            raise MemoryError(
                f"No memory for the index of table {self.name!r} {change} ({num_bytes:,} bytes). "
                f"It is as it was, with {self.size:,} keys."
            ) from error

    def new_side(self) -> Array:
        """Returns the slots of the reserved keys, and their scores, which hold nothing."""
        side = self.backend.xp.zeros(6 if self.has_scores else 4, np.int64)
        side[1:4:2] = NO_ROW  # and last seen by lookup 0: by none
        return side

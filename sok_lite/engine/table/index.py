"""The base class of both hash indexes: slots {key, row number, last seen} in segments.

kernels/slots.cuh has the layout. Two keys mark free slots, the reserved keys; each has a slot of
its own beside the segments, so that every key is legal. Checkpoints name a slot by its number,
counted through the segments and then the two reserved slots; kernels take its address, which is
valid until the index grows. The index grows and shrinks segment by segment (directory.py).
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import LaunchArgs
from sok_lite.backend.launches import Launch
from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.hashing import new_seed, seed_after
from sok_lite.engine.rows.access import RowCopy
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.directory import (
    Directory,
    Segment,
    SegmentShape,
    SizePolicy,
    matching_groups,
    segment_bytes,
)
from sok_lite.engine.table.hkv_options import STRATEGIES
from sok_lite.engine.table.record import IndexRecord

# Slots that a scan of the whole index reads at a time: 16 MB.
CHUNK_SLOTS = 1 << 20
_CUSTOMIZED = STRATEGIES.index("kCustomized")


class Found(NamedTuple):
    """Row numbers (n,) uint32, NO_ROW for a missing key, and the number of missing keys."""

    rows: Array
    num_missing: int


class AccessCounts(NamedTuple):
    """Access counters of rows, (num_rows,) uint8 (engine/rows/tiers.py), and whether a lookup
    increments them."""

    counts: Array
    is_counting: bool


class Search(NamedTuple):
    """A search for keys, before or after its launch.

    Attributes:
      rows: (n,) uint32, written by the launch.
      counts: (2,) int64: missing keys, and distinct keys found (only where there are scores or
        access counts to update); None: not counted.
    """

    launch: Launch
    rows: Array
    counts: Array | None

    @property
    def found(self) -> Found:
        """The result, after the launch."""
        assert self.counts is not None
        return Found(self.rows, int(self.counts[0]))


class IndexEntries(NamedTuple):
    """The occupied slots of a range.

    Attributes:
      keys: (n,) int64.
      rows: (n,) uint32, row numbers; in an index of pending counts, the counts.
      last_seen: (n,) uint32, the number of the last lookup of the key; 0: none.
      slots: (n,) int64, slot numbers.
      scores: (n,) uint64; equal to `last_seen` in an index without scores.
    """

    keys: Array
    rows: Array
    last_seen: Array
    slots: Array
    scores: Array

    def column(self, name: str) -> Array:
        """Returns a field by its name in checkpoint files, where `last_seen` is "stamps"."""
        array: Array = getattr(self, "last_seen" if name == "stamps" else name)
        return array


class Index(ABC):
    """A hash index on a backend: segments of slots, and the two reserved slots.

    Attributes:
      name: of the table, for errors.
      sizes: the sizes that segments may have.
      has_scores: whether slots have scores beside `last_seen`.
      bucket: slots per bucket; 0: no buckets. Buckets have digests and overflow bytes beside the
        slots; see kernels/hkv/hkv.cuh.
      directory: the segments, as kernels find them.
      side: (4 or 6,) int64, the two reserved slots, and their scores.
      init_slots, least_slots: the initial number of slots, and the number below which it does not
        shrink, since `reserve` was called, say.
      size: number of keys.
      num_rehashes: how many segments were rewritten.
      record: the index as native code sees it, with the addresses of `directory` and `side`.
    """

    bucket = 0
    scores_age = False  # whether the low half of a score is a lookup number

    def __init__(
        self,
        backend: Backend,
        key_dtype: KeyDtype,
        name: str,
        sizes: SizePolicy,
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
        self.set_segments(*self._new_empty(num_slots))

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Number of slots as users count them, without the reserved ones."""

    # attrgetter runs in C: a step may have a thousand tables.
    size = property(attrgetter("record.size"))

    @property
    def seed(self) -> int:
        """Seed of the hash of keys (engine/hashing.py)."""
        return self.directory.seed

    @property
    def num_bytes(self) -> int:
        """Memory of the index, in bytes."""
        return self.directory.num_bytes + int(self.side.nbytes)

    def reserved_keys(self) -> tuple[int, int]:
        """Returns the two reserved keys."""
        return self.key_dtype.empty_key, self.key_dtype.reclaim_key

    # ---------------------------------------------------------------- keys

    @property
    def num_slots(self) -> int:
        """Number of slots, the two reserved ones included."""
        return self.directory.num_slots + 2

    def entries(self, first: int = 0, count: int | None = None) -> IndexEntries:
        """Returns the entries in slots [first, first + count); without `count`, to the end."""
        num_slots, xp = self.num_slots, self.backend.xp
        end = num_slots if count is None else min(first + count, num_slots)
        starts, segments = self.directory.starts.tolist(), self.directory.segments
        empty_key, reclaim_key = self.reserved_keys()
        parts = []
        for i in range(max(0, bisect_right(starts, first) - 1), len(segments)):
            start, segment = starts[i], segments[i]
            if start >= end:
                break
            some = slice(max(0, first - start), end - start)
            slots = segment.slots[some]
            scores = None if segment.scores is None else segment.scores[some]
            keys = slots[:, 0]
            is_key = (keys != empty_key) & (keys != reclaim_key)
            parts.append(self._entries_where(is_key, keys, slots, scores, start + some.start))
        # The reserved slots do not contain their keys.
        keys = self.backend.from_host(np.array([empty_key, reclaim_key], np.int64))
        scores = self.side[4:].view(np.uint64) if self.has_scores else None
        numbers = xp.arange(num_slots - 2, num_slots)
        is_key = (numbers >= first) & (numbers < end)
        slots = self.side[:4].reshape(2, 2)
        parts.append(self._entries_where(is_key, keys, slots, scores, num_slots - 2))
        return IndexEntries(*(xp.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _entries_where(
        self, is_key: Array, keys: Array, slots: Array, scores: Array | None, start: int
    ) -> IndexEntries:
        """Returns the entries of slots (n, 2), numbered from `start` on, where `is_key`."""
        words = slots.view(np.uint32)
        # A key without a row is being inserted: it is not in the index yet.
        at = self.backend.xp.flatnonzero(is_key & (words[:, 2] != np.uint32(NO_ROW)))
        last_seen = words[at, 3]
        scores = last_seen.astype(np.uint64) if scores is None else scores[at]
        return IndexEntries(keys[at], words[at, 2], last_seen, at + start, scores)

    def probe_lengths(self) -> tuple[float, int]:
        """Returns the mean and the largest number of lines that a search for a key reads.

        It scans the whole index.
        """
        num_keys, total, longest = 0, 0, 0
        num_slots = self.directory.num_slots
        for first in range(0, num_slots, CHUNK_SLOTS):
            entries = self.entries(first, min(CHUNK_SLOTS, num_slots - first))
            if entries.keys.size:
                lengths = self.probe_lengths_of(entries)
                num_keys += int(lengths.size)
                total += int(lengths.sum())
                longest = max(longest, int(lengths.max()))
        return total / max(1, num_keys), longest

    @abstractmethod
    def probe_lengths_of(self, entries: IndexEntries) -> Array:
        """Returns how many lines a search for each key reads, (n,) integers."""

    @abstractmethod
    def reserve(self, num_keys: int) -> None:
        """Grows for `num_keys` keys in all, up to its maximum.

        Raises:
          MemoryError: no memory; the index is as it was.
        """

    @abstractmethod
    def update_launch(self, keys: Array, rows: Array | None = None) -> Launch:
        """Returns the launch that writes the row numbers (n,) uint32 of distinct keys. Missing keys
        are skipped. Subclasses write more."""

    def update(self, keys: Array, *args: Any, **what: Any) -> None:
        """Runs `update_launch`."""
        self.update_launch(keys, *args, **what)()

    def write_rows(self, slot_addresses: Array, rows: Array) -> None:
        """Writes row numbers (n,) uint32 into slots, given by address (n,) int64; address 0 is
        skipped."""
        self.backend.launch("slots_give_rows", int(rows.size), slot_addresses, rows, int(rows.size))

    @abstractmethod
    def erase(self, keys: Array) -> None:
        """Erases distinct keys (n,) int64, all of which must be present."""

    @abstractmethod
    def last_seen(self, keys: Array) -> Array:
        """Returns the number of the last lookup of each key, (n,) uint32; 0 for a missing key."""

    @abstractmethod
    def clean(self) -> None:
        """Frees memory that erased keys have left, where there is enough of it."""

    def allocate_empty(self) -> tuple[Directory, Array]:
        """Returns empty segments and reserved slots, for `clear`."""
        return self._new_empty(self.init_slots)

    def clear(self, empty: tuple[Directory, Array] | None = None) -> None:
        """Removes all keys and frees their memory.

        Args:
          empty: the result of `allocate_empty`; without it that is called here.

        Raises:
          MemoryError: no memory for the empty index; the index is as it was.
        """
        self.set_segments(*(empty or self.allocate_empty()))
        self.least_slots, self.num_rehashes = self.init_slots, 0
        self.record.size = 0

    def prepared(self, kernel: str, num_items: int, *args: object) -> Launch:
        """Returns the launch of a kernel of this index, which takes the index before `args`."""
        return self.backend.prepared(kernel, num_items, *self.kernel_args(), *args)

    def launch(self, kernel: str, num_items: int, *args: object) -> None:
        """Runs a kernel of this index."""
        self.prepared(kernel, num_items, *args)()

    def kernel_args(self) -> tuple[Any, ...]:
        """Returns the index as kernels take it (`sok_index` of kernels/slots.cuh), valid until it
        grows."""
        directory = self.directory
        kind = (int(self.has_scores), self.bucket, *self.reserved_keys())
        return directory.table, directory.hashing, self.side, *kind

    def search(
        self,
        keys: Array,
        lookup_number: int = 0,
        caller_scores: Array | None = None,
        accesses: AccessCounts | None = None,
        copying: RowCopy | None = None,
        into: tuple[Array, Array | None] | None = None,
        refreshes: bool = True,
    ) -> Search:
        """Returns a search for keys, not yet launched.

        Args:
          keys: (n,) int64, duplicates allowed.
          lookup_number: number of this lookup, stored as `last_seen` of the keys found, whose
            scores change; 0: nothing is written.
          caller_scores: (n,) uint64, equal for duplicates: increments (kLfu, kEpochLfu) or scores
            (kCustomized).
          accesses: counters of rows to increment.
          copying: where to copy the rows found.
          into: memory for `rows` and zeroed memory for `counts`; without it new arrays.
          refreshes: whether scores change; otherwise only `last_seen` does.
        """
        xp, n = self.backend.xp, int(keys.size)
        rows, counts = into or (xp.empty(n, np.uint32), xp.zeros(2, np.int64))
        *where, out, gives_zeros = (None, 0, 0, None, 0) if copying is None else copying
        note = self.mark_seen_args(lookup_number, accesses, refreshes)
        marking = (*note[:3], caller_scores, *note[3:])
        args = (*self.kernel_args(), *marking, *where, keys, rows, out, gives_zeros, counts, n)
        return Search(self.backend.prepared("find", n, *args), rows, counts)

    def mark_seen_args(
        self, lookup_number: int, accesses: AccessCounts | None, refreshes: bool = True
    ) -> tuple[Any, ...]:
        """Returns the arguments of kernels that mark keys as seen by a lookup."""
        counts, is_counting = (None, False) if accesses is None or not lookup_number else accesses
        # Under kCustomized a search leaves scores as they are.
        strategy = self.record.strategy if refreshes else _CUSTOMIZED
        return lookup_number, strategy, self.record.epoch, counts, int(is_counting)

    def find(self, keys: Array) -> Found:
        """Finds keys (n,) int64 at once, and changes nothing."""
        search = self.search(keys)
        search.launch()
        return search.found

    def age(self) -> None:
        """Halves every `last_seen`, also inside scores, when lookup numbers reach their limit."""
        parts = []
        reserved = (self.side[:4], self.side[4:].view(np.uint64) if self.has_scores else None)
        for slots, scores in (*((s.slots, s.scores) for s in self.directory.segments), reserved):
            n = int(slots.size) // 2
            parts.append(LaunchArgs(n, (slots, scores if self.scores_age else None, n)))
        self.backend.launch_tables("slots_age", parts)

    def decay(self, factor: float) -> None:
        """Multiplies the counts of kLfu or kEpochLfu by a factor, rounded down."""
        raise NotImplementedError(f"an index of {type(self).__name__} has no counts")

    def age_scores(self, scores: Array) -> Array:
        """Returns scores (n,) uint64 as `age` changes them."""
        return scores >> np.uint64(1)

    # ---------------------------------------------------------------- segments

    def set_segments(self, directory: Directory, side: Array | None = None) -> None:
        """Replaces the segments; with `side`, the reserved slots too."""
        if side is not None:
            self.side = side
        self.directory = directory
        self.record.hashing = directory.hashing
        self.record.directory = self.backend.address(directory.table)
        self.record.side = self.backend.address(self.side)

    @abstractmethod
    def move_keys(self, segments: Sequence[Segment], directory: Directory) -> bool:
        """Copies the keys of segments into those that replace them in `directory`, before
        `set_segments`.

        Returns:
          False if keys found no slot there. Then nothing has changed.
        """

    def resize(self, num_slots: int, *, grows: bool = True) -> None:
        """Grows, or shrinks, the segments whose size differs in an index of `num_slots` slots.

        One group of segments after the other, so that little memory is needed twice. Where keys
        find no slot, an index that grows takes a new seed; one that shrinks stays as it is.

        Raises:
          MemoryError: no memory; all keys are as they were.
          RuntimeError: keys find no slot with another seed either: they are chosen against it.
        """
        left, done = deque(self.directory.segments), list[Segment]()
        wanted = self.sizes.shapes(num_slots)
        for count, shapes in list(matching_groups(self.directory.shapes, wanted)):
            some = [left.popleft() for _ in range(count)]
            before = sum(segment.shape.slots for segment in some)
            after = sum(shape.slots for shape in shapes)
            if after > before if grows else after < before:
                made = self.replace_segments(done, some, shapes, left, num_slots)
                if made is None:
                    if grows:
                        self.rehash(num_slots)
                    return
                some = made
            done += some

    def rehash(self, num_slots: int) -> None:
        """Places every key anew, by another seed.

        Raises:
          MemoryError: no memory for a second index; the index is as it was.
          RuntimeError: keys find no slot with another seed either: they are chosen against it.
        """
        old, shapes = self.directory.segments, self.sizes.shapes(num_slots)
        if self.replace_segments([], old, shapes, [], num_slots, seed_after(self.seed)) is None:
            raise self.hash_flooding_error()

    def hash_flooding_error(self) -> RuntimeError:
        """Returns the error for keys that find no slot with any seed."""
        return RuntimeError(
            f"Keys of table {self.name!r} find no slot, though only {self.size:,} of "
            f"{self.capacity:,} are in use, and with another seed of the hash they find none "
            "either. Nothing was changed. Somebody knows the seeds and has chosen these keys: do "
            "not fix the seed of the hash where keys come from strangers (hash_seed of sok.init, "
            "SOK_LITE_HASH_SEED). Or keys repeat that were promised to be distinct."
        )

    def replace_segments(
        self,
        before: Sequence[Segment],
        segments: Sequence[Segment],
        shapes: Sequence[SegmentShape],
        after: Sequence[Segment],
        num_slots: int,
        seed: int | None = None,
    ) -> list[Segment] | None:
        """Moves the keys of segments into new ones, and returns these; None: keys found no slot
        there, and nothing has changed.

        Args:
          before, after: the segments that stay.
          shapes: of the new segments.
          num_slots: of the index at the end of the resize, for errors.
          seed: a new one, where no segment stays.
        """
        made = self._new_segments(shapes, num_slots)
        seed = self.seed if seed is None else seed
        segments_then = [*before, *made, *after]
        directory = Directory(self.backend, segments_then, self.sizes.granule, seed)
        with uninterrupted():
            if not self.move_keys(segments, directory):
                return None
            self.set_segments(directory)
            self.num_rehashes += len(segments)
        return made

    def _new_empty(self, num_slots: int) -> tuple[Directory, Array]:
        """Returns a directory of empty segments, and empty reserved slots."""
        segments = self._new_segments(self.sizes.shapes(num_slots), num_slots)
        side = self.backend.xp.zeros(6 if self.has_scores else 4, np.int64)
        side[1:4:2] = NO_ROW  # and last seen by lookup 0: by none
        return Directory(self.backend, segments, self.sizes.granule, self.seed), side

    def _new_segments(self, shapes: Sequence[SegmentShape], num_slots: int) -> list[Segment]:
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

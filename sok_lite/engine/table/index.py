"""The base of both kinds of index: segments of slots {key, row number, last seen}.

kernels/slots.cuh describes them. Two more slots belong to the two keys that mark free slots: so
every key is legal. A slot has a number, by which it is saved, and an address, which kernels work
with: good until the next growth. Numbers run through the segments, and those two come last.

It grows and shrinks one segment after another (directory.py).
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import Work
from sok_lite.backend.launches import Launch
from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.hashing import new_seed, seed_after
from sok_lite.engine.rows.access import Copying
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.directory import Directory, Segment, Shape, Sizes, paired, segment_bytes
from sok_lite.engine.table.record import IndexRecord

# The largest number of a lookup that a slot can keep. Beyond it all are halved (`Index.age`).
LAST_LOOKUP_NUMBER = 0xFFFFFFFF

# Slots that a walk over the whole index looks at together: 16 MB.
CHUNK_SLOTS = 1 << 20


class Found(NamedTuple):
    """Row numbers (n,) uint32, NO_ROW where there is none, and how many have none."""

    rows: Array
    num_missing: int


class AccessCounts(NamedTuple):
    """How often rows were accessed lately, to which a lookup may add.

    Attributes:
      counts: (num_rows,) uint8; see engine/rows/tiers.py.
      is_counting: whether a lookup counts the rows that it finds.
    """

    counts: Array
    is_counting: bool


class Search(NamedTuple):
    """A search for keys.

    Attributes:
      launch: makes it; it writes the others.
      rows: (n,) uint32.
      counts: (2,) int64: the keys that are missing; those that are found, each once, where there
        are scores or access counts, which a key that repeats changes once. None: they are not
        counted.
    """

    launch: Launch
    rows: Array
    counts: Array | None

    def run(self) -> Found:
        """Makes the search by itself."""
        self.launch()
        return self.found

    @property
    def found(self) -> Found:
        """The row numbers and counts, once the search was made."""
        assert self.counts is not None
        return Found(self.rows, int(self.counts[0]))


class IndexAddress(NamedTuple):
    """Where an index is, as kernels take it; see kernels/slots.cuh.

    Attributes:
      directory: (2 ** depth, 2) uint64.
      hashing: the seed of the hash, and 31 - depth.
      side: (4 or 6,) int64, the slots of the reserved keys.
      is_scored: whether there are scores behind the slots, 0 or 1.
      bucket: slots of a bucket; 0: it has none.
      empty_key, reclaim_key: the two reserved keys.
    """

    directory: Array
    hashing: int
    side: Array
    is_scored: int
    bucket: int
    empty_key: int
    reclaim_key: int


class ProbeLengths(NamedTuple):
    """Lines of slots that a search for a key that is there reads: the mean, and the most."""

    mean: float
    longest: int


class IndexEntries(NamedTuple):
    """The keys of some slots, and what is kept with each.

    Attributes:
      keys: (n,) int64.
      rows: (n,) uint32, the number of its row; of an index of pending counts, the count.
      last_seen: (n,) uint32, the number of the lookup that last saw it; 0: none did.
      slots: (n,) int64, the number of its slot.
      scores: (n,) uint64; `last_seen` where an index keeps none.
    """

    keys: Array
    rows: Array
    last_seen: Array
    slots: Array
    scores: Array

    def column(self, name: str) -> Array:
        """Returns the field of a column that files name so: "stamps" are `last_seen`."""
        array: Array = getattr(self, "last_seen" if name == "stamps" else name)
        return array


class Index(ABC):
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

    # ---------------------------------------------------------------- keys

    @property
    def num_slots(self) -> int:
        """Slots that `entries` can be asked for."""
        return self.directory.num_slots + 2

    def entries(self, first: int = 0, count: int | None = None) -> IndexEntries:
        """Returns what the slots [first, first + count) hold; None: all from `first` on."""
        num_slots, xp = self.num_slots, self.backend.xp
        end = num_slots if count is None else min(first + count, num_slots)
        starts, segments = self.directory.starts.tolist(), self.directory.segments
        parts = []
        for i in range(max(0, bisect_right(starts, first) - 1), len(segments)):
            start, segment = starts[i], segments[i]
            if start >= end:
                break
            some = slice(max(0, first - start), end - start)
            scores = None if segment.scores is None else segment.scores[some]
            parts.append(self._entries_of(segment.slots[some], scores, start + some.start))
        parts.append(self._entries_beside(first, end))
        return IndexEntries(*(xp.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _entries_of(self, slots: Array, scores: Array | None, number: int) -> IndexEntries:
        """Returns what slots (n, 2) hold, the first of which has a number."""
        keys, reserved = slots[:, 0], self.reserved_keys()
        # Where a key has no row yet, it is being inserted: until then it is not there.
        has_row = slots.view(np.uint32)[:, 2] != np.uint32(NO_ROW)
        at = self.backend.xp.flatnonzero((keys != reserved[0]) & (keys != reserved[1]) & has_row)
        return _read(slots, scores, at, keys[at], number)

    def _entries_beside(self, first: int, end: int) -> IndexEntries:
        """Returns what the slots of the reserved keys hold, if they are in [first, end)."""
        xp, number = self.backend.xp, self.directory.num_slots
        slots, scores = self.side[:4].reshape(2, 2), None
        if self.has_scores:
            scores = self.side[4:].view(np.uint64)
        has_row = slots.view(np.uint32)[:, 2] != np.uint32(NO_ROW)
        numbers = xp.arange(number, number + 2)
        at = xp.flatnonzero(has_row & (numbers >= first) & (numbers < end))
        # They do not hold their key: it is known from their place.
        keys = self.backend.from_host(np.array(self.reserved_keys(), np.int64))
        return _read(slots, scores, at, keys[at], number)

    def probe_lengths(self) -> ProbeLengths:
        """Returns how long the searches for the keys are. It looks at every slot."""
        num_keys, total, longest = 0, 0, 0
        num_slots = self.directory.num_slots
        for first in range(0, num_slots, CHUNK_SLOTS):
            entries = self.entries(first, min(CHUNK_SLOTS, num_slots - first))
            if entries.keys.size:
                lines = self.lines_read(entries)
                num_keys += int(lines.size)
                total += int(lines.sum())
                longest = max(longest, int(lines.max()))
        return ProbeLengths(total / max(1, num_keys), longest)

    @abstractmethod
    def lines_read(self, entries: IndexEntries) -> Array:
        """Returns how many lines a search for each of some keys reads, (n,) integers."""

    @abstractmethod
    def reserve(self, num_keys: int) -> None:
        """Makes the index large enough for `num_keys` keys in all, as far as it may grow.

        Raises:
          MemoryError: no memory; the index is as it was.
        """

    @abstractmethod
    def update_launch(self, keys: Array, rows: Array | None = None) -> Launch:
        """Returns the launch that writes row numbers (n,) uint32 of distinct keys; a missing key is
        skipped. Each kind of index writes more."""

    def update(self, keys: Array, *args: Any, **what: Any) -> None:
        """Writes what `update_launch` says."""
        self.update_launch(keys, *args, **what)()

    def give_rows(self, placed: Array, rows: Array) -> None:
        """Writes the rows (n,) uint32 of keys that have slots `placed` (n,) int64, as
        `reserve_launch` gave them; a key that got none is skipped."""
        self.backend.launch("slots_give_rows", int(rows.size), placed, rows, int(rows.size))

    @abstractmethod
    def erase(self, keys: Array) -> None:
        """Erases distinct keys (n,) int64 that are all there."""

    @abstractmethod
    def last_seen(self, keys: Array) -> Array:
        """Returns the number of the lookup that last saw each key, (n,) uint32; missing: 0."""

    @abstractmethod
    def clean(self) -> None:
        """Gives back what erased keys have left, where it is worth it."""

    def empty_place(self) -> tuple[Directory, Array]:
        """Returns memory for the index without keys, for `clear`."""
        return self.new_directory(self.init_slots), self.new_side()

    def clear(self, place: tuple[Directory, Array] | None = None) -> None:
        """Removes every key and gives the memory back.

        Args:
          place: of `empty_place`; None: it is made now.

        Raises:
          MemoryError: no memory for the empty index; it is as it was.
        """
        self.set_place(*(place or self.empty_place()))
        self.least_slots, self.num_rehashes = self.init_slots, 0
        self.record.size = 0

    @abstractmethod
    def prepared(self, kernel: str, num_items: int, *args: object) -> Launch:
        """Returns the launch of a kernel of this index: it takes the index first, then `args`."""

    def launch(self, kernel: str, num_items: int, *args: object) -> None:
        """Runs a kernel of this index."""
        self.prepared(kernel, num_items, *args)()

    def place(self) -> IndexAddress:
        """Returns where it is, until it grows."""
        table, hashing = self.directory.table, self.directory.hashing
        kind = (int(self.has_scores), self.bucket, *self.reserved_keys())
        return IndexAddress(table, hashing, self.side, *kind)

    def score_rule(self, refreshes: bool = True) -> tuple[int, int]:
        """Returns how scores are kept: the number of the strategy, and the epoch.

        Args:
          refreshes: whether a search changes those of the keys that it finds.
        """
        return self.record.strategy, self.record.epoch

    def search(
        self,
        keys: Array,
        lookup_number: int = 0,
        caller_scores: Array | None = None,
        accesses: AccessCounts | None = None,
        copying: Copying | None = None,
        into: tuple[Array, Array | None] | None = None,
        refreshes: bool = True,
    ) -> Search:
        """Returns a search for keys, which may repeat, that is not made yet.

        Args:
          keys: (n,) int64.
          lookup_number: number of this lookup, kept with each key that is found, whose score is
            refreshed; 0: nothing is written.
          caller_scores: (n,) uint64, the same for all items of a key: increments (kLfu, kEpochLfu)
            or scores (kCustomized).
          accesses: of the rows that are found; None: they are not counted.
          copying: copies the rows that are found; None: does not.
          into: memory for `rows` and `counts` of the search, which are zeros; None: new memory.
          refreshes: whether scores change; if not, it is only kept when the keys were seen.
        """
        xp, n = self.backend.xp, int(keys.size)
        rows, counts = into or (xp.empty(n, np.uint32), xp.zeros(2, np.int64))
        *where, out, gives_zeros = (None, 0, 0, None, 0) if copying is None else copying
        note = self.seen_arguments(lookup_number, accesses, refreshes)
        arguments = (
            *(*self.place(), *note[:3], caller_scores, *note[3:]),
            *(*where, keys, rows, out, gives_zeros, counts, n),
        )
        return Search(Launch(self.backend, "find", Work(n, arguments)), rows, counts)

    def seen_arguments(
        self, lookup_number: int, accesses: AccessCounts | None, refreshes: bool = True
    ) -> tuple[Any, ...]:
        """Returns what a kernel takes that notes which keys a lookup has seen."""
        counts, is_counting = (None, False) if accesses is None or not lookup_number else accesses
        return lookup_number, *self.score_rule(refreshes), counts, int(is_counting)

    def find(
        self, keys: Array, lookup_number: int = 0, caller_scores: Array | None = None
    ) -> Found:
        """Finds keys (n,) int64 at once; with a `lookup_number` they count as seen."""
        return self.search(keys, lookup_number, caller_scores).run()

    def age(self) -> None:
        """Halves every `last_seen`, so that counting can go on."""
        ages = self.has_aging_scores()
        slots = [(segment.slots, segment.scores) for segment in self.directory.segments]
        beside = (self.side[:4], self.side[4:].view(np.uint64) if self.has_scores else None)
        parts = [
            Work(int(some.size) // 2, (some, scores if ages else None, int(some.size) // 2))
            for some, scores in (*slots, beside)
        ]
        self.backend.launch_parts("slots_age", parts)

    def decay(self, factor: float) -> None:
        """Multiplies the counts of kLfu or kEpochLfu, which no other index has, by a factor,
        rounded down."""
        raise NotImplementedError(f"an index of {type(self).__name__} has no counts")

    def aged(self, scores: Array) -> Array:
        """Returns scores (n,) uint64 as `age` makes them."""
        return scores >> np.uint64(1)

    def has_aging_scores(self) -> bool:
        """Whether there are scores with the number of a lookup in their low half."""
        return False

    # ---------------------------------------------------------------- segments

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


def _read(slots: Array, scores: Array | None, at: Array, keys: Array, number: int) -> IndexEntries:
    words = slots.view(np.uint32)
    last_seen = words[at, 3]
    scores = last_seen.astype(np.uint64) if scores is None else scores[at]
    return IndexEntries(keys, words[at, 2], last_seen, at + number, scores)

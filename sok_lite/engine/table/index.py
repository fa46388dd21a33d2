"""The base of both kinds of index: segments of slots {key, row number, last seen}.

kernels/slots.cuh describes them. Two more slots belong to the two keys that mark free slots: so
every key is legal. A slot has a number, by which it is saved, and an address, which kernels work
with: good until the next growth. Numbers run through the segments, and those two come last.
"""

from abc import abstractmethod
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.base import Work
from sok_lite.backend.launches import Launch
from sok_lite.engine.rows.access import Copying
from sok_lite.engine.table.directory import Directory
from sok_lite.engine.table.index_entries import IndexEntries, entries
from sok_lite.engine.table.segmented import Segmented

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


class Index(Segmented):
    """Slots that keys are looked for in."""

    @property
    def num_slots(self) -> int:
        """Slots that `entries` can be asked for."""
        return self.directory.num_slots + 2

    entries = entries

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

"""What both kinds of index have in common: an array of slots {key, row number, stamp}.

kernels/slots.cuh describes a slot. Behind the last one there are two more, which belong to the two
keys that mark free slots: so every key is legal.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import Part
from sok_lite.backend.publish import Action, Launch, publish
from sok_lite.backend.tunables import kernel_defines
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.rows.access import Copying
from sok_lite.engine.rows.store import ABSENT

# SOK_LINE of kernels/platform.cuh: slots that a search reads at a time.
LINE = kernel_defines().get("SOK_LINE", 4)
# The largest stamp. Lookups are counted up to it; see `Index.ageing`.
LAST_STAMP = 0xFFFFFFFF


# Slots that a walk over the whole index looks at together: 16 MB.
CHUNK_SLOTS = 1 << 20


class Found(NamedTuple):
    """Row numbers (n,) uint32, ABSENT where there is none, and how many are absent."""

    rows: Array
    num_missing: int


class Warming(NamedTuple):
    """The heat of rows, which a lookup may add to.

    Attributes:
      heat: (num_rows,) uint8; see engine/rows/tiers.py.
      warms: whether rows that are found get warmer.
    """

    heat: Array
    warms: bool


class Search(NamedTuple):
    """A search for keys that is prepared.

    Attributes:
      launch: makes it; it writes the others.
      rows: (n,) uint32.
      counts: (2,) int64: the keys that are missing; those that are found, each once, where there
        are scores or heat, which a key that repeats changes once. None: they are not counted.
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
        """What the search has found, once it was made."""
        assert self.counts is not None
        return Found(self.rows, int(self.counts[0]))


class Place(NamedTuple):
    """Where an index is, as kernels take it.

    Attributes:
      slots: of 16 bytes, see kernels/slots.cuh.
      scores: beside the slots; None: there are none.
      capacity: number of slots.
      bucket: slots of a bucket; 0: it has none.
      empty_key, reclaim_key: the two reserved keys.
    """

    slots: Array
    scores: Array | None
    capacity: int
    bucket: int
    empty_key: int
    reclaim_key: int


class IndexEntries(NamedTuple):
    """Slots that hold a key: keys (n,) int64, rows and stamps (n,) uint32, slots (n,) int64."""

    keys: Array
    rows: Array
    stamps: Array
    slots: Array


class ProbeLengths(NamedTuple):
    """Lines of slots that a search for a held key reads: the mean over all keys, and the most."""

    mean: float
    longest: int


class Index(ABC):
    """Slots on a backend.

    Attributes:
      backend: where they are.
      key_dtype: key type of the table; it names the two reserved keys.
      name: of the table, for errors.
      capacity: number of slots, the two reserved ones not counted.
      size: keys held.
      num_rehashes: how often all slots were written anew.
    """

    def __init__(self, backend: Backend, key_dtype: KeyDtype, name: str, capacity: int) -> None:
        self.backend = backend
        self.key_dtype = key_dtype
        self.name = name
        self.capacity = self.size = self.num_rehashes = 0
        self._init_capacity = capacity
        self._place: Place | None = None  # as it was last asked for
        self._place_words: np.ndarray | None = None
        self._slots = self._new_slots(capacity)
        self.capacity = capacity

    @property
    def num_bytes(self) -> int:
        """Memory of the index."""
        return int(self._slots.nbytes)

    @property
    def num_slots(self) -> int:
        """Slots that `entries` can be asked for."""
        return self.capacity + 2

    def entries(self, first: int = 0, count: int | None = None) -> IndexEntries:
        """Returns what the slots [first, first + count) hold; None: all from `first` on."""
        xp = self.backend.xp
        end = self.num_slots if count is None else min(first + count, self.num_slots)
        part = self._slots[first:end]
        words = part.view(np.uint32)
        keys = part[:, 0].copy()
        live = (keys != self.key_dtype.empty_key) & (keys != self.key_dtype.reclaim_key)
        # The two slots at the end do not hold their key: it is known from their place.
        reserved = (self.key_dtype.empty_key, self.key_dtype.reclaim_key)
        for slot, key in enumerate(reserved, self.capacity):
            if first <= slot < end:
                keys[slot - first] = key
                live[slot - first] = words[slot - first, 2] != np.uint32(ABSENT)
        at = xp.flatnonzero(live)
        return IndexEntries(keys[at], words[at, 2], words[at, 3], at + first)

    def probe_lengths(self) -> ProbeLengths:
        """Returns how long the searches for the keys are. It looks at every slot."""
        num_keys, total, longest = 0, 0, 0
        for first in range(0, self.capacity, CHUNK_SLOTS):
            held = self.entries(first, min(CHUNK_SLOTS, self.capacity - first))
            if held.keys.size:
                lines = self._lines_read(held)
                num_keys += int(lines.size)
                total += int(lines.sum())
                longest = max(longest, int(lines.max()))
        return ProbeLengths(total / max(1, num_keys), longest)

    @abstractmethod
    def _lines_read(self, held: IndexEntries) -> Array:
        """Returns how many lines a search for each of some keys reads, (n,) integers."""

    @abstractmethod
    def reserve(self, num_keys: int) -> None:
        """Makes the index large enough for `num_keys` keys in all, as far as it may grow.

        Raises:
          MemoryError: no memory; the index is as it was.
        """

    @abstractmethod
    def erasing(self, keys: Array) -> list[Action]:
        """Prepares to erase distinct keys (n,) int64 that are all there."""

    @abstractmethod
    def clean(self) -> None:
        """Rids the index of what erased keys have left, where it is worth it."""

    @abstractmethod
    def clearing(self) -> list[Action]:
        """Returns the actions that remove every key and give the memory back.

        Raises:
          MemoryError: no memory for the empty index.
        """

    def clear(self) -> None:
        """Removes every key and gives the memory back. Raises as `clearing` does."""
        publish(self.clearing())

    @abstractmethod
    def _prepared(self, kernel: str, num_items: int, *args: object) -> Action:
        """Prepares a kernel of this index: it takes the index first, then `args`."""

    def _launch(self, kernel: str, num_items: int, *args: object) -> None:
        self._prepared(kernel, num_items, *args)()

    @abstractmethod
    def place(self) -> Place:
        """Returns where it is, until it grows."""

    def _placed(self, scores: Array | None, bucket: int) -> Place:
        place = self._place
        if place is None or place.slots is not self._slots or place.scores is not scores:
            place = Place(self._slots, scores, self.capacity, bucket, *self._reserved())
            self._place, self._place_words = place, None
        return place

    def place_words(self) -> np.ndarray:
        """Returns `place` as the words that a kernel takes, (6,) int64."""
        place = self.place()
        if self._place_words is None:
            addresses = [0 if a is None else self.backend.address(a) for a in place[:2]]
            self._place_words = np.array([*addresses, *place[2:]], np.int64)
        return self._place_words

    def scoring(self) -> tuple[int, int]:
        """Returns how scores are kept: the number of the strategy, and the epoch."""
        return 0, 0

    def searching(
        self,
        keys: Array,
        stamp: int = 0,
        given: Array | None = None,
        warming: Warming | None = None,
        copying: Copying | None = None,
        into: tuple[Array, Array | None] | None = None,
    ) -> Search:
        """Prepares a search for keys, which may repeat.

        Args:
          keys: (n,) int64.
          stamp: number of this lookup, kept with each key that is found, whose score is refreshed;
            0: nothing is written.
          given: (n,) uint64, of distinct keys: increments (kLfu, kEpochLfu) or scores
            (kCustomized).
          warming: of the rows that are found; None: they have no heat.
          copying: copies the rows that are found; None: does not.
          into: memory for `rows` and `counts` of the search, which are zeros; None: new memory.
        """
        xp, n = self.backend.xp, int(keys.size)
        rows, counts = into or (xp.empty(n, np.uint32), xp.zeros(2, np.int64))
        pointers, shift, row_bytes, out = (None, 0, 0, None) if copying is None else copying
        note = self.noting(stamp, warming)
        arguments = (
            *(*self.place(), *note[:3], given, *note[3:]),
            *(pointers, shift, row_bytes, keys, rows, out, counts, n),
        )
        return Search(Launch(self.backend, "find", Part(n, arguments)), rows, counts)

    def noting(self, stamp: int, warming: Warming | None) -> tuple[Any, ...]:
        """Returns what a kernel takes that notes which keys a lookup has seen."""
        heat, warms = (None, False) if warming is None or not stamp else warming
        return stamp, *self.scoring(), heat, int(warms)

    def find(self, keys: Array, stamp: int = 0, given: Array | None = None) -> Found:
        """Finds keys; see `searching`."""
        return self.searching(keys, stamp, given).run()

    def ageing(self) -> list[Action]:
        """Returns the actions that halve every stamp, so that counting can go on."""
        n = int(self._slots.shape[0])
        return [self.backend.prepared("slots_age", n, self._slots, self._aged_scores(), n)]

    def aged(self, scores: Array) -> Array:
        """Returns scores (n,) uint64 as `ageing` makes them."""
        return scores >> np.uint64(1)

    def _aged_scores(self) -> Array | None:
        """The scores that have a stamp in their low half."""
        return None

    def _reserved(self) -> tuple[int, int]:
        """The two reserved keys, for kernels."""
        return self.key_dtype.empty_key, self.key_dtype.reclaim_key

    def _new_slots(self, capacity: int) -> Array:
        num_bytes = 16 * (capacity + 2)
        try:
            # Not xp.empty: a line of slots is a cache line, and large pages save address lookups.
            slots = self.backend.zeros_chunk(num_bytes).view(np.int64).reshape(-1, 2)
        except MemoryError as error:
            raise MemoryError(
                f"No memory for the index of table {self.name!r} to grow from {self.capacity:,} "
                f"to {capacity:,} slots ({num_bytes:,} bytes). It is as it was, with "
                f"{self.size:,} keys."
            ) from error
        slots[:, 0] = self.key_dtype.empty_key
        slots[:, 1] = ABSENT  # and stamp 0
        return slots

"""The index of the "hybrid" table: buckets with scores (kernels/hkv), up to a number of slots."""

from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, publish, setting
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.hashing import hash_keys
from sok_lite.engine.table.index import LAST_STAMP, LINE, Index, IndexEntries, Place

# What the score of a key is; the place in the list is its number in kernels/hkv/hkv.cuh.
STRATEGIES = ("kLru", "kLfu", "kEpochLru", "kEpochLfu", "kCustomized")


class Placed(NamedTuple):
    """What became of keys that were inserted.

    Attributes:
      slots: (n,) int64, -1 for a refused key.
      evicted_keys, evicted_rows, evicted_scores: (n,) int64, uint32, uint64: what was in the slot;
        row ABSENT where it was free.
    """

    slots: Array
    evicted_keys: Array
    evicted_rows: Array
    evicted_scores: Array


class HkvIndex(Index):
    """Row numbers and scores by key. Keys are int64 arrays (n,).

    Attributes:
      max_capacity: it doubles up to this number of slots; then insertion evicts.
      bucket: slots of a bucket.
      max_load_factor: share of the slots in use above which it doubles.
      strategy: one of STRATEGIES.
      epoch: the current one, for kEpochLru and kEpochLfu.
    """

    def __init__(
        self,
        backend: Backend,
        key_dtype: KeyDtype,
        name: str,
        *,
        init_capacity: int,
        max_capacity: int,
        bucket: int,
        max_load_factor: float,
        strategy: str,
    ) -> None:
        self.max_capacity = max_capacity
        self.bucket = bucket
        self.max_load_factor = max_load_factor
        self.strategy = strategy
        self.epoch = 0
        self._scores: Array | None = None
        super().__init__(backend, key_dtype, name, init_capacity)
        self._scores = self._new_scores(init_capacity)

    @property
    def num_bytes(self) -> int:
        scores = 0 if self._scores is None else int(self._scores.nbytes)
        return super().num_bytes + scores

    @property
    def is_full_size(self) -> bool:
        """Whether it grows no more."""
        return self.capacity >= self.max_capacity

    @property
    def has_scores(self) -> bool:
        """Whether scores are kept beside the stamps."""
        return self._scores is not None

    @property
    def room(self) -> int:
        """The most keys that can still come without eviction."""
        return self.max_capacity + 2 - self.size

    def place(self) -> Place:
        return self._placed(self._scores, self.bucket)

    def scoring(self) -> tuple[int, int]:
        return STRATEGIES.index(self.strategy), self.epoch

    def make_room(self, count: int) -> None:
        """Doubles, as far as it may, until `count` more keys keep below the load factor.

        Raises:
          MemoryError: no memory; the index is as it was.
        """
        while not self.is_full_size and self.size + count > self.max_load_factor * self.capacity:
            self.double()

    def unplaced(self, num_keys: int) -> Placed:
        """Returns memory for what becomes of keys."""
        xp = self.backend.xp
        return Placed(
            xp.empty(num_keys, np.int64),
            xp.empty(num_keys, np.int64),
            xp.empty(num_keys, np.uint32),
            xp.empty(num_keys, np.uint64),
        )

    def placing(
        self,
        keys: Array,
        stamp: int,
        given: Array | None,
        placed: Placed,
        num_refused: Array,
        *,
        given_is_score: bool = False,
    ) -> Action:
        """Prepares to give slots to distinct keys that are not there.

        `giving_rows` gives them row numbers, and the caller changes `size`. It evicts only at
        `max_capacity`; before, it refuses what finds both buckets full.

        Args:
          given: (n,) uint64, as in `searching`.
          placed: gets what becomes of the keys.
          num_refused: (1,) int64, grows by the keys that are refused.
          given_is_score: whether `given` are scores, whatever the strategy. A key whose given
            score is below all that it could evict is refused.
        """
        n = int(keys.size)
        strategy, epoch = self.scoring()
        if given_is_score and given is not None:
            strategy = STRATEGIES.index("kCustomized")
        may_evict = self.is_full_size
        may_refuse = given is not None and STRATEGIES[strategy] == "kCustomized"
        return self._prepared(
            *("hkv_insert", n, stamp, strategy, epoch, int(may_evict), int(may_refuse)),
            *(given, keys, *placed, num_refused, n),
        )

    def taking_back(self, keys: Array, placed: Placed) -> Action:
        """Prepares to undo `placing` of keys that have evicted none and have no rows yet."""
        n = int(keys.size)
        return self._prepared("hkv_erase", n, keys, placed.slots, n)

    def giving_rows(
        self, placed: Placed, spare: Array, rows: Array, counts: Array, *, one_each: bool
    ) -> Action:
        """Prepares to give row numbers to keys that were placed.

        Args:
          spare: (m,) uint32, rows that nobody holds, at least as many as free slots were taken.
          rows: (n,) uint32, gets the row number of each key, or ABSENT.
          counts: (3,) int64, grow by the spare rows used, the keys placed and those evicted.
          one_each: key i gets spare[i], for m = n keys that have evicted none; else those who need
            one use up the first ones, in no order.
        """
        n = int(rows.size)
        return self.backend.prepared(
            *("hkv_give_rows", n, self._slots, placed.slots, placed.evicted_rows),
            *(spare, int(spare.size), int(one_each), rows, counts, n),
        )

    def updating(
        self, keys: Array, rows: Array | None = None, scores: Array | None = None
    ) -> list[Action]:
        """Prepares to write row numbers (n,) uint32 or scores (n,) uint64 of distinct keys; a
        missing key is skipped."""
        n = int(keys.size)
        stamps = None
        if scores is not None and self._scores is None:
            stamps, scores = scores.astype(np.uint32), None
        return [self._prepared("hkv_update", n, keys, rows, stamps, scores, n)]

    def scores(self, keys: Array) -> Array:
        """Returns the scores (n,) uint64 of keys; 0 for a missing one."""
        n = int(keys.size)
        out = self.backend.xp.empty(n, np.uint64)
        self._launch("hkv_scores", n, keys, out, n)
        return out

    def slot_scores(self, stamps: Array, slots: Array) -> Array:
        """Returns the scores (n,) uint64 of entries."""
        return stamps.astype(np.uint64) if self._scores is None else self._scores[slots]

    def erasing(self, keys: Array) -> list[Action]:
        """Prepares to erase distinct keys that are all there."""
        n = int(keys.size)
        erase = self._prepared("hkv_erase", n, keys, None, n)
        return [erase, *setting(self, size=self.size - n)]

    def clean(self) -> None:
        """Does nothing: a slot that was erased is as good as one that was never used."""

    def clearing(self) -> list[Action]:
        capacity = self._init_capacity
        slots, scores = self._new_slots(capacity), self._new_scores(capacity)
        return setting(self, _slots=slots, _scores=scores, capacity=capacity, size=0)

    def reserve(self, num_keys: int) -> None:
        self.make_room(max(0, num_keys - self.size))

    def double(self) -> None:
        """Doubles the slots. Row numbers, stamps and scores stay.

        Raises:
          MemoryError: no memory; the index is as it was.
        """
        capacity = 2 * self.capacity
        slots, scores = self._new_slots(capacity), self._new_scores(capacity)
        self._launch("hkv_split", self.capacity // self.bucket, slots, scores)
        slots[-2:] = self._slots[-2:]
        if scores is not None and self._scores is not None:
            scores[-2:] = self._scores[-2:]
        num_rehashes = self.num_rehashes + 1
        publish(
            setting(
                self, _slots=slots, _scores=scores, capacity=capacity, num_rehashes=num_rehashes
            )
        )

    def aged(self, scores: Array) -> Array:
        if self.strategy == "kLru":
            return super().aged(scores)
        if self.strategy != "kEpochLru":
            return scores
        stamps = scores & np.uint64(LAST_STAMP)
        return (scores - stamps) | super().aged(stamps)

    def _aged_scores(self) -> Array | None:
        return self._scores if self.strategy == "kEpochLru" else None

    def _lines_read(self, held: IndexEntries) -> Array:
        first, _, line = self.homes_of(held.keys)
        in_bucket = held.slots & (self.bucket - 1)
        lines = ((in_bucket - line) & (self.bucket - 1)) // LINE + 1
        return lines + np.int64(self.bucket // LINE) * (held.slots - in_bucket != first)

    def homes_of(self, keys: Array) -> tuple[Array, Array, Array]:
        """Returns the first slots of each key's two buckets and its line there, (n,) int64 each.

        The same rule as in kernels/hkv/hkv.cuh.
        """
        h = hash_keys(keys)
        mask = np.uint64(self.capacity // self.bucket - 1)
        low = h & np.uint64(0xFFFFFFFF)
        bucket = np.int64(self.bucket)
        first = (low & mask).astype(np.int64) * bucket
        second = ((h >> np.uint64(32)) & mask).astype(np.int64) * bucket
        line = (h >> np.uint64(24)).astype(np.int64) & (bucket - 1) & ~np.int64(LINE - 1)
        return first, second, line

    # ---------------------------------------------------------------- made anew from what was saved

    def emptied(self, capacity: int | None = None) -> "HkvIndex":
        """Returns an index like this one without keys, of `capacity` slots; None: as at first."""
        index = HkvIndex(
            self.backend,
            self.key_dtype,
            self.name,
            init_capacity=self._init_capacity if capacity is None else capacity,
            max_capacity=self.max_capacity,
            bucket=self.bucket,
            max_load_factor=self.max_load_factor,
            strategy=self.strategy,
        )
        index._init_capacity = self._init_capacity
        return index

    def insert_all(self, keys: Array) -> int:
        """Inserts distinct keys (n,) into an empty index, whose row numbers become 0 to n - 1.

        Returns:
          How many found no room at `max_capacity`.
        """
        xp = self.backend.xp
        at = xp.arange(keys.size)
        while True:
            placed, n = self.unplaced(int(at.size)), int(at.size)
            counts = xp.zeros(3, np.int64)
            rows, spare = xp.empty(n, np.uint32), at.astype(np.uint32)
            self.placing(keys[at], 1, None, placed, xp.zeros(1, np.int64))()
            self.giving_rows(placed, spare, rows, counts, one_each=True)()
            self.size += int(counts[1])
            at = at[placed.slots < 0]
            if at.size == 0 or self.is_full_size:
                return int(at.size)
            self.double()

    def with_keys_in(self, keys: Array, slots: Array, capacity: int) -> "tuple[HkvIndex, Array]":
        """Returns a new index with distinct keys in the slots that they had in another like it.

        Args:
          slots: (n,) int64.
          capacity: of the other; if it is less than this one begins with, the new one is doubled.

        Returns:
          (index, slots (n,) int64 of the keys in it).

        Raises:
          ValueError: a slot is none of its key's.
        """
        xp = self.backend.xp
        index = self.emptied(capacity)
        first, second, _ = index.homes_of(keys)
        at = slots & ~np.int64(self.bucket - 1)
        fits = (at == first) | (at == second)
        for side, key in enumerate(self._reserved()):
            fits = xp.where(keys == np.int64(key), slots == capacity + side, fits)
        if not bool(fits.all()) or int(xp.unique(slots).size) < int(keys.size):
            raise ValueError(
                f"What was saved of table {self.name!r} is corrupt: keys and slots contradict "
                "each other. Nothing was changed."
            )
        usual = slots < capacity  # the last two slots do not hold their key
        index._slots[slots[usual], 0] = keys[usual]
        index._slots.view(np.uint32)[slots, 2] = xp.arange(keys.size, dtype=np.uint32)
        index.size = int(keys.size)
        while index.capacity < self._init_capacity:
            index.double()
        return index, index.slots_of_rows(int(keys.size))

    def slots_of_rows(self, n: int) -> Array:
        """Returns the slots (n,) int64 of keys whose row numbers are 0 to n - 1."""
        held = self.entries()
        slots = self.backend.xp.empty(n, np.int64)
        slots[held.rows] = held.slots
        return slots

    def write(self, slots: Array, rows: Array, stamps: Array, scores: Array | None) -> None:
        """Writes what slots know of their keys.

        Args:
          slots: (n,) int64, distinct, all of them held.
          rows, stamps: (n,) uint32.
          scores: (n,) uint64; None where the stamps are the scores.
        """
        words = self._slots.view(np.uint32)
        words[slots, 2] = rows
        words[slots, 3] = stamps
        if self._scores is not None:
            self._scores[slots] = scores

    def initial_scores(self, stamps: Array) -> Array:
        """Returns the scores (n,) uint64 of keys that lookups of those numbers saw first."""
        epoch = np.uint64(self.epoch << 32)
        if self.strategy == "kEpochLru":
            return epoch | stamps.astype(np.uint64)
        one = {"kLfu": np.uint64(1), "kEpochLfu": epoch | np.uint64(1)}
        return self.backend.xp.full(stamps.size, one.get(self.strategy, np.uint64(0)), np.uint64)

    # ---------------------------------------------------------------- inside

    def _prepared(self, kernel: str, num_items: int, *args: object) -> Action:
        return self.backend.prepared(
            *(kernel, num_items, self._slots, self._scores, self.capacity, self.bucket),
            *(*self._reserved(), *args),
        )

    def _new_scores(self, capacity: int) -> Array | None:
        if self.strategy == "kLru":
            return None  # the stamps are the scores
        try:
            return self.backend.zeros_chunk(8 * (capacity + 2)).view(np.uint64)
        except MemoryError as error:
            raise MemoryError(
                f"No memory for the scores of table {self.name!r}: {8 * capacity:,} bytes for "
                f"{capacity:,} slots. It is as it was, with {self.size:,} keys."
            ) from error

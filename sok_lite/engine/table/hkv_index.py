"""The index of the "hybrid" table: buckets with scores (kernels/hkv), up to a maximum capacity."""

import contextlib
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import LaunchArgs
from sok_lite.backend.launches import Launch
from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.hashing import hash_keys, seed_after
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.table.directory import LINE, Directory, Segment, SizePolicy, fast_range
from sok_lite.engine.table.hkv_options import STRATEGIES, HkvOptions
from sok_lite.engine.table.index import Index, IndexEntries
from sok_lite.engine.table.record import LAST_LOOKUP_NUMBER

_CUSTOMIZED = STRATEGIES.index("kCustomized")
# Segments begin to be split at this share of the number of keys at which the capacity doubles.
_SPLITS_FROM = 0.7
# Load factor below which both buckets of a key are not full by chance, by slots per bucket.
_SPARSE, _SPARSE_FROM_16 = {4: 0.01, 8: 0.05}, 0.2


class Placement(NamedTuple):
    """The slots of inserted keys, and what was evicted from them.

    Attributes:
      slots: (n,) int64, slot addresses; 0: the key was refused.
      evicted_keys, evicted_rows, evicted_scores: (n,) int64, uint32, uint64; the row is NO_ROW
        where the slot was free.
    """

    slots: Array
    evicted_keys: Array
    evicted_rows: Array
    evicted_scores: Array


class HkvIndex(Index):
    """Row numbers and scores by key. Keys are int64 arrays (n,).

    A segment doubles while it is small, and is then split into two: each bucket becomes two, so
    that all keys find slots. The first segments are split before the capacity doubles, to spread
    the work: there can be more slots than `capacity`.

    Args:
      capacity: initial number of slots; None: that of the options.
      seed: of the hash of keys; None: a new one.

    Attributes:
      max_capacity, bucket, max_load_factor, strategy: of the options.
    """

    def __init__(
        self,
        backend: Backend,
        key_dtype: KeyDtype,
        name: str,
        options: HkvOptions,
        capacity: int | None = None,
        seed: int | None = None,
    ) -> None:
        self._options = options
        self.max_capacity, self.bucket = options.max_capacity, options.bucket
        self.max_load_factor, self.strategy = options.max_load_factor, options.evict_strategy
        self.scores_age = self.strategy == "kEpochLru"
        self._sparse_load = _SPARSE.get(self.bucket, _SPARSE_FROM_16)
        self._capacity = 0
        sizes, is_scored = SizePolicy.of(backend, self.bucket, 1), self.strategy != "kLru"
        init_slots = max(options.init_capacity, self.bucket)
        capacity = init_slots if capacity is None else capacity
        super().__init__(backend, key_dtype, name, sizes, capacity, is_scored, seed)
        self.init_slots = self.least_slots = init_slots
        self.record.strategy = STRATEGIES.index(self.strategy)
        self._set_capacity(capacity)

    @property
    def epoch(self) -> int:
        """The current epoch, for kEpochLru and kEpochLfu."""
        return self.record.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.record.epoch = epoch

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def is_at_max_capacity(self) -> bool:
        """Whether it cannot grow further."""
        return self.directory.num_slots >= self.max_capacity

    @property
    def is_nearly_full(self) -> bool:
        """Whether most keys find no free slot: two buckets have less than one on average."""
        num_slots = self.directory.num_slots
        return (num_slots - self.size) * 2 * self.bucket < num_slots

    @property
    def room(self) -> int:
        """How many keys can be inserted without eviction, at most."""
        return self.max_capacity + 2 - self.size

    def make_room(self, count: int) -> None:
        """Grows, up to `max_capacity`, for `count` more keys below the load factor.

        Raises:
          MemoryError: no memory; all keys are as they were.
        """
        num_keys = self.size + count
        capacity = self._capacity_for(num_keys, self._capacity)
        self._grow(capacity, self._slots_for(num_keys, capacity))

    def update_launch(
        self,
        keys: Array,
        rows: Array | None = None,
        scores: Array | None = None,
        last_seen: Array | None = None,
    ) -> Launch:
        """Returns the launch that writes row numbers and `last_seen`, (n,) uint32, and scores, (n,)
        uint64, of distinct keys. Missing keys are skipped."""
        n = int(keys.size)
        if scores is not None and not self.has_scores:
            last_seen, scores = scores.astype(np.uint32), None
        return self.prepared("hkv_update", n, keys, rows, last_seen, scores, n)

    def new_placement(self, num_keys: int) -> Placement:
        """Returns uninitialized memory for the placement of keys."""
        dtypes = (np.int64, np.int64, np.uint32, np.uint64)
        return Placement(*(self.backend.xp.empty(num_keys, dtype) for dtype in dtypes))

    def reserve_launch(
        self,
        keys: Array,
        lookup_number: int,
        caller_scores: Array | None,
        placed: Placement,
        counts: Array,
        claim: Claim | None = None,
        rows: Array | None = None,
        *,
        are_scores: bool = False,
        scores_follow: bool = False,
    ) -> Launch:
        """Returns the launch that gives slots to distinct new keys. The caller changes `size`.

        With a claim, keys get rows and, where both of their buckets are full, evict others.
        Without one, such keys are refused, and the others are not found before they get rows, by
        `store.give_rows_launches` or `write_rows`.

        Args:
          caller_scores: (n,) uint64, increments (kLfu, kEpochLfu) or scores (kCustomized); None: 1
            for each key, or 0 (kCustomized).
          placed: output.
          counts: (4,) int64, grow by the keys refused and, with a claim, by the rows of it that are
            used, the keys placed and the keys evicted. Without a claim (1,) is enough.
          claim: rows for the keys in free slots; the first ones are used, in no order.
          rows: (n,) uint32, with a claim: output, the row number of each key, or NO_ROW.
          are_scores: whether `caller_scores` are scores, whatever the strategy. A key with a score
            below all that it could evict is refused.
          scores_follow: whether the caller will write the scores of keys that have none yet, which
            are then not refused for their score.
        """
        n, may_evict = int(keys.size), 0 if claim is None else 1 + self.is_nearly_full
        strategy, epoch = self.record.strategy, self.record.epoch
        if are_scores and caller_scores is not None:
            strategy = _CUSTOMIZED
        has_score = caller_scores is not None or not scores_follow
        may_refuse = has_score and strategy == _CUSTOMIZED
        claimed = (None, 0, 0, 0, None, 0) if claim is None else claim.words
        return self.prepared(
            *("hkv_insert", n, lookup_number, strategy, epoch, may_evict, int(may_refuse)),
            *(caller_scores, keys, *placed, *claimed, rows, counts, n),
        )

    def take_back(self, keys: Array, placed: Placement) -> None:
        """Undoes `reserve_launch` without a claim."""
        n = int(keys.size)
        self.launch("hkv_erase", n, keys, placed.slots, n)

    def scores(self, keys: Array) -> Array:
        """Returns the scores (n,) uint64 of keys; 0 for a missing key."""
        n = int(keys.size)
        out = self.backend.xp.empty(n, np.uint64)
        self.launch("hkv_scores", n, keys, out, n)
        return out

    def last_seen(self, keys: Array) -> Array:
        n = int(keys.size)
        out = self.backend.xp.empty(n, np.uint32)
        self.launch("hkv_stamps", n, keys, out, n)
        return out

    def erase(self, keys: Array) -> None:
        n = int(keys.size)
        self.launch("hkv_erase", n, keys, None, n)
        self.record.size -= n

    def clean(self) -> None:
        """Shrinks where a fraction of the slots is enough for the keys that are left."""
        capacity = self._capacity_for(2 * self.size, max(self.least_slots, self.bucket))
        if capacity >= self._capacity:
            return
        # It is not necessary, so that a lack of memory is no error.
        with contextlib.suppress(MemoryError):
            self._rehash_into(self.empty_copy(capacity, self.seed), self._capacity // 2)

    def is_sparse(self, count: int) -> bool:
        """Whether `count` more keys would find free slots, unless they are chosen to collide."""
        return self.size + count < self._sparse_load * self.directory.num_slots

    def reseed(self) -> bool:
        """Rehashes a sparse index with a new seed.

        Returns:
          False if keys collide with that seed as well; then nothing has changed.

        Raises:
          MemoryError: no memory for a second index; the index is as it was.
        """
        other = self.empty_copy(self._capacity, seed_after(self.seed))
        return self._rehash_into(other, self._capacity)

    def _rehash_into(self, other: "HkvIndex", most: int) -> bool:
        """Inserts all keys into another, empty index, and takes its segments.

        Returns:
          False if keys find no room there in `most` slots; then nothing has changed.
        """
        entries = self.entries()
        if other.insert_all(entries.keys, most):
            return False
        scores = entries.scores if self.has_scores else None
        other.update(entries.keys, entries.rows, scores, entries.last_seen)
        num_segments = len(self.directory.segments)
        with uninterrupted():
            self.set_segments(other.directory, other.side)
            self.num_rehashes += num_segments
            self._set_capacity(other._capacity)
        return True

    def clear(self, empty: tuple[Directory, Array] | None = None) -> None:
        super().clear(empty)
        self._capacity = self.init_slots  # until it grows, native code inserts no keys

    def set_segments(self, directory: Directory, side: Array | None = None) -> None:
        super().set_segments(directory, side)
        self.record.most_keys = 0  # until `_set_capacity`

    def _set_capacity(self, capacity: int) -> None:
        """Sets the capacity, and up to how many keys native code may insert."""
        directory = self.directory

        def is_too_small(num_keys: int) -> bool:
            grows = self._capacity_for(num_keys, capacity) > capacity
            return grows or self._slots_for(num_keys, capacity) > directory.num_slots

        most = 0
        if capacity <= directory.effective_slots:
            most = bisect_left(range(1, directory.num_slots + 1), True, key=is_too_small)
        if directory.num_slots >= self.max_capacity:  # unless it is sparse, insertion evicts
            most = min(most, math.ceil(self._sparse_load * directory.num_slots) - 1)
        self._capacity, self.record.most_keys = capacity, most

    def reserve(self, num_keys: int) -> None:
        self.make_room(max(0, num_keys - self.size))
        capacity = self._capacity_for(num_keys, self.least_slots)
        self.least_slots = max(self.least_slots, capacity)

    def double(self) -> None:
        """Doubles the capacity, or raises MemoryError; all keys are as they were."""
        capacity = min(2 * self._capacity, self.max_capacity)
        self._grow(capacity, capacity)

    def decay(self, factor: float) -> None:
        scores: list[Any] = [segment.scores for segment in self.directory.segments]
        scores.append(self.side[4:].view(np.uint64))
        has_epochs = int(self.strategy == "kEpochLfu")
        parts = [LaunchArgs(int(x.size), (x, has_epochs, factor, int(x.size))) for x in scores]
        self.backend.launch_tables("scores_decay", parts)

    def age_scores(self, scores: Array) -> Array:
        if self.strategy == "kLru":
            return super().age_scores(scores)
        if not self.scores_age:
            return scores
        last_seen = scores & np.uint64(LAST_LOOKUP_NUMBER)
        return (scores - last_seen) | super().age_scores(last_seen)

    def cap_scores(self, scores: Array, last: np.uint32) -> Array:
        """Returns scores (n,) uint64 in which no lookup number is above `last`."""
        if not self.scores_age:
            return scores
        last_seen = scores & np.uint64(LAST_LOOKUP_NUMBER)
        return (scores - last_seen) | self.backend.xp.minimum(last_seen, np.uint64(last))

    def probe_lengths_of(self, entries: IndexEntries) -> Array:
        first, _, line = self.homes_of(entries.keys)
        # In other lines digests lead to the slot. Equal digests of other keys are rare enough.
        return 1 + (entries.slots // LINE != (first + line) // LINE).astype(np.int64)

    def homes_of(self, keys: Array) -> tuple[Array, Array, Array]:
        """Returns the first slots of each key's two buckets and its line there, (n,) int64 each; as
        kernels/hkv/hkv.cuh."""
        hashes, starts, sizes = self.directory.homes(keys)
        bucket = np.int64(self.bucket)
        first = starts + fast_range(hashes, sizes) * bucket
        second = starts + fast_range(hashes >> np.uint64(16), sizes) * bucket
        line = (hashes & np.uint64(self.bucket - 1)).astype(np.int64) & ~np.int64(LINE - 1)
        return first, second, line

    def digests_of(self, keys: Array) -> Array:
        """Returns the digests of keys, (n,) uint8; as kernels/hkv/hkv.cuh."""
        return (hash_keys(keys, self.seed) >> np.uint64(56)).astype(np.uint8)

    # ---------------------------------------------------------------- restoring

    def empty_copy(self, capacity: int | None = None, seed: int | None = None) -> "HkvIndex":
        """Returns an index like this one without keys."""
        kind = (self.backend, self.key_dtype, self.name, self._options)
        return HkvIndex(*kind, capacity, seed)

    def insert_all(self, keys: Array, most: int | None = None, first: int = 0) -> int:
        """Inserts distinct new keys (n,). Nothing else may use the index meanwhile.

        Args:
          most: slots up to which it doubles, unless it is sparse; None: `max_capacity`.
          first: row number of the first key; the next keys get the next ones.

        Returns:
          How many keys found no room.
        """
        most = self.max_capacity if most is None else most
        xp = self.backend.xp
        at = xp.arange(keys.size)
        while True:
            n = int(at.size)
            placed = self.new_placement(n)
            num_refused = xp.zeros(1, np.int64)
            self.reserve_launch(keys[at], 1, None, placed, num_refused)()
            self.write_rows(placed.slots, (at + first).astype(np.uint32))
            self.record.size += n - int(num_refused[0])
            at = at[placed.slots == 0]
            if at.size == 0 or 2 * self._capacity > most or self.is_sparse(int(at.size)):
                return int(at.size)
            self.double()

    @property
    def is_regular(self) -> bool:
        """Whether the shapes of segments follow from the number of slots. They do not if a growth
        was cut short."""
        return self.directory.shapes == self.sizes.shapes(self.directory.num_slots)

    def adopt_capacity(self, capacity: int) -> None:
        """Takes the capacity of a saved index, after its slots, and grows to the initial one."""
        self._set_capacity(capacity)
        if capacity < self.init_slots:
            self._grow(self.init_slots, self.init_slots)

    def initial_scores(self, last_seen: Array) -> Array:
        """Returns the scores (n,) uint64 of keys that were inserted by the lookups `last_seen`."""
        epoch = np.uint64(self.epoch << 32)
        if self.strategy == "kEpochLru":
            return epoch | last_seen.astype(np.uint64)
        one = {"kLfu": np.uint64(1), "kEpochLfu": epoch | np.uint64(1)}
        return self.backend.xp.full(last_seen.size, one.get(self.strategy, np.uint64(0)), np.uint64)

    # ---------------------------------------------------------------- inside

    def move_keys(self, segments: Sequence[Segment], directory: Directory) -> bool:
        where = (directory.table, directory.hashing, *self.kernel_args()[2:])
        parts = []
        for segment in segments:
            n = segment.shape.slots // self.bucket
            parts.append(LaunchArgs(n, (segment.slots, n, *where)))
        self.backend.launch_tables("hkv_move", parts)
        return True

    def _capacity_for(self, num_keys: int, capacity: int) -> int:
        return capacity_for(num_keys, capacity, self.max_capacity, self.max_load_factor)

    def _slots_for(self, num_keys: int, capacity: int) -> int:
        limits = (self.max_capacity, self.max_load_factor)
        return slots_for(num_keys, capacity, *limits, self.sizes.unit)

    def _grow(self, capacity: int, num_slots: int) -> None:
        # Some segments are smaller than others if an earlier growth was cut short.
        is_crowded = capacity > self.directory.effective_slots
        if num_slots > self.directory.num_slots or is_crowded:
            self.resize(num_slots)
        if capacity != self._capacity or self.record.most_keys == 0:
            self._set_capacity(capacity)


def capacity_for(num_keys: int, capacity: int, max_capacity: int, max_load_factor: float) -> int:
    """Returns the capacity for `num_keys` keys: `capacity`, doubled as often as needed."""
    while capacity < max_capacity and num_keys > max_load_factor * capacity:
        capacity *= 2
    return capacity


def slots_for(
    num_keys: int, capacity: int, max_capacity: int, max_load_factor: float, unit: int
) -> int:
    """Returns the number of slots for `num_keys` keys at a capacity.

    From `_SPLITS_FROM` on, segments of `unit` slots are split one after the other, so that no split
    is left to do when the capacity doubles.
    """
    num_segments = capacity // unit
    most = max_load_factor * capacity
    if capacity >= max_capacity or num_segments == 0 or num_keys <= _SPLITS_FROM * most:
        return capacity
    part = (num_keys / most - _SPLITS_FROM) / (1 - _SPLITS_FROM)
    return capacity + min(num_segments - 1, int(num_segments * part)) * unit

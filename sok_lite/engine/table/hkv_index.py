"""The index of the "hybrid" table: buckets with scores (kernels/hkv), up to a number of slots."""

import contextlib
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import Work
from sok_lite.backend.launches import Launch
from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.hashing import hash_keys, seed_after
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.table.directory import LINE, Directory, Segment, Sizes, scaled
from sok_lite.engine.table.hkv_options import STRATEGIES
from sok_lite.engine.table.index import LAST_LOOKUP_NUMBER, Index, IndexEntries

_CUSTOMIZED = STRATEGIES.index("kCustomized")
# Share of the keys at which the capacity doubles, from which on segments are split.
_SPLITS_FROM = 0.7
# Share of the slots in use below which no two buckets are full by chance, by the slots of a bucket.
_SPARSE = {4: 0.01, 8: 0.05}
_SPARSE_FROM_16 = 0.2


class Placed(NamedTuple):
    """The slots of keys that were inserted, and what they have evicted.

    Attributes:
      slots: (n,) int64, the address of its slot; 0 for a refused key.
      evicted_keys, evicted_rows, evicted_scores: (n,) int64, uint32, uint64: what was in the slot;
        row NO_ROW where it was free.
    """

    slots: Array
    evicted_keys: Array
    evicted_rows: Array
    evicted_scores: Array


class HkvIndex(Index):
    """Row numbers and scores by key. Keys are int64 arrays (n,).

    A segment grows by being split in two as large, or by doubling where it is small: each of its
    buckets then becomes two, and all keys have room. So that not all are split at once, the first
    are before the capacity doubles: there can be more slots than `capacity`.

    Attributes:
      max_capacity: it doubles up to this number of slots; then insertion evicts.
      bucket: slots of a bucket.
      max_load_factor: share of the slots in use above which it doubles.
      strategy: one of STRATEGIES.
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
        seed: int | None = None,
    ) -> None:
        self.max_capacity = max_capacity
        self.bucket = bucket
        self.max_load_factor = max_load_factor
        self.strategy = strategy
        self._capacity = 0
        sizes = Sizes.of(backend, bucket, 1)
        super().__init__(backend, key_dtype, name, sizes, init_capacity, strategy != "kLru", seed)
        self.record.strategy = STRATEGIES.index(strategy)
        self._set_capacity(init_capacity)

    @property
    def epoch(self) -> int:
        """The current one, for kEpochLru and kEpochLfu."""
        return self.record.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.record.epoch = epoch

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def is_full_size(self) -> bool:
        """Whether it grows no more."""
        return self.directory.num_slots >= self.max_capacity

    @property
    def looks_full(self) -> bool:
        """Whether most keys find no free slot: two buckets have less than one on average."""
        num_slots = self.directory.num_slots
        return (num_slots - self.size) * 2 * self.bucket < num_slots

    @property
    def room(self) -> int:
        """The most keys that can still come without eviction."""
        return self.max_capacity + 2 - self.size

    def score_rule(self, refreshes: bool = True) -> tuple[int, int]:
        # Of kCustomized they change only where somebody gives others.
        strategy, epoch = super().score_rule()
        return strategy if refreshes else _CUSTOMIZED, epoch

    def make_room(self, count: int) -> None:
        """Doubles, as far as it may, until `count` more keys keep below the load factor.

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
        """Returns the launch that writes row numbers (n,) uint32, `last_seen` (n,) uint32 or scores
        (n,) uint64 of distinct keys; a missing key is skipped."""
        n = int(keys.size)
        if scores is not None and not self.has_scores:
            last_seen, scores = scores.astype(np.uint32), None
        return self.prepared("hkv_update", n, keys, rows, last_seen, scores, n)

    def unplaced(self, num_keys: int) -> Placed:
        """Returns memory for what becomes of keys."""
        dtypes = (np.int64, np.int64, np.uint32, np.uint64)
        return Placed(*(self.backend.xp.empty(num_keys, dtype) for dtype in dtypes))

    def reserve_launch(
        self,
        keys: Array,
        lookup_number: int,
        caller_scores: Array | None,
        placed: Placed,
        counts: Array,
        claim: Claim | None = None,
        rows: Array | None = None,
        *,
        are_scores: bool = False,
        scores_follow: bool = False,
    ) -> Launch:
        """Returns the launch that gives slots to distinct keys that are not there. The caller
        changes `size`.

        Args:
          caller_scores: (n,) uint64, increments (kLfu, kEpochLfu) or scores (kCustomized); None: 1
            of each, or 0 (kCustomized).
          placed: gets what becomes of the keys.
          counts: (4,) int64, grow by the keys that are refused and, with a claim, by its rows that
            are used, the keys placed and those evicted. Without a claim (1,) is enough.
          claim: rows, at least as many as free slots are taken: those who need one use up the
            first ones, in no order. A key then takes the place of another where both its buckets
            are full. None: it is refused there, and none gets a row, so that no search finds it:
            that comes with `store.list_launches` or `give_rows`.
          rows: (n,) uint32, with a claim, gets the row number of each key, or NO_ROW.
          are_scores: whether `caller_scores` are scores, whatever the strategy. Where a program
            says the scores, a key is refused whose score is below all that it could evict.
          scores_follow: whether the program gives keys that come without a score theirs
            afterwards: they are not refused for it.
        """
        n, may_evict = int(keys.size), 0 if claim is None else 1 + self.looks_full
        strategy, epoch = self.score_rule()
        if are_scores and caller_scores is not None:
            strategy = _CUSTOMIZED
        has_score = caller_scores is not None or not scores_follow
        may_refuse = has_score and strategy == _CUSTOMIZED
        claimed = (None, 0, 0, 0, None, 0) if claim is None else claim.words
        return self.prepared(
            *("hkv_insert", n, lookup_number, strategy, epoch, may_evict, int(may_refuse)),
            *(caller_scores, keys, *placed, *claimed, rows, counts, n),
        )

    def take_back(self, keys: Array, placed: Placed) -> None:
        """Undoes `reserve_launch` of keys that have evicted none and have no rows yet."""
        n = int(keys.size)
        self.launch("hkv_erase", n, keys, placed.slots, n)

    def scores(self, keys: Array) -> Array:
        """Returns the scores (n,) uint64 of keys; 0 for a missing one."""
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
        """Gives memory back where a fraction of it would do for the keys that are left."""
        capacity = self._capacity_for(2 * self.size, max(self.least_slots, self.bucket))
        if capacity >= self._capacity:
            return
        # Without the memory for a smaller one it works on as it is.
        with contextlib.suppress(MemoryError):
            self._move_into(self.emptied(capacity, self.seed), self._capacity // 2)

    def is_sparse(self, count: int) -> bool:
        """Whether `count` more keys would find room by far, if no one had chosen them."""
        share = _SPARSE.get(self.bucket, _SPARSE_FROM_16)
        return self.size + count < share * self.directory.num_slots

    def take_new_seed(self) -> bool:
        """Gives every key another place, where the index is sparse.

        Returns:
          Whether it did: the keys may lie badly there too.

        Raises:
          MemoryError: no memory for all of the index beside what it is; it is as it was.
        """
        other = self.emptied(self._capacity, seed_after(self.seed))
        return self._move_into(other, self._capacity)

    def _move_into(self, other: "HkvIndex", most: int) -> bool:
        """Becomes another index, which is empty, with the keys of this one.

        Returns:
          Whether it did: not where these find no room in `most` slots.
        """
        entries = self.entries()
        if other.insert_all(entries.keys, most):
            return False
        scores = entries.scores if self.has_scores else None
        other.update(entries.keys, entries.rows, scores, entries.last_seen)
        num_segments = len(self.directory.segments)
        with uninterrupted():
            self.set_place(other.directory, other.side)
            self.num_rehashes += num_segments
            self._set_capacity(other._capacity)
        return True

    def clear(self, place: tuple[Directory, Array] | None = None) -> None:
        super().clear(place)
        self._capacity = self.init_slots  # until it grows, native code inserts none

    def set_place(self, directory: Directory, side: Array | None = None) -> None:
        super().set_place(directory, side)
        self.record.most_keys = 0  # `_set_capacity` follows

    def _set_capacity(self, capacity: int) -> None:
        """Has a capacity from now on."""
        directory = self.directory

        def is_too_small(num_keys: int) -> bool:
            grows = self._capacity_for(num_keys, capacity) > capacity
            return grows or self._slots_for(num_keys, capacity) > directory.num_slots

        most = 0
        if capacity <= directory.densest:
            most = bisect_left(range(1, directory.num_slots + 1), True, key=is_too_small)
        if directory.num_slots >= self.max_capacity:  # it evicts, but for keys in a sparse index
            share = _SPARSE.get(self.bucket, _SPARSE_FROM_16)
            most = min(most, math.ceil(share * directory.num_slots) - 1)
        self._capacity, self.record.most_keys = capacity, most

    def reserve(self, num_keys: int) -> None:
        self.make_room(max(0, num_keys - self.size))
        capacity = self._capacity_for(num_keys, self.least_slots)
        self.least_slots = max(self.least_slots, capacity)

    def double(self) -> None:
        """Doubles the slots. Row numbers, `last_seen` and scores stay.

        Raises:
          MemoryError: no memory; all keys are as they were.
        """
        capacity = min(2 * self._capacity, self.max_capacity)
        self._grow(capacity, capacity)

    def decay(self, factor: float) -> None:
        beside = self.side[4:].view(np.uint64)
        has_epochs = int(self.strategy == "kEpochLfu")
        parts = [
            Work(int(scores.size), (scores, has_epochs, factor, int(scores.size)))
            for scores in (*(segment.scores for segment in self.directory.segments), beside)
        ]
        self.backend.launch_parts("scores_decay", parts)

    def aged(self, scores: Array) -> Array:
        if self.strategy == "kLru":
            return super().aged(scores)
        if self.strategy != "kEpochLru":
            return scores
        last_seen = scores & np.uint64(LAST_LOOKUP_NUMBER)
        return (scores - last_seen) | super().aged(last_seen)

    def not_after(self, scores: Array, last: np.uint32) -> Array:
        """Returns scores (n,) uint64 that say of no key that a later lookup than `last` saw it."""
        if self.strategy != "kEpochLru":
            return scores
        last_seen = scores & np.uint64(LAST_LOOKUP_NUMBER)
        return (scores - last_seen) | self.backend.xp.minimum(last_seen, np.uint64(last))

    def has_aging_scores(self) -> bool:
        return self.strategy == "kEpochLru"

    def lines_read(self, entries: IndexEntries) -> Array:
        first, _, line = self.homes_of(entries.keys)
        # Elsewhere digests say where. The few lines that have the same one by chance do not count.
        return 1 + (entries.slots // LINE != (first + line) // LINE).astype(np.int64)

    def homes_of(self, keys: Array) -> tuple[Array, Array, Array]:
        """Returns the first slots of each key's two buckets and its line there, (n,) int64 each.

        The same rule as in kernels/hkv/hkv.cuh.
        """
        hashes, starts, sizes = self.directory.homes(keys)
        bucket = np.int64(self.bucket)
        first = starts + scaled(hashes, sizes) * bucket
        second = starts + scaled(hashes >> np.uint64(16), sizes) * bucket
        line = (hashes & np.uint64(self.bucket - 1)).astype(np.int64) & ~np.int64(LINE - 1)
        return first, second, line

    def digests_of(self, keys: Array) -> Array:
        """Returns the digests of keys, (n,) uint8. The same rule as in kernels/hkv/hkv.cuh."""
        return (hash_keys(keys, self.seed) >> np.uint64(56)).astype(np.uint8)

    # ---------------------------------------------------------------- made anew from what was saved

    def emptied(self, capacity: int | None = None, seed: int | None = None) -> "HkvIndex":
        """Returns an index like this one without keys.

        Args:
          capacity: slots; None: as at first.
          seed: of the hash of keys; None: a new one.
        """
        index = HkvIndex(
            self.backend,
            self.key_dtype,
            self.name,
            init_capacity=self.init_slots if capacity is None else capacity,
            max_capacity=self.max_capacity,
            bucket=self.bucket,
            max_load_factor=self.max_load_factor,
            strategy=self.strategy,
            seed=seed,
        )
        index.init_slots = index.least_slots = self.init_slots
        return index

    def insert_all(self, keys: Array, most: int | None = None, first: int = 0) -> int:
        """Inserts distinct keys (n,) that are not there. Nothing else may use the index meanwhile.

        Args:
          most: slots up to which it doubles; None: `max_capacity`.
          first: their row numbers begin with it.

        Returns:
          How many found no room. Where it is sparse it does not double for these.
        """
        most = self.max_capacity if most is None else most
        xp = self.backend.xp
        at = xp.arange(keys.size)
        while True:
            n = int(at.size)
            placed = self.unplaced(n)
            num_refused = xp.zeros(1, np.int64)
            self.reserve_launch(keys[at], 1, None, placed, num_refused)()
            self.give_rows(placed.slots, (at + first).astype(np.uint32))
            self.record.size += n - int(num_refused[0])
            at = at[placed.slots == 0]
            if at.size == 0 or 2 * self._capacity > most or self.is_sparse(int(at.size)):
                return int(at.size)
            self.double()

    @property
    def is_regular(self) -> bool:
        """Whether the number of all slots says where each is; not where a growth has failed on its
        way."""
        return self.directory.shapes == self.sizes.shapes(self.directory.num_slots)

    def begin_from(self, capacity: int) -> None:
        """Takes the capacity of another index, whose slots it has, and grows if it began larger."""
        self._set_capacity(capacity)
        if capacity < self.init_slots:
            self._grow(self.init_slots, self.init_slots)

    def initial_scores(self, last_seen: Array) -> Array:
        """Returns the scores (n,) uint64 of keys that lookups of those numbers saw first."""
        epoch = np.uint64(self.epoch << 32)
        if self.strategy == "kEpochLru":
            return epoch | last_seen.astype(np.uint64)
        one = {"kLfu": np.uint64(1), "kEpochLfu": epoch | np.uint64(1)}
        return self.backend.xp.full(last_seen.size, one.get(self.strategy, np.uint64(0)), np.uint64)

    # ---------------------------------------------------------------- inside

    def prepared(self, kernel: str, num_items: int, *args: object) -> Launch:
        return self.backend.prepared(kernel, num_items, *self.place(), *args)

    def move(self, segments: Sequence[Segment], directory: Directory) -> bool:
        place = (directory.table, directory.hashing, self.side)
        where = (*place, int(self.has_scores), self.bucket)
        parts = []
        for slots in (segment.slots for segment in segments):
            n = int(slots.shape[0]) // self.bucket
            parts.append(Work(n, (slots, n, *where, *self.reserved_keys())))
        self.backend.launch_parts("hkv_move", parts)
        return True

    def _capacity_for(self, num_keys: int, capacity: int) -> int:
        """Returns the capacity that it has with so many keys, from one that it has on."""
        return capacity_for(num_keys, capacity, self.max_capacity, self.max_load_factor)

    def _slots_for(self, num_keys: int, capacity: int) -> int:
        """Returns how many slots there are for so many keys at a capacity."""
        limits = (self.max_capacity, self.max_load_factor)
        return slots_for(num_keys, capacity, *limits, self.sizes.unit)

    def _grow(self, capacity: int, num_slots: int) -> None:
        """Grows to a capacity, and so many slots."""
        # Where a growth has failed on its way, some segments are smaller than others.
        is_crowded = capacity > self.directory.densest
        if num_slots > self.directory.num_slots or is_crowded:
            self.resize(num_slots)
        if capacity != self._capacity or self.record.most_keys == 0:
            self._set_capacity(capacity)


def capacity_for(num_keys: int, capacity: int, max_capacity: int, max_load_factor: float) -> int:
    """Returns the capacity that an index has with so many keys, from one that it has on."""
    while capacity < max_capacity and num_keys > max_load_factor * capacity:
        capacity *= 2
    return capacity


def slots_for(
    num_keys: int, capacity: int, max_capacity: int, max_load_factor: float, unit: int
) -> int:
    """Returns how many slots an index has for so many keys at a capacity.

    From `_SPLITS_FROM` of the keys on at which the capacity doubles, segment after segment is
    split, so that none is loaded more then.

    Args:
      unit: slots of a segment where there are several.
    """
    num_segments = capacity // unit
    most = max_load_factor * capacity
    if capacity >= max_capacity or num_segments == 0 or num_keys <= _SPLITS_FROM * most:
        return capacity
    part = (num_keys / most - _SPLITS_FROM) / (1 - _SPLITS_FROM)
    return capacity + min(num_segments - 1, int(num_segments * part)) * unit

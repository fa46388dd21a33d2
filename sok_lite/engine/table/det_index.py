"""The index of the "hbm" table: open addressing (kernels/det), growing without bound."""

import contextlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import LaunchArgs
from sok_lite.backend.launches import Launch
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.table.directory import LINE, Directory, Segment, SizePolicy, fast_range
from sok_lite.engine.table.index import Index, IndexEntries

_MIN_CAPACITY = 64
# Up to this load a hit reads 1.2 lines of 4 slots on average.
_MAX_LOAD_FACTOR = 0.7
# Shares of tombstones, which lengthen every probe, above which segments are rebuilt: in an index
# with few keys, and in a crowded one. The latter is not 0, for a rebuild reads all slots.
_MAX_TOMBSTONES, _MAX_TOMBSTONES_CROWDED = 0.15, 0.05
# Lines after which a new key is refused: probes are so long only for keys chosen to collide.
MAX_PROBE_LINES = 1024 // LINE
_ALL_LINES = 0xFFFFFFFF
# Units of a segment that has just been split: it has 2 or 3. With 4 to 7 the index would take 27
# bytes a key and not 32; but keys move twice as often, and lookups read more lines.
_MIN_UNITS = 2
# It shrinks when it has more slots than for so many times its keys, and then to so many times.
_SHRINKS_ABOVE, _SHRINKS_TO = 2.0, 1.6


class DetIndex(Index):
    """Row numbers by key. Keys are int64 arrays (n,), the engine's form of every key type.

    An erased slot is a tombstone until a new key reuses it, or its segment is rebuilt.
    """

    def __init__(
        self, backend: Backend, key_dtype: KeyDtype, name: str = "table", init_capacity: int = 0
    ) -> None:
        # A lower bound of how many erased slots were reused, known without waiting for the device.
        self._num_reused = 0
        self._next_rebuilt = 0  # number of the segment to rebuild next
        # Erased slots that were reused or dropped, keys that found no slot, and slots erased, all
        # counted by kernels.
        self._counts = backend.xp.zeros(3, np.int64)
        sizes = sizes_of(backend)
        super().__init__(backend, key_dtype, name, sizes, slots_for(sizes, init_capacity))
        self.record.counts = backend.address(self._counts)

    @property
    def capacity(self) -> int:
        return self.directory.num_slots

    def empty_copy(self) -> "DetIndex":
        """Returns an index like this one without keys, as it was at first."""
        index = DetIndex(self.backend, self.key_dtype, self.name)
        index.init_slots = self.init_slots
        index.clear()
        return index

    def make_room(self, count: int) -> None:
        """Grows so that `count` keys can be inserted, or drops tombstones.

        Raises:
          MemoryError: no memory; all keys are as they were.
        """
        if not self._grow(self.size + count):
            open_slots = _MAX_LOAD_FACTOR * self.capacity - self.size - count
            self._drop_tombstones(
                max(open_slots, _MAX_TOMBSTONES_CROWDED * self.capacity), open_slots
            )

    def insert_launch(self, keys: Array, rows: Array, lookup_number: int) -> Launch:
        """Returns the launch that inserts distinct new keys, after `make_room`. The caller changes
        `size`.

        Args:
          keys: (n,) int64.
          rows: (n,) uint32; a key whose row is NO_ROW is skipped.
          lookup_number: their `last_seen`.
        """
        n = int(keys.size)
        counts = (self._counts, self._counts[1:])
        return self.prepared(
            "det_insert", n, lookup_number, keys, rows, _ALL_LINES, None, *counts, n
        )

    def reserve_launch(
        self, keys: Array, lookup_number: int, placed: Array, num_refused: Array
    ) -> Launch:
        """Returns the launch that gives slots, but no rows yet, to distinct new keys, after
        `make_room`. Until they have rows no search finds them. The caller changes `size`.

        Args:
          keys: (n,) int64.
          lookup_number: their `last_seen`.
          placed: (n,) int64, gets the address of each key's slot; 0: refused.
          num_refused: (1,) int64, grows by the keys without a slot in `MAX_PROBE_LINES`.
        """
        n = int(keys.size)
        to = (placed, self._counts, num_refused)
        return self.prepared("det_insert", n, lookup_number, keys, None, MAX_PROBE_LINES, *to, n)

    def has_room(self, count: int) -> bool:
        """Whether `count` more keys fit without growth."""
        return not self._is_too_small(self.size + count)

    def insert_items_launches(
        self,
        keys: Array,
        rows: Array,
        lookup_number: int,
        claim: Claim,
        to: tuple[Array, Array, Array],
        counts: Array,
    ) -> list[Launch]:
        """Returns the launches that insert new keys (n,) with duplicates, after `make_room`. The
        caller changes `size`.

        Args:
          rows: (n,) uint32; items with NO_ROW are inserted, and get the row of their key.
          lookup_number: `last_seen` of the keys, larger than that of any key in the index.
          claim: rows, one for each of these items; the first ones are used, in no order.
          to: outputs of each item: (n,) int64, the address of its key's slot, 0 if refused or not
            inserted; (n,) int32, the item's number, -1 if not inserted; (n,) uint32, the row for
            one item of each key, NO_ROW for its duplicates.
          counts: (2,) int64, grow by the items without a slot in `MAX_PROBE_LINES`, and by the
            distinct keys inserted.
        """
        n, placed = int(keys.size), to[0]
        insert = self.prepared(
            *("det_insert_items", n, lookup_number, keys, rows, MAX_PROBE_LINES),
            *(*claim.words, *to, self._counts, counts, n),
        )
        return [insert, self.backend.prepared("slots_tell_rows", n, placed, rows, n)]

    def take_back(self, keys: Array, placed: Array, rows: Array | None = None) -> None:
        """Undoes `reserve_launch`; with the `rows` from `to`, `insert_items_launches`."""
        n = int(keys.size)
        self.launch("det_erase", n, keys, rows, placed, self._counts, None, n)
        self.record.num_erased += n

    def reseed(self) -> None:
        """Rehashes the index with a new seed, after `check`; see `rehash`."""
        self.check()
        self.rehash(self.capacity)

    def insert(self, keys: Array, rows: Array, lookup_number: int) -> None:
        """Inserts distinct new keys with their row numbers at once, after `make_room`.

        Nothing else may use the index meanwhile. Errors are those of `rehash`.
        """
        xp, n = self.backend.xp, int(keys.size)
        for has_new_seed in (False, True):
            placed, num_refused = xp.empty(n, np.int64), xp.zeros(1, np.int64)
            self.reserve_launch(keys, lookup_number, placed, num_refused)()
            if not int(num_refused[0]):
                break
            self.take_back(keys, placed)
            if has_new_seed:
                raise self.hash_flooding_error()
            self.reseed()
        self.write_rows(placed, rows)
        self.record.size += n

    def check(self) -> None:
        """Raises RuntimeError if keys found no slot though the counters say that there is room."""
        failed = int(self._counts[1])
        if failed:
            raise RuntimeError(
                f"The index of table {self.name!r} is corrupt: {failed:,} keys found no free slot, "
                f"where {self.size:,} keys in {self.capacity:,} slots were counted. Restore the "
                "table from a checkpoint, and please report this."
            )

    def update_launch(
        self, keys: Array, rows: Array | None = None, last_seen: Array | None = None
    ) -> Launch:
        """Returns the launch that writes row numbers and `last_seen`, (n,) uint32, of distinct
        keys. Missing keys, and those whose new row is NO_ROW, are skipped."""
        n = int(keys.size)
        return self.prepared("det_update", n, keys, rows, last_seen, n)

    def last_seen(self, keys: Array) -> Array:
        n = int(keys.size)
        last_seen = self.backend.xp.zeros(n, np.uint32)
        self.launch("det_stamps", n, keys, last_seen, n)
        return last_seen

    def erase(self, keys: Array) -> None:
        n = int(keys.size)
        self.launch("det_erase", n, keys, None, None, self._counts, None, n)
        self.note_erased(n)

    def erase_found_launch(self, keys: Array, rows: Array, num_erased: Array) -> Launch:
        """Returns the launch that erases distinct keys. The caller calls `note_erased` afterwards.

        Args:
          keys: (n,) int64; missing keys are skipped.
          rows: (n,) uint32; a key whose row is NO_ROW here is skipped.
          num_erased: (1,) int64, grows by the erased keys.
        """
        n = int(keys.size)
        return self.prepared("det_erase", n, keys, rows, None, self._counts, num_erased, n)

    def note_erased(self, count: int) -> None:
        """Counts erased keys."""
        self.record.size -= count
        self.record.num_erased += count

    def clean(self) -> None:
        """Shrinks an index of few keys, and drops tombstones where there are many."""
        # Neither is necessary, so that a lack of memory is no error.
        with contextlib.suppress(MemoryError):
            if self.capacity > self._slots_for(_SHRINKS_ABOVE * self.size):
                self.check()
                self.resize(self._slots_for(_SHRINKS_TO * self.size), grows=False)
        self._drop_tombstones(_MAX_TOMBSTONES * self.capacity, -self.capacity)

    def clear(self, empty: tuple[Directory, Array] | None = None) -> None:
        super().clear(empty)
        self.record.num_erased = self._num_reused = 0
        self._counts.fill(0)

    def reserve(self, num_keys: int) -> None:
        self._grow(num_keys)
        self.least_slots = max(self.least_slots, slots_for(self.sizes, num_keys))

    def probe_lengths_of(self, entries: IndexEntries) -> Array:
        hashes, starts, sizes = self.directory.homes(entries.keys)
        lines = (entries.slots - starts) // LINE - fast_range(hashes, sizes)
        return lines % sizes.astype(np.int64) + 1

    # ---------------------------------------------------------------- inside

    def _grow(self, num_keys: int) -> bool:
        """Grows for `num_keys` keys in all; returns whether it was too small."""
        if not self._is_too_small(num_keys):
            return False
        self.check()
        self.resize(self._slots_for(num_keys))
        return True

    def _is_too_small(self, num_keys: int) -> bool:
        # Some segments are smaller than others if an earlier growth was cut short.
        is_crowded = num_keys > _MAX_LOAD_FACTOR * self.directory.effective_slots
        return is_crowded or self._slots_for(num_keys) > self.capacity

    def _slots_for(self, num_keys: float) -> int:
        return max(self.least_slots, slots_for(self.sizes, num_keys))

    def prepared(self, kernel: str, num_items: int, *args: object) -> Launch:
        where = (self.directory.table, self.directory.hashing, self.side)
        return self.backend.prepared(kernel, num_items, *where, *self.reserved_keys(), *args)

    def move_keys(self, segments: Sequence[Segment], directory: Directory) -> bool:
        where = (directory.table, directory.hashing, self.side)
        counts = self.backend.xp.zeros(3, np.int64)
        parts = []
        for slots in (segment.slots for segment in segments):
            n = int(slots.shape[0])
            parts.append(LaunchArgs(n, (slots, n, *where, *self.reserved_keys(), counts)))
        self.backend.launch_tables("det_move", parts)
        if int(counts[1]):
            return False
        self._counts = self._counts + counts
        self.record.counts = self.backend.address(self._counts)
        return True

    def set_segments(self, directory: Directory, side: Array | None = None) -> None:
        super().set_segments(directory, side)
        # The largest number of keys for which `_is_too_small` is false, but for `least_slots`.
        most_by_load = int(_MAX_LOAD_FACTOR * directory.effective_slots)
        needed = partial(slots_for, self.sizes)
        most = bisect_right(range(most_by_load + 1), directory.num_slots, key=needed) - 1
        self.record.most_keys = most

    def _drop_tombstones(self, limit: float, allowed: float) -> None:
        """Rebuilds segments with tombstones, one by one.

        Args:
          limit: up to so many tombstones nothing is done.
          allowed: about how many may be left.
        """
        # It waits for the device only if the bounds known here do not decide.
        if self.record.num_erased - self._num_reused <= limit:
            return
        self.check()
        num_reused, _, num_erased = self.backend.to_host(self._counts).tolist()
        self.record.num_erased, self._num_reused = num_erased, num_reused
        num_tombstones, num_segments = num_erased - num_reused, len(self.directory.segments)
        if num_tombstones <= limit:
            return
        share = min(1.0, (num_tombstones - allowed) / num_tombstones)
        with contextlib.suppress(MemoryError):
            for _ in range(min(num_segments, int(share * num_segments) + 1)):
                segments = self.directory.segments
                at = self._next_rebuilt % num_segments
                before, one, after = segments[:at], segments[at], segments[at + 1 :]
                if not self.replace_segments(before, [one], [one.shape], after, self.capacity):
                    return
                self._next_rebuilt = at + 1


def sizes_of(backend: Backend | type[Backend]) -> SizePolicy:
    """Returns the sizes that an index of a backend can have."""
    return SizePolicy.of(backend, LINE, _MIN_UNITS)


def slots_for(sizes: SizePolicy, num_keys: float) -> int:
    """Returns the number of slots of an index for `num_keys` keys.

    No segment exceeds the load factor. Segments begin to grow at the load at which the first is too
    small, and all have grown when the last one has to.
    """
    wanted = max(_MIN_CAPACITY, int(num_keys / _MAX_LOAD_FACTOR) + 1)
    unit, first = sizes.unit, sizes.min_units
    depth = 0
    while wanted > (2 * first - 1) * unit << depth:
        depth += 1
    # In units a segment: at most 2 * first - 1, and above half of it where there are several.
    if 2 * wanted <= (2 * first - 1) * unit << depth:
        return sizes.round_up(wanted)
    if wanted > first * unit << depth:
        num_units = -(-wanted // unit) + (1 << depth) - 1
    else:  # twice as fast: the last step was to half as many segments
        num_units = -(-2 * wanted // unit) - ((first - 1) << depth) - 1
    return num_units * unit

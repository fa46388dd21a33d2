"""The index of the "hbm" table: open addressing (kernels/det), growing without bound."""

import contextlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import Work
from sok_lite.backend.launches import Launch
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.table.directory import LINE, Directory, Segment, Sizes, scaled
from sok_lite.engine.table.index import Index, IndexEntries

_MIN_CAPACITY = 64
# Lines of 4 slots stay short up to here (1.2 lines a hit).
_MAX_LOAD_FACTOR = 0.7
# Erased slots lengthen every probe until their segment is rebuilt: at once where there are many,
# and where keys crowd the index from a few on. Never for one or two, for that walks all slots.
_MAX_RECLAIM_FACTOR = 0.15
_MIN_RECLAIM_FACTOR = 0.05
# Lines after which a new key gets no slot: keys lie so badly only where somebody has chosen them.
MOST_LINES = 1024 // LINE
_ALL_LINES = 0xFFFFFFFF
# Units of a segment that has just been split: it has 2 or 3. With 4 to 7 the index would take 27
# bytes a key and not 32; but keys move twice as often, and lookups read more lines.
_FIRST = 2
# It shrinks where it has more slots than for so many times its keys, and then to so many times.
_SHRINKS_ABOVE, _SHRINKS_TO = 2.0, 1.6


class DetIndex(Index):
    """Row numbers by key. Keys are int64 arrays (n,), the engine's form of every key type."""

    def __init__(
        self, backend: Backend, key_dtype: KeyDtype, name: str = "table", init_capacity: int = 0
    ) -> None:
        # At least so many erased slots were used again: what is certain without a look at the
        # device.
        self._num_reused = 0
        self._next_rebuilt = 0  # number of the segment that is rebuilt next
        # Erased slots used again or gone, keys that found no slot, and slots erased. Kernels count
        # them, so that they are never behind what the slots hold.
        self._counts = backend.xp.zeros(3, np.int64)
        sizes = sizes_of(backend)
        super().__init__(backend, key_dtype, name, sizes, slots_for(sizes, init_capacity))
        self.record.counts = backend.address(self._counts)

    @property
    def capacity(self) -> int:
        return self.directory.num_slots

    def emptied(self) -> "DetIndex":
        """Returns an index like this one as it was at first."""
        index = DetIndex(self.backend, self.key_dtype, self.name)
        index.init_slots = self.init_slots
        index.clear()
        return index

    def make_room(self, count: int) -> None:
        """Grows so that `count` keys can be inserted, or drops erased slots.

        Raises:
          MemoryError: no memory; all keys are as they were.
        """
        most = _MAX_LOAD_FACTOR * self.capacity
        if not self._grow(self.size + count):
            open_slots = most - self.size - count
            self._rebuild(max(open_slots, _MIN_RECLAIM_FACTOR * self.capacity), open_slots)

    def insert_launch(self, keys: Array, rows: Array, lookup_number: int) -> Launch:
        """Returns the launch that inserts distinct keys that are not there, after `make_room`. The
        caller changes `size`.

        Args:
          keys: (n,) int64.
          rows: (n,) uint32, their row numbers; a key whose row is NO_ROW is skipped.
          lookup_number: number of the lookup that they come with.
        """
        n = int(keys.size)
        counts = (self._counts, self._counts[1:])
        return self.prepared(
            "det_insert", n, lookup_number, keys, rows, _ALL_LINES, None, *counts, n
        )

    def reserve_launch(
        self, keys: Array, lookup_number: int, placed: Array, num_refused: Array
    ) -> Launch:
        """Returns the launch that gives slots to distinct keys that are not there, after
        `make_room`.

        They are not found before they have rows; the caller changes `size`.

        Args:
          keys: (n,) int64.
          lookup_number: number of the lookup that they come with.
          placed: (n,) int64, gets the address of the slot of each; 0: it found none.
          num_refused: (1,) int64, grows by the keys that found no slot in `MOST_LINES`.
        """
        n = int(keys.size)
        to = (placed, self._counts, num_refused)
        return self.prepared("det_insert", n, lookup_number, keys, None, MOST_LINES, *to, n)

    def has_room(self, count: int) -> bool:
        """Whether `count` more keys need no larger index."""
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
        """Returns the launches that insert keys (n,) that are not there and may repeat, after
        `make_room` for as many as there are. The caller changes `size`.

        Args:
          rows: (n,) uint32; an item takes part if it has NO_ROW, and gets the row of its key.
          lookup_number: number of the lookup that they come with, which no key has yet.
          claim: rows, as many as there are such items; the first ones are used up, in no order.
          to: get what is told of items: (n,) int64, the address of the slot of its key, 0 where it
            found none or does not take part; (n,) int32, the item's number if it takes part, else
            -1; (n,) uint32, the row of the one item of each key that has taken it, NO_ROW of the
            others.
          counts: (2,) int64, grow by the items that found no slot in `MOST_LINES`, and by the rows
            used: the keys that were inserted.
        """
        n, placed = int(keys.size), to[0]
        insert = self.prepared(
            *("det_insert_items", n, lookup_number, keys, rows, MOST_LINES),
            *(*claim.words, *to, self._counts, counts, n),
        )
        return [insert, self.backend.prepared("slots_tell_rows", n, placed, rows, n)]

    def take_back(self, keys: Array, placed: Array, rows: Array | None = None) -> None:
        """Undoes `reserve_launch` of keys, or `insert_items_launches` of those that have taken
        `rows`."""
        n = int(keys.size)
        self.launch("det_erase", n, keys, rows, placed, self._counts, None, n)
        self.record.num_erased += n

    def take_new_seed(self) -> None:
        """Gives every key another place.

        Raises:
          MemoryError: no memory for all of the index beside what it is; it is as it was.
          RuntimeError: keys find no slot whatever the seed of the hash: they are chosen against it.
        """
        self.check()
        self.hash_anew(self.capacity)

    def insert(self, keys: Array, rows: Array, lookup_number: int) -> None:
        """Inserts distinct keys that are not there, after `make_room`, with their row numbers.

        Nothing else may use the index meanwhile.

        Raises:
          MemoryError: no memory for another seed; the index is as it was.
          RuntimeError: keys find no slot whatever the seed of the hash: they are chosen against it.
        """
        xp, n = self.backend.xp, int(keys.size)
        for has_new_seed in (False, True):
            placed, num_refused = xp.empty(n, np.int64), xp.zeros(1, np.int64)
            self.reserve_launch(keys, lookup_number, placed, num_refused)()
            if not int(num_refused[0]):
                break
            self.take_back(keys, placed)
            if has_new_seed:
                raise self.error_of_chosen_keys()
            self.take_new_seed()
        self.give_rows(placed, rows)
        self.record.size += n

    def check(self) -> None:
        """Raises RuntimeError if keys have found the index full, which has room by its counters."""
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
        """Returns the launch that writes row numbers (n,) uint32 or `last_seen` (n,) uint32 of
        distinct keys. A missing key is skipped, and so is one whose new row is NO_ROW."""
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
        """Returns the launch that erases distinct keys. `note_erased` must follow, when it is known
        how many.

        Args:
          keys: (n,) int64; one that is not there is skipped.
          rows: (n,) uint32; a key whose row is NO_ROW here is skipped.
          num_erased: (1,) int64, grows by those that are erased.
        """
        n = int(keys.size)
        return self.prepared("det_erase", n, keys, rows, None, self._counts, num_erased, n)

    def note_erased(self, count: int) -> None:
        """Notes how many keys were erased."""
        self.record.size -= count
        self.record.num_erased += count

    def clean(self) -> None:
        """Gives back slots that few keys need, and erased ones where there are many."""
        # Both cost time only: the index works on without the memory for them.
        with contextlib.suppress(MemoryError):
            if self.capacity > self._slots_for(_SHRINKS_ABOVE * self.size):
                self.check()
                self.resize(self._slots_for(_SHRINKS_TO * self.size), grows=False)
        self._rebuild(_MAX_RECLAIM_FACTOR * self.capacity, -self.capacity)

    def clear(self, place: tuple[Directory, Array] | None = None) -> None:
        super().clear(place)
        self.record.num_erased = self._num_reused = 0
        self._counts.fill(0)

    def reserve(self, num_keys: int) -> None:
        self._grow(num_keys)
        self.least_slots = max(self.least_slots, slots_for(self.sizes, num_keys))

    def lines_read(self, entries: IndexEntries) -> Array:
        hashes, starts, sizes = self.directory.homes(entries.keys)
        lines = (entries.slots - starts) // LINE - scaled(hashes, sizes)
        return lines % sizes.astype(np.int64) + 1

    # ---------------------------------------------------------------- inside

    def _grow(self, num_keys: int) -> bool:
        """Grows for so many keys in all; returns whether it was too small."""
        if not self._is_too_small(num_keys):
            return False
        self.check()
        self.resize(self._slots_for(num_keys))
        return True

    def _is_too_small(self, num_keys: int) -> bool:
        # Where a growth has failed on its way, some segments are smaller than others.
        is_crowded = num_keys > _MAX_LOAD_FACTOR * self.directory.densest
        return is_crowded or self._slots_for(num_keys) > self.capacity

    def _slots_for(self, num_keys: float) -> int:
        return max(self.least_slots, slots_for(self.sizes, num_keys))

    def _has_reclaimed_above(self, count: float) -> bool:
        """Whether more slots than that were erased and not used again. On a GPU it waits where
        that is not certain."""
        if self.record.num_erased - self._num_reused <= count:
            return False
        self.check()
        num_reused, _, num_erased = self.backend.to_host(self._counts).tolist()
        self.record.num_erased, self._num_reused = num_erased, num_reused
        return num_erased - num_reused > count

    def prepared(self, kernel: str, num_items: int, *args: object) -> Launch:
        place = self.place()
        where = (place.directory, place.hashing, place.side)
        return self.backend.prepared(kernel, num_items, *where, *self.reserved_keys(), *args)

    def move(self, segments: Sequence[Segment], directory: Directory) -> bool:
        where = (directory.table, directory.hashing, self.side)
        counts = self.backend.xp.zeros(3, np.int64)
        parts = []
        for slots in (segment.slots for segment in segments):
            n = int(slots.shape[0])
            parts.append(Work(n, (slots, n, *where, *self.reserved_keys(), counts)))
        self.backend.launch_parts("det_move", parts)
        if int(counts[1]):
            return False
        self._set_counts(self._counts + counts)
        return True

    def _set_counts(self, counts: Array) -> None:
        """Has kernels count in another array."""
        self._counts = counts
        self.record.counts = self.backend.address(counts)

    def set_place(self, directory: Directory, side: Array | None = None) -> None:
        # The most for which `_is_too_small` says no; fewer are asked for of what fits.
        crowded = int(_MAX_LOAD_FACTOR * directory.densest)
        fits = range(crowded + 1)
        slots = partial(slots_for, self.sizes)
        most = bisect_right(fits, directory.num_slots, key=slots) - 1
        super().set_place(directory, side)
        self.record.most_keys = most

    def _rebuild(self, limit: float, allowed: float) -> None:
        """Rids segments of erased slots.

        Args:
          limit: so many erased slots are left alone.
          allowed: else it goes on, from segment to segment, until there are about so few.
        """
        if not self._has_reclaimed_above(limit):
            return
        num_reclaimed = self.record.num_erased - self._num_reused
        num_segments = len(self.directory.segments)
        share = min(1.0, (num_reclaimed - allowed) / num_reclaimed)
        with contextlib.suppress(MemoryError):
            for _ in range(min(num_segments, int(share * num_segments) + 1)):
                segments = self.directory.segments
                at = self._next_rebuilt % num_segments
                one = segments[at : at + 1]
                shapes = [segment.shape for segment in one]
                after = segments[at + 1 :]
                if self._replace(segments[:at], one, shapes, after, self.capacity) is None:
                    return
                self._next_rebuilt = at + 1


def sizes_of(backend: Backend | type[Backend]) -> Sizes:
    """Returns the sizes that an index of a backend can have."""
    return Sizes.of(backend, LINE, _FIRST)


def slots_for(sizes: Sizes, num_keys: float) -> int:
    """Returns how many slots the index has for so many keys.

    No segment is loaded above the load factor. From the load on at which the first are too small,
    more and more of them grow, so that all have grown when the last one has to.
    """
    wanted = max(_MIN_CAPACITY, int(num_keys / _MAX_LOAD_FACTOR) + 1)
    unit, first = sizes.unit, sizes.first
    depth = 0
    while wanted > (2 * first - 1) * unit << depth:
        depth += 1
    # In units a segment: at most 2 * first - 1, and above half of it where there are several.
    if 2 * wanted <= (2 * first - 1) * unit << depth:
        return sizes.rounded(wanted)
    if wanted > first * unit << depth:
        num_units = -(-wanted // unit) + (1 << depth) - 1
    else:  # twice as fast: the last step was to half as many segments
        num_units = -(-2 * wanted // unit) - ((first - 1) << depth) - 1
    return num_units * unit

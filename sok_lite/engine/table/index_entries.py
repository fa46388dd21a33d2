"""What the slots of an index hold: keys, their row numbers, and when they were last seen."""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.segmented import Segmented


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


def entries(index: Segmented, first: int = 0, count: int | None = None) -> IndexEntries:
    """Returns what the slots [first, first + count) hold; None: all from `first` on."""
    num_slots = index.directory.num_slots + 2
    end = num_slots if count is None else min(first + count, num_slots)
    starts, segments = index.directory.starts.tolist(), index.directory.segments
    parts = []
    for i in range(max(0, bisect_right(starts, first) - 1), len(segments)):
        start, segment = starts[i], segments[i]
        if start >= end:
            break
        cut = slice(max(0, first - start), end - start)
        scores = None if segment.scores is None else segment.scores[cut]
        parts.append(_entries_of(index, segment.slots[cut], scores, start + cut.start))
    parts.append(_entries_beside(index, first, end))
    return IndexEntries(
        *(index.backend.xp.concatenate(arrays) for arrays in zip(*parts, strict=True))
    )


def _entries_of(index: Segmented, slots: Array, scores: Array | None, number: int) -> IndexEntries:
    """Returns what slots (n, 2) hold, the first of which has a number."""
    keys = slots[:, 0]
    reserved = index.reserved_keys()
    # Where a key has no row yet, it is being inserted: until then it is not there.
    has_row = slots.view(np.uint32)[:, 2] != np.uint32(NO_ROW)
    at = index.backend.xp.flatnonzero((keys != reserved[0]) & (keys != reserved[1]) & has_row)
    return _read(slots, scores, at, keys[at], number)


def _entries_beside(index: Segmented, first: int, end: int) -> IndexEntries:
    """Returns what the slots of the reserved keys hold, if they are in [first, end)."""
    xp, number = index.backend.xp, index.directory.num_slots
    slots, scores = index.side[:4].reshape(2, 2), None
    if index.has_scores:
        scores = index.side[4:].view(np.uint64)
    has_row = slots.view(np.uint32)[:, 2] != np.uint32(NO_ROW)
    numbers = xp.arange(number, number + 2)
    at = xp.flatnonzero(has_row & (numbers >= first) & (numbers < end))
    # They do not hold their key: it is known from their place.
    keys = index.backend.from_host(np.array(index.reserved_keys(), np.int64))
    return _read(slots, scores, at, keys[at], number)


def _read(slots: Array, scores: Array | None, at: Array, keys: Array, number: int) -> IndexEntries:
    words = slots.view(np.uint32)
    last_seen = words[at, 3]
    scores = last_seen.astype(np.uint64) if scores is None else scores[at]
    return IndexEntries(keys, words[at, 2], last_seen, at + number, scores)

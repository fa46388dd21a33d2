"""The counters that kernels of a lookup keep of each table, in one array that the host reads at
once."""

from enum import IntEnum

import numpy as np

from sok_lite.backend import Array, Backend


class Count(IntEnum):
    """A counter, by its place among those of a table. Kernels take several that are neighbours."""

    MISSING = 0  # keys without a row, one that repeats each time
    SEEN = 1  # keys that were found, each once, where there are scores or access counts
    WRONG_SPLITS = 2  # row splits that do not fit the keys
    ADMITTED = 3  # new keys that may have a row
    FIRST_SEEN = 4  # new keys that have a pending count from now on
    REFUSED = 5  # new keys that found no slot, whenever they looked for one
    USED = 6  # rows that were taken of those claimed
    PLACED = 7  # new keys that got a slot
    EVICTED = 8  # keys that lost theirs
    FORGOTTEN = 9  # keys whose pending count is dropped
    NO_ROW = 10  # items whose keys were missing and have no row afterwards
    LOGGED = 11  # keys that lost their slot and were in the log of removals before


_NUM_COUNTS = len(Count)


def new_counters(backend: Backend, num_tables: int) -> Array:
    """Returns (num_tables, len(Count)) int64, zeros."""
    return backend.xp.zeros((num_tables, _NUM_COUNTS), np.int64)


def counter(counters: Array, first: Count, last: Count | None = None) -> Array:
    """Returns one of the counters (len(Count),) of a table, or several, as kernels take them."""
    return counters[first : (first if last is None else last) + 1]

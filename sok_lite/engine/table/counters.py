"""Counters that the kernels of a lookup keep for each table, in one array for the host to read."""

from enum import IntEnum

import numpy as np

from sok_lite.backend import Array, Backend


class Count(IntEnum):
    """The position of each counter of a table. Kernels take several that are neighbours."""

    MISSING = 0  # items whose keys have no row
    SEEN = 1  # distinct keys that were found, where there are scores or access counts
    WRONG_SPLITS = 2  # row splits that do not fit the keys
    ADMITTED = 3  # new keys that may have a row
    FIRST_SEEN = 4  # new keys that have a pending count from now on
    REFUSED = 5  # new keys that found no slot, of all attempts
    USED = 6  # claimed rows that were taken
    PLACED = 7  # new keys that got a slot
    EVICTED = 8  # keys that lost theirs
    FORGOTTEN = 9  # keys whose pending count is dropped
    NO_ROW = 10  # items whose keys were missing and have no row afterwards
    LOGGED = 11  # evicted keys that were in the log of removals before


_NUM_COUNTS = len(Count)  # an enum counts its members in Python


def new_counters(backend: Backend, num_tables: int) -> Array:
    """Returns (num_tables, len(Count)) int64, zeros."""
    return backend.xp.zeros((num_tables, _NUM_COUNTS), np.int64)


def counter(counters: Array, first: Count, last: Count | None = None) -> Array:
    """Returns a view of one of the counters (len(Count),) of a table, or of several."""
    return counters[first : (first if last is None else last) + 1]

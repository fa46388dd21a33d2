"""Which new keys get a row: by chance, or after they were seen often enough."""

import math
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import Launch
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.hashing import hash_keys
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.det_index import DetIndex

# Pending counts saturate here, above every threshold, as in kernels/admission.cu.
MAX_PENDING_COUNT = (1 << 30) + 1


def draw_launch(
    backend: Backend,
    keys: Array,
    ratio: float,
    table_seed: int,
    lookup: int,
    drawn: Array,
    count: Array | None = None,
) -> Launch:
    """Returns the launch that draws keys at random, each with chance `ratio`.

    The draw depends on table, number of the lookup and key: it is the same on every backend, and
    another one when the key is next seen.

    Args:
      keys: (n,) int64.
      drawn: (n,) uint8, gets 1 for each key that is drawn, else 0.
      count: (1,) int64, grows by the keys that are; None: not counted.
    """
    salt = np.array([table_seed ^ (lookup * 0x9E3779B97F4A7C15 & 0x7FFFFFFFFFFFFFFF)], np.int64)
    salt_hash = int(hash_keys(salt).view(np.int64)[0])
    # Compares 53 bits of a hash, which a double holds exactly.
    limit = math.ceil(ratio * 2.0**53)
    n = int(keys.size)
    return backend.prepared("admission_draw", n, keys, salt_hash, limit, drawn, count, n)


class CountUpdate(NamedTuple):
    """New pending counts of keys that a lookup has seen, before they are stored.

    Attributes:
      keys: (n,) int64.
      lookup_number: number of the lookup that saw them.
      known: (n,) uint32, the new count of a key that had one; NO_ROW: no change.
      first: (n,) uint32, the count of a key that had none; NO_ROW: no change.
      last_seen: (n,) uint32, `lookup_number` for each key.
    """

    keys: Array
    lookup_number: int
    known: Array
    first: Array
    last_seen: Array


class PendingCounts(DetIndex):
    """Pending counts: how often keys without a row were seen. The index has counts in place of row
    numbers, so that such keys take no row.

    A lookup counts each key once, or as often as the caller says.

    Attributes:
      threshold: the count at which a key gets a row.
    """

    def __init__(self, backend: Backend, key_dtype: KeyDtype, name: str, threshold: int) -> None:
        self.threshold = threshold
        super().__init__(backend, key_dtype, name)

    def count_launches(
        self,
        keys: Array,
        lookup_number: int,
        admitted: Array,
        counts: Array,
        occurrences: Array | None = None,
    ) -> tuple[CountUpdate, list[Launch]]:
        """Returns the new counts of distinct keys without a row, and the launches that compute
        them; `store_launches` stores them.

        Args:
          keys: (n,) int64.
          lookup_number: number of the lookup that saw them.
          admitted: (n,) uint8, in: whether a key is counted; out: whether its count has reached the
            threshold. Such a count stays: it is dropped if the key gets a row, and admits the key
            again the next time if not.
          counts: (2,) int64, grow by the keys at the threshold, and by those below it that had no
            count.
          occurrences: (n,) uint64, by how much each count grows, 1 at least; None: by 1.
        """
        xp, n = self.backend.xp, int(keys.size)
        self.clean()
        search = self.search(keys, into=(xp.empty(n, np.uint32), None))
        counted = CountUpdate(keys, lookup_number, *(xp.empty(n, np.uint32) for _ in range(3)))
        count = self.backend.prepared(
            "admission_count",
            n,
            search.rows,
            occurrences,
            self.threshold,
            lookup_number,
            admitted,
            counted.known,
            counted.first,
            counted.last_seen,
            counts,
            n,
        )
        return counted, [search.launch, count]

    def store_launches(self, counted: CountUpdate, num_first: int) -> list[Launch]:
        """Returns the launches that store new pending counts. The caller adds `num_first` to
        `size`.

        Args:
          counted: of `count_launches`, whose launches were made.
          num_first: how many of the keys had no count.

        Raises:
          MemoryError: no memory for new counters; the counts are as they were.
        """
        keys, lookup_number, known, first, last_seen = counted
        self.make_room(num_first)
        return [
            self.update_launch(keys, rows=known, last_seen=last_seen),
            self.insert_launch(keys, first, lookup_number),
        ]

    def counts(self, keys: Array) -> Array:
        """Returns the counts of keys, (n,) uint32; 0 for one that is not counted."""
        xp, n = self.backend.xp, int(keys.size)
        search = self.search(keys, into=(xp.empty(n, np.uint32), None))
        search.launch()
        return xp.where(search.rows == np.uint32(NO_ROW), np.uint32(0), search.rows)

    def select_counted(self, keys: Array) -> Array:
        """Returns the distinct keys (n,) int64 that have a count, for `erase`."""
        self.clean()
        return keys[self.find(keys).rows != np.uint32(NO_ROW)]

    def last_seen_before(self, lookup_number: int) -> Array:
        """Returns the keys that no lookup from this number on has seen, for `erase`."""
        self.clean()
        entries = self.entries()
        return entries.keys[entries.last_seen < lookup_number]

    def restore(self, keys: Array, counts: Array, last_seen: Array) -> None:
        """Adds saved counts.

        Args:
          keys: (n,) int64, distinct, which have no count.
          counts: (n,) uint32, each from 1 to `MAX_PENDING_COUNT`.
          last_seen: (n,) uint32, the number of the lookup that last saw each.
        """
        self.make_room(int(keys.size))
        self.insert(keys, counts, 0)
        self.update(keys, last_seen=last_seen)

    def empty_copy(self) -> "PendingCounts":
        """Returns a copy without keys."""
        return PendingCounts(self.backend, self.key_dtype, self.name, self.threshold)

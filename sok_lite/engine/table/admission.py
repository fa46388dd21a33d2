"""Which new keys get a row: by chance, or after they were seen often enough."""

import math
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, publish
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.hashing import hash_keys
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.det_index import DetIndex
from sok_lite.engine.table.index_entries import IndexEntries


def plan_draw(
    backend: Backend,
    keys: Array,
    ratio: float,
    table_seed: int,
    lookup: int,
    drawn: Array,
    count: Array | None = None,
) -> Action:
    """Prepares to draw keys with chance `ratio`.

    The draw is a function of the table, the number of the lookup and the key: the same on every
    backend, and another one when the key is next seen.

    Args:
      keys: (n,) int64.
      drawn: (n,) uint8, gets 1 for each key that is drawn, else 0.
      count: (1,) int64, grows by the keys that are; None: it is not wanted.
    """
    salt = np.array([table_seed ^ (lookup * 0x9E3779B97F4A7C15 & 0x7FFFFFFFFFFFFFFF)], np.int64)
    salt_hash = int(hash_keys(salt).view(np.int64)[0])
    # 53 bits of a hash are as good as a double from 0 to 1, and exact in both.
    limit = math.ceil(ratio * 2.0**53)
    n = int(keys.size)
    return backend.prepared("admission_draw", n, keys, salt_hash, limit, drawn, count, n)


class CountedKeys(NamedTuple):
    """New pending counts of keys that a lookup has seen, before they are stored.

    Attributes:
      keys: (n,) int64.
      lookup_number: number of the lookup that saw them.
      known: (n,) uint32, the new count of a key that has one; NO_ROW: it stays.
      first: (n,) uint32, the count of a key that has none yet; NO_ROW: the key is no such.
      last_seen: (n,) uint32, `lookup_number` for each key.
    """

    keys: Array
    lookup_number: int
    known: Array
    first: Array
    last_seen: Array


class PendingCounts:
    """Pending counts: how often keys without a row were seen. They have an index of their own, so
    that such keys take no row.

    A lookup counts each key once, or as often as the caller says.

    Attributes:
      threshold: a key gets a row when it is seen for this time.
    """

    def __init__(self, backend: Backend, key_dtype: KeyDtype, name: str, threshold: int) -> None:
        self.threshold = threshold
        self._name = name
        self._backend = backend
        # The counts stand where a table's index has row numbers.
        self._index = DetIndex(backend, key_dtype, f"{name} (pending counts)")

    @property
    def size(self) -> int:
        """Keys that were seen, but not often enough."""
        return self._index.size

    @property
    def num_bytes(self) -> int:
        """Memory of the counters."""
        return self._index.num_bytes

    def plan_count(
        self,
        keys: Array,
        lookup_number: int,
        admitted: Array,
        counts: Array,
        occurrences: Array | None = None,
    ) -> tuple[CountedKeys, list[Action]]:
        """Prepares to count distinct keys without a row once more. Nothing is stored yet.

        Args:
          keys: (n,) int64.
          lookup_number: number of the lookup that saw them.
          admitted: (n,) uint8, in: whether a key is counted; gets whether it has been
            seen often enough by now. The count of such a key stays: if it gets a row it is
            forgotten next, if it gets none it has entered again the next time.
          counts: (2,) int64, grow by the keys that have been seen often enough, and by those that
            were not seen before and have not.
          occurrences: (n,) uint64, by how much each count grows, 1 at least; None: by 1.

        Returns:
          (the new counts, which `plan_note` stores; the actions that compute them).
        """
        xp, n = self._backend.xp, int(keys.size)
        self._index.clean()
        search = self._index.plan_search(keys, into=(xp.empty(n, np.uint32), None))
        counted = CountedKeys(keys, lookup_number, *(xp.empty(n, np.uint32) for _ in range(3)))
        count = self._backend.prepared(
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

    def plan_note(self, counted: CountedKeys, num_first: int) -> list[Action]:
        """Prepares to store new pending counts.

        Args:
          counted: the result of `plan_count`, once its actions were made.
          num_first: how many of the keys were not seen before.

        Raises:
          MemoryError: no memory for new counters; the counts are as they were.
        """
        keys, lookup_number, known, first, last_seen = counted
        self._index.make_room(num_first)
        return [
            *self._index.plan_update(keys, rows=known, last_seen=last_seen),
            *self._index.plan_insert(keys, first, lookup_number, num_first),
        ]

    def of(self, keys: Array) -> Array:
        """Returns the counts of keys, (n,) uint32; 0 for one that is not counted."""
        xp, n = self._backend.xp, int(keys.size)
        search = self._index.plan_search(keys, into=(xp.empty(n, np.uint32), None))
        publish([search.launch])
        return xp.where(search.rows == np.uint32(NO_ROW), np.uint32(0), search.rows)

    def last_seen(self, keys: Array) -> Array:
        """Returns the number of the lookup that last saw each key, (n,) uint32; 0 for one that is
        not counted."""
        return self._index.last_seen(keys)

    def plan_forget_those(self, keys: Array, rows: Array, num_forgotten: Array) -> Action:
        """Prepares to forget the counts of keys that have a row now. `forgot` must follow, when it
        is known how many.

        Args:
          keys: (n,) int64, distinct.
          rows: (n,) uint32; a key whose row is NO_ROW is not forgotten.
          num_forgotten: (1,) int64, grows by those that are.
        """
        return self._index.plan_erase_found(keys, rows, num_forgotten)

    def forgot(self, count: int) -> list[Action]:
        """Returns the actions that note how many keys were forgotten."""
        return self._index.erased(count)

    def plan_forget(self, keys: Array) -> list[Action]:
        """Prepares to forget the counts of distinct keys (n,) int64, such as have a row now."""
        self._index.clean()
        is_counted = self._index.find(keys).rows != np.uint32(NO_ROW)
        return self._index.plan_erase(keys[is_counted])

    def plan_forget_before(self, lookup_number: int) -> list[Action]:
        """Prepares to forget the counts of keys that no lookup from this number on has
        seen."""
        self._index.clean()
        entries = self._index.entries()
        return self._index.plan_erase(entries.keys[entries.last_seen < lookup_number])

    def plan_age(self) -> list[Action]:
        """Prepares to halve the numbers of all lookups, as the table does."""
        return self._index.plan_age()

    def export(self) -> tuple[Array, Array, Array]:
        """Returns the keys, (n,) int64 in no order, their counts and when they were last seen,
        (n,) uint32 each."""
        entries = self._index.entries()
        return entries.keys, entries.rows, entries.last_seen

    @property
    def num_slots(self) -> int:
        """Slots that `entries` can read."""
        return self._index.num_slots

    def entries(self, first: int, count: int) -> IndexEntries:
        """Returns what the slots [first, first + count) hold; the counts stand for rows."""
        return self._index.entries(first, count)

    def restore(self, keys: Array, counts: Array, last_seen: Array) -> None:
        """Adds keys that were saved.

        Args:
          keys: (n,) int64, distinct, which are not counted.
          counts: (n,) uint32, each at least 1.
          last_seen: (n,) uint32, the number of the lookup that last saw each.
        """
        self._index.make_room(int(keys.size))
        self._index.insert(keys, counts, 0)
        publish(self._index.plan_update(keys, last_seen=last_seen))

    def plan_clear(self) -> list[Action]:
        """Prepares to forget all counts."""
        return self._index.plan_clear()

    def emptied(self) -> "PendingCounts":
        """Returns a counter like this one that has seen nothing."""
        index = self._index
        return PendingCounts(index.backend, index.key_dtype, self._name, self.threshold)

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
from sok_lite.engine.table.index import IndexEntries


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
    backend, and another one at the key's next sighting.

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


class Sightings(NamedTuple):
    """One more sighting of some keys, before it is noted: (n,) int64, then uint32.

    Attributes:
      keys: that were seen.
      stamp: number of the lookup that saw them.
      known: the new count of those that were seen before; NO_ROW: it stays.
      first: the count of those that were not; NO_ROW: of no such key.
      stamps: the stamp, for each of them.
    """

    keys: Array
    stamp: int
    known: Array
    first: Array
    stamps: Array


class SightingCounter:
    """How often keys without a row were seen, in an index of their own: no row is taken for them.

    A key counts once a lookup, or as often as the caller says.

    Attributes:
      threshold: a key gets a row at this sighting.
    """

    def __init__(self, backend: Backend, key_dtype: KeyDtype, name: str, threshold: int) -> None:
        self.threshold = threshold
        self._name = name
        self._backend = backend
        # The counts stand where a table's index has row numbers.
        self._index = DetIndex(backend, key_dtype, f"{name} (sightings)")

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
        stamp: int,
        admitted: Array,
        counts: Array,
        given: Array | None = None,
    ) -> tuple[Sightings, list[Action]]:
        """Prepares to count sightings of distinct keys without a row. Nothing of it is kept.

        Args:
          keys: (n,) int64.
          stamp: number of the lookup that saw them.
          admitted: (n,) uint8, in: whether the sighting of a key counts; gets whether it has been
            seen often enough by now. The count of such a key stays: if it gets a row it is
            forgotten next, if it gets none it has entered again the next time.
          counts: (2,) int64, grow by the keys that have been seen often enough, and by those that
            were not seen before and have not.
          given: (n,) uint64, sightings of each key, of which at least one counts; None: one.

        Returns:
          (what was counted, for `plan_note`; the actions that count it).
        """
        xp, n = self._backend.xp, int(keys.size)
        self._index.clean()
        search = self._index.plan_search(keys, into=(xp.empty(n, np.uint32), None))
        sightings = Sightings(keys, stamp, *(xp.empty(n, np.uint32) for _ in range(3)))
        count = self._backend.prepared(
            *("admission_count", n, search.rows, given, self.threshold, stamp, admitted),
            *(*sightings[2:], counts, n),
        )
        return sightings, [search.launch, count]

    def plan_note(self, sightings: Sightings, num_first: int) -> list[Action]:
        """Prepares to note sightings.

        Args:
          sightings: what `plan_count` has counted.
          num_first: how many of the keys were not seen before.

        Raises:
          MemoryError: no memory for new counters; the counts are as they were.
        """
        keys, stamp, known, first, stamps = sightings
        self._index.make_room(num_first)
        return [
            *self._index.plan_update(keys, rows=known, stamps=stamps),
            *self._index.plan_insert(keys, first, stamp, num_first),
        ]

    def count(self, keys: Array, stamp: int) -> Array:
        """Counts one sighting of distinct keys without a row.

        Returns:
          (n,) bool, whether each has been seen often enough.
        """
        xp = self._backend.xp
        admitted, counts = xp.ones(int(keys.size), np.uint8), xp.zeros(2, np.int64)
        sightings, actions = self.plan_count(keys, stamp, admitted, counts)
        publish(actions)
        publish(self.plan_note(sightings, int(counts[1])))
        return admitted.view(bool)

    def of(self, keys: Array) -> Array:
        """Returns the counts of keys, (n,) uint32; 0 for one that is not counted."""
        xp, n = self._backend.xp, int(keys.size)
        search = self._index.plan_search(keys, into=(xp.empty(n, np.uint32), None))
        publish([search.launch])
        return xp.where(search.rows == np.uint32(NO_ROW), np.uint32(0), search.rows)

    def stamps(self, keys: Array) -> Array:
        """Returns the number of the lookup that last saw each key, (n,) uint32; 0 for one that is
        not counted."""
        return self._index.stamps(keys)

    def plan_forget_those(self, keys: Array, rows: Array, num_forgotten: Array) -> Action:
        """Prepares to forget the counts of keys that have a row now. `forgot` must follow, when it
        is known how many.

        Args:
          keys: (n,) int64, distinct.
          rows: (n,) uint32; a key whose row is NO_ROW is not forgotten.
          num_forgotten: (1,) int64, grows by those that are.
        """
        return self._index.plan_erase_held(keys, rows, num_forgotten)

    def forgot(self, count: int) -> list[Action]:
        """Returns the actions that note how many keys were forgotten."""
        return self._index.erased(count)

    def plan_forget(self, keys: Array) -> list[Action]:
        """Prepares to forget the counts of distinct keys (n,) int64, such as have a row now."""
        self._index.clean()
        is_counted = self._index.find(keys).rows != np.uint32(NO_ROW)
        return self._index.plan_erase(keys[is_counted])

    def plan_forget_before(self, stamp: int) -> list[Action]:
        """Prepares to forget the counts of keys that no lookup from number `stamp` on has seen."""
        self._index.clean()
        held = self._index.entries()
        return self._index.plan_erase(held.keys[held.stamps < stamp])

    def plan_age(self) -> list[Action]:
        """Prepares to halve the numbers of all lookups, as the table does."""
        return self._index.plan_age()

    def export(self) -> tuple[Array, Array, Array]:
        """Returns the keys, (n,) int64 in no order, their counts and their stamps, (n,) uint32."""
        held = self._index.entries()
        return held.keys, held.rows, held.stamps

    @property
    def num_slots(self) -> int:
        """Slots that `entries` can be asked for."""
        return self._index.num_slots

    def entries(self, first: int, count: int) -> IndexEntries:
        """Returns what the slots [first, first + count) hold; the counts stand for rows."""
        return self._index.entries(first, count)

    def restore(self, keys: Array, counts: Array, stamps: Array) -> None:
        """Adds keys that were saved.

        Args:
          keys: (n,) int64, distinct, which are not counted.
          counts: (n,) uint32, each at least 1.
          stamps: (n,) uint32, the number of the lookup that last saw each.
        """
        self._index.make_room(int(keys.size))
        self._index.insert(keys, counts, 0)
        publish(self._index.plan_update(keys, stamps=stamps))

    def plan_clear(self) -> list[Action]:
        """Prepares to forget all counts."""
        return self._index.plan_clear()

    def emptied(self) -> "SightingCounter":
        """Returns a counter like this one that has seen nothing."""
        index = self._index
        return SightingCounter(index.backend, index.key_dtype, self._name, self.threshold)

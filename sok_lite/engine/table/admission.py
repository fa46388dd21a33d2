"""Which new keys get a row: by chance, or after they were seen often enough."""

from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, publish
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.hashing import hash_keys
from sok_lite.engine.rows.store import ABSENT
from sok_lite.engine.table.det_index import DetIndex


def drawn(keys: Array, ratio: float, table_seed: int, lookup: int) -> Array:
    """Returns which keys a draw with chance `ratio` chooses, (n,) bool.

    The draw is a function of the table, the number of the lookup and the key: the same on every
    backend, and another one at the key's next sighting.

    Args:
      keys: (n,) int64.
    """
    salt = np.array([table_seed ^ (lookup * 0x9E3779B97F4A7C15 & 0x7FFFFFFFFFFFFFFF)], np.int64)
    salt_hash = int(hash_keys(salt)[0])
    bits = hash_keys(keys) ^ np.uint64(salt_hash)
    # 53 bits: every one of them counts in a double.
    uniform = (hash_keys(bits.view(np.int64)) >> np.uint64(11)).astype(np.float64) / 2.0**53
    return uniform < ratio


class Counting(NamedTuple):
    """Sightings that are to be counted.

    Attributes:
      has_entered: (n,) bool, which keys have been seen often enough by now. Their counts stay: one
        that gets a row is forgotten next, one that gets none has entered again the next time.
      actions: count the others.
    """

    has_entered: Array
    actions: list[Action]


class SightingCounter:
    """How often keys without a row were seen, in an index of their own: no row is taken for them.

    A key counts once a lookup, however often the batch has it.

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

    def counting(self, keys: Array, stamp: int, mask: Array | None = None) -> "Counting":
        """Prepares to count one sighting of distinct keys without a row.

        Args:
          keys: (n,) int64.
          stamp: number of the lookup that saw them.
          mask: (n,) bool, keys to leave uncounted where it is false; None: none.

        Raises:
          MemoryError: no memory for new counters; the counts are as they were.
        """
        xp = self._backend.xp
        found = self._index.find(keys).rows
        is_new = found == np.uint32(ABSENT)
        # Saturates far below ABSENT.
        counts = xp.where(
            is_new, np.uint32(1), xp.minimum(found, np.uint32(1 << 30)) + np.uint32(1)
        )
        is_counted = xp.ones(keys.size, bool) if mask is None else mask
        has_entered = is_counted & (counts >= np.uint32(self.threshold))
        counts = xp.where(has_entered, found, counts)
        new, known = is_counted & is_new, is_counted & ~is_new
        new_keys, known_keys = keys[new], keys[known]
        self._index.make_room(int(new_keys.size))
        stamps = xp.full(known_keys.size, stamp, np.uint32)
        return Counting(
            has_entered,
            [
                *self._index.updating(known_keys, rows=counts[known], stamps=stamps),
                *self._index.inserting(new_keys, counts[new], stamp),
            ],
        )

    def count(self, keys: Array, stamp: int) -> Array:
        """Counts one sighting of distinct keys without a row; see `counting`.

        Returns:
          (n,) bool, whether each has been seen often enough.
        """
        counting = self.counting(keys, stamp)
        publish(counting.actions)
        return counting.has_entered

    def forgetting(self, keys: Array) -> list[Action]:
        """Prepares to forget the counts of distinct keys (n,) int64, such as have a row now."""
        self._index.clean()
        is_counted = self._index.find(keys).rows != np.uint32(ABSENT)
        return self._index.erasing(keys[is_counted])

    def forgetting_before(self, stamp: int) -> list[Action]:
        """Prepares to forget the counts of keys that no lookup from number `stamp` on has seen."""
        self._index.clean()
        held = self._index.entries()
        return self._index.erasing(held.keys[held.stamps < stamp])

    def ageing(self) -> list[Action]:
        """Prepares to halve the numbers of all lookups, as the table does."""
        return self._index.ageing()

    def export(self) -> tuple[Array, Array]:
        """Returns the keys, (n,) int64 in no order, and their counts, (n,) uint32."""
        held = self._index.entries()
        return held.keys, held.rows

    def restore(self, keys: Array, counts: Array, stamp: int) -> None:
        """Replaces all counts.

        Args:
          keys: (n,) int64, distinct.
          counts: (n,) uint32, each at least 1.
          stamp: number of the lookup that is to count as the last to have seen them.
        """
        self._index.clear()
        self._index.make_room(int(keys.size))
        self._index.insert(keys, counts, stamp)

    def clearing(self) -> list[Action]:
        """Prepares to forget all counts."""
        return self._index.clearing()

    def emptied(self) -> "SightingCounter":
        """Returns a counter like this one that has seen nothing."""
        index = self._index
        return SightingCounter(index.backend, index.key_dtype, self._name, self.threshold)

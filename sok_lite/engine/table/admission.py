"""Which new keys get a row: by chance, or after they were seen often enough."""

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.hashing import hash_keys
from sok_lite.engine.row_store import ABSENT
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


class SightingCounter:
    """How often keys without a row were seen, in an index of their own: no row is taken for them.

    A key counts once a lookup, however often the batch has it.

    Attributes:
      threshold: a key gets a row at this sighting.
    """

    def __init__(self, backend: Backend, key_dtype: KeyDtype, name: str, threshold: int) -> None:
        self.threshold = threshold
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

    def count(self, keys: Array, stamp: int, mask: Array | None = None) -> Array:
        """Counts one sighting of distinct keys without a row.

        Args:
          keys: (n,) int64.
          stamp: number of the lookup that saw them.
          mask: (n,) bool, keys to leave uncounted where it is false; None: none.

        Returns:
          (n,) bool, whether each has been seen often enough. It is known as such until `forget`.

        Raises:
          MemoryError: no memory for new counters; the counts are as they were.
        """
        xp = self._backend.xp
        if mask is not None:
            has_entered = xp.zeros(keys.size, bool)
            has_entered[mask] = self.count(keys[mask], stamp)
            return has_entered
        counts = self._index.find(keys, stamp).rows
        is_new = counts == np.uint32(ABSENT)
        new_keys = keys[is_new]
        self._index.make_room(int(new_keys.size))
        # Saturates far below ABSENT.
        counts = xp.where(
            is_new, np.uint32(1), xp.minimum(counts, np.uint32(1 << 30)) + np.uint32(1)
        )
        has_entered = counts >= np.uint32(self.threshold)
        self._index.update(keys[~is_new], rows=counts[~is_new])
        self._index.insert(new_keys, counts[is_new], stamp)
        return has_entered

    def forget(self, keys: Array) -> None:
        """Forgets the counts of distinct keys (n,) int64, such as have a row now."""
        self._index.erase(keys)

    def forget_before(self, stamp: int) -> None:
        """Forgets the counts of keys that no lookup from number `stamp` on has seen."""
        held = self._index.entries()
        self._index.erase(held.keys[held.stamps < stamp])

    def age(self) -> None:
        """Halves the numbers of all lookups, as the table does."""
        self._index.age()

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

    def clear(self) -> None:
        """Forgets all counts."""
        self._index.clear()

"""Which keys have lost their rows, and since which lookup."""

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, plan_set, publish
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.det_index import DetIndex


class RemovalLog:
    """Keys that were removed, each with the number of the last lookup by then.

    A key stays that gets a row again: whoever reads the log asks the table.

    Attributes:
      since: the log has all removals after this lookup.
    """

    def __init__(self, backend: Backend, key_dtype: KeyDtype, name: str, since: int) -> None:
        self.since = since
        self._name = name
        self._backend = backend
        # Only the keys and `last_seen`, the lookup after which each was removed, mean something.
        self._index = DetIndex(backend, key_dtype, f"{name} (removals)")

    @property
    def size(self) -> int:
        """Keys in the log."""
        return self._index.size

    @property
    def num_bytes(self) -> int:
        """Memory of the log."""
        return self._index.num_bytes

    def plan_note(self, keys: Array, lookup_number: int) -> list[Action]:
        """Prepares to note distinct keys (n,) int64 that are removed after a lookup.

        Raises:
          MemoryError: no memory for them; the log is as it was.
        """
        xp, index = self._backend.xp, self._index
        is_new = index.find(keys).rows == np.uint32(NO_ROW)
        new, again = keys[is_new], keys[~is_new]
        index.make_room(int(new.size))
        rows = xp.zeros(int(new.size), np.uint32)
        return [
            *index.plan_update(again, last_seen=xp.full(int(again.size), lookup_number, np.uint32)),
            *index.plan_insert(new, rows, lookup_number),
        ]

    def plan_note_evicted(
        self, keys: Array, rows: Array, lookup_number: int, most: int, num_again: Array
    ) -> list[Action]:
        """Prepares to note keys that a kernel will have evicted. `noted` must follow, when it is
        known how many.

        Args:
          keys: (n,) int64, distinct where they count.
          rows: (n,) uint32; a key whose row is NO_ROW does not count.
          lookup_number: number of the lookup that evicts them.
          most: no more of them will count.
          num_again: (1,) int64, grows by the keys that the log has already.

        Raises:
          MemoryError: no memory for them; the log is as it was.
        """
        self._index.make_room(most)
        again = self._index.plan_erase_found(keys, rows, num_again)
        return [again, *self._index.plan_insert(keys, rows, lookup_number, 0)]

    def noted(self, num_evicted: int, num_again: int) -> list[Action]:
        """Returns the actions that note how many keys were evicted, and were in the log before."""
        return self._index.erased(num_again, num_evicted)

    def keys_since(self, lookup_number: int) -> Array:
        """Returns the keys (n,) int64, in no order, that were removed since a lookup began."""
        entries = self._index.entries()
        return entries.keys[entries.last_seen >= lookup_number]

    def forget(self, before: int) -> None:
        """Forgets the keys that were removed before lookup `before` began, and not since."""
        entries = self._index.entries()
        erasing = self._index.plan_erase(entries.keys[entries.last_seen < before])
        publish([*erasing, *plan_set(self, since=max(self.since, before))])
        self._index.clean()

    def plan_age(self) -> list[Action]:
        """Prepares to halve the numbers of all lookups, as the table does."""
        return [*self._index.plan_age(), *plan_set(self, since=self.since >> 1)]

    def emptied(self, since: int) -> "RemovalLog":
        """Returns an empty log of the same table, from a lookup on."""
        return RemovalLog(self._backend, self._index.key_dtype, self._name, since)

"""Which keys have lost their rows, and since which lookup."""

from collections.abc import Callable

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import Launch, launch_all
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.det_index import DetIndex


class RemovalLog(DetIndex):
    """Keys that were removed, each last seen by the last lookup by then; row numbers say nothing.

    A key stays that gets a row again: whoever reads the log asks the table.

    Attributes:
      since: the log has all removals after this lookup.
    """

    def __init__(self, backend: Backend, key_dtype: KeyDtype, name: str, since: int) -> None:
        self.since = since
        super().__init__(backend, key_dtype, name)

    def noting(self, keys: Array, lookup_number: int) -> Callable[[], None]:
        """Returns what notes distinct keys (n,) int64 that are removed after a lookup; it needs no
        memory.

        Raises:
          MemoryError: no memory for them; the log is as it was.
        """
        xp = self.backend.xp
        is_new = self.find(keys).rows == np.uint32(NO_ROW)
        new, again = keys[is_new], keys[~is_new]
        self.make_room(int(new.size))
        rows = xp.zeros(int(new.size), np.uint32)
        last_seen = xp.full(int(again.size), lookup_number, np.uint32)
        launches = [
            self.update_launch(again, last_seen=last_seen),
            self.insert_launch(new, rows, lookup_number),
        ]

        def note() -> None:
            launch_all(launches)
            self.record.size += int(new.size)

        return note

    def evicted_launches(
        self, keys: Array, rows: Array, lookup_number: int, most: int, num_again: Array
    ) -> list[Launch]:
        """Returns the launches that note keys that a kernel will have evicted. `note_evicted` must
        follow.

        Args:
          keys: (n,) int64, distinct where they count.
          rows: (n,) uint32; a key whose row is NO_ROW does not count.
          lookup_number: number of the lookup that evicts them.
          most: no more of them will count.
          num_again: (1,) int64, grows by the keys that the log has already.

        Raises:
          MemoryError: no memory for them; the log is as it was.
        """
        self.make_room(most)
        again = self.erase_found_launch(keys, rows, num_again)
        return [again, self.insert_launch(keys, rows, lookup_number)]

    def note_evicted(self, num_again: int, num_evicted: int) -> None:
        """Notes how many keys the log had already, and how many were evicted."""
        self.note_erased(num_again)
        self.record.size += num_evicted

    def keys_since(self, lookup_number: int) -> Array:
        """Returns the keys (n,) int64, in no order, that were removed since a lookup began."""
        entries = self.entries()
        return entries.keys[entries.last_seen >= lookup_number]

    def forget(self, before: int) -> None:
        """Forgets the keys that were removed before lookup `before` began, and not since."""
        entries = self.entries()
        self.erase(entries.keys[entries.last_seen < before])
        self.since = max(self.since, before)
        self.clean()

    def age(self) -> None:
        """Halves the numbers of all lookups, as the table does."""
        super().age()
        self.since >>= 1

    def begun_anew(self, since: int) -> "RemovalLog":
        """Returns an empty log of the same table, from a lookup on."""
        return RemovalLog(self.backend, self.key_dtype, self.name, since)

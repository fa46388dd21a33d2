"""The log of a table's removed keys."""

from collections.abc import Callable

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import Launch, launch_all
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.det_index import DetIndex


class RemovalLog(DetIndex):
    """An index of removed keys, by the last lookup before their removal. It has no row numbers.

    Keys that have got a row again stay in the log, and readers leave them out.

    Attributes:
      since: number of the lookup after which the log has all removals.
    """

    def __init__(self, backend: Backend, key_dtype: KeyDtype, name: str, since: int) -> None:
        self.since = since
        super().__init__(backend, key_dtype, name)

    def prepare_note(self, keys: Array, lookup_number: int) -> Callable[[], None]:
        """Returns a function that logs the removal of distinct keys (n,) int64 after a lookup; it
        allocates nothing.

        Raises:
          MemoryError: no memory for the keys; the log is as it was.
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
        """Returns the launches that log the keys evicted by a lookup. `note_evicted` must follow.

        Args:
          keys: (n,) int64, distinct.
          rows: (n,) uint32; keys whose row is NO_ROW were not evicted, and may repeat.
          most: upper bound of the number of evicted keys.
          num_again: (1,) int64, grows by the keys that were in the log.

        Raises:
          MemoryError: no memory for the keys; the log is as it was.
        """
        self.make_room(most)
        again = self.erase_found_launch(keys, rows, num_again)
        return [again, self.insert_launch(keys, rows, lookup_number)]

    def note_evicted(self, num_again: int, num_evicted: int) -> None:
        """Counts the evicted keys, and those of them that were in the log."""
        self.note_erased(num_again)
        self.record.size += num_evicted

    def keys_since(self, lookup_number: int) -> Array:
        """Returns the keys (n,) int64, in no order, removed since a lookup began."""
        entries = self.entries()
        return entries.keys[entries.last_seen >= lookup_number]

    def forget(self, before: int) -> None:
        """Drops the keys removed before lookup `before` began, and not since."""
        entries = self.entries()
        self.erase(entries.keys[entries.last_seen < before])
        self.since = max(self.since, before)
        self.clean()

    def age(self) -> None:
        super().age()
        self.since >>= 1

    def empty_log(self, since: int) -> "RemovalLog":
        """Returns an empty log of the same table, with removals after a lookup."""
        return RemovalLog(self.backend, self.key_dtype, self.name, since)

"""What a table knows of the past of its keys: how often and when they were seen, what became of
them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.publish import plan_set, publish
from sok_lite.engine.dtypes import is_integer
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.exclusive import changing, exclusive
from sok_lite.engine.table.export import Exports
from sok_lite.engine.table.index import CHUNK_SLOTS
from sok_lite.engine.table.removal_log import RemovalLog

# The most that one item of a batch counts: so sums over a batch fit 63 bits.
_MOST_COUNT = 2**32 - 1


class History(Exports):
    """The methods that tell what happened to keys."""

    @exclusive
    def counts(self, keys: Any) -> Array:
        """Returns how often lookups that insert have asked for each key, (n,) int64.

        Of a key without a row these are its sightings; 0 where there are none.

        Raises:
          ValueError: the table was not made with `count_repeats`.
        """
        self._check_counts_repeats("counts()")
        return self._occurrences(self._keys(keys))

    @exclusive
    def times(self, keys: Any) -> Array:
        """Returns when a lookup that inserts last saw each key, (n,) float64 in seconds since 1970.

        A write into a row counts as of the last lookup that there was before it. Of a key without
        a row that is when it was last sighted; 0 where it never was. A time is
        none too early, and too late by at most a second or 1/128 of how long ago it was. A
        checkpoint keeps them.
        """
        backend = self.backend
        stamps = backend.to_host(self._stamps(self._keys(keys)))
        return backend.from_host(self.clock.times_of(stamps))

    @exclusive
    def sighted_keys(self) -> Array:
        """Returns the keys that have no row yet and were seen, (n,) of the key type, ascending.

        None where a key gets a row when it is first seen.
        """
        return self._sorted_keys(self._sighted())

    # ---------------------------------------------------------------- what has changed

    @exclusive
    def changed_since(self, number: int) -> Array:
        """Returns the keys whose rows or states may have changed, (n,) of the key type, ascending.

        Those are the keys with a row that a lookup or a write has inserted, a lookup has seen that
        inserts, or a write or an optimizer has changed. All of these say when by the number of the
        last lookup, so the lookup of that number counts as well, and what came after it. Left out
        is what a caller has given scores of earlier lookups, in tables whose scores are such. What
        a restored table tells of the time before is what the saved one knew.

        Args:
          number: `num_lookups` at some time.

        Raises:
          TypeError, ValueError: it is no number of a lookup. Numbers are halved after 2**32 - 1
            lookups: one from before may then be above `num_lookups`.
        """
        number = self._checked_number("number", number)
        return self._sorted_keys(self._keys_where(lambda stamps: stamps >= number))

    @exclusive
    def export_since(self, at: float) -> tuple[Array, Array]:
        """Returns the keys whose rows may have changed since a time, and their rows, as `export`
        gives all.

        Those are the keys that `changed_since` gives for the first lookup since then. Some may be
        of up to a second before; long ago, of up to 1/128 of how long ago it was. As everywhere, a
        write that inserts nothing counts as of the last lookup that there was before it.

        Args:
          at: in seconds since 1970.
        """
        number = self.clock.first_since(at)
        keys = self._keys_where(lambda stamps: stamps >= np.uint64(number))
        ordered = self._sorted_keys(keys)
        return ordered, self.store.read(self._find(self._keys(ordered)).rows)

    @changing
    def log_removals(self) -> None:
        """Begins to note which keys lose their rows, for `removed_since`.

        The log takes 23 to 34 bytes a key. A restored table begins a new one. Where there is one it
        goes on.

        Raises:
          MemoryError: no memory for it; there is none.
        """
        if self.removals is None:
            log = RemovalLog(self.backend, self.key_dtype, self.name, self.num_lookups)
            publish(plan_set(self, removals=log))

    @exclusive
    def removed_since(self, number: int) -> Array:
        """Returns the keys that have lost their rows and have none now, (n,) of the key type,
        ascending: by `erase` and its like, `expire`, `clear` or eviction.

        Args:
          number: `num_lookups` at some time since `log_removals`. Removals between the lookup of
            that number and the next one count as well.

        Raises:
          TypeError, ValueError: it is no number of a lookup, or the log does not reach back so far.
        """
        log = self._log()
        number = self._checked_number("number", number)
        if number < log.since:
            raise ValueError(
                f"The log of table {self.name!r} has the removals since lookup {log.since:,}. "
                f"Received: number={number:,}. What is there now, `export` tells."
            )
        keys = log.keys_since(number)
        return self._sorted_keys(keys[self._find(keys).rows == np.uint32(NO_ROW)])

    @changing
    def forget_removals(self, *, before: int) -> None:
        """Forgets which keys were removed before a lookup began, and gives the memory back.

        Args:
          before: number of the lookup, at most `num_lookups`.

        Raises:
          TypeError, ValueError: it is no number of a lookup, or there is no log.
        """
        self._log().forget(self._checked_number("before", before))

    # ---------------------------------------------------------------- inside

    def _log(self) -> RemovalLog:
        if self.removals is None:
            raise ValueError(
                f"Table {self.name!r} does not note which keys are removed. Call log_removals() "
                "before the first is."
            )
        return self.removals

    def _checked_number(self, name: str, number: int) -> int:
        if not is_integer(number):
            raise TypeError(f"`{name}` must be an integer. Received: {name}={number!r}.")
        if not 0 <= number <= self.num_lookups:
            raise ValueError(
                f"`{name}` must be the number of a lookup of table {self.name!r}, from 0 to "
                f"{self.num_lookups:,}. Received: {name}={number:,}. If it is from before numbers "
                "were halved, or from another table, take all keys instead."
            )
        return int(number)

    def _keys_where(self, choose: Callable[[Array], Array]) -> Array:
        """Returns the keys (n,) int64, in no order, whose stamps a function of (m,) uint32 chooses
        by (m,) bool."""
        found = []
        for first in range(0, self.num_slots, CHUNK_SLOTS):
            held = self.index.entries(first, CHUNK_SLOTS)
            found.append(held.keys[choose(held.stamps)])
        return self.backend.xp.concatenate(found)

    def _sorted_keys(self, keys: Array) -> Array:
        """Returns keys (n,) int64 in the key type, ascending."""
        keys = self.key_dtype.from_int64(self.backend.xp, keys)
        return keys[self.backend.xp.argsort(keys)]

    def _stamps(self, keys: Array) -> Array:
        """Returns the number of the lookup that last saw each key, (n,) uint32; 0: none has."""
        return self.index.stamps(keys)

    def _sighted(self) -> Array:
        """Returns the keys that were seen and have no row, (n,) int64, in no order."""
        return self.backend.xp.empty(0, np.int64)

    def _occurrences(self, keys: Array) -> Array:
        """Returns what `counts` does, of a table that counts."""
        raise NotImplementedError(f"Table {self.name!r} does not count.")

    def _checked_counts(self, keys: Array, counts: Any) -> Array:
        """Returns how often keys count, (n,) uint64, or raises ValueError."""
        self._check_counts_repeats("`counts`")
        xp = self.backend.xp
        counts = xp.asarray(counts)
        if counts.shape != keys.shape or counts.dtype.kind not in "iu":
            raise ValueError(
                f"`counts` must be integers of shape {keys.shape}, one for each key. "
                f"Received: {counts.dtype} of shape {counts.shape}."
            )
        if counts.size and not 1 <= int(counts.min()) <= int(counts.max()) <= _MOST_COUNT:
            raise ValueError(
                f"`counts` must be from 1 to {_MOST_COUNT}. Received: from {int(counts.min())} to "
                f"{int(counts.max())}."
            )
        return xp.ascontiguousarray(counts, dtype=np.uint64)

    def _check_counts_repeats(self, what: str) -> None:
        if not self.counts_repeats:
            raise ValueError(
                f"{what} is for tables that count how often keys come, and {self.name!r} does not. "
                "Make a hybrid table with evict_strategy='kLfu' and count_repeats=True."
            )

"""What a table knows of the past of its keys: how often and when they were seen."""

from typing import Any

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.table.exclusive import exclusive
from sok_lite.engine.table.export import Exports

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

        Of a key without a row that is when it was last sighted; 0 where it never was. A time is
        none too early, and too late by at most a second or 1/128 of how long ago it was. A
        checkpoint keeps them.
        """
        backend = self.backend
        stamps = backend.to_host(self._stamps(self._keys(keys)))
        return backend.from_host(self.clock.times_of(stamps))

    # ---------------------------------------------------------------- inside

    def _stamps(self, keys: Array) -> Array:
        """Returns the number of the lookup that last saw each key, (n,) uint32; 0: none has."""
        return self.index.stamps(keys)

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

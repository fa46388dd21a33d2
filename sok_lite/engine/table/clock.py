"""The time of a table: its lookups are counted, and the count is kept with every key it sees."""

import time
from bisect import bisect_right

from sok_lite.engine.table.index import LAST_STAMP

_MAX_MARKS = 4096


class Clock:
    """Counts lookups from 1 on and knows about when each was.

    Attributes:
      now: number of the last lookup; 0 before the first.
    """

    def __init__(self) -> None:
        self.now = 0
        # Number of the first lookup of a second, and that second: both ascending.
        self._numbers: list[int] = []
        self._times: list[float] = []
        self._last_time = 0.0

    @property
    def is_full(self) -> bool:
        """Whether the next number would not fit a stamp."""
        return self.now == LAST_STAMP

    def tick(self) -> int:
        """Begins a lookup and returns its number."""
        self.now += 1
        at = self._last_time = time.monotonic()
        if not self._times or at - self._times[-1] >= 1.0:
            self._numbers.append(self.now)
            self._times.append(at)
            if len(self._times) > _MAX_MARKS:
                # The older a time, the coarser it may be known: every other mark of the older
                # half goes, never the newest.
                half = _MAX_MARKS // 2
                self._numbers[:half] = self._numbers[:half:2]
                self._times[:half] = self._times[:half:2]
        return self.now

    def first_since(self, at: float) -> int:
        """Returns the number of the first lookup since a time: of one up to a second earlier, or
        long ago a little more, where it is not known so exactly.

        Args:
          at: by time.monotonic().
        """
        if self._last_time < at:
            return self.now + 1
        position = bisect_right(self._times, at) - 1
        return self._numbers[position] if position >= 0 else 0

    def restart(self, now: int) -> None:
        """Goes on counting after another number; what was counted before counts as of this time."""
        self.now = now
        self._last_time = time.monotonic()
        self._numbers = [now + 1]
        self._times = [self._last_time]

    def halve(self) -> None:
        """Halves the number of every lookup, as the stamps of keys are halved."""
        self.now >>= 1
        self._numbers = [number >> 1 for number in self._numbers]

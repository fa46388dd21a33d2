"""The time of a table: its lookups are counted, and the count is kept with every key it sees."""

import time
from bisect import bisect_right

from sok_lite.engine.table.index import LAST_STAMP

# A time of long ago is known to this part of how long ago it was. So few spans suffice: some 3,300
# for a year of lookups in every second.
_PRECISION = 128
_MAX_SPANS = 4096


class Clock:
    """Counts lookups from 1 on and knows about when each was.

    Attributes:
      now: number of the last lookup; 0 before the first.
    """

    def __init__(self) -> None:
        self.now = 0
        # Spans of about a second: number and time of the first lookup, time of the last one. All
        # ascending.
        self._numbers: list[int] = []
        self._times: list[float] = []
        self._ends: list[float] = []

    @property
    def is_full(self) -> bool:
        """Whether the next number would not fit a stamp."""
        return self.now == LAST_STAMP

    def tick(self) -> int:
        """Begins a lookup and returns its number."""
        self.now += 1
        at = time.monotonic()
        if self._times and at - self._times[-1] < 1.0:
            self._ends[-1] = at
        else:
            self._begin_span(self.now, at)
        return self.now

    def _begin_span(self, number: int, at: float) -> None:
        self._numbers.append(number)
        self._times.append(at)
        self._ends.append(at)
        if len(self._times) > _MAX_SPANS:
            self._join_spans(at)

    def _join_spans(self, now: float) -> None:
        spans = list(zip(self._numbers, self._times, self._ends, strict=True))
        self._numbers, self._times, self._ends = [], [], []
        for number, first, last in spans:
            if self._times and last - self._times[-1] < (now - last) / _PRECISION:
                self._ends[-1] = last
            else:
                self._numbers.append(number)
                self._times.append(first)
                self._ends.append(last)

    def first_since(self, at: float) -> int:
        """Returns the number of the first lookup since a time, or of an earlier one: by up to a
        second, or long ago by up to 1/128 of how long ago it was.

        Args:
          at: by time.monotonic().
        """
        position = bisect_right(self._times, at) - 1
        if position < 0:
            return 0
        if self._ends[position] >= at:
            return self._numbers[position]
        # Nothing was looked up from then until the next span.
        position += 1
        return self._numbers[position] if position < len(self._numbers) else self.now + 1

    def restart(self, now: int) -> None:
        """Goes on counting after another number; what was counted before counts as of this time."""
        self.now = now
        self._numbers.clear()
        self._times.clear()
        self._ends.clear()
        self._begin_span(now + 1, time.monotonic())

    def halve(self) -> None:
        """Halves the number of every lookup, as the stamps of keys are halved."""
        self.now >>= 1
        self._numbers = [number >> 1 for number in self._numbers]

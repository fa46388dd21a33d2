"""The time of a table: its lookups are counted, and the count is kept with every key it sees."""

import time
from bisect import bisect_right
from functools import partial

from sok_lite.backend.publish import Action, publish, setting
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
        self._last_time = 0.0  # of the last lookup
        # Spans of about a second: number and time of the first lookup, and time of the last one
        # but in the last span, where it is `_last_time`. All ascending.
        self._numbers: list[int] = []
        self._times: list[float] = []
        self._ends: list[float] = []

    @property
    def is_full(self) -> bool:
        """Whether the next number would not fit a stamp."""
        return self.now == LAST_STAMP

    def ticking(self) -> list[Action]:
        """Prepares to begin the lookup of number `now + 1`."""
        at = time.monotonic()
        last = {"now": self.now + 1, "_last_time": at}
        if self._times and at - self._times[-1] < 1.0:
            return [partial(vars(self).update, last)]  # by one action: many tables tick at once
        if len(self._times) >= _MAX_SPANS:
            publish(self._joining_spans(at))
        # Not appended: a list that grows allocates.
        return setting(
            self,
            **last,
            _numbers=[*self._numbers, self.now + 1],
            _times=[*self._times, at],
            _ends=self._all_ends(),
        )

    def tick(self) -> int:
        """Begins a lookup and returns its number."""
        publish(self.ticking())
        return self.now

    def _all_ends(self) -> list[float]:
        """Returns when the last lookup of each span was."""
        return [*self._ends, self._last_time] if self._times else []

    def _joining_spans(self, now: float) -> list[Action]:
        numbers: list[int] = []
        times: list[float] = []
        ends: list[float] = []
        for number, first, last in zip(self._numbers, self._times, self._all_ends(), strict=True):
            if times and last - times[-1] < (now - last) / _PRECISION:
                ends[-1] = last
            else:
                numbers.append(number)
                times.append(first)
                ends.append(last)
        return setting(self, _numbers=numbers, _times=times, _ends=ends[:-1])

    def first_since(self, at: float) -> int:
        """Returns the number of the first lookup since a time, or of an earlier one: by up to a
        second, or long ago by up to 1/128 of how long ago it was.

        Args:
          at: by time.monotonic().
        """
        position = bisect_right(self._times, at) - 1
        if position < 0:
            return 0
        if self._all_ends()[position] >= at:
            return self._numbers[position]
        # Nothing was looked up from then until the next span.
        position += 1
        return self._numbers[position] if position < len(self._numbers) else self.now + 1

    def restarting(self, now: int) -> list[Action]:
        """Prepares to go on counting after another number; what was counted before counts as of
        this time."""
        at = time.monotonic()
        return setting(self, now=now, _last_time=at, _numbers=[now + 1], _times=[at], _ends=[])

    def restart(self, now: int) -> None:
        """Goes on counting after another number; see `restarting`."""
        publish(self.restarting(now))

    def halving(self) -> list[Action]:
        """Prepares to halve the number of every lookup, as the stamps of keys are halved."""
        return setting(self, now=self.now >> 1, _numbers=[number >> 1 for number in self._numbers])

    def halve(self) -> None:
        """Halves the number of every lookup; see `halving`."""
        publish(self.halving())

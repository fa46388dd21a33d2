"""The time of a table: its lookups are counted, and the count is kept with every key it sees.

When a lookup was is told by the machine's clock, in seconds since 1970: so it means the same in
another process. Where that clock is put back, lookups that are ahead of it count as of then.
"""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend.publish import Action, plan_set, publish
from sok_lite.engine.table.index import LAST_LOOKUP_NUMBER

# A time of long ago is known to this part of how long ago it was. So few spans suffice: some 3,300
# for a year of lookups in every second.
_PRECISION = 128
_MAX_SPANS = 4096
# The last second that has a date: of the year 9999.
_LAST_TIME = 253_402_300_799


class Spans(NamedTuple):
    """Spans of about a second, or longer ones of long ago, in which there were lookups.

    Attributes:
      numbers: of the first lookup of each, ascending.
      times: of that lookup, ascending.
      ends: times of the last lookup of each, none later than the next span.
    """

    numbers: list[int]
    times: list[float]
    ends: list[float]

    @classmethod
    def of(cls, saved: Any, now: int) -> "Spans":
        """Returns spans of what `_asdict` gave, by way of JSON.

        Args:
          now: number of the last lookup.

        Raises:
          ValueError: these are none.
        """
        try:
            numbers, times, ends = (list(saved[name]) for name in cls._fields)
            in_order = [at for both in zip(times, ends, strict=True) for at in both]
            is_right = (
                len(numbers) == len(times)
                and all(isinstance(number, int) for number in numbers)
                and numbers == sorted(numbers)
                and 0 <= min(numbers, default=0) <= max(numbers, default=0) <= now + 1
                and all(isinstance(at, (int, float)) for at in in_order)
                and all(0 <= at <= _LAST_TIME for at in in_order)
                and in_order == sorted(in_order)
            )
        except (TypeError, ValueError, LookupError):
            is_right = False
        if not is_right:
            raise ValueError("the times of its lookups contradict each other")
        return cls(numbers, times, ends)


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
        """Whether no larger number of a lookup fits the 32 bits that an index keeps of it."""
        return self.now == LAST_LOOKUP_NUMBER

    def read(self) -> float:
        """Returns the time, in seconds since 1970. Lookups that are ahead of it count as of now."""
        now = time.time()
        if now < self._last_time:
            publish(self._plan_put_back(now))
        return now

    def _plan_put_back(self, now: float) -> list[Action]:
        """Prepares to let lookups be no later than a time: those that were are in one span."""
        at = bisect_left(self._times, now)
        is_ahead = at < len(self._times)
        times = [*self._times[:at], now] if is_ahead else self._times
        numbers = self._numbers[: at + 1]
        ends = [min(end, now) for end in self._all_ends()[: len(times) - 1]]
        return plan_set(self, _last_time=now, _numbers=numbers, _times=times, _ends=ends)

    def plan_tick(self) -> list[Action]:
        """Prepares to begin the lookup of number `now + 1`."""
        at = self.read()
        last = {"now": self.now + 1, "_last_time": at}
        if self._times and at - self._times[-1] < 1.0:
            return [partial(self.__dict__.update, last)]  # by one action: many tables tick at once
        if len(self._times) >= _MAX_SPANS:
            publish(self._plan_join_spans(at))
        # Not appended: a list that grows allocates.
        return plan_set(
            self,
            **last,
            _numbers=[*self._numbers, self.now + 1],
            _times=[*self._times, at],
            _ends=self._all_ends(),
        )

    @staticmethod
    def plan_tick_alike(clocks: "Sequence[Clock]") -> list[Action] | None:
        """Does what `plan_tick` does for each of several, where all go on with their last span.

        Returns:
          None: one does not, or is full.
        """
        # Nothing is called for each: a step may have a thousand tables.
        at, last = time.time(), LAST_LOOKUP_NUMBER
        actions: list[Action] = [
            partial(clock.__dict__.update, {"now": clock.now + 1, "_last_time": at})
            for clock in clocks
            if clock.now != last
            and clock._last_time <= at
            and clock._times
            and at - clock._times[-1] < 1.0
        ]
        return actions if len(actions) == len(clocks) else None

    def _all_ends(self) -> list[float]:
        """Returns when the last lookup of each span was."""
        return [*self._ends, self._last_time] if self._times else []

    def _plan_join_spans(self, now: float) -> list[Action]:
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
        return plan_set(self, _numbers=numbers, _times=times, _ends=ends[:-1])

    def first_since(self, at: float) -> int:
        """Returns the number of the first lookup since a time, or of an earlier one: by up to a
        second, or long ago by up to 1/128 of how long ago it was.

        Args:
          at: in seconds since 1970.
        """
        position = bisect_right(self._times, at) - 1
        if position < 0:
            return 0
        if self._all_ends()[position] >= at:
            return self._numbers[position]
        # Nothing was looked up from then until the next span.
        position += 1
        return self._numbers[position] if position < len(self._numbers) else self.now + 1

    def times_of(self, numbers: np.ndarray) -> np.ndarray:
        """Returns when lookups were, (n,) float64; 0 of number 0.

        No time is too early, and none too late by more than a second, or 1/128 of how long ago it
        was. None is in the future, even where the clock was put back.

        Args:
          numbers: (n,) integers, none above `now`.
        """
        if not self._numbers:
            return np.zeros(numbers.shape)
        at = np.searchsorted(np.array(self._numbers, np.int64), numbers.astype(np.int64), "right")
        # Lookups before the first span count as made when that began: no time of them is known.
        times = np.array([self._times[0], *self._all_ends()])[at]
        return np.where(numbers == 0, 0.0, np.minimum(times, time.time()))

    @property
    def spans(self) -> Spans:
        """The times of lookups, span by span."""
        return Spans([*self._numbers], [*self._times], self._all_ends())

    def plan_restart(self, now: int, spans: Spans | None = None) -> list[Action]:
        """Prepares to go on counting after another number.

        Args:
          spans: of the lookups before; None, or none: they all count as of this time.
        """
        if spans is None or not spans.numbers:
            at = time.time()
            spans = Spans([now + 1], [at], [at])
        numbers, times, ends = spans
        last = {"_last_time": ends[-1], "_ends": ends[:-1]}
        return plan_set(self, now=now, _numbers=numbers, _times=times, **last)

    def plan_halve(self) -> list[Action]:
        """Prepares to halve the number of every lookup, as the index halves those of its keys."""
        return plan_set(self, now=self.now >> 1, _numbers=[number >> 1 for number in self._numbers])

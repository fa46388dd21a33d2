"""The time of a table: its lookups are counted, and the count is kept with every key it sees.

When a lookup was is told by the machine's clock, in seconds since 1970: so it means the same in
another process. Where that clock is put back, lookups that are ahead of it count as of then.
"""

import math
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.table.index import LAST_LOOKUP_NUMBER
from sok_lite.engine.table.record import ClockRecord, TableRecord

# A time of long ago is known to this part of how long ago it was. So few spans suffice: some 3,300
# for a year of lookups in every second.
_PRECISION = 128
_MAX_SPANS = 4096
_FEWEST_SPANS = 16  # that there is room for
# The first two fields of a ClockRecord, `now` and `last_time`.
_LAST = struct.Struct("=qd")
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


class Clock(ClockRecord):
    """Counts lookups from 1 on and knows about when each was.

    Its fields are where native code finds them, which begins lookups as `tick` does wherever
    that takes no memory (kernels/table_clock.h). What is behind the spans that there are says
    nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._begin()

    @classmethod
    def of(cls, record: TableRecord) -> "Clock":
        """Returns the clock of a table, before its first lookup: its fields are in the record."""
        clock = cls.from_buffer(record.clock)
        clock._begin()
        return clock

    def _begin(self) -> None:
        self.span_time = -math.inf
        self._room = _Spans.of(Spans([], [], []))  # of the spans before the current one
        self._set_spans(self._room)

    @property
    def is_full(self) -> bool:
        """Whether no larger number of a lookup fits the 32 bits that an index keeps of it."""
        return self.now == LAST_LOOKUP_NUMBER

    def read(self) -> float:
        """Returns the time, in seconds since 1970. Lookups that are ahead of it count as of now."""
        now = time.time()
        if now < self.last_time:
            self._put_back(now)
        return now

    def _put_back(self, now: float) -> None:
        """Has lookups be no later than a time: those that were are in one span."""
        spans = self._spans()
        end = int(np.searchsorted(spans.times, now)) + 1
        times, ends = np.minimum(spans.times[:end], now), np.minimum(spans.ends[:end], now)
        self._set_spans(_Spans(spans.numbers[:end], times, ends))

    def tick(self) -> None:
        """Begins the lookup of number `now + 1`."""
        at = self.read()
        if at - self.span_time >= 1.0:
            self._begin_span(at)
        _LAST.pack_into(self, 0, self.now + 1, at)

    def _begin_span(self, at: float) -> None:
        if self.num_spans + 1 >= _MAX_SPANS:
            self._join_spans(at)
        if self.num_spans == self.max_spans:
            self._set_spans(self._spans(), more=1)
        if self.span_time >= 0:
            for of_spans, value in zip(self._room, self._current(), strict=True):
                of_spans[self.num_spans] = value
            self.num_spans += 1
        self.span_time, self.span_number = at, self.now + 1

    @staticmethod
    def tick_alike(clocks: "Sequence[Clock]") -> bool:
        """Does what `tick` does for each of several, where all go on with their last span.

        Returns:
          Whether it did: not if one does not, or is full.
        """
        # Nothing is called for each: a step may have a thousand tables.
        at, last, pack = time.time(), LAST_LOOKUP_NUMBER, _LAST.pack_into
        for clock in clocks:
            if clock.now == last or clock.last_time > at or at - clock.span_time >= 1.0:
                return False
        for clock in clocks:
            pack(clock, 0, clock.now + 1, at)
        return True

    def _current(self) -> tuple[int, float, float]:
        """Returns the current span: its first lookup, when that was, and the last one's time."""
        return self.span_number, self.span_time, self.last_time

    def _spans(self) -> "_Spans":
        """Returns all spans, the current one last."""
        before = _Spans(*(each[: self.num_spans] for each in self._room))
        if self.span_time < 0:
            return before
        return _Spans(*map(np.append, before, self._current()))

    def _set_spans(self, spans: "_Spans", more: int = 0) -> None:
        """Has other spans, the current one last, and room for more."""
        self._take_room(*_room_for(spans, more))

    def _take_room(self, room: "_Spans", count: int, last: tuple[int, float, float] | None) -> None:
        """Has the spans that `_room_for` has made room for. It needs no memory to speak of."""
        numbers, times, ends = (of_spans.ctypes.data for of_spans in room)
        with uninterrupted():
            self.numbers, self.times, self.ends, self._room = numbers, times, ends, room
            self.num_spans, self.max_spans = count, len(room.numbers)
            if last is not None:
                self.span_number, self.span_time, self.last_time = last

    def _join_spans(self, now: float) -> None:
        numbers: list[int] = []
        times: list[float] = []
        ends: list[float] = []
        for number, first, last in zip(*self.spans, strict=True):
            if times and last - times[-1] < (now - last) / _PRECISION:
                ends[-1] = last
            else:
                numbers.append(number)
                times.append(first)
                ends.append(last)
        self._set_spans(_Spans.of(Spans(numbers, times, ends)))

    def first_since(self, at: float) -> int:
        """Returns the number of the first lookup since a time, or of an earlier one: by up to a
        second, or long ago by up to 1/128 of how long ago it was.

        Args:
          at: in seconds since 1970.
        """
        numbers, times, ends = self._spans()
        position = int(np.searchsorted(times, at, "right")) - 1
        if position < 0:
            return 0
        if ends[position] >= at:
            return int(numbers[position])
        # Nothing was looked up from then until the next span.
        position += 1
        return int(numbers[position]) if position < len(numbers) else self.now + 1

    def times_of(self, numbers: np.ndarray) -> np.ndarray:
        """Returns when lookups were, (n,) float64; 0 of number 0.

        No time is too early, and none too late by more than a second, or 1/128 of how long ago it
        was. None is in the future, even where the clock was put back.

        Args:
          numbers: (n,) integers, none above `now`.
        """
        spans = self._spans()
        if not len(spans.numbers):
            return np.zeros(numbers.shape)
        at = np.searchsorted(spans.numbers, numbers.astype(np.int64), "right")
        # Lookups before the first span count as made when that began: no time of them is known.
        times = np.append(spans.times[0], spans.ends)[at]
        return np.where(numbers == 0, 0.0, np.minimum(times, time.time()))

    @property
    def spans(self) -> Spans:
        """The times of lookups, span by span."""
        return Spans(*(each.tolist() for each in self._spans()))

    def restarting(self, now: int, spans: Spans | None = None) -> Callable[[], None]:
        """Returns what goes on counting after another number; it needs no memory.

        Args:
          spans: of the lookups before; None, or none: they all count as of this time.
        """
        if spans is None or not spans.numbers:
            at = time.time()
            spans = Spans([now + 1], [at], [at])
        room = _room_for(_Spans.of(spans))

        def restart() -> None:
            with uninterrupted():
                self._take_room(*room)
                self.now = now

        return restart

    def halve(self) -> None:
        """Halves the number of every lookup, as the index halves those of its keys."""
        numbers, *others = self._spans()
        with uninterrupted():
            self._set_spans(_Spans(numbers >> 1, *others))
            self.now >>= 1


class _Spans(NamedTuple):
    """What `Spans` has, as arrays (n,): numbers int64, times and ends float64."""

    numbers: np.ndarray
    times: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, spans: Spans) -> "_Spans":
        numbers, *others = spans
        return cls(np.array(numbers, np.int64), *(np.array(each, np.float64) for each in others))


def _room_for(spans: _Spans, more: int = 0) -> tuple[_Spans, int, tuple[int, float, float] | None]:
    """Returns what `_take_room` takes: memory that has all spans but the last, and room for more;
    how many it has; and the last span, None where there is none."""
    count = max(0, len(spans.numbers) - 1)
    most = max(count + more, min(max(_FEWEST_SPANS, 2 * count), _MAX_SPANS - 1))
    room = _Spans(np.zeros(most, np.int64), np.zeros(most), np.zeros(most))
    for of_spans, values in zip(room, spans, strict=True):
        of_spans[:count] = values[:count]
    if not len(spans.numbers):
        return room, count, None
    number, at, last = (each[-1].item() for each in spans)
    return room, count, (number, at, last)

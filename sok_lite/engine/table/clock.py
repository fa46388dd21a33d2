"""The clock of a table: it numbers lookups, and knows about when each of them was.

Times are in seconds since 1970, by the machine's clock, so that they mean the same in another
process. Where that clock is put back, lookups that are ahead of it count as of its new time.
"""

import math
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.table.record import LAST_LOOKUP_NUMBER, ClockRecord, TableRecord

# Times are known to 1/128 of how long ago they were. Then few spans are enough: some 3,300 for a
# year with a lookup in every second.
_PRECISION = 128
_MAX_SPANS = 4096
_MIN_ROOM = 16  # spans for which memory is allocated at least
_LAST = struct.Struct("=qd")  # the first two fields of a ClockRecord, `now` and `last_time`
_LAST_TIME = 253_402_300_799  # the last second of the year 9999, the latest that has a date

# Spans as arrays (n,): numbers int64, times and ends float64; see `Spans`.
_Arrays = tuple[np.ndarray, ...]


class Spans(NamedTuple):
    """Spans of time with lookups, each about a second long; those of long ago are longer.

    Attributes:
      numbers: of the first lookup of each span, ascending.
      times: of that lookup, ascending.
      ends: times of the last lookup of each span, at most the next of `times`.
    """

    numbers: list[int]
    times: list[float]
    ends: list[float]

    @classmethod
    def of(cls, saved: Any, now: int) -> "Spans":
        """Returns the spans of a mapping read from JSON, or raises ValueError.

        Args:
          now: number of the last lookup.
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
    """Numbers lookups from 1 on, in a record that native code ticks too (kernels/table_clock.h).

    The current span is in fields of its own; arrays have the earlier ones, and room for more.
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
        self._set_spans(_arrays([], [], []))

    @property
    def is_full(self) -> bool:
        """Whether the next lookup number would not fit the 32 bits that slots have for it."""
        return self.now == LAST_LOOKUP_NUMBER

    def read(self) -> float:
        """Returns the time, in seconds since 1970. Lookups that are ahead of it count as of now."""
        now = time.time()
        if now < self.last_time:  # the machine's clock was put back
            numbers, times, ends = self._spans()
            n = int(np.searchsorted(times, now)) + 1
            self._set_spans((numbers[:n], np.minimum(times[:n], now), np.minimum(ends[:n], now)))
        return now

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
            for array, value in zip(self._room, self._current(), strict=True):
                array[self.num_spans] = value
            self.num_spans += 1
        self.span_time, self.span_number = at, self.now + 1

    @staticmethod
    def tick_all(clocks: "Sequence[Clock]") -> bool:
        """Ticks all clocks, if each one stays in its current span.

        Returns:
          Whether it did; not if a clock needs a new span, is full, or is ahead of time.
        """
        # No call for each: a step may have a thousand tables.
        at, last, pack = time.time(), LAST_LOOKUP_NUMBER, _LAST.pack_into
        for clock in clocks:
            if clock.now == last or clock.last_time > at or at - clock.span_time >= 1.0:
                return False
        for clock in clocks:
            pack(clock, 0, clock.now + 1, at)
        return True

    def _current(self) -> tuple[int, float, float]:
        """Returns the current span, as one of `Spans`."""
        return self.span_number, self.span_time, self.last_time

    def _spans(self) -> _Arrays:
        """Returns all spans, the current one last."""
        before = tuple(array[: self.num_spans] for array in self._room)
        if self.span_time < 0:
            return before
        return tuple(map(np.append, before, self._current()))

    def _set_spans(self, spans: _Arrays, more: int = 0) -> None:
        self._prepare_spans(spans, more)()

    def _prepare_spans(self, spans: _Arrays, more: int = 0) -> Callable[[], None]:
        """Allocates memory for spans, the last of them the current one, and for `more`.

        Returns:
          A function that replaces the spans, which allocates nothing.
        """
        count = max(0, len(spans[0]) - 1)
        max_spans = max(count + more, min(max(_MIN_ROOM, 2 * count), _MAX_SPANS - 1))
        room = np.zeros(max_spans, np.int64), np.zeros(max_spans), np.zeros(max_spans)
        for array, values in zip(room, spans, strict=True):
            array[:count] = values[:count]
        addresses = [array.ctypes.data for array in room]
        current = [array[-1].item() for array in spans] if len(spans[0]) else None

        def replace() -> None:
            with uninterrupted():
                self.numbers, self.times, self.ends = addresses
                self._room, self.num_spans, self.max_spans = room, count, max_spans
                if current is not None:
                    self.span_number, self.span_time, self.last_time = current

        return replace

    def _join_spans(self, now: float) -> None:
        """Joins spans as far as `_PRECISION` allows."""
        joined = Spans([], [], [])
        for number, first, last in zip(*self.spans, strict=True):
            if joined.times and last - joined.times[-1] < (now - last) / _PRECISION:
                joined.ends[-1] = last
            else:
                joined.numbers.append(number)
                joined.times.append(first)
                joined.ends.append(last)
        self._set_spans(_arrays(*joined))

    def first_since(self, at: float) -> int:
        """Returns the number of the first lookup since a time in seconds since 1970, or of one
        earlier by up to a second, or up to 1/128 of how long ago it was."""
        numbers, times, ends = self._spans()
        position = int(np.searchsorted(times, at, "right")) - 1
        if position < 0:
            return 0
        if ends[position] >= at:
            return int(numbers[position])
        # No lookup from then until the next span.
        position += 1
        return int(numbers[position]) if position < len(numbers) else self.now + 1

    def times_of(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the times of lookups, (n,) float64; 0 for number 0.

        No time is too early, and none too late by more than a second, or 1/128 of how long ago it
        was. None is in the future, even where the clock was put back.

        Args:
          numbers: (n,) integers, none above `now`.
        """
        first, times, ends = self._spans()
        if not len(first):
            return np.zeros(numbers.shape)
        at = np.searchsorted(first, numbers.astype(np.int64), "right")
        # The times of lookups before the first span are unknown: they count as of its beginning.
        found = np.append(times[0], ends)[at]
        return np.where(numbers == 0, 0.0, np.minimum(found, time.time()))

    @property
    def spans(self) -> Spans:
        """The times of lookups, span by span."""
        return Spans(*(array.tolist() for array in self._spans()))

    def prepare_restart(self, now: int, spans: Spans | None = None) -> Callable[[], None]:
        """Returns a function that sets the number of the last lookup; it allocates nothing.

        Args:
          spans: times of the lookups by then; None, or without any: all count as of this moment.
        """
        if spans is None or not spans.numbers:
            at = time.time()
            spans = Spans([now + 1], [at], [at])
        replace_spans = self._prepare_spans(_arrays(*spans))

        def restart() -> None:
            with uninterrupted():
                replace_spans()
                self.now = now

        return restart

    def halve(self) -> None:
        """Halves the numbers of all lookups, as `Index.age` does in slots."""
        numbers, *others = self._spans()
        with uninterrupted():
            self._set_spans((numbers >> 1, *others))
            self.now >>= 1


def _arrays(numbers: Any, times: Any, ends: Any) -> _Arrays:
    """Returns new arrays of spans."""
    return np.array(numbers, np.int64), np.array(times, np.float64), np.array(ends, np.float64)

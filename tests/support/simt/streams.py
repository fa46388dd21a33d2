"""Streams of the simulated GPU, and whether what they do has an order.

What is put on a stream runs when something waits for it, and what it needs of other streams runs
before it: what it and the null stream make each other wait for. Whatever else there is on other
streams runs later, as late as CUDA allows.

That finds who reads too early, in one order of many. So it is also asked whether there is any order
at all: each piece of work knows by a vector clock what CUDA has run before it, on which stream.
Where two touch the same bytes, one of them writes, and neither is before the other, the later one
is a `Race`. What the host does counts as one thread: which of its threads waits for which other is
not known here, so an order that only their locks could give is taken for granted.

As long as the null stream is the only one, all is in order, and nothing of this is noted.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tests.support.simt import runtime

Clock = dict["Queue", int]  # stream -> how much of its work is before
Views = Sequence[np.ndarray | None]


class Race(runtime.SimtError):
    """Two streams touch the same bytes, one of them writes, and nothing orders them."""


class _Work(NamedTuple):
    """A piece of work.

    `views`: what it writes, or None, and then what it reads; None: a kernel, of which the scheduler
    knows. `clock`: what is before it, itself included; None: the null stream was the only one.
    """

    name: str
    run: Callable[[], object]
    views: Views | None
    clock: Clock | None


class Queue:
    """What is on a stream: pieces of work that have not run, how many there ever were and how many
    have run, and what is before the next one. A blocking one and the null stream wait for each
    other."""

    def __init__(self, name: str, is_blocking: bool, ptr: int) -> None:
        self.name, self.is_blocking, self.ptr = name, is_blocking, ptr
        self.work: deque[_Work] = deque()
        self.number = self.done = 0
        self.clock: Clock = {}
        self.is_closed = False


class _Access(NamedTuple):
    """Who touched some bytes last, of a stream: `number` is which of its work it was."""

    number: int
    name: str


NULL = Queue("the null stream", True, 0)

lock = threading.RLock()  # who has it runs the streams
_queues = [NULL]
_pointers = itertools.count(0x1000, 0x10)
_is_noted = False  # whether there are several streams
_is_running = False
_host: Clock = {}  # what the host has waited for
# By finalizers, which may come in the midst of anything: they are put on their streams later.
_freed: deque[tuple[Queue, Callable[[], None], Views]] = deque()
# (stream, whether it was written, first address, one behind the last) -> the last who did so.
_accesses: dict[tuple[Queue, bool, int, int], _Access] = {}


def new_queue(name: str = "", is_blocking: bool = False) -> Queue:
    """Makes a stream. It is there until it is closed and its work is done."""
    global _is_noted, _host
    with lock:
        ptr = next(_pointers)
        queue = Queue(name or f"stream {ptr:#x}", is_blocking, ptr)
        if not _is_noted:
            _take_freed()
            NULL.number = NULL.done + len(NULL.work)
            NULL.clock = {NULL: NULL.number}
            _host = {NULL: NULL.done}
            _is_noted = True
            runtime.note_ranges(True)
        _queues.append(queue)
    return queue


def queue_of(ptr: int) -> Queue | None:
    """Returns the stream of a number; None: there is none."""
    return next((queue for queue in _queues if queue.ptr == ptr), None)


def is_noted() -> bool:
    """Whether there are several streams, and so whether it is noted what they touch."""
    return _is_noted


# ---------------------------------------------------------------- what is put on streams


def put(queue: Queue, name: str, run: Callable[[], object], views: Views | None = None) -> None:
    """Puts work on a stream. It touches memory that lives until then, and no other state."""
    if not _is_noted:
        if _freed:
            _take_freed()
        NULL.work.append(_Work(name, run, views, None))
        return
    with lock:
        _take_freed()
        _put(queue, name, run, views)


def free(queue: Queue, run: Callable[[], None], views: Views) -> None:
    """Puts on a stream that memory is freed, which nobody may use any more: a finalizer may."""
    _freed.append((queue, run, views))


def _take_freed() -> None:
    while _freed:
        try:
            queue, run, views = _freed.popleft()
        except IndexError:  # another thread has taken it
            return
        if _is_noted:
            _put(queue if queue in _queues else NULL, "free", run, views)
        else:
            NULL.work.append(_Work("free", run, views, None))


def _put(queue: Queue, name: str, run: Callable[[], object], views: Views | None) -> None:
    clock = _next_clock(queue)
    queue.number += 1
    clock[queue] = queue.number
    queue.clock = clock
    queue.work.append(_Work(name, run, views, clock))


def _joined(clocks: Iterable[Clock]) -> Clock:
    """Returns what is before where all of these are."""
    result: Clock = {}
    for clock in clocks:
        for queue, number in clock.items():
            if number > result.get(queue, 0):
                result[queue] = number
    return result


def _next_clock(queue: Queue) -> Clock:
    """Returns what is before the next piece of work of a stream."""
    if not _is_noted:
        return {NULL: NULL.done + len(NULL.work)}
    others: Iterable[Queue] = ()
    if queue is NULL:
        others = [other for other in _queues if other.is_blocking]
    elif queue.is_blocking:
        others = [NULL]
    return _joined([queue.clock, _host, *(other.clock for other in others)])


# ---------------------------------------------------------------- the host waits


def wait(queue: Queue | None = None) -> None:
    """Runs all that is on a stream, or on all. What the host does from now on is behind it.

    Where a kernel did something wrong, or there is a Race, what was on any stream is dropped; CUDA
    would make every later call fail.
    """
    global _host
    with lock:
        _take_freed()
        queues = _queues if queue is None else [queue]
        clock = None if queue is None or not _is_noted else queue.clock
        run(clock)
        if _is_noted:
            _host = _joined([_host, *(each.clock for each in queues)])
            _tidy()


def run(clock: Clock | None = None) -> None:
    """Runs what is before a clock, or all that is on any stream, and says so to nobody."""
    global _is_running
    with lock:
        if _is_running:  # a finalizer, in the midst of it
            return
        _is_running = True
        try:
            if clock is not None:
                for queue, number in clock.items():
                    _run_until(queue, number)
                return
            while True:
                _take_freed()
                if not any(queue.work for queue in _queues):
                    return
                # The null stream last: most memory is freed there, which others may still use.
                for queue in reversed(list(_queues)):
                    _run_until(queue, None)
        finally:
            _is_running = False


def _run_until(queue: Queue, number: int | None) -> None:
    """Runs the first pieces of work of a stream, up to this number, and what they wait for."""
    while queue.work and (number is None or queue.done < number):
        work = queue.work.popleft()
        for other, needed in (work.clock or {}).items():
            if other is not queue and other.done < needed:
                _run_until(other, needed)
        queue.done += 1
        try:
            work.run()
            if _is_noted:
                _note(queue, work)
        except runtime.SimtError:
            _drop()
            raise


def _drop() -> None:
    """Empties all streams. What was to be freed is."""
    for queue in _queues:
        while queue.work:
            work = queue.work.popleft()
            queue.done += 1
            if work.name == "free":
                work.run()
    _accesses.clear()


def _tidy() -> None:
    """Forgets what is before all that can still come, and streams that are closed."""
    global _queues, _accesses, _is_noted
    if any(queue.work for queue in _queues):
        return
    _accesses = {
        place: access
        for place, access in _accesses.items()
        if access.number > _host.get(place[0], 0)
    }
    _queues = [queue for queue in _queues if queue is NULL or not queue.is_closed]
    if len(_queues) == 1:
        _is_noted = False
        _accesses.clear()
        runtime.note_ranges(False)


# ---------------------------------------------------------------- who touches what


def forget(address: int, size: int) -> None:
    """Forgets who touched memory: it is other memory from now on, at the same address."""
    global _accesses
    with lock:
        _accesses = {
            place: access
            for place, access in _accesses.items()
            if place[2] >= address + size or place[3] <= address
        }


def _note(queue: Queue, work: _Work) -> None:
    """Notes what a piece of work has touched. Raises Race."""
    if work.views is None:
        for memory in runtime.touched():
            for (begin, end), is_write in ((memory.written, True), (memory.read, False)):
                if begin < end:
                    place = f"{runtime.name_of(memory.address)} at {memory.address:#x}"
                    _note_access(queue, work, is_write, begin, end, place)
        return
    for i, view in enumerate(work.views):
        if view is not None and view.size:
            begin, end = _bounds(view)
            _note_access(queue, work, i == 0, begin, end, f"an array {view.dtype} {view.shape}")


def _note_access(
    queue: Queue, work: _Work, is_write: bool, begin: int, end: int, what: str
) -> None:
    before = work.clock or {}
    for (other, was_written, first, last), access in _accesses.items():
        if other is queue or not (is_write or was_written) or last <= begin or end <= first:
            continue
        if before.get(other, 0) < access.number:
            raise Race(
                f"{work.name} on {queue.name} {'writes' if is_write else 'reads'} bytes that "
                f"{access.name} on {other.name} {'writes' if was_written else 'reads'}, and "
                "nothing orders the two: no wait of the host, no null stream.\n"
                f"  {min(end, last) - max(begin, first)} bytes at {max(begin, first):#x}, of "
                f"{what}"
            )
    _accesses[queue, is_write, begin, end] = _Access(queue.done, work.name)


def _bounds(view: np.ndarray) -> tuple[int, int]:
    """Returns the first address of an array and the one behind its last."""
    begin = end = int(view.__array_interface__["data"][0])
    for size, stride in zip(view.shape, view.strides, strict=True):
        begin += min(0, (size - 1) * stride)
        end += max(0, (size - 1) * stride)
    return begin, end + view.itemsize

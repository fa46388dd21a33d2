"""Memory, streams and counters of a GPU that is not there.

What is launched is put on a stream and runs when something waits for it, as late as CUDA allows:
who reads too early reads what was there before (streams.py). Memory holds a pattern where a GPU
leaves it as it is, and once more after it was freed; its addresses come back late, and a kernel may
touch what is allocated and nothing else.
"""

import ctypes
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.support.simt import runtime, streams

POISON = 0xDB
_ALIGNMENT = 512  # of what CuPy's pool gives, and what it rounds sizes up to
_QUARANTINE = 1 << 25  # bytes that were freed last, whose addresses nobody gets

num_devices = 1  # tests set it
compute_capability = "90"  # of every device; tests set it
limit = 1 << 33  # bytes of a device; tests set it
totals: Counter[str] = Counter()
random = np.random.default_rng(0)

_current = threading.local()


class OutOfMemoryError(MemoryError):
    """What CuPy raises where the device has no memory left."""


class CUDARuntimeError(RuntimeError):
    """What CuPy raises where a call of the CUDA runtime fails."""


class CUDADriverError(RuntimeError):
    """What CuPy raises where a call of the CUDA driver fails."""


# ---------------------------------------------------------------- counts


def count(what: str, number: int = 1) -> None:
    """Counts `number` of something.

    What is counted: "kernels" of ours that were launched; "array operations", each at least one
    launch of CuPy's; "memsets"; "waits" of the host; "cudaMalloc" and "from the pool", allocations;
    "copies to the device", "bytes to the device", "copies to the host" and "bytes to the host".
    """
    totals[what] += number


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Gives what was counted within, when it is left."""
    before, counts = totals.copy(), Counter[str]()
    yield counts
    counts.update(totals - before)


# ---------------------------------------------------------------- devices


def current_device() -> int:
    """Returns the calling thread's device. A thread begins with device 0."""
    return getattr(_current, "device", 0)


def use_device(number: int) -> None:
    """Makes a device the calling thread's."""
    if not 0 <= number < num_devices:
        raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
    _current.device = number


def check_device(number: int) -> None:
    """Raises ValueError where memory is on another device than the calling thread's."""
    if number != current_device():
        raise ValueError(
            f"The device where the array resides ({number}) is different from the current device "
            f"({current_device()}). Peer access is unavailable between these devices."
        )


# ---------------------------------------------------------------- streams


def current_queue() -> streams.Queue:
    """Returns the calling thread's stream. A thread begins with the null stream."""
    return getattr(_current, "queue", streams.NULL)


def use_queue(queue: streams.Queue) -> None:
    """Makes a stream the calling thread's."""
    _current.queue = queue


def enqueue(name: str, work: Callable[[], object], views: streams.Views | None = None) -> None:
    """Puts work on the thread's stream, which touches memory that lives until then and no more."""
    streams.put(current_queue(), name, work, views)


def wait(queue: streams.Queue | None = None) -> None:
    """Runs all that is on a stream, or on all of them. What was behind a wrong launch is dropped;
    CUDA would make every later call fail."""
    count("waits")
    streams.wait(queue)


def wait_to_read(view: np.ndarray) -> None:
    """Copies an array to the host: runs all that is on the thread's stream."""
    if streams.is_noted():
        enqueue("copy to the host", _nothing, (None, view))
    wait(current_queue())


def _nothing() -> None:
    pass


def restart() -> None:
    """Runs all that was launched; launches from now on have the schedules of a test's first."""
    wait()
    runtime.restart()


# ---------------------------------------------------------------- memory

_quarantine: deque[np.ndarray] = deque()
_in_quarantine = 0


def address_of(view: np.ndarray) -> int:
    """Returns where an array of NumPy's begins."""
    # Not view.ctypes.data, which takes ten times as long.
    return int(view.__array_interface__["data"][0])


def _host_memory(size: int) -> tuple[np.ndarray, int]:
    """Returns memory and its address."""
    whole = np.empty(size + _ALIGNMENT, np.uint8)
    address = address_of(whole)
    start = -address % _ALIGNMENT
    part = whole[start : start + size]
    part.fill(POISON)
    return part, address + start


def _release(part: np.ndarray, address: int) -> None:
    global _in_quarantine
    runtime.remove_memory(address)
    part.fill(POISON)
    _quarantine.append(part)
    _in_quarantine += part.nbytes
    while _in_quarantine > _QUARANTINE:
        _in_quarantine -= _quarantine.popleft().nbytes


class Memory:
    """Memory of a device, from CuPy's pool or, `pinned`, of the host for all devices.

    A kernel may touch the bytes that were asked for and no more, though the pool rounds up.
    """

    def __init__(self, size: int, pinned: bool = False) -> None:
        self.size, self.device_id, self._queue = size, current_device(), current_queue()
        self._pool: Pool | None = None
        self.content, self.ptr = np.empty(0, np.uint8), 0
        if size == 0:
            return
        if not pinned:
            self._pool = pool()
            self._taken = self._pool.take(size)
        self.content, self.ptr = _host_memory(size)
        kind = "pinned memory" if pinned else f"memory of device {self.device_id}"
        runtime.add_memory(self.ptr, size, f"{size} bytes of {kind}")
        if streams.is_noted():
            streams.forget(self.ptr, size)
        _known[self.ptr] = (size, self.device_id, pinned)

    def __del__(self) -> None:
        # In the order of the stream for which it was allocated: what was launched there before may
        # still use it, and CuPy gives it out again to what is launched there later.
        if getattr(self, "ptr", 0) and streams is not None:  # Python ends
            content, address = self.content, self.ptr
            del _known[address]
            # CUDA itself waits before it frees pinned memory.
            views = () if self._pool is None else (content,)
            streams.free(self._queue, lambda: _release(content, address), views)
            if self._pool is not None:
                self._pool.returned.append(self._taken)


# Of all memory there is: address -> (bytes, device, whether it is pinned memory of the host).
_known: dict[int, tuple[int, int, bool]] = {}


def owner_of(address: int) -> tuple[int, bool] | None:
    """Returns the device of an address and whether it is pinned memory; None: nobody knows it."""
    for start, (size, number, is_pinned) in list(_known.items()):
        if start <= address < start + size:
            return number, is_pinned
    return None


class UnownedMemory:
    """Memory of somebody else's, as CuPy's class of that name; `owner` lives as long."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.size, self._owner = ptr, size, owner
        self.device_id = current_device() if device_id < 0 else device_id
        cells = (ctypes.c_uint8 * size).from_address(ptr) if size else b""
        self.content = np.frombuffer(cells, np.uint8)


# ---------------------------------------------------------------- CuPy's pool


class Pool:
    """CuPy's memory pool of a device, as far as it is counted: all that is free fits anything."""

    def __init__(self) -> None:
        self._used = self._total = 0
        self._lock = threading.RLock()
        # Sizes, by finalizers: they come in the midst of anything, and must not wait for a lock.
        self.returned: deque[int] = deque()

    def total_bytes(self) -> int:
        return self._total

    def free_bytes(self) -> int:
        with self._lock:
            while self.returned:
                self._used -= self.returned.popleft()
            return self._total - self._used

    def free_all_blocks(self) -> None:
        """Gives CUDA back what is free. cudaFree waits for all streams."""
        with self._lock:
            num_bytes = self.free_bytes()
            self._total -= num_bytes
        if num_bytes:
            wait()

    def take(self, size: int) -> int:
        """Returns how many bytes are to be returned."""
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if size <= self.free_bytes():
                count("from the pool")
            else:
                self._allocate(size)
            self._used += size
        return size

    def _allocate(self, size: int) -> None:
        if self._total + size > limit:
            self.free_all_blocks()
            if self._total + size > limit:
                raise OutOfMemoryError(
                    f"Out of memory allocating {size:,} bytes (allocated so far: "
                    f"{self._total:,} bytes)."
                )
        count("cudaMalloc")
        self._total += size


_pools: dict[int, Pool] = {}


def pool() -> Pool:
    """Returns the pool of the calling thread's device."""
    return _pools.setdefault(current_device(), Pool())

"""The CPU backend: NumPy arrays, and kernels called through ctypes, which releases the GIL."""

import ctypes
import itertools
import mmap
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend.arguments import WORDS, address_of, addresses_of, pack_arguments
from sok_lite.backend.base import Array, Backend, LaunchArgs
from sok_lite.backend.build import find_library
from sok_lite.backend.local_ranks import local_size
from sok_lite.backend.table_lock import TableLock, load

_HUGE_PAGE_BYTES = 1 << 21
_MOST_HEAP_BYTES = 1 << 16  # chunks up to this size are not worth pages of their own
_CACHE_LINE_BYTES = 64

# Words of a launch without tables: the nine members of SokLaunch in kernels/cpu_runtime.cpp, and
# one of the offsets of items that follow them.
_FIRST = 10

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Kernel(NamedTuple):
    address: int
    signature: str


class _Kernels(dict[str, _Kernel]):
    """The kernels of a library by name, each found at its first use."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __missing__(self, name: str) -> _Kernel:
        describe: Callable[[], bytes] = getattr(self._library, f"sok_signature_{name}")
        describe.restype = ctypes.c_char_p  # type: ignore[attr-defined]
        symbol = getattr(self._library, f"sok_run_{name}")
        address = ctypes.cast(symbol, ctypes.c_void_p).value or 0
        self[name] = _Kernel(address, describe().decode())
        return self[name]


_MAX_THREADS = 256  # kMaxWorkers of kernels/cpu_runtime.cpp


def default_num_threads() -> int:
    """Returns SOK_LITE_NUM_THREADS, else this rank's share of the cores.

    Raises:
      ValueError: SOK_LITE_NUM_THREADS is no whole number from 1 to 256.
    """
    named = os.environ.get("SOK_LITE_NUM_THREADS", "").strip()
    if named:
        number = int(named) if re.fullmatch("[0-9]{1,9}", named) else 0
        if 1 <= number <= _MAX_THREADS:
            return number
        raise ValueError(
            f"SOK_LITE_NUM_THREADS must be a whole number from 1 to {_MAX_THREADS}, the threads of "
            f"one rank. Received: {named!r}. Unset it to use this rank's share of the cores."
        )
    return own_cores()


def own_cores() -> int:
    """Returns this rank's share of the cores that this process may use, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // local_size())


class CpuBackend(Backend):
    """NumPy arrays and the CPU kernel library.

    Attributes:
      num_threads: the most worker threads of one launch.
      grain: the fewest items of a piece. A launch first runs one piece, to measure how many threads
        the rest is worth; below 64 items it measures nothing and uses all threads.
      pieces: the most pieces for each thread of a launch.
    """

    name = "cpu"
    xp = np
    # Touched pages alone cost memory, so a chunk can be large enough for huge pages.
    chunk_bytes = far_chunk_bytes = 1 << 24
    gives_back = True

    def __init__(self, library: Path | None = None, num_threads: int | None = None) -> None:
        self.num_threads = default_num_threads() if num_threads is None else num_threads
        self._may_spin = self.num_threads <= own_cores()
        self.grain = 128
        self.pieces = 8
        library = library or find_library()
        self._library = ctypes.CDLL(str(library))
        load(library)
        self._launch = self._library.sok_launch
        # Without types ctypes passes a reference unconverted: a launch allocates nothing.
        self._launch.argtypes = None  # type: ignore[assignment]
        self._launch.restype = None
        self._kernels = _Kernels(self._library)

    def new_lock(self, record: Any) -> TableLock:
        lock: TableLock = record.lock
        return lock

    def kernel(self, name: str) -> tuple[int, int]:
        """Returns the address of a kernel and the number of its arguments, for native code."""
        address, signature = self._kernels[name]
        return address, len(signature)

    def words_of(self, kernel: str, arguments: Sequence[Any]) -> list[int]:
        """Returns a kernel's arguments as words, arrays as addresses, for native code."""
        signature = self._kernels[kernel].signature
        words = WORDS[len(signature)]()
        pack_arguments(kernel, signature, [arguments], addresses_of, words)
        return list(words)

    def launching(self) -> tuple[int, int, int, int, int]:
        """Returns how native code launches kernels: (address of the function, num_threads, grain,
        pieces, whether threads may spin)."""
        address = ctypes.cast(self._launch, ctypes.c_void_p).value or 0
        return address, self.num_threads, self.grain, self.pieces, int(self._may_spin)

    def launch(self, kernel: str, num_items: int, *args: Any) -> None:
        if num_items > 0:
            self._launch(self._words(kernel, [LaunchArgs(num_items, args)]))

    def packed(self, kernel: str, tables: Sequence[LaunchArgs]) -> list[Callable[[], Any]]:
        action = partial(self._launch, ctypes.byref(self._words(kernel, tables)))
        action.tables = tables  # type: ignore[attr-defined]  # keeps their arrays alive
        return [action]

    def _words(self, kernel: str, tables: Sequence[LaunchArgs]) -> Any:
        words, first = self._launch_words(kernel, [each.num_items for each in tables])
        signature = self._kernels[kernel].signature
        arguments = [each.arguments for each in tables]
        pack_arguments(kernel, signature, arguments, addresses_of, words, first)
        return words

    def _launch_words(self, kernel: str, num_items: Sequence[int]) -> tuple[Any, int]:
        """Returns the words of a launch, without arguments yet, and the index of the first of
        these. SokLaunch points to the words that follow it."""
        address, signature = self._kernels[kernel]
        num_parts, num_arguments = len(num_items), len(signature)
        begin = list(itertools.accumulate(num_items, initial=0))
        total, grain = begin[-1], self.grain
        workers = total // grain or 1
        workers = workers if workers < self.num_threads else self.num_threads
        pieces = total // workers // grain or 1
        pieces = pieces if pieces < self.pieces else self.pieces
        first = _FIRST + num_parts
        words = WORDS[first + num_parts * num_arguments]()
        place = ctypes.addressof(words)
        words[:first] = [
            *(address, place + 8 * (_FIRST - 1), place + 8 * first, num_parts, num_arguments),
            *(workers, pieces, 0 if grain < 64 else grain, self._may_spin),
            *begin,
        ]
        return words, first

    def set_bits(self, n: int, dtype: np.dtype) -> np.ndarray:
        return np.full(n, ~dtype.type(0), dtype)

    def zeros_chunk(self, num_bytes: int) -> Array:
        if num_bytes <= _MOST_HEAP_BYTES:
            memory = np.zeros(num_bytes + _CACHE_LINE_BYTES, np.uint8)
            start = -self.address(memory) % _CACHE_LINE_BYTES
            return memory[start : start + num_bytes]
        return self._map_zeroed(num_bytes, small=0)

    def _map_zeroed(self, num_bytes: int, small: int) -> Array:
        """Returns zeroed memory, with huge pages from byte `small` on."""
        is_large = hasattr(mmap, "MADV_HUGEPAGE") and num_bytes >= 1 << 22
        length = max(1, num_bytes + is_large * _HUGE_PAGE_BYTES)
        try:
            # Private: a forked child gets rows of its own, and huge pages are for private memory.
            memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"No {num_bytes:,} bytes of memory for rows: {error}") from error
        if not is_large:
            return np.frombuffer(memory, dtype=np.uint8, count=num_bytes)
        # Random rows touch a page each: 2 MB pages save most of the page-table misses. They begin
        # at multiples of their size.
        whole = np.frombuffer(memory, dtype=np.uint8)
        start = -self.address(whole) % _HUGE_PAGE_BYTES
        end = num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if end > small:
            memory.madvise(mmap.MADV_HUGEPAGE, start + small, end - small)
        return whole[start : start + num_bytes]

    def first_chunk(self, num_bytes: int) -> Array:
        # Small pages first: every column of a small table would take 2 MB otherwise.
        return self._map_zeroed(num_bytes, small=_HUGE_PAGE_BYTES)

    def far_chunk(self, num_bytes: int) -> np.ndarray:
        return self.zeros_chunk(num_bytes)

    def give_back(self, memory: Array) -> None:
        first = -(-self.address(memory) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (self.address(memory) + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            _madvise(first, end - first, mmap.MADV_DONTNEED)  # nothing depends on its success

    address = staticmethod(address_of)

    def to_host(self, array: Array) -> np.ndarray:
        return np.asarray(array)

    def from_host(self, array: Any) -> Array:
        return np.ascontiguousarray(array)

    def synchronize(self) -> None:
        pass

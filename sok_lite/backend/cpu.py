"""Kernels on the CPU: the compiled library, called through ctypes, which drops the GIL."""

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

from sok_lite.backend.arguments import WORDS, address_of, addresses_of, pack_parts
from sok_lite.backend.base import Array, Backend, Work
from sok_lite.backend.build import find_library
from sok_lite.backend.local_ranks import local_size
from sok_lite.backend.table_lock import TableLock, load

_SMALL_BYTES = 1 << 21  # one large page
# What is smaller is not worth pages of its own.
_ORDINARY_BYTES, _LINE_BYTES = 1 << 16, 64

# Words of a launch of no parts: the nine members of SokLaunch in kernels/cpu_runtime.cpp, and an
# end. Where each part begins comes after the members.
_FIRST = 10

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Kernel(NamedTuple):
    address: int
    signature: str


class _Kernels(dict[str, _Kernel]):
    """The kernels of a library by name; each is looked up in the library when it is first used."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __missing__(self, name: str) -> _Kernel:
        describe: Callable[[], bytes] = getattr(self._library, f"sok_signature_{name}")
        describe.restype = ctypes.c_char_p  # type: ignore[attr-defined]
        symbol = getattr(self._library, f"sok_run_{name}")
        address = ctypes.cast(symbol, ctypes.c_void_p).value or 0
        kernel = self[name] = _Kernel(address, describe().decode())
        return kernel


_MAX_THREADS = 256  # kMaxWorkers of kernels/cpu_runtime.cpp


def _launching(launch: Any, words: Any, arrays: Any) -> "partial[Any]":
    # By a reference, which is there before: to make the launch allocates nothing.
    action = partial(launch, ctypes.byref(words))
    action.arrays = arrays  # type: ignore[attr-defined]  # live as long as it does
    return action


def default_num_threads() -> int:
    """Returns the threads of one rank: its share of the cores this process may use.

    SOK_LITE_NUM_THREADS overrides it unless it is empty. Several ranks on one machine share its
    cores.

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
      grain: the fewest items of a piece. A launch does as many by one thread, to see how many
        threads the rest is worth; fewer than 64 would say nothing, and it has all threads then.
      pieces: into how many pieces a launch is cut for each of its threads.
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
        # Without types ctypes takes a reference as it stands, and a launch allocates nothing.
        self._launch.argtypes = None  # type: ignore[assignment]
        self._launch.restype = None
        self._kernels = _Kernels(self._library)

    def new_lock(self, record: Any) -> TableLock:
        lock: TableLock = record.lock
        return lock

    def _kernel(self, name: str) -> _Kernel:
        return self._kernels[name]

    def kernel(self, name: str) -> tuple[int, int]:
        """Returns the address of a kernel, as launches call it, and the number of its arguments."""
        address, signature = self._kernels[name]
        return address, len(signature)

    def words_of(self, kernel: str, arguments: Sequence[Any]) -> list[int]:
        """Returns arguments of a kernel as it takes them: arrays by their addresses."""
        signature = self._kernels[kernel].signature
        words = WORDS[len(signature)]()
        pack_parts(kernel, signature, [arguments], addresses_of, words)
        return list(words)

    def launching(self) -> tuple[int, int, int, int, int]:
        """Returns the address of what launches kernels, and how it is told to: the most threads,
        the grain, the pieces of each thread, whether threads may spin."""
        address = ctypes.cast(self._launch, ctypes.c_void_p).value or 0
        return address, self.num_threads, self.grain, self.pieces, int(self._may_spin)

    def launch(self, kernel: str, num_items: int, *args: Any) -> None:
        if num_items > 0:
            self._launch(self._words(kernel, [Work(num_items, args)]))

    def packed(self, kernel: str, parts: Sequence[Work]) -> list[Callable[[], Any]]:
        return [_launching(self._launch, self._words(kernel, parts), parts)]

    def _words(self, kernel: str, parts: Sequence[Work]) -> Any:
        words, first = self._launch_words(kernel, [part.num_items for part in parts])
        signature = self._kernels[kernel].signature
        arguments = [part.arguments for part in parts]
        pack_parts(kernel, signature, arguments, addresses_of, words, first)
        return words

    def _launch_words(self, kernel: str, num_items: Sequence[int]) -> tuple[Any, int]:
        """Returns the words of a launch, and the number of its first argument word.

        They are the members of SokLaunch, then what they point to.
        """
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
        if num_bytes <= _ORDINARY_BYTES:
            memory = np.zeros(num_bytes + _LINE_BYTES, np.uint8)
            start = -self.address(memory) % _LINE_BYTES
            return memory[start : start + num_bytes]
        return self._map_zeroed(num_bytes, small=0)

    def _map_zeroed(self, num_bytes: int, small: int) -> Array:
        """Returns zeroed memory, on large pages from `small` bytes on."""
        is_large = hasattr(mmap, "MADV_HUGEPAGE") and num_bytes >= 1 << 22
        length = max(1, num_bytes + is_large * _SMALL_BYTES)
        try:
            # Private: a forked child gets rows of its own, and huge pages are for private memory.
            memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"No {num_bytes:,} bytes of memory for rows: {error}") from error
        if not is_large:
            return np.frombuffer(memory, dtype=np.uint8, count=num_bytes)
        # Random rows touch a page each: 2 MB pages save most of the page-table misses. The system
        # has one only where it begins at a multiple of its size.
        whole = np.frombuffer(memory, dtype=np.uint8)
        start = -self.address(whole) % _SMALL_BYTES
        end = num_bytes // _SMALL_BYTES * _SMALL_BYTES
        if end > small:
            memory.madvise(mmap.MADV_HUGEPAGE, start + small, end - small)
        return whole[start : start + num_bytes]

    def first_chunk(self, num_bytes: int) -> Array:
        # The first rows of a store lie on small pages: of a hundred small tables each would else
        # take 2 MB for each of its columns.
        return self._map_zeroed(num_bytes, small=_SMALL_BYTES)

    def far_chunk(self, num_bytes: int) -> np.ndarray:
        return self.zeros_chunk(num_bytes)

    def give_back(self, memory: Array) -> None:
        first = -(-self.address(memory) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (self.address(memory) + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            # What it returns says whether it could, and nothing hangs on that.
            _madvise(first, end - first, mmap.MADV_DONTNEED)

    address = staticmethod(address_of)

    def to_host(self, array: Array) -> np.ndarray:
        return np.asarray(array)

    def from_host(self, array: Any) -> Array:
        return np.ascontiguousarray(array)

    def synchronize(self) -> None:
        pass

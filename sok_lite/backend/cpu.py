"""Kernels on the CPU: the compiled library, called through ctypes, which drops the GIL."""

import ctypes
import mmap
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend.base import ARGUMENT_DTYPES, Array, Backend, Part
from sok_lite.backend.build import find_library
from sok_lite.backend.local_ranks import local_size

_SMALL_BYTES = 1 << 21  # one large page


class _Kernel(NamedTuple):
    run: Any
    signature: str


_MAX_THREADS = 256  # kMaxWorkers of kernels/cpu_runtime.cpp


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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // local_size())


_first_byte: Any = ctypes.c_char.from_buffer


def _address(array: np.ndarray) -> int:
    """Returns the address of an array's first byte."""
    try:
        # A sixth of the time that __array_interface__ takes: a launch for many tables has hundreds.
        return ctypes.addressof(_first_byte(array))
    except (TypeError, ValueError):  # it is not to be written, or it is empty
        return int(array.ctypes.data)


class CpuBackend(Backend):
    """NumPy arrays and the CPU kernel library.

    Attributes:
      num_threads: the most worker threads of one launch.
      grain: the fewest items that are worth one more thread.
      pieces: into how many pieces a launch is cut for each of its threads.
    """

    name = "cpu"
    xp = np
    # Touched pages alone cost memory, so a chunk can be large enough for huge pages.
    chunk_bytes = far_chunk_bytes = 1 << 24

    def __init__(self, library: Path | None = None, num_threads: int | None = None) -> None:
        self.num_threads = default_num_threads() if num_threads is None else num_threads
        self.grain = 1024
        self.pieces = 4
        self._library = ctypes.CDLL(str(library or find_library()))
        self._launch = self._library.sok_launch
        # Without types ctypes takes a reference as it stands, and a launch allocates nothing.
        self._launch.argtypes = None  # type: ignore[assignment]
        self._launch.restype = None
        self._kernels: dict[str, _Kernel] = {}

    def _kernel(self, name: str) -> _Kernel:
        kernel = self._kernels.get(name)
        if kernel is None:
            describe: Callable[[], bytes] = getattr(self._library, f"sok_signature_{name}")
            describe.restype = ctypes.c_char_p  # type: ignore[attr-defined]
            symbol = getattr(self._library, f"sok_run_{name}")
            run = ctypes.cast(symbol, ctypes.c_void_p).value
            kernel = self._kernels[name] = _Kernel(run, describe().decode())
        return kernel

    def joined(self, kernel: str, parts: Sequence[Part]) -> "partial[Any]":
        run, signature = self._kernel(kernel)
        parts = [part for part in parts if part.num_items > 0]
        if not parts:
            return partial(bool)
        begin, words = [0], []
        for part in parts:
            if len(part.arguments) != len(signature):
                raise TypeError(
                    f"{kernel} takes {len(signature)} arguments. Received: {len(part.arguments)}."
                )
            begin.append(begin[-1] + part.num_items)
            for i, (arg, code) in enumerate(zip(part.arguments, signature, strict=True)):
                if code == "#":
                    words.append(int(arg))
                elif code == ".":
                    words.append(int(np.float32(arg).view(np.uint32)))
                elif arg is None:
                    words.append(0)
                else:
                    if arg.dtype != ARGUMENT_DTYPES[code] or not arg.flags.c_contiguous:
                        raise TypeError(
                            f"Argument {i} of {kernel} must be a C-contiguous array of "
                            f"{ARGUMENT_DTYPES[code]}. Received: {arg.dtype}, strides "
                            f"{arg.strides}."
                        )
                    words.append(_address(arg))
        # The seven members of SokLaunch in kernels/cpu_runtime.cpp, then what they point to.
        cells = (ctypes.c_uint64 * (7 + len(begin) + len(words)))()
        first = ctypes.addressof(cells) + 56
        num_items = begin[-1]
        workers = min(self.num_threads, max(1, num_items // self.grain))
        pieces = workers * self.pieces
        piece = -(-num_items // pieces)
        cells[:] = [
            *(run, first, first + 8 * len(begin), len(parts), len(signature), workers, piece),
            *begin,
            *words,
        ]
        action = partial(self._launch, ctypes.byref(cells))
        action.parts = parts  # type: ignore[attr-defined]  # whose arrays live as long as it does
        return action

    def zeros_chunk(self, num_bytes: int) -> Array:
        return self._mapped(num_bytes, small=0)

    def _mapped(self, num_bytes: int, small: int) -> Array:
        """Returns zeroed memory, on large pages from `small` bytes on."""
        try:
            # Private: a forked child gets rows of its own, and huge pages are for private memory.
            memory = mmap.mmap(-1, max(1, num_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"No {num_bytes:,} bytes of memory for rows: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE") and num_bytes >= 1 << 22:
            # Random rows touch a page each: 2 MB pages save most of the page-table misses.
            memory.madvise(mmap.MADV_HUGEPAGE, small)
        return np.frombuffer(memory, dtype=np.uint8, count=num_bytes)

    def first_chunk(self, num_bytes: int) -> Array:
        # The first rows of a store lie on small pages: of a hundred small tables each would else
        # take 2 MB for each of its columns.
        return self._mapped(num_bytes, small=_SMALL_BYTES)

    def far_chunk(self, num_bytes: int) -> np.ndarray:
        return self.zeros_chunk(num_bytes)

    def address(self, array: Array) -> int:
        return _address(array)

    def to_host(self, array: Array) -> np.ndarray:
        return np.asarray(array)

    def from_host(self, array: Any) -> Array:
        return np.ascontiguousarray(array)

    def synchronize(self) -> None:
        pass

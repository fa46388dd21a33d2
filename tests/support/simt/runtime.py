"""Loads programs of the simulated GPU and runs launches of their kernels."""

import bisect
import ctypes
import functools
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.simt.compiler import runtime_library

_ERROR_BYTES = 1 << 14
_ADDRESS = re.compile(r"\[(0x[0-9a-f]+)\]")
_NAME = re.compile(r"(\w+)[<(]")  # without its type and parameters
_MOST_RANGES = 1 << 12  # that a launch touches; of more the rest is not told
_ranges = (ctypes.c_uint64 * 5 * _MOST_RANGES)()
_seed = 0
_launches = 0
_names: dict[int, str] = {}  # of the device's memory, by its address


class SimtError(RuntimeError):
    """What a launch did that a GPU does not allow, or that it would never end."""


class Touched(NamedTuple):
    """What a launch has read and written of one piece of memory, which begins at `address`: the
    first address and the one behind the last; (0, 0): nothing was."""

    address: int
    read: tuple[int, int]
    written: tuple[int, int]


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(runtime_library()))
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32
    library.simt_launch.restype = size
    library.simt_launch.argtypes = [
        *(pointer, pointer, pointer, size, number, number),
        *(ctypes.c_uint64, ctypes.c_char_p, size),
    ]  # fmt: skip
    library.simt_add_memory.argtypes = [pointer, size, ctypes.c_char_p, ctypes.c_int]
    library.simt_remove_memory.argtypes = [pointer]
    library.simt_set_limits.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    library.simt_set_stale_loads.argtypes = [number]
    library.simt_note_ranges.argtypes = [ctypes.c_int]
    library.simt_touched.restype = size
    library.simt_touched.argtypes = [pointer, size]
    for begin, end in _segments(runtime_library()):  # threadIdx is there
        library.simt_add_memory(begin, end - begin, b"the scheduler", True)
    return library


def add_memory(address: int, size: int, what: str) -> None:
    """Lets kernels read and write `size` bytes from now on; `what` is for error texts."""
    _names[address] = what
    _library().simt_add_memory(address, size, what.encode(), False)


def remove_memory(address: int) -> None:
    """Forgets what `add_memory` was told of an address."""
    _names.pop(address, None)
    _library().simt_remove_memory(address)


def name_of(address: int) -> str:
    """Returns what `add_memory` was told of an address."""
    return _names.get(address, "memory that was given back")


def note_ranges(is_wanted: bool) -> None:
    """Says whether `touched` is to know what later launches read and write."""
    _library().simt_note_ranges(is_wanted)


def touched() -> list[Touched]:
    """Returns what the last launch has read and written; nothing where that is not noted."""
    count = min(_library().simt_touched(_ranges, _MOST_RANGES), _MOST_RANGES)
    return [Touched(a, (b, c), (d, e)) for a, b, c, d, e in _ranges[:count]]


def set_seed(seed: int) -> None:
    """Sets what the schedules of all later launches are drawn from."""
    global _seed
    _seed = seed
    restart()


def restart() -> None:
    """Lets later launches have the schedules that those after `set_seed` had."""
    global _launches
    _launches = 0


def set_limits(idle: int = 4_000_000, launch: int = 400_000_000) -> None:
    """Sets after how many switch points, without any change to memory and in all, a launch is
    stuck."""
    _library().simt_set_limits(idle, launch)


def set_stale_loads(one_in: int) -> None:
    """Lets plain loads of later launches give older values, in one of how many schedules; 0: in
    none.

    A plain load then gives what other lanes have overwritten since the lane's last acquire, fence
    or `__syncwarp`: at random, or in half of these schedules always the oldest that it may give.
    """
    _library().simt_set_stale_loads(one_in)


class Program:
    """One compiled source.

    Args:
      path: what `compile_source` returned.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._segments = _segments(path)
        for begin, end in self._segments:
            _library().simt_add_memory(begin, end - begin, b"the program", True)

    def kernel(self, name: str) -> "Kernel":
        """Returns a kernel.

        Raises:
          KeyError: the source has none of that name.
        """
        try:
            describe: Any = getattr(self._library, f"simt_signature_{name}")
            call = getattr(self._library, f"simt_call_{name}")
        except AttributeError:
            raise KeyError(name) from None
        describe.restype = ctypes.c_char_p
        return Kernel(self, name, describe().decode(), ctypes.cast(call, ctypes.c_void_p).value)

    def in_words(self, text: str) -> str:
        """Returns an error text with its addresses in this program as functions and lines."""
        return _ADDRESS.sub(lambda match: self._place(int(match[1], 16)), text)

    def _place(self, address: int) -> str:
        index = bisect.bisect(self._segments, (address, 1 << 64)) - 1
        if index < 0 or address >= self._segments[index][1]:
            return hex(address)
        # A call returns behind itself.
        offset = hex(address - self._segments[0][0] - 1)
        done = subprocess.run(
            ["addr2line", "-Cfise", str(self.path), offset], capture_output=True, text=True
        )
        lines = done.stdout.split("\n")
        names = [(_NAME.search(name) or [name, name])[1] for name in lines[::2]]
        places = [
            f"{name} ({at.split(' ')[0]})" for name, at in zip(names, lines[1::2], strict=False)
        ]
        return " in ".join(p for p in places if "shim.h" not in p) or hex(address)


class Kernel:
    """A kernel of a program; its signature has a letter for each parameter: "P" a pointer, "#" an
    i64, "." an f32, "S" a struct."""

    def __init__(self, program: Program, name: str, signature: str, call: int | None) -> None:
        self.name, self.signature = name, signature
        self._program, self._call = program, call

    def run(self, grid: int, block: int, arguments: Sequence[bytes]) -> None:
        """Runs a whole launch; arguments are the bytes of each parameter, and what lies behind
        them."""
        global _launches
        assert len(arguments) == len(self.signature) and 0 < block <= 1024 and grid > 0
        seed, _launches = (_seed << 24) + _launches, _launches + 1
        buffers = [ctypes.create_string_buffer(content, len(content)) for content in arguments]
        count = len(buffers)
        cells = (ctypes.c_uint64 * count)(*map(ctypes.addressof, buffers))
        sizes = (ctypes.c_uint64 * count)(*map(len, arguments))
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        how = (grid, block, seed, error, _ERROR_BYTES)
        if _library().simt_launch(self._call, cells, sizes, count, *how):
            text = self._program.in_words(error.value.decode(errors="replace"))
            raise SimtError(f"{self.name}: {text}\n  {grid} blocks of {block}, seed {seed}")


def _segments(path: Path) -> list[tuple[int, int]]:
    """Returns where a loaded library lies in memory, sorted."""
    segments = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            segments.append((begin, end))
    return sorted(segments)

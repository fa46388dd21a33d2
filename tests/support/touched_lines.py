"""Counts the lines of memory that launches on the simulated GPU touch.

A process asks for it before it makes its first array of a device and loads its first kernel.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.support.simt import compiler, runtime

LINE = 64
_FLAGS = "-std=c++17 -O2 -fPIC -Wall -Wextra -Werror".split()


class Touched(NamedTuple):
    """A launch.

    Attributes:
      kernel: its name.
      read, written: distinct lines of 64 bytes, of the device's memory and of the host's that
        kernels use.
    """

    kernel: str
    read: int
    written: int


@functools.cache
def _library() -> ctypes.CDLL:
    assert not runtime._library.cache_info().currsize, "arrays of a device are there already"
    source = Path(__file__).with_suffix(".cpp").read_text()
    # For everybody, so that the kernels' calls come here.
    library = ctypes.CDLL(str(compiler._built(_FLAGS, source, [])), ctypes.RTLD_GLOBAL)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.touched_add_memory.argtypes = [pointer, size]
    library.touched_remove_memory.argtypes = [pointer]
    library.touched_lines.restype = size
    assert library.touched_open(runtime._library()._name.encode())
    return library


@contextmanager
def touched_lines() -> Iterator[list[Touched]]:
    """Gives all launches of kernels that run within, each once it has run."""
    library, launches = _library(), list[Touched]()
    add, remove, run = runtime.add_memory, runtime.remove_memory, runtime.Kernel.run

    def adding(address: int, size: int, what: str) -> None:
        if " bytes of " in what:  # not a program's own
            library.touched_add_memory(address, size)
        add(address, size, what)

    def removing(address: int) -> None:
        library.touched_remove_memory(address)
        remove(address)

    def running(kernel: Any, *args: Any) -> Any:
        library.touched_restart()
        result = run(kernel, *args)
        launches.append(Touched(kernel.name, library.touched_lines(0), library.touched_lines(1)))
        return result

    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (runtime, "add_memory", adding),
        (runtime, "remove_memory", removing),
        (runtime.Kernel, "run", running),
    ]
    with mock.patch.object(*patches[0]), mock.patch.object(*patches[1]):
        with mock.patch.object(*patches[2]):
            yield launches

"""Memory that runs out at the k-th allocation of a call, once or for good, in two ways.

`Shortage` stands in for everything by which Python code of the engine asks a backend for memory.
`Preloaded` runs in a process with failing_memory.cpp preloaded, whose malloc and mmap fail, for
what no Python code can see.
"""

import contextlib
import ctypes

from sok_lite.engine.rows.far_file import FarFile


class _Shortage:
    """The allocation number `at` fails while it is entered; with `for_good` all later ones too.

    Attributes:
      calls: allocations so far.
    """

    def __init__(self, at, for_good):
        self.at, self.for_good, self.calls = at, for_good, 0

    @property
    def place(self):
        later = " and all later ones" * self.for_good
        return f"allocation {self.at}{later}" if self.calls >= self.at else None

    def run(self, work):
        with self:
            return work()

    def is_its(self, raised, text):
        # In some places NumPy ends a call for want of memory and forgets to say so.
        forgotten = raised is SystemError and "exception" in text
        return raised is type(None) or issubclass(raised, MemoryError) or forgotten


class Shortage(_Shortage):
    """Of what is asked of a backend."""

    def __init__(self, backend, at, for_good):
        super().__init__(at, for_good)
        self.backend = backend
        self._undo = contextlib.ExitStack()

    def __enter__(self):
        self._replace(self.backend, "xp", _Arrays(self.backend.xp, self))
        for name in ("zeros_chunk", "first_chunk", "far_chunk", "from_host"):
            self._replace(self.backend, name, self.limited(getattr(self.backend, name)))
        zeros = FarFile.zeros
        limited = self.limited(zeros)
        FarFile.zeros = lambda file, num_bytes: limited(file, num_bytes)
        self._undo.callback(setattr, FarFile, "zeros", zeros)
        return self

    def __exit__(self, *error):
        self._undo.close()

    def _replace(self, owner, name, value):
        """An attribute of the object hides that of its class."""
        had = vars(owner).get(name, self)
        setattr(owner, name, value)
        if had is self:
            self._undo.callback(delattr, owner, name)
        else:
            self._undo.callback(setattr, owner, name, had)

    def limited(self, allocate):
        def call(*args, **kwargs):
            self.calls += 1
            if self.calls == self.at or (self.for_good and self.calls > self.at):
                raise MemoryError("none left")
            return allocate(*args, **kwargs)

        return call


class _Arrays:
    """NumPy or CuPy, whose functions allocate what they return."""

    def __init__(self, xp, shortage):
        self._xp, self._shortage = xp, shortage

    def __getattr__(self, name):
        value = getattr(self._xp, name)
        if callable(value) and not isinstance(value, type):
            return self._shortage.limited(value)
        return value


class Preloaded(_Shortage):
    """The same by failing_memory.cpp, for allocations of at least a kilobyte."""

    def __enter__(self):
        ctypes.CDLL(None).sok_fail_memory(self.at, int(self.for_good), 1024)
        return self

    def __exit__(self, *error):
        self.calls = ctypes.CDLL(None).sok_spare_memory()

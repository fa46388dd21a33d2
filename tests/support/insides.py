"""All that tables are made of, in a form that can be compared.

Tables whose insides are equal do the same from then on, so what was checked of one of them is known
of the others. Equal means: every attribute that can be reached, every byte of every array, and
which of them are the same object. Where memory lies is left out, and when a lookup was: an address
is told by what lies there, a time of the clock by how many are earlier.

What this file does not know it refuses: a table of a new make is not taken for another one.
"""

import ctypes
import enum
import math
import os
import threading
import weakref
from collections import deque
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np

from sok_lite.backend import Backend
from sok_lite.engine.rows.far_file import FarFile
from sok_lite.engine.table.clock import Clock

_ATOMS = (bool, str, bytes, float, complex, type(None), type, np.dtype, range, slice, enum.Enum)
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_OURS = ("sok_lite.", "tests.")
_LOCK = type(threading.Lock())
_RECURSIVE = type(threading.RLock())
# Below it a number is a key, a score or a count, and above it nothing lies in memory.
_LOWEST, _HIGHEST = 1 << 32, 1 << 48
_NONE = np.iinfo(np.int64).min
# Of a table's record: which tables had it before. The clock is an object of its own.
_NO_MATTER = ("generation", "clock")


def insides(tables):
    """Returns what tables are made of, as a value with `==` and a hash.

    No call of the tables may be under way.

    Raises:
      TypeError: they are made of something that this file does not know.
    """
    walk = _Walk()
    walk.visit(list(tables))
    return walk.result()


class _Walk:
    def __init__(self):
        self._out = []
        self._numbers = {}  # id of what was visited -> its number
        self._kept = []  # so that no id is used twice
        self._memory = {}  # address -> (address, end, number, what is counted from)
        # (place in `_out`, numbers that may be addresses): they are told when all memory is known.
        self._late = []

    def result(self):
        # The first one is of what lies in none.
        memory = [(_NONE, _NONE, -1, 0), *sorted(self._memory.values())]
        starts, ends, numbers, origins = np.array(memory, np.int64).T
        for place, words in self._late:
            at = np.searchsorted(starts, words, "right") - 1
            at[words >= ends[at]] = 0
            self._out[place] = ((words - origins[at]).tobytes(), numbers[at].tobytes())
        return tuple(self._out)

    def visit(self, value):
        """Appends a value and all that can be reached from it."""
        out = self._out
        kind = type(value)
        if kind is int:
            if _LOWEST <= value < _HIGHEST:
                self._later(np.array([value], np.int64))
            else:
                out.append(value)
        elif isinstance(value, _ATOMS):
            # A float by its bits: a NaN is itself.
            out.append(value.hex() if kind is float else value)
        elif isinstance(value, np.generic):
            out.append((value.dtype.char, value.tobytes()))
        elif isinstance(value, _CODE):
            out.append(getattr(value, "__qualname__", value.__name__))
            self.visit(getattr(value, "__self__", None) if kind is MethodType else None)
        elif kind is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
            out.append((kind.__name__, len(value)))
            for part in value:
                self.visit(part)
        elif kind is _LOCK:  # each call has another
            out.append(value.locked())
        elif id(value) in self._numbers:
            out.append(("again", self._numbers[id(value)]))
        else:
            self._numbers[id(value)] = len(self._numbers)
            self._kept.append(value)
            out.append(kind.__name__)
            self._visit_object(value, kind)

    def _visit_object(self, value, kind):
        out = self._out
        if isinstance(value, Backend):
            return
        if hasattr(value, "dtype") and hasattr(value, "strides"):
            self._visit_array(value)
        elif kind in (list, deque):
            self._visit_all(value)
        elif isinstance(value, dict):
            out.append(len(value))
            for key, part in value.items():
                self.visit(key)
                self.visit(part)
        elif kind is weakref.WeakKeyDictionary:
            self._visit_all(list(value.values()))
        elif kind in (set, frozenset):
            out.append(frozenset(value))
        elif kind is partial:
            self.visit(value.func)
            self.visit(value.args)
            self.visit(value.keywords)
        elif kind is weakref.ref:
            self.visit(value())
        elif kind is weakref.finalize:
            out.append(value.alive)
        elif kind is _RECURSIVE:
            # Its text has who holds it and how often; free, it says nobody.
            out.append("count=0" in repr(value))
        elif isinstance(value, Clock):
            self.visit(_ranked(value))
        elif isinstance(value, ctypes.Structure):
            self._visit_record(value)
        elif isinstance(value, ctypes.Array):
            self._note_memory(value)
            self._visit_all(list(value))
        elif kind.__module__.startswith(_OURS):
            attributes = _attributes(value)
            if isinstance(value, FarFile):
                attributes["_fd"] = os.fstat(value._fd).st_size
            self.visit(attributes)
        else:
            raise TypeError(
                "tests/support/insides.py does not know what a "
                f"{kind.__module__}.{kind.__qualname__} is made of. Add it."
            )

    def _visit_record(self, record):
        if record._b_base_ is None:  # it is no part of another one
            self._note_memory(record)
        for name, _ in record._fields_:
            if name not in _NO_MATTER:
                self.visit(getattr(record, name))

    def _note_memory(self, value):
        start, size = ctypes.addressof(value), ctypes.sizeof(value)
        self._memory.setdefault(start, (start, start + size, len(self._memory), start))

    def _visit_all(self, values):
        self._out.append(len(values))
        for part in values:
            self.visit(part)

    def _visit_array(self, array):
        content = array
        if isinstance(array, np.ndarray):
            owner = array
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            start, size = _address(owner), owner.nbytes
            first = _address(array)
        else:
            start, size, first = array.data.mem.ptr, array.data.mem.size, array.data.ptr
            content = array.get()
        if size:
            # Whose memory it is, and where in it; what is aligned may begin anywhere.
            its = (start, start + size, len(self._memory), first)
            *_, number, origin = self._memory.setdefault(start, its)
            self._out.append((array.dtype.char, array.shape, number, first - origin))
        else:
            self._out.append((array.dtype.char, array.shape))
        if content.dtype.kind in "iu" and content.dtype.itemsize == 8 and content.size:
            words = np.ascontiguousarray(content).view(np.int64)
            if ((words >= _LOWEST) & (words < _HIGHEST)).any():
                self._later(words)
                return
        self._out.append(content.tobytes())

    def _later(self, words):
        self._late.append((len(self._out), words.copy()))
        self._out.append(None)


def _address(array):
    return array.__array_interface__["data"][0]


def _attributes(value):
    """The attributes of an object by name."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found[name] = getattr(value, name)
    found.pop("num_changes", None)  # how often it was changed, whatever came of it
    return found


def _ranked(clock):
    """What a clock says, each time by how many are earlier. What it has room for does not count."""
    numbers, *of_times = clock.spans
    last = clock.last_time
    times = sorted({last, *of_times[0], *of_times[1]})
    rank = {time: number for number, time in enumerate(times)}
    of_times = [[rank[time] for time in each] for each in of_times]
    return [clock.now, math.isinf(clock.span_time), numbers, *of_times, rank[last]]

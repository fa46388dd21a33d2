"""Calls of Python by operations: what is asked for, with arrays over TensorFlow's own memory.

A call has a number, an input of its operation. A random part of it is this process's own: a graph
that was made in another process, and read here, asks for a call that nobody has. A call lives as
long as whoever made it keeps it: a graph for its operations, or the caller in eager mode.

An operation fails where its call raises, with the kind and the text of the exception. In eager mode
the caller raises the exception itself: its number is odd, and it finds it in `raised`.
"""

import ctypes
import itertools
import math
import os
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.native import library

# TensorFlow's numbers of types (tensorflow/core/framework/types.proto), and arrays' types:
# bfloat16 comes as its 16 bits.
_NAMES = {
    "float32": [1],
    "float64": [2],
    "int32": [3],
    "uint8": [4],
    "int16": [5],
    "int8": [6],
    "int64": [9],
    "bool": [10],
    "uint16": [14, 17],
    "float16": [19],
    "uint32": [22],
    "uint64": [23],
}
_DTYPES = {number: np.dtype(name) for name, numbers in _NAMES.items() for number in numbers}
# Codes of errors (tensorflow/c/tsl_status.h) by kinds of exceptions, as `tf.py_function` has them.
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (KeyboardInterrupt, 1),
    (ValueError, 3),
    (TypeError, 3),
    (StopIteration, 11),
    (MemoryError, 8),
    (NotImplementedError, 12),
)
_UNKNOWN, _EXHAUSTED = 2, 8


class _Memory:
    """An address that becomes an array, which keeps the frame: it owns the memory."""

    __slots__ = ("__array_interface__", "frame")
    __array_interface__: dict[str, object]
    frame: "Frame"


class Frame:
    """What an operation asks, while it runs.

    Attributes:
      call: the number of the call.
      is_on_gpu: whether the memory of inputs and outputs is a GPU's.
    """

    __slots__ = ("__weakref__", "_address", "_capsule", "_inputs", "call", "is_on_gpu")

    def __init__(self, address: int, capsule: object) -> None:
        count = ctypes.c_int64.from_address(address).value
        words = (ctypes.c_int64 * count).from_address(address)[:]
        _, self._address, self.call, self.is_on_gpu = words[:4]
        self._capsule = capsule
        self._inputs: list[tuple[int, int, tuple[int, ...]]] = []
        at = 4
        while at < count:
            first, end = at + 3, at + 3 + words[at + 2]
            self._inputs.append((words[at], words[at + 1], tuple(words[first:end])))
            at = end

    def inputs(self, backend: Backend, num_numbers: int = 0) -> list[Array]:
        """Returns all inputs but handles and call, as arrays that are read only by agreement.

        Args:
          backend: whose arrays they become; a copy is made where the memory is not its own.
          num_numbers: how many of them, the last ones, are `numbers`: NumPy's, on the host.
        """
        end = len(self._inputs) - num_numbers
        arrays = [self._array(*each, backend) for each in self._inputs[:end]]
        if backend.name != "cpu" and not self.is_on_gpu:
            arrays = [backend.from_host(array) for array in arrays]
        return arrays + [_on_host(self, *each) for each in self._inputs[end:]]

    def output(self, number: int, shape: Sequence[int], dtype: int, backend: Backend) -> Array:
        """Returns the memory of an output, on the device of the operation, not initialised.

        Args:
          number: of the output.
          shape: it gets.
          dtype: TensorFlow's number of its type; bfloat16 is an array of uint16.
          backend: whose device it is, where that is a GPU.

        Raises:
          MemoryError: TensorFlow has not as much.
          RuntimeError: the operation has ended, or TensorFlow refuses otherwise.
        """
        num_bytes = ctypes.c_int64(math.prod(shape) * _DTYPES[dtype].itemsize)
        dims, frame = (ctypes.c_int64 * len(shape))(*shape), ctypes.c_void_p(self._address)
        ops = operations().library
        address = ops.sok_ops_allocate(frame, number, dtype, num_bytes, dims, len(shape))
        if address == -1:
            text = ctypes.create_string_buffer(1000)
            code = ops.sok_ops_error(frame, text, ctypes.c_int64(len(text)))
            reason = text.value.decode(errors="replace")
            if code == _EXHAUSTED:
                raise MemoryError(reason)
            raise RuntimeError(f"TensorFlow gives no memory for a result: {reason}")
        return self._array(address, dtype, tuple(shape), backend)

    def _array(self, address: int, dtype: int, shape: tuple[int, ...], backend: Backend) -> Array:
        kind, size = _DTYPES[dtype], math.prod(shape)
        if self.is_on_gpu:
            xp = backend.xp
            if not size:
                return xp.empty(shape, kind)
            num_bytes = size * kind.itemsize
            memory = xp.cuda.UnownedMemory(address, num_bytes, (self,), backend.device_id)
            return xp.ndarray(shape, kind, xp.cuda.MemoryPointer(memory, 0))
        return _on_host(self, address, dtype, shape)


def _on_host(frame: Frame, address: int, dtype: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array over memory of the host that a frame owns."""
    kind = _DTYPES[dtype]
    if not math.prod(shape):
        return np.empty(shape, kind)
    memory = _Memory()
    memory.frame = frame
    memory.__array_interface__ = {
        "version": 3,
        "shape": shape,
        "typestr": kind.str,
        "data": (address, False),
    }
    return np.asarray(memory)


class Call:
    """What an operation asks Python for, by its number.

    Args:
      run: takes the frame, and writes all outputs.
      is_eager: whether the caller takes what it raises, from `raised`.
    """

    __slots__ = ("__weakref__", "number", "run")

    def __init__(self, run: Callable[[Frame], None], is_eager: bool) -> None:
        self.run = run
        self.number = _of_process | (next(_serial) << 1) | is_eager
        _calls[self.number] = self


_serial = itertools.count()
_of_process = 0


def _begin_process() -> None:
    """Draws this process's own part of numbers: a child has other calls than its parent."""
    global _of_process
    _of_process = int.from_bytes(os.urandom(3), "little") << 39


_begin_process()
os.register_at_fork(after_in_child=_begin_process)
_calls: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()
# What eager calls have raised, by their number: the caller takes it.
raised: dict[int, BaseException] = {}


def _enter(address: int, capsule: object) -> None:
    """Is called by an operation."""
    frame = Frame(address, capsule)
    call = _calls.get(frame.call)
    if call is None:
        raise ValueError(
            "The graph of this operation was made in another process, or it is a copy, as by prune "
            "or import_graph_def, whose original is gone. Build the lookup anew, from tables of "
            "this process, or keep the original."
        )
    call.run(frame)


def _describe(error: BaseException) -> tuple[int, bytes]:
    """Returns the code and the text by which an operation fails."""
    codes = [code for kind, code in _CODES if isinstance(error, kind)]
    text = f"{type(error).__name__}: {error}\n" + "".join(traceback.format_tb(error.__traceback__))
    return (codes or [_UNKNOWN])[0], text.encode(errors="replace").replace(b"\0", b"")


@cache
def operations() -> library.Operations:
    """Returns the library of operations, loaded, and told of Python.

    Raises:
      RuntimeError: it cannot be compiled or loaded; the text says what to do.
    """
    loaded = library.load()
    loaded.library.sok_ops_allocate.restype = ctypes.c_int64
    api = ctypes.pythonapi
    is_finalizing = "Py_IsFinalizing" if hasattr(api, "Py_IsFinalizing") else "_Py_IsFinalizing"
    functions = [
        ctypes.cast(getattr(api, name), ctypes.c_void_p)
        for name in (
            *("PyGILState_Ensure", "PyGILState_Release", is_finalizing, "Py_DecRef"),
            *("PyCapsule_New", "PyCapsule_GetPointer", "PyLong_FromLongLong", "PyLong_AsLong"),
            *("PyObject_CallFunctionObjArgs", "PyErr_Fetch", "PyErr_NormalizeException"),
            *("PyErr_Clear", "PyException_SetTraceback", "PyDict_SetItem", "PyTuple_GetItem"),
            "PyBytes_AsString",
        )
    ]
    table = (ctypes.c_void_p * len(functions))(*[each.value for each in functions])
    objects = [ctypes.py_object(each) for each in (_enter, _describe, raised)]
    loaded.library.sok_ops_python(table, *objects)
    return loaded

"""Calls from operations into Python, with arrays over TensorFlow's own memory.

A call has a number, an input of its operation. A random part of it identifies this process: a graph
made in another process and loaded here refers to a call that does not exist. A call lives as long
as its owner keeps it: a graph for its operations, or the caller in eager mode.

An asynchronous operation continues after its call has returned; the call receives an object that
completes the operation.

An operation fails if its call raises, with the type and text of the exception. In eager mode the
caller raises the exception itself: eager numbers are odd, and the exception is in `raised`.
"""

import ctypes
import itertools
import math
import os
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.arguments import WORDS
from sok_lite.native import library

# TensorFlow's dtype numbers (tensorflow/core/framework/types.proto), and array dtypes: bfloat16
# comes as its 16 bits.
_NAMES = {
    "float32": [1],
    "float64": [2],
    "int32": [3],
    "uint8": [4],
    "int16": [5],
    "int8": [6],
    "complex64": [8],
    "int64": [9],
    "bool": [10],
    "uint16": [14, 17],
    "complex128": [18],
    "float16": [19],
    "uint32": [22],
    "uint64": [23],
}
_DTYPES = {number: np.dtype(name) for name, numbers in _NAMES.items() for number in numbers}
# Error codes (tensorflow/c/tsl_status.h) by exception type, as in `tf.py_function`.
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (KeyboardInterrupt, 1),
    (ValueError, 3),
    (TypeError, 3),
    (StopIteration, 11),
    (MemoryError, 8),
    (NotImplementedError, 12),
)
_CANCELLED, _UNKNOWN, _EXHAUSTED = 1, 2, 8


class _Memory:
    """An address that becomes an array. It keeps the frame, which owns the memory."""

    __slots__ = ("__array_interface__", "frame")
    __array_interface__: dict[str, object]
    frame: "Frame"


class Frame:
    """The request of a running operation.

    Attributes:
      address: by which the library identifies it.
      is_on_gpu: whether inputs and outputs are in GPU memory, except those always on the host.
      is_gradient: whether the operation is the gradient of the one that the call was made for.
    """

    __slots__ = (
        *("__weakref__", "_begun", "_capsule", "_inputs", "_num_numbers"),
        *("address", "call", "is_gradient", "is_on_gpu"),
    )

    def __init__(self, address: int, capsule: object) -> None:
        count = ctypes.c_int64.from_address(address).value
        words = WORDS[count].from_address(address)[:]
        _, self.address, self.call, self.is_on_gpu, self._num_numbers, self.is_gradient = words[:6]
        self._begun = words[6:8]
        self._capsule = capsule
        self._inputs: list[tuple[int, int, tuple[int, ...]]] = []
        at = 8
        while at < count:
            first, end = at + 3, at + 3 + words[at + 2]
            self._inputs.append((words[at], words[at + 1], tuple(words[first:end])))
            at = end

    def begun(
        self, shape: tuple[int, int], num_rows: int = 0, backend: Backend | None = None
    ) -> tuple[Array, Array] | None:
        """Returns the results of a lookup that native code has begun; None if it has not.

        Then this thread holds the locks of the tables, and their clocks have advanced. To be
        written: the counters, int64 on the host, and `num_rows` row numbers, uint32 of the backend.
        """
        counters, rows = self._begun
        if not counters:
            return None
        int64, uint32 = 9, 22
        counts = self.array(counters, int64, shape, None)
        return counts, self.array(rows, uint32, (num_rows,), backend)

    def inputs(self, backend: Backend) -> list[Array]:
        """Returns all inputs except handles and call, as arrays that must not be written.

        Memory of another processor than the backend's is copied; numbers become NumPy arrays.
        """
        begin = len(self._inputs) - self._num_numbers
        arrays = [self.array(*each, backend) for each in self._inputs[:begin]]
        if backend.name != "cpu" and not self.is_on_gpu:
            arrays = [backend.from_host(array) for array in arrays]
        return arrays + [self.array(*each, None) for each in self._inputs[begin:]]

    def allocate(
        self,
        first: int,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[int],
        is_on_host: bool = False,
    ) -> list[int]:
        """Allocates consecutive outputs of one rank, not initialized; returns the addresses.

        `dtypes` are TensorFlow's numbers; `is_on_host`: wherever the operation runs. Raises
        MemoryError, or RuntimeError: the operation has ended, or another error of TensorFlow.
        """
        count, num_dims = len(shapes), len(shapes[0])
        sizes = [math.prod(s) * _DTYPES[t].itemsize for s, t in zip(shapes, dtypes, strict=True)]
        words = WORDS[count * (3 + num_dims)](
            *dtypes, *sizes, *itertools.chain.from_iterable(shapes)
        )
        place = ctypes.addressof(words)
        types, num_bytes, dims = (ctypes.c_void_p(place + 8 * i * count) for i in range(3))
        addresses = place + 8 * (2 + num_dims) * count
        ops, frame = operations().library, ctypes.c_void_p(self.address)
        of_call = (ctypes.c_int64(first), ctypes.c_int64(count), types, num_bytes, dims)
        room = (ctypes.c_int64(num_dims), ctypes.c_void_p(addresses))
        if ops.sok_ops_allocate(frame, *of_call, *room) == count:
            return words[(2 + num_dims) * count :]
        text = ctypes.create_string_buffer(1000)
        code = ops.sok_ops_error(frame, text, ctypes.c_int64(len(text)))
        reason = text.value.decode(errors="replace")
        if code == _EXHAUSTED:
            raise MemoryError(reason)
        raise RuntimeError(f"TensorFlow gives no memory for a result: {reason}")

    def output(self, number: int, shape: Sequence[int], dtype: int, backend: Backend) -> Array:
        """Returns the memory of an output as an array; see `allocate` and `array`."""
        (address,) = self.allocate(number, [shape], [dtype])
        return self.array(address, dtype, tuple(shape), backend)

    def array(
        self, address: int, dtype: int, shape: tuple[int, ...], backend: Backend | None
    ) -> Array:
        """Returns an array over memory that the operation owns; without a backend, of the host.

        `dtype` is TensorFlow's number; bfloat16 becomes uint16.
        """
        kind, size = _DTYPES[dtype], math.prod(shape)
        if self.is_on_gpu and backend is not None:
            xp = backend.xp
            if not size:
                return xp.empty(shape, kind)
            num_bytes = size * kind.itemsize
            memory = xp.cuda.UnownedMemory(address, num_bytes, (self,), backend.device_id)
            return xp.ndarray(shape, kind, xp.cuda.MemoryPointer(memory, 0))
        if not size:
            return np.empty(shape, kind)
        memory = _Memory()
        memory.frame = self
        memory.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": kind.str,
            "data": (address, False),
        }
        return np.asarray(memory)


class Running:
    """An asynchronous operation: it runs until `end`, and fails if this object is dropped."""

    __slots__ = ("_address", "_capsule")

    def __init__(self, address: int, capsule: object) -> None:
        self._address, self._capsule = address, capsule

    def end(self, error: BaseException | None = None) -> None:
        """Completes the operation, or fails it by an error; only the first call has an effect.

        What waits for the operation may run before this returns: hold no lock.
        """
        code, text = 0, b""
        if error is not None:
            code, text = _CANCELLED, b"A call of sok_lite's was interrupted."
            with suppress(Exception):  # an exception may fail to describe itself
                code, text = _describe(error)
        operations().library.sok_ops_end(ctypes.c_void_p(self._address), code, text)


class Call:
    """The Python side of an operation, found by its number.

    Args:
      run: takes the frame, and writes all outputs; of an asynchronous operation also its `Running`.
      is_eager: whether the caller takes its errors from `raised`.
      gradient: as `run`, for the operation's gradient, if that uses the same call.
      source: any object, returned by `source_of`.
    """

    __slots__ = ("__weakref__", "gradient", "number", "run", "source")

    def __init__(
        self,
        run: Callable[..., None],
        is_eager: bool,
        gradient: Callable[[Frame], None] | None = None,
        source: Any = None,
    ) -> None:
        self.run, self.gradient, self.source = run, gradient, source
        self.number = _of_process | (next(_serial) << 1) | is_eager
        _calls[self.number] = self


_serial = itertools.count()
_of_process = 0


def _begin_process() -> None:
    """Draws this process's part of call numbers; a forked child has calls of its own."""
    global _of_process
    _of_process = int.from_bytes(os.urandom(3), "little") << 39


_begin_process()
os.register_at_fork(after_in_child=_begin_process)
_calls: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()
# Errors of eager calls by number, until the caller takes them.
raised: dict[int, BaseException] = {}


def call_of(number: int) -> Call | None:
    """Returns a call by its number; None if it is gone."""
    return _calls.get(number)


def source_of(number: int) -> Any:
    """Returns the source of a call by its number; None if the call is gone."""
    call = call_of(number)
    return None if call is None else call.source


def _enter(address: int, capsule: object, *running: object) -> None:
    """The entry point of operations."""
    frame = Frame(address, capsule)
    call = _calls.get(frame.call)
    if call is None:
        raise ValueError(
            "The graph of this operation was made in another process, or it is a copy, as by prune "
            "or import_graph_def, whose original is gone. Build the lookup anew, from tables of "
            "this process, or keep the original."
        )
    run = call.gradient if frame.is_gradient and call.gradient is not None else call.run
    run(frame, *(Running(frame.address, each) for each in running))


def _describe(error: BaseException) -> tuple[int, bytes]:
    """Returns the code and the text of an operation's error."""
    codes = [code for kind, code in _CODES if isinstance(error, kind)]
    text = f"{type(error).__name__}: {error}\n" + "".join(traceback.format_tb(error.__traceback__))
    return (codes or [_UNKNOWN])[0], text.encode(errors="replace").replace(b"\0", b"")


@cache
def operations() -> library.Operations:
    """Returns the loaded library of operations, initialized with Python's functions.

    Raises RuntimeError, with advice, if it cannot be compiled or loaded.
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
            *("PyBytes_AsString", "PyEval_SaveThread", "PyEval_RestoreThread"),
        )
    ]
    table = (ctypes.c_void_p * len(functions))(*[each.value for each in functions])
    objects = [ctypes.py_object(each) for each in (_enter, _describe, raised)]
    loaded.library.sok_ops_python(table, *objects)
    return loaded

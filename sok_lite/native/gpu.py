"""GPU launches by native code: CUDA's driver, and how launches are ordered with TensorFlow's.

TensorFlow's stream and CUDA's null stream, on which Python launches, do not wait for each other;
see kernels/ops/gpu.h. There are three modes:

* "tensorflow": launches are on TensorFlow's stream, obtained by a few lines of C++ (stream.py).
* "context": launches are on the null stream, which waits for all other streams by an event of
  CUDA's context, and they for it. Requires a driver of CUDA 12.5 or later.
* "python": native code launches nothing. Python does, and waits for the whole GPU before and after.

The default is the first if possible, else the last; SOK_LITE_GPU_STREAM selects one.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any

from sok_lite.backend import Backend
from sok_lite.backend.cpu import find_library
from sok_lite.backend.table_lock import has_functions
from sok_lite.backend.table_lock import load as load_locks
from sok_lite.engine.callers import warn
from sok_lite.native.stream import load_stream_of

WAYS = ("tensorflow", "context", "python")
_VARIABLE = "SOK_LITE_GPU_STREAM"
_LOCKS = "locks"  # key in `reasons`
# CUDA's functions for GpuRecord's first fields; the last two need CUDA 12.5.
_FUNCTIONS = {
    "launch": "cuLaunchKernel",
    "fill": "cuMemsetD8Async",
    "copy_to_host": "cuMemcpyDtoHAsync_v2",
    "synchronize": "cuStreamSynchronize",
    "new_event": "cuEventCreate",
    "record": "cuEventRecord",
    "wait": "cuStreamWaitEvent",
    "push_context": "cuCtxPushCurrent_v2",
    "pop_context": "cuCtxPopCurrent_v2",
    "new_host_memory": "cuMemHostAlloc",
    "record_all": "cuCtxRecordEvent",
    "all_wait": "cuCtxWaitEvent",
}
_OF_CONTEXT = ("record_all", "all_wait")


class GpuRecord(ctypes.Structure):
    """Native code's record of a GPU: `Gpu` of kernels/ops/gpu.h."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in (*_FUNCTIONS, "stream_of", "note", "forget")],
        ("context", ctypes.c_void_p),
        ("order", ctypes.c_int64),
        *[(name, ctypes.c_int64) for name in ("threads_per_block", "max_blocks")],
        *[(name, ctypes.c_int64) for name in ("words", "wide_words", "is_simulated")],
    )


# By id of the backend, None if Python launches; by GPU, the opened record.
_records: dict[int, tuple[Backend, GpuRecord | None]] = {}
_opened: dict[int, GpuRecord | None] = {}
# The mode in use, and why earlier ones are not.
chosen: str | None = None
reasons: dict[str, str] = {}


def prepare(backend: Any) -> None:
    """Gives tables of a GPU created from now on locks that native code can take.

    Raises ValueError if SOK_LITE_GPU_STREAM is not a mode; so does `record_of`.
    """
    if _asked() == "python" or _LOCKS in reasons:
        return
    try:
        if not has_functions():  # finding the library reads all sources of a checkout
            load_locks(find_library())
    except RuntimeError as error:  # no library for CPUs, and no compiler
        reasons[_LOCKS] = _short(error)
        return
    backend.use_native_locks()


def record_of(backend: Any) -> GpuRecord | None:
    """Returns native code's record of a backend's GPU; None if Python launches."""
    known = _records.get(id(backend))
    if known is None:
        if backend.device_id not in _opened:
            _opened[backend.device_id] = open_gpu(backend)
        record = _opened[backend.device_id]
        if record is not None:
            record = GpuRecord.from_buffer_copy(record)  # with this backend's block sizes
            limits = ("threads_per_block", "max_blocks", "words", "wide_words")
            for name, number in zip(limits, backend.launching(), strict=True):
                setattr(record, name, number)
        known = _records.setdefault(id(backend), (backend, record))
    return known[1]


def open_gpu(backend: Backend) -> GpuRecord | None:
    """Returns a record of the GPU in the requested mode, or the first possible default.

    "context" must be requested: its events break another thread's stream capture, such as a graph
    of XLA's or CuPy's.
    """
    global chosen
    asked = _asked()
    for way in [asked] if asked else ("tensorflow", "python"):
        try:
            if way != "python" and _LOCKS in reasons:
                raise RuntimeError(reasons[_LOCKS])
            record = _OPENING[way](backend)
        except (OSError, AttributeError, RuntimeError) as error:
            reasons[way] = _short(error)
            continue
        chosen = way
        return record
    chosen = "python"
    if asked:
        warn(
            f"{_VARIABLE}={asked} is not possible on this machine: {reasons[asked]}. Python "
            "launches the kernels, and waits for the whole GPU before and after.",
        )
    return None


def _asked() -> str:
    """Returns the requested mode; "" for none."""
    asked = os.environ.get(_VARIABLE, "").strip()
    if asked and asked not in WAYS:
        raise ValueError(
            f"{_VARIABLE} must be one of {', '.join(WAYS)}. Received: {asked!r}. Unset it to use "
            "the first, or the last if this machine lacks the first."
        )
    return asked


def _short(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]


def _driver(backend: Backend) -> tuple[ctypes.CDLL, GpuRecord]:
    library = ctypes.CDLL("libcuda.so.1")
    record = GpuRecord()
    for field, name in _FUNCTIONS.items():
        if field not in _OF_CONTEXT:
            setattr(record, field, _address_of(getattr(library, name)))
    backend.activate()  # makes its context current
    context = ctypes.c_void_p()
    error = library.cuCtxGetCurrent(ctypes.byref(context))
    if error or not context:
        raise RuntimeError(f"CUDA gives no context of the GPU: error {error}.")
    record.context = context
    return library, record


def _on_stream_of_tensorflow(backend: Backend) -> GpuRecord:
    _, record = _driver(backend)
    record.stream_of, record.order = _address_of(load_stream_of()), 1
    return record


def _by_events_of_the_context(backend: Backend) -> GpuRecord:
    library, record = _driver(backend)
    for field in _OF_CONTEXT:
        setattr(record, field, _address_of(getattr(library, _FUNCTIONS[field])))
    record.order = 2
    return record


def _by_python(backend: Backend) -> None:
    return None


_OPENING: dict[str, Callable[[Backend], GpuRecord | None]] = {
    "tensorflow": _on_stream_of_tensorflow,
    "context": _by_events_of_the_context,
    "python": _by_python,
}


def _address_of(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value

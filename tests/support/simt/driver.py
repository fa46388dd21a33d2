"""CUDA's driver on the simulated GPU, as native code calls it (sok_lite/native/gpu.py).

Events order streams as CUDA's do. What goes wrong in a call is kept in `Driver.errors`: a function
of the driver returns a number, which native code answers by leaving the call to Python.
"""

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from sok_lite.native.gpu import GpuRecord
from tests.support.simt import device, streams

_POINTER, _SIZE, _UINT, _INT64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int64
_NULL_STREAM = 1  # CU_STREAM_LEGACY
_CONTEXT = 0xC0
_FAILED = 719  # CUDA_ERROR_LAUNCH_FAILED
# The parameters of each function; the first seven numbers of a launch are a grid and a block.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "launch": (_POINTER, *[_UINT] * 7, _POINTER, _POINTER, _POINTER),
    "fill": (_POINTER, ctypes.c_ubyte, _SIZE, _POINTER),
    "copy_to_host": (_POINTER, _POINTER, _SIZE, _POINTER),
    "synchronize": (_POINTER,),
    "new_event": (_POINTER, _UINT),
    "record": (_POINTER, _POINTER),
    "wait": (_POINTER, _POINTER, _UINT),
    "push_context": (_POINTER,),
    "pop_context": (_POINTER,),
    "new_host_memory": (_POINTER, _SIZE, _UINT),
    "record_all": (_POINTER, _POINTER),
    "all_wait": (_POINTER, _POINTER),
}

# Native code keeps them by thread, longer than any driver of a test.
_events: dict[int, streams.Clock] = {}
_numbers = itertools.count(0xE000)
_memory: list[np.ndarray] = []


class Driver:
    """A driver, and what native code is told of it: `record`.

    `stream_of` gives the stream that an operation of TensorFlow's runs on, `note` is told of the
    memory that an operation has, `forget` that it goes on without native code.
    """

    def __init__(
        self,
        backend: Any,
        stream_of: Callable[[], streams.Queue],
        note: Callable[[int, int, bool], None],
        forget: Callable[[], None],
    ) -> None:
        self._backend = backend
        self.errors: list[BaseException] = []
        # By thread of the system: of one that is not Python's, Python keeps nothing between calls.
        self._depths: Counter[int] = Counter()
        self._kept: list[Any] = []  # what native code has addresses of
        self.record = GpuRecord(context=_CONTEXT, order=1, is_simulated=1)
        for name, types in SIGNATURES.items():
            self._set(name, ctypes.c_int, types, getattr(self, f"_{name}"))

        def ptr_of(operation: int) -> int:
            return stream_of().ptr or _NULL_STREAM

        self._set("stream_of", _POINTER, (_POINTER,), ptr_of)
        self._note = note
        self._set("note", None, (_POINTER, _INT64, _INT64), lambda a, n, i: note(a, n, bool(i)))
        self._set("forget", None, (), forget)

    def _set(self, name: str, result: Any, types: Any, function: Callable[..., Any]) -> None:
        def call(*arguments: Any) -> Any:
            try:
                with streams.lock:
                    value = function(*[each or 0 for each in arguments])
            except BaseException as error:
                self.errors.append(error)
                value = _FAILED
            return None if result is None else value or 0

        made = ctypes.CFUNCTYPE(result, *types)(call)
        self._kept.append(made)
        setattr(self.record, name, ctypes.cast(made, _POINTER).value)

    # ---------------------------------------------------------------- CUDA's functions

    def _launch(self, function: int, *how: int) -> None:
        grid, _, _, block, _, _, _, stream, arguments, _ = how
        self._check_context()
        kernel, num_words = self._kernel(function)
        places = (_POINTER * 2).from_address(arguments)
        words = ctypes.string_at(places[0], 8 * num_words)
        count = ctypes.string_at(places[1], 8)
        device.count("kernels")
        run = partial(kernel.run, grid, block, [words, count])
        streams.put(self._queue(stream), kernel.name, run)

    def _fill(self, to: int, value: int, num_bytes: int, stream: int) -> None:
        device.count("memsets")
        view = _bytes(to, num_bytes)
        streams.put(self._queue(stream), "fill", partial(view.fill, value), (view,))

    def _copy_to_host(self, to: int, begin: int, num_bytes: int, stream: int) -> None:
        device.count("copies to the host")
        device.count("bytes to the host", num_bytes)
        view, host = _bytes(begin, num_bytes), _bytes(to, num_bytes)
        copy = partial(np.copyto, host, view)
        streams.put(self._queue(stream), "copy to the host", copy, (None, view))

    def _synchronize(self, stream: int) -> None:
        device.wait(self._queue(stream))

    def _new_event(self, place: int, flags: int) -> None:
        number = next(_numbers)
        _events[number] = {}
        _POINTER.from_address(place).value = number

    def _record(self, event: int, stream: int) -> None:
        _events[event] = dict(self._queue(stream).clock)

    def _wait(self, stream: int, event: int, flags: int) -> None:
        queue = self._queue(stream)
        queue.clock = streams._joined([queue.clock, _events[event]])

    def _record_all(self, context: int, event: int) -> None:
        _events[event] = streams._joined(each.clock for each in streams._queues)

    def _all_wait(self, context: int, event: int) -> None:
        for queue in streams._queues:
            queue.clock = streams._joined([queue.clock, _events[event]])

    def _push_context(self, context: int) -> None:
        assert context == _CONTEXT
        self._depths[threading.get_native_id()] += 1

    def _pop_context(self, place: int) -> None:
        self._check_context()
        self._depths[threading.get_native_id()] -= 1

    def _new_host_memory(self, place: int, num_bytes: int, flags: int) -> None:
        memory = np.full(num_bytes, device.POISON, np.uint8)
        _memory.append(memory)
        _POINTER.from_address(place).value = memory.ctypes.data

    # ---------------------------------------------------------------- what they use

    def _check_context(self) -> None:
        assert self._depths[threading.get_native_id()] > 0, "no context is current"

    def _queue(self, stream: int) -> streams.Queue:
        queue = streams.queue_of(0 if stream == _NULL_STREAM else stream)
        assert stream and queue is not None, "invalid resource handle"
        return queue

    def _kernel(self, function: int) -> tuple[Any, int]:
        """Returns a kernel by its handle, and how many words its launches have."""
        _, _, narrow, wide = self._backend.launching()
        for (_, is_wide), kernel in list(self._backend._kernels.items()):
            if kernel.run.ptr == function:
                return kernel.run._kernel, wide if is_wide else narrow
        raise AssertionError("no such function")


def _bytes(address: int, count: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8)

"""What the stand-in has of `cupy.cuda`: devices, streams, kernels, pinned memory."""

import ctypes
import os
import types
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tests.support.simt import device, nvrtc, runtime, streams
from tests.support.simt.arrays import DeviceArray, MemoryPointer, check_scalar

_MAX_THREADS = 1024  # of a block
_MAX_BLOCKS = 2**31 - 1
_MAX_THREADS_PER_BLOCK = 0  # CUDA's number of that attribute
_MEMORY_TYPES = {
    "memoryTypeUnregistered": 0,
    "memoryTypeHost": 1,
    "memoryTypeDevice": 2,
    "memoryTypeManaged": 3,
}


class Device:
    """A device, as CuPy's class of that name."""

    def __init__(self, device_id: int | None = None) -> None:
        self.id = device.current_device() if device_id is None else device_id

    def use(self) -> None:
        device.use_device(self.id)

    def synchronize(self) -> None:
        device.wait()

    @property
    def attributes(self) -> dict[str, int]:
        # As few as there can be: a loop over items goes round more than once.
        return {"MultiProcessorCount": 1}

    @property
    def compute_capability(self) -> str:
        return device.compute_capability

    def __enter__(self) -> "Device":
        self._before = device.current_device()
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        device.use_device(self._before)


class _AnyStream:
    """What streams have in common."""

    _queue: streams.Queue

    @property
    def ptr(self) -> int:
        return self._queue.ptr

    def use(self) -> "_AnyStream":
        device.use_queue(self._queue)
        return self

    def synchronize(self) -> None:
        device.wait(self._queue)

    def __enter__(self) -> "_AnyStream":
        self._before = device.current_queue()
        return self.use()

    def __exit__(self, *_: object) -> None:
        device.use_queue(self._before)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _AnyStream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return hash(self.ptr)


class Stream(_AnyStream):
    """A stream, as CuPy's class of that name. The null stream and others wait for each other, but
    for those that are `non_blocking`."""

    null: "Stream"

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self._queue = streams.NULL if null else streams.new_queue(is_blocking=not non_blocking)

    def __del__(self) -> None:
        # What is on it still runs.
        if getattr(self, "_queue", None) is not None and streams is not None:
            self._queue.is_closed = self._queue is not streams.NULL


class ExternalStream(_AnyStream):
    """Somebody else's stream, as CuPy's class of that name.

    Raises:
      CUDARuntimeError: nobody has such a stream.
    """

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        queue = streams.queue_of(ptr)
        if queue is None:
            raise device.CUDARuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
        self._queue = queue


Stream.null = Stream(null=True)


class _StreamOfThread(_AnyStream):
    """CUDA's own stream of a thread, by its number alone: nothing can be put on it here."""

    ptr = 2  # cudaStreamPerThread


def get_current_stream() -> _AnyStream:
    queue = device.current_queue()
    if queue is not streams.NULL:
        return ExternalStream(queue.ptr)
    if int(os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0")):
        return _StreamOfThread()
    return Stream.null


class Module:
    """A compiled file of kernels, on the device that was the thread's when it was loaded."""

    def load(self, cubin: bytes) -> None:
        if not isinstance(cubin, bytes):
            raise TypeError(f"Expected bytes, got {type(cubin).__name__}")
        program = nvrtc.loaded(cubin)
        if program is None:
            raise device.CUDADriverError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")
        self._program = program
        self._device = device.current_device()

    def get_function(self, name: str) -> "Function":
        try:
            return Function(self._program.kernel(name), self._device)
        except KeyError:
            raise device.CUDADriverError(
                f"CUDA_ERROR_NOT_FOUND: named symbol not found: {name}"
            ) from None


class Function:
    """A kernel."""

    def __init__(self, kernel: runtime.Kernel, device_id: int) -> None:
        self._kernel, self._device = kernel, device_id
        self.ptr = id(self)

    def __call__(self, grid: tuple, block: tuple, args: Sequence[Any]) -> None:
        for sizes in (grid, block):
            if type(sizes) is not tuple:
                raise TypeError(f"Expected tuple, got {type(sizes).__name__}")
        blocks, threads = max(1, *grid[:1]), max(1, *block[:1])
        if any(n > 1 for n in (*grid[1:], *block[1:])):
            raise NotImplementedError("not in the stand-in: more than one dimension")
        if threads > _MAX_THREADS or blocks > _MAX_BLOCKS:
            raise device.CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        if self._device != device.current_device():
            raise device.CUDADriverError("CUDA_ERROR_INVALID_HANDLE: invalid resource handle")
        signature = self._kernel.signature
        if len(args) != len(signature):
            raise ValueError(
                f"{self._kernel.name} reads {len(signature)} arguments, not {len(args)}"
            )
        arguments = [_argument(arg) for arg in args]
        device.count("kernels")
        device.enqueue(self._kernel.name, partial(self._kernel.run, blocks, threads, arguments))


def _argument(arg: Any) -> bytes:
    """Returns the bytes that a kernel finds where CuPy points it to an argument.

    A parameter that is wider than what is there reads what lies behind.
    """
    if arg is None:
        return bytes(8)
    if isinstance(arg, DeviceArray):
        return arg.data.ptr.to_bytes(8, "little")
    if isinstance(arg, MemoryPointer):
        return arg.ptr.to_bytes(8, "little")
    if isinstance(arg, np.ndarray):
        if arg.size != 1:
            raise TypeError(
                f"You are trying to pass a numpy.ndarray of shape {arg.shape} as a kernel "
                "parameter. Only numpy.ndarrays of size one can be passed by value."
            )
        content = arg.tobytes()
    else:
        check_scalar(arg)
        content = np.asarray(arg).tobytes()
    return content + bytes([device.POISON]) * 8


class PinnedMemory:
    """Memory of the host that kernels can use."""

    def __init__(self, size: int, flags: int = 0) -> None:
        self._memory = device.Memory(size, pinned=True)
        self.ptr = self._memory.ptr


def PinnedMemoryPointer(mem: PinnedMemory, offset: int) -> Any:
    """Returns what CuPy's class of that name is: a buffer of the memory from `offset` on."""
    size = mem._memory.size - offset
    buffer = (ctypes.c_uint8 * size).from_address(mem.ptr + offset)
    buffer.mem = mem  # type: ignore[attr-defined]
    return buffer


def _func_get_attribute(attribute: int, f: int) -> int:
    assert attribute == _MAX_THREADS_PER_BLOCK, "not in the stand-in"
    return _MAX_THREADS


def _get_device_count() -> int:
    return device.num_devices


class PointerAttributes(NamedTuple):
    """What CUDA knows of an address."""

    device: int
    type: int


def _pointer_get_attributes(ptr: int) -> PointerAttributes:
    owner = device.owner_of(ptr)
    if owner is None:
        return PointerAttributes(-2, _MEMORY_TYPES["memoryTypeUnregistered"])
    number, is_pinned = owner
    kind = "memoryTypeHost" if is_pinned else "memoryTypeDevice"
    return PointerAttributes(number, _MEMORY_TYPES[kind])


# ---------------------------------------------------------------- the modules


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"The stand-in of {self.__name__} has no {name!r}. If CuPy has it, add it to "
            "tests/support/simt with all that CuPy refuses."
        )


def make_module(name: str, **members: Any) -> types.ModuleType:
    """Returns a module; a name that it lacks is an AttributeError that says so."""
    module = _StandIn(name)
    module.__file__ = __file__
    vars(module).update(members)
    return module


_runtime = make_module(
    "cupy.cuda.runtime",
    CUDARuntimeError=device.CUDARuntimeError,
    driverGetVersion=lambda: 99000,
    getDeviceCount=_get_device_count,
    deviceSynchronize=lambda: device.wait(),
    pointerGetAttributes=_pointer_get_attributes,
    PointerAttributes=PointerAttributes,
    **_MEMORY_TYPES,
)
cuda = make_module(
    "cupy.cuda",
    Device=Device,
    Stream=Stream,
    ExternalStream=ExternalStream,
    Module=Module,
    Function=Function,
    MemoryPointer=MemoryPointer,
    UnownedMemory=device.UnownedMemory,
    PinnedMemory=PinnedMemory,
    PinnedMemoryPointer=PinnedMemoryPointer,
    get_current_stream=get_current_stream,
    runtime=_runtime,
    driver=make_module(
        "cupy.cuda.driver",
        CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK=_MAX_THREADS_PER_BLOCK,
        funcGetAttribute=_func_get_attribute,
    ),
    memory=make_module("cupy.cuda.memory", OutOfMemoryError=device.OutOfMemoryError),
    nvrtc=make_module(
        "cupy.cuda.nvrtc",
        NVRTCError=nvrtc.NVRTCError,
        **{function.__name__: function for function in nvrtc.FUNCTIONS},
    ),
)

"""A module that stands where CuPy stands, on the simulated GPU.

It has the names that the package, its tests and its scripts use, with CuPy's parameters; any other
name is an AttributeError.
"""

import ctypes
import types
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.support.simt import arrays, compiler, device, runtime
from tests.support.simt.arrays import MemoryPointer, ndarray

_MAX_THREADS = 1024  # of a block
_MAX_BLOCKS = 2**31 - 1
_MEMORY_TYPES = {
    "memoryTypeUnregistered": 0,
    "memoryTypeHost": 1,
    "memoryTypeDevice": 2,
    "memoryTypeManaged": 3,
}

# ---------------------------------------------------------------- functions of arrays


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 0, dtype, order)


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 1, dtype, order)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    if dtype is None:
        is_ours = isinstance(fill_value, ndarray)
        dtype = fill_value.dtype if is_ours else np.array(fill_value).dtype
    out = ndarray(shape, dtype, order=order)
    out.fill(fill_value)
    return out


def empty_like(prototype: ndarray, dtype: Any = None) -> ndarray:
    _check_arrays(prototype)
    return ndarray(prototype.shape, prototype.dtype if dtype is None else dtype)


def zeros_like(a: ndarray, dtype: Any = None) -> ndarray:
    _check_arrays(a)
    return zeros(a.shape, a.dtype if dtype is None else dtype)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    for number in (start, stop, step):
        if isinstance(number, ndarray):
            raise TypeError("arange takes numbers of the host")
    if dtype is None:
        kinds = {np.dtype(type(number)).kind for number in (start, stop, step)}
        dtype = float if "f" in kinds else int  # never the dtype of a NumPy scalar
    values = np.arange(start, stop, step) if stop is not None else np.arange(0, start, step)
    out = ndarray(values.shape, dtype)
    # Multiplied out in the dtype.
    values = values.astype(dtype)
    arrays.launch("arange", [out], lambda to: np.copyto(to, values))
    return out


def array(obj: Any, dtype: Any = None, copy: bool | None = True) -> ndarray:
    return arrays.array(obj, dtype, copy)


def asarray(a: Any, dtype: Any = None) -> ndarray:
    return arrays.array(a, dtype, copy=False)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    a = asarray(a) if not isinstance(a, ndarray) else a
    if dtype is not None and np.dtype(dtype) != a.dtype:
        a = a.astype(dtype)
    elif not a.flags.c_contiguous:
        a = a.copy()
    return a.reshape(1) if a.ndim == 0 else a


def asnumpy(a: Any, stream: Any = None, order: str = "C") -> np.ndarray:
    return a.get(stream, order) if isinstance(a, ndarray) else np.asarray(a, order=order)


def concatenate(tup: Sequence[ndarray], axis: int = 0) -> ndarray:
    tup = list(tup)
    if not tup:
        raise ValueError("Cannot concatenate from empty tuple")
    for item in tup:
        if not isinstance(item, ndarray):
            raise TypeError("Only cupy arrays can be concatenated")
        if item.ndim == 0:
            raise TypeError("zero-dimensional arrays cannot be concatenated")
    model = np.concatenate([np.broadcast_to(np.zeros((), a.dtype), a.shape) for a in tup], axis)
    out = ndarray(model.shape, model.dtype)
    arrays.launch(
        "concatenate", [out, *tup], lambda to, *parts: np.copyto(to, np.concatenate(parts, axis))
    )
    return out


def take(a: ndarray, indices: Any, axis: int | None = None) -> ndarray:
    _check_arrays(a)
    return a.take(indices, axis)


def where(condition: ndarray, x: Any = None, y: Any = None) -> Any:
    _check_arrays(condition)
    if (x is None) != (y is None):
        raise ValueError("Must provide both 'x' and 'y' or neither.")
    if x is None:
        return condition.nonzero()
    for item in (x, y):
        if not isinstance(item, ndarray):
            arrays._check_scalar(item)
    given = [condition, x, y]
    inputs = [item for item in given if isinstance(item, ndarray)]
    model = np.where(
        np.ones(1, bool), *[np.ones(1, i.dtype) if isinstance(i, ndarray) else i for i in (x, y)]
    )
    out = ndarray(np.broadcast_shapes(*[item.shape for item in inputs]), model.dtype)

    scalars = [None if isinstance(item, ndarray) else item for item in given]

    def run(to: np.ndarray, *views: np.ndarray) -> None:
        rest = iter(views)
        np.copyto(to, np.where(*[next(rest) if item is None else item for item in scalars]))

    arrays.launch("where", [out, *inputs], run)
    return out


def flatnonzero(a: ndarray) -> ndarray:
    _check_arrays(a)
    return a.ravel().nonzero()[0]


def argsort(a: ndarray, axis: int = -1, kind: str | None = None) -> ndarray:
    _check_arrays(a)
    return a.argsort(axis, kind)


def searchsorted(a: ndarray, v: Any, side: str = "left") -> ndarray:
    if not isinstance(a, ndarray):
        raise NotImplementedError("Only int or ndarray are supported for a")
    if not isinstance(v, ndarray):
        if not isinstance(v, (int, float, complex)):
            raise NotImplementedError("Only python scalars or ndarrays are supported for v")
        v = asarray(v)
    if a.ndim != 1:
        raise ValueError("a must have one dimension")
    out = ndarray(v.shape, np.int64)
    arrays.launch(
        "searchsorted", [out, a, v], lambda to, a, v: np.copyto(to, np.searchsorted(a, v, side))
    )
    return out


def unique(ar: ndarray) -> ndarray:
    _check_arrays(ar)
    device.count("array operations", 3)  # sorts, compares neighbours, takes by the mask
    found = np.unique(arrays._read(ar)) if ar.size else np.empty(0, ar.dtype)
    out = ndarray(found.shape, found.dtype)
    arrays.launch("unique", [out, ar], lambda to, _: np.copyto(to, found))
    return out


def cumsum(a: ndarray, axis: int | None = None) -> ndarray:
    _check_arrays(a)
    return a.cumsum(axis)


def count_nonzero(a: ndarray, axis: int | None = None) -> ndarray:
    _check_arrays(a)
    return a._reduced(np.count_nonzero, axis, None, False)


def _check_arrays(*given: Any) -> None:
    for item in given:
        if not isinstance(item, ndarray):
            raise TypeError(f"Unsupported type {type(item)}")


# ---------------------------------------------------------------- cupy.cuda


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
        return "90"

    def __enter__(self) -> "Device":
        self._before = device.current_device()
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        device.use_device(self._before)


class Stream:
    """The default stream."""

    def synchronize(self) -> None:
        device.wait()


_NULL = Stream()


def get_current_stream() -> Stream:
    return _NULL


class Module:
    """A compiled file of kernels, on the device that was the thread's when it was loaded."""

    def load(self, cubin: bytes) -> None:
        if not isinstance(cubin, bytes):
            raise TypeError(f"Expected bytes, got {type(cubin).__name__}")
        path = Path(cubin.decode())
        if not path.is_file():
            raise device.CUDADriverError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")
        self._program = runtime.Program(path)
        self._device = device.current_device()

    def get_function(self, name: str) -> "Function":
        try:
            return Function(self._program.kernel(name), self._device)
        except KeyError:
            raise device.CUDADriverError(
                f"CUDA_ERROR_NOT_FOUND: named symbol not found: {name}"
            ) from None


class RawModule:
    """A file of kernels that is compiled on first use."""

    def __init__(self, *, code: str, options: tuple[str, ...] = ()) -> None:
        self._code, self._options = code, options
        self._module: Module | None = None

    def get_function(self, name: str) -> "Function":
        if self._module is None:
            self._module = Module()
            self._module.load(compile_using_nvrtc(self._code, self._options)[0])
        return self._module.get_function(name)


class Function:
    """A kernel."""

    def __init__(self, kernel: runtime.Kernel, device_id: int) -> None:
        self._kernel, self._device = kernel, device_id

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
        cells = [_cell(arg) for arg in args]
        device.count("kernels")
        device.enqueue(self._kernel.name, partial(self._kernel.run, blocks, threads, cells))


def _cell(arg: Any) -> int:
    """Returns the 8 bytes that a kernel finds where CuPy points it to an argument.

    A parameter that is wider than what is there reads what lies behind.
    """
    if arg is None:
        return 0
    if isinstance(arg, ndarray):
        return arg.data.ptr
    if isinstance(arg, MemoryPointer):
        return arg.ptr
    if isinstance(arg, np.ndarray):
        if arg.size != 1:
            raise TypeError(
                f"You are trying to pass a numpy.ndarray of shape {arg.shape} as a kernel "
                "parameter. Only numpy.ndarrays of size one can be passed by value."
            )
        content = arg.tobytes()
    else:
        arrays._check_scalar(arg)
        content = np.asarray(arg).tobytes()
    return int.from_bytes(content.ljust(8, bytes([device.POISON]))[:8], "little")


def compile_using_nvrtc(source: str, options: tuple[str, ...] = (), arch: Any = None) -> Any:
    return str(compiler.compile_source(source, options)).encode(), None


def _nvrtc_version() -> tuple[int, int]:
    # A version that NVRTC never has: what is cached by it is for the simulated GPU, as it is now.
    files = sorted(compiler.FOLDER.glob("*.h")) + [compiler.FOLDER / "compiler.py"]
    return 0, zlib.crc32(b"".join(path.read_bytes() for path in files))


class PinnedMemory:
    """Memory of the host that kernels can use."""

    def __init__(self, size: int, flags: int = 0) -> None:
        self._memory = device.Memory(size, pinned=True)
        self.ptr = self._memory.ptr

    def __del__(self) -> None:
        device.count("pinned frees")


def PinnedMemoryPointer(mem: PinnedMemory, offset: int) -> Any:
    """Returns what CuPy's class of that name is: a buffer of the memory from `offset` on."""
    size = mem._memory.size - offset
    buffer = (ctypes.c_uint8 * size).from_address(mem.ptr + offset)
    buffer.mem = mem  # type: ignore[attr-defined]
    return buffer


def _get_device_count() -> int:
    return device.num_devices


def _mem_get_info() -> tuple[int, int]:
    total = device.limit or 1 << 40
    return total - device.pool().total_bytes(), total


class PointerAttributes(NamedTuple):
    """What CUDA knows of an address."""

    device: int
    devicePointer: int
    hostPointer: int
    type: int


def _pointer_get_attributes(ptr: int) -> PointerAttributes:
    owner = device.owner_of(ptr)
    if owner is None:
        return PointerAttributes(-2, 0, ptr, _MEMORY_TYPES["memoryTypeUnregistered"])
    number, is_pinned = owner
    if is_pinned:
        return PointerAttributes(number, ptr, ptr, _MEMORY_TYPES["memoryTypeHost"])
    return PointerAttributes(number, ptr, 0, _MEMORY_TYPES["memoryTypeDevice"])


def _set_device(number: int) -> None:
    device.use_device(number)


# ---------------------------------------------------------------- the module


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"The stand-in of {self.__name__} has no {name!r}. If CuPy has it, add it to "
            "tests/support/simt with all that CuPy refuses."
        )


def _module(name: str, **members: Any) -> types.ModuleType:
    module = _StandIn(name)
    module.__file__ = __file__
    vars(module).update(members)
    return module


_DTYPES = ("bool_", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_FUNCTIONS = (
    *(empty, zeros, ones, full, empty_like, zeros_like, arange, array, asarray),
    *(ascontiguousarray, asnumpy, concatenate, take, where, flatnonzero, argsort, searchsorted),
    *(unique, cumsum, count_nonzero),
)
_runtime = _module(
    "cupy.cuda.runtime",
    CUDARuntimeError=device.CUDARuntimeError,
    getDeviceCount=_get_device_count,
    getDevice=device.current_device,
    setDevice=_set_device,
    memGetInfo=_mem_get_info,
    pointerGetAttributes=_pointer_get_attributes,
    PointerAttributes=PointerAttributes,
    **_MEMORY_TYPES,
)
_cuda = _module(
    "cupy.cuda",
    Device=Device,
    Stream=Stream,
    Module=Module,
    Function=Function,
    MemoryPointer=MemoryPointer,
    UnownedMemory=device.UnownedMemory,
    PinnedMemory=PinnedMemory,
    PinnedMemoryPointer=PinnedMemoryPointer,
    get_current_stream=get_current_stream,
    runtime=_runtime,
    compiler=_module("cupy.cuda.compiler", compile_using_nvrtc=compile_using_nvrtc),
    memory=_module("cupy.cuda.memory", OutOfMemoryError=device.OutOfMemoryError),
    nvrtc=_module("cupy.cuda.nvrtc", getVersion=_nvrtc_version),
)
cupy = _module(
    "cupy",
    __version__="14.2.0",
    ndarray=ndarray,
    RawModule=RawModule,
    cuda=_cuda,
    get_default_memory_pool=device.pool,
    **{function.__name__: function for function in _FUNCTIONS},
    **{name: partial(arrays.apply, ufunc) for name, ufunc in arrays.UFUNCS.items()},
    **{name: getattr(np, name) for name in (*_DTYPES, "float16", "float32", "float64")},
)

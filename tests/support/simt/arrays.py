"""Arrays in the memory of the simulated GPU: what they are, and how they come and go.

They are none of NumPy's. Every operation is put on the stream of `device` and runs later, on NumPy
views of the memory. What is refused here is refused by CuPy 14; what is missing here may well be in
CuPy. indexing.py and ndarray.py make CuPy's ndarray of them.
"""

import math
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tests.support.simt import device

_LETTERS = "?bBhHiIlLqQefdFD"


def checked_dtype(dtype: Any) -> np.dtype:
    """Returns a dtype; ValueError: CuPy has no arrays of it."""
    dtype = np.dtype(dtype)
    if dtype.char not in _LETTERS:
        raise ValueError(f"Unsupported dtype {dtype}")
    return dtype


class MemoryPointer:
    """A place in memory, as CuPy's class of that name."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.offset = mem, offset
        self.device_id = mem.device_id

    @property
    def ptr(self) -> int:
        return int(self.mem.ptr + self.offset)

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        """Sets bytes, on the thread's stream; counted as no operation on arrays."""
        assert stream is None, "not in the stand-in"
        device.check_device(self.device_id)
        if size:
            device.count("memsets")
            part = self.mem.content[self.offset : self.offset + size]
            assert part.size == size, "beyond the end of the memory"
            device.enqueue("memset", partial(part.fill, value & 0xFF), (part,))


class Flags:
    """What CuPy's arrays know of their layout."""

    def __init__(self, view: np.ndarray) -> None:
        self.c_contiguous = view.flags.c_contiguous


class DeviceArray:
    """An array in the memory of a simulated GPU; arguments as of CuPy's."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: Any = None,
        order: str = "C",
    ) -> None:
        assert strides is None and order == "C", "not in the stand-in"
        shape = _checked_shape(shape)
        dtype = checked_dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if memptr is None:
            memptr = MemoryPointer(device.Memory(size), 0)
        content = memptr.mem.content[memptr.offset : memptr.offset + size]
        self._set(memptr, content.view(dtype).reshape(shape), None)

    def _set(self, data: MemoryPointer, view: np.ndarray, base: "DeviceArray | None") -> None:
        self.data, self.base = data, base
        self._view = view  # what work on the stream reads and writes

    # ---------------------------------------------------------------- layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self._view.shape

    @shape.setter
    def shape(self, shape: Any) -> None:
        view = self._view.view()
        view.shape = shape
        self._view = view

    dtype = property(lambda self: self._view.dtype)
    strides = property(lambda self: self._view.strides)
    size = property(lambda self: self._view.size)
    ndim = property(lambda self: self._view.ndim)
    itemsize = property(lambda self: self._view.itemsize)
    nbytes = property(lambda self: self._view.nbytes)
    flags = property(lambda self: Flags(self._view))
    T = property(lambda self: view_of(self, self._view.T))

    def view(self, dtype: Any = None) -> "DeviceArray":
        return view_of(self, self._view.view() if dtype is None else self._view.view(dtype))

    def reshape(self, *shape: Any, order: str = "C") -> "DeviceArray":
        shape = shape[0] if len(shape) == 1 else shape
        new_shape = np.broadcast_to(np.uint8(0), self.shape).reshape(shape, order=order).shape
        view = self._view.view()
        try:
            view.shape = new_shape
        except AttributeError:  # it cannot be without a copy
            return view_of(copied := self.copy(), copied._view.reshape(new_shape))
        return view_of(self, view)

    def ravel(self, order: str = "C") -> "DeviceArray":
        return self.reshape(-1, order=order)

    def transpose(self, *axes: Any) -> "DeviceArray":
        return view_of(self, self._view.transpose(*axes))

    def __len__(self) -> int:
        if self.ndim == 0:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterable["DeviceArray"]:
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(self.shape[0]))

    # ---------------------------------------------------------------- to the host

    def get(self, stream: Any = None, order: str = "C", out: Any = None) -> np.ndarray:
        assert stream is None and out is None, "not in the stand-in"
        device.check_device(self.data.device_id)
        if self.size == 0:
            return np.ndarray(self.shape, self.dtype)
        if not self._view.flags.c_contiguous:
            device.count("array operations")
        device.count("copies to the host")
        device.count("bytes to the host", self.nbytes)
        device.wait_to_read(self._view)
        return np.array(self._view, order=order)

    def item(self) -> Any:
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __bool__(self) -> bool:
        if self.size == 0:
            warnings.warn("The truth value of an empty array", DeprecationWarning, stacklevel=2)
            return False
        if self.size > 1:
            raise ValueError("The truth value of an array with more than one element is ambiguous.")
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __repr__(self) -> str:
        return repr(self.get())

    def __str__(self) -> str:
        return str(self.get())

    def __format__(self, spec: str) -> str:
        return format(self.get(), spec)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct "
            "a NumPy array explicitly."
        )

    # ---------------------------------------------------------------- copies

    def astype(self, dtype: Any, order: str = "K", *, copy: bool = True) -> "DeviceArray":
        dtype = checked_dtype(dtype)
        if dtype == self.dtype and not copy:
            return self
        out = type(self)(self.shape, dtype)
        launch("astype", [out, self], copy_to)
        return out

    def copy(self, order: str = "C") -> "DeviceArray":
        return self.astype(self.dtype, order=order)

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> "DeviceArray":
        return self.copy()

    def fill(self, value: Any) -> None:
        if isinstance(value, DeviceArray):
            if value.shape != ():
                raise ValueError("non-scalar cupy.ndarray cannot be used for fill")
            launch("fill", [self, value], copy_to)
            return
        number = np.asarray(value, dtype=self.dtype)
        if number.shape != ():
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        launch("fill", [self], lambda to: to.fill(number[()]))


def array(kind: "type[DeviceArray]", obj: Any, dtype: Any = None, copy: bool | None = True) -> Any:
    """Returns an array of a kind: a copy of one, or of what NumPy makes an array of.

    What the host has is taken at the call: CuPy copies it into a buffer of its own first.
    """
    if isinstance(obj, DeviceArray):
        return obj.astype(obj.dtype if dtype is None else dtype, copy=bool(copy))
    if isinstance(obj, (list, tuple)) and any(isinstance(x, DeviceArray) for x in obj):
        raise NotImplementedError("not in the stand-in: an array of arrays")
    host = np.array(obj, dtype=None if dtype is None else checked_dtype(dtype), order="C")
    out = kind(host.shape, checked_dtype(host.dtype))
    if host.size:
        device.count("copies to the device")
        device.count("bytes to the device", host.nbytes)
        to = out._view
        device.enqueue("copy to the device", lambda: copy_to(to, host), (to,))
    return out


def launch(name: str, arrays: Sequence[DeviceArray], work: Callable[..., None]) -> None:
    """Puts an operation on the stream: the first array is written, the others are read.

    The stream holds NumPy views of them only: an array is freed, and its memory is CuPy's pool's
    again, when the host drops it. An array on another device is refused.
    """
    for x in arrays:
        device.check_device(x.data.device_id)
    if arrays[0].size:
        device.count("array operations")
        views = [x._view for x in arrays]
        device.enqueue(name, partial(work, *views), views)


def copy_to(to: np.ndarray, what: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        np.copyto(to, what, casting="unsafe")


def check_scalar(x: Any) -> None:
    if type(x) in (int, float, bool, complex):
        return
    if isinstance(x, np.generic) and x.dtype.char in _LETTERS:
        return
    raise TypeError(f"Unsupported type {type(x)}")


def arrays_of(items: Iterable[Any]) -> list[DeviceArray]:
    return [x for x in items if isinstance(x, DeviceArray)]


# ---------------------------------------------------------------- inside


def view_of(x: DeviceArray, view: np.ndarray) -> DeviceArray:
    result = type(x).__new__(type(x))
    memory = x.data.mem
    offset = device.address_of(view) - memory.ptr if view.size else x.data.offset
    place = MemoryPointer(memory, offset)
    result._set(place, view, x if x.base is None else x.base)
    return result


def _checked_shape(shape: Any) -> tuple[int, ...]:
    """Returns a shape. An array of the device is none: it would be read from there."""
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    shape = tuple(operator.index(n) for n in shape)
    if shape and min(shape) < 0:
        raise ValueError("Negative dimensions are not allowed")
    return shape

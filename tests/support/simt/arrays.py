"""CuPy's ndarray, as strict as CuPy: an array that is none of NumPy's.

Every operation is put on the stream of `device` and runs later, on NumPy views of the memory.
What is refused here is refused by CuPy 14; what is missing here may well be in CuPy.
"""

import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tests.support.simt import device

_LETTERS = "?bBhHiIlLqQefdFD"
_COMPARISONS = ("less", "less_equal", "equal", "not_equal", "greater", "greater_equal")


def checked_dtype(dtype: Any) -> np.dtype:
    """Returns a dtype.

    Raises:
      ValueError: CuPy has no arrays of it.
    """
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


class Flags:
    """What CuPy's arrays know of their layout."""

    def __init__(self, view: np.ndarray, owns: bool) -> None:
        self.c_contiguous = view.flags.c_contiguous
        self.f_contiguous = view.flags.f_contiguous
        self.owndata = owns

    def __getitem__(self, name: str) -> bool:
        return bool(getattr(self, name.lower()))


class ndarray:
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

    def _set(self, data: MemoryPointer, view: np.ndarray, base: "ndarray | None") -> None:
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
    flags = property(lambda self: Flags(self._view, self.base is None))
    T = property(lambda self: _view_of(self, self._view.T))

    def view(self, dtype: Any = None) -> "ndarray":
        return _view_of(self, self._view.view() if dtype is None else self._view.view(dtype))

    def reshape(self, *shape: Any, order: str = "C") -> "ndarray":
        shape = shape[0] if len(shape) == 1 else shape
        new_shape = np.broadcast_to(np.uint8(0), self.shape).reshape(shape, order=order).shape
        view = self._view.view()
        try:
            view.shape = new_shape
        except AttributeError:  # it cannot be without a copy
            return _view_of(copied := self.copy(), copied._view.reshape(new_shape))
        return _view_of(self, view)

    def ravel(self, order: str = "C") -> "ndarray":
        return self.reshape(-1, order=order)

    def transpose(self, *axes: Any) -> "ndarray":
        return _view_of(self, self._view.transpose(*axes))

    def __len__(self) -> int:
        if self.ndim == 0:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterable["ndarray"]:
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
        device.wait()
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

    def astype(self, dtype: Any, order: str = "K", *, copy: bool = True) -> "ndarray":
        dtype = checked_dtype(dtype)
        if dtype == self.dtype and not copy:
            return self
        out = ndarray(self.shape, dtype)
        launch("astype", [out, self], _copy)
        return out

    def copy(self, order: str = "C") -> "ndarray":
        return self.astype(self.dtype, order=order)

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> "ndarray":
        return self.copy()

    def fill(self, value: Any) -> None:
        if isinstance(value, ndarray):
            if value.shape != ():
                raise ValueError("non-scalar cupy.ndarray cannot be used for fill")
            launch("fill", [self, value], _copy)
            return
        number = np.asarray(value, dtype=self.dtype)
        if number.shape != ():
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        launch("fill", [self], lambda to: to.fill(number[()]))

    # ---------------------------------------------------------------- indexing

    def __getitem__(self, index: Any) -> "ndarray":
        place, arrays, axis = _resolved(self, index)
        if not arrays:
            return place
        if len(arrays) == 1 and arrays[0].dtype.kind != "b":
            return place.take(arrays[0], axis)
        if len(arrays) == 1:
            mask = arrays[0]
            count = int(np.count_nonzero(_read(mask))) if mask.size else 0
            rest = place.shape[axis + mask.ndim :]
            out = ndarray((*place.shape[:axis], count, *rest), self.dtype)
            before = [slice(None)] * axis
            launch("getitem", [out, place, mask], lambda to, a, m: _copy(to, a[(*before, m)]))
            return out
        where = _where(place, axis)
        # Zeros: the shape does not depend on the numbers.
        zeros = tuple(np.broadcast_to(np.int8(0), array.shape) for array in arrays)
        blank = np.broadcast_to(np.int8(0), [max(1, n) for n in place.shape])
        out = ndarray(blank[(*[slice(None)] * axis, *zeros)].shape, self.dtype)
        launch("getitem", [out, place, *arrays], lambda to, a, *at: _copy(to, a[where(*at)]))
        return out

    def __setitem__(self, index: Any, value: Any) -> None:
        place, arrays, axis = _resolved(self, index)
        if not arrays:
            if not isinstance(value, ndarray):
                place.fill(value)  # refuses arrays of NumPy's
                return
            np.broadcast_to(value._view, place.shape)
            if _is_same(place._view, value._view):
                return
            _check_overlap(place, value)
            launch("setitem", [place, value], _copy)
            return
        if not isinstance(value, ndarray):
            value = array(value, dtype=self.dtype)  # a copy to the device
        value = value.astype(self.dtype, copy=False)
        if len(arrays) == 1 and arrays[0].dtype.kind == "b":
            mask = arrays[0]
            count = int(np.count_nonzero(_read(mask))) if mask.size else 0
            shape = (*place.shape[:axis], count, *place.shape[axis + mask.ndim :])
            before = [slice(None)] * axis
            np.broadcast_to(value._view, shape)
            launch(
                "setitem",
                [place, mask, value],
                lambda to, m, v: operator.setitem(to, (*before, m), np.broadcast_to(v, shape)),
            )
            return
        assert all(a.ndim == 1 for a in arrays) or value.ndim == 0, "not in the stand-in"
        where = _where(place, axis)
        n = np.broadcast_shapes(*[a.shape for a in arrays])
        shape = (*place.shape[:axis], *n, *place.shape[axis + len(arrays) :])
        np.broadcast_to(value._view, shape)

        def write(to: np.ndarray, source: np.ndarray, *numbers: np.ndarray) -> None:
            at, source = where(*numbers), np.broadcast_to(source, shape)
            if len(n) != 1:
                to[at] = source
                return
            # Of an index that repeats any one wins.
            order = device.random.permutation(n[0])
            shuffled = tuple(np.broadcast_to(a, n)[order] for a in at[axis:])
            to[(*at[:axis], *shuffled)] = np.take(source, order, axis)

        launch("setitem", [place, value, *arrays], write)

    def take(self, indices: Any, axis: int | None = None, out: Any = None) -> "ndarray":
        assert out is None, "not in the stand-in"
        if not np.isscalar(indices) and not isinstance(indices, ndarray):
            indices = array(indices, dtype=int)  # a copy to the device
        shape = () if np.isscalar(indices) else indices.shape
        if isinstance(indices, ndarray) and indices.dtype.kind not in "iu":
            raise TypeError(f"Wrong type of indices: {indices.dtype}")
        if axis is not None:
            axis = range(self.ndim)[axis]
        around = ((), ()) if axis is None else (self.shape[:axis], self.shape[axis + 1 :])
        out = ndarray((*around[0], *shape, *around[1]), self.dtype)
        if self.size == 0 and out.size:
            raise IndexError("cannot do a non-empty take from an empty axes.")

        def take(to: np.ndarray, source: np.ndarray, *numbers: np.ndarray) -> None:
            at = np.asarray(numbers[0] if numbers else indices).astype(np.int64)
            _copy(to, np.take(source, at, axis, mode="wrap"))

        launch("take", [out, self, *_arrays([indices])], take)
        return out

    # ---------------------------------------------------------------- reductions and sorting

    def _reduced(
        self, function: Callable[..., Any], axis: Any, out: Any, keepdims: bool, dtype: Any = None
    ) -> "ndarray":
        assert out is None, "not in the stand-in"
        name = function.__name__
        options: dict[str, Any] = {"axis": axis, "keepdims": keepdims}
        if dtype is not None:
            options["dtype"] = checked_dtype(dtype)
        if self.size == 0 and name in ("max", "min", "amax", "amin"):
            raise ValueError(
                f"zero-size array to reduction operation cupy_{name} which has no identity"
            )
        with np.errstate(all="ignore"):
            model = np.asarray(
                function(np.broadcast_to(np.ones((), self.dtype), self.shape), **options)
            )
        result = ndarray(model.shape, model.dtype)

        def reduce(to: np.ndarray, source: np.ndarray) -> None:
            with np.errstate(all="ignore"):
                to[...] = function(source, **options)

        launch(name, [result, self], reduce)
        return result

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> "ndarray":
        return self._reduced(np.max, axis, out, keepdims)

    def min(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> "ndarray":
        return self._reduced(np.min, axis, out, keepdims)

    def sum(
        self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> "ndarray":
        return self._reduced(np.sum, axis, out, keepdims, dtype)

    def mean(
        self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> "ndarray":
        return self._reduced(np.mean, axis, out, keepdims, dtype)

    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> "ndarray":
        return self._reduced(np.all, axis, out, keepdims)

    def any(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> "ndarray":
        return self._reduced(np.any, axis, out, keepdims)

    def cumsum(self, axis: Any = None, dtype: Any = None, out: Any = None) -> "ndarray":
        assert dtype is None and out is None, "not in the stand-in"
        model = np.cumsum(np.zeros(min(1, self.size), self.dtype))
        shape = (self.size,) if axis is None else self.shape
        result = ndarray(shape, model.dtype)
        launch("cumsum", [result, self], lambda to, a: _copy(to, a.cumsum(axis)))
        return result

    def argsort(self, axis: int = -1, kind: str | None = None) -> "ndarray":
        if kind not in (None, "stable"):
            raise ValueError("kind can only be None or 'stable'")
        out = ndarray(self.shape, np.int64)
        launch("argsort", [out, self], lambda to, a: _copy(to, a.argsort(axis, "stable")))
        return out

    def nonzero(self) -> tuple["ndarray", ...]:
        if self.ndim == 0:
            raise ValueError("Calling nonzero on 0d arrays is not allowed.")
        device.count("array operations")
        found = np.argwhere(_read(self)) if self.size else np.empty((0, self.ndim), np.int64)
        out = ndarray(found.shape, np.int64)
        launch("nonzero", [out, self], lambda to, _: _copy(to, found))
        return tuple(out[:, i] for i in range(self.ndim))

    # ---------------------------------------------------------------- arithmetic

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or ufunc.__name__ not in UFUNCS:
            return NotImplemented
        if "out" in options:
            (options["out"],) = options["out"]
        if ufunc.__name__ in _COMPARISONS:
            inputs = tuple(
                x.item() if isinstance(x, np.ndarray) and x.ndim == 0 else x for x in inputs
            )
        return apply(ufunc, *inputs, **options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from tests.support.simt import cupy_stand_in

        ours = getattr(cupy_stand_in.cupy, function.__name__, None)
        if ours is None or not all(issubclass(t, (ndarray, np.ndarray)) for t in types):
            return NotImplemented
        return ours(*args, **kwargs)

    def __neg__(self) -> "ndarray":
        return apply(np.negative, self)

    def __abs__(self) -> "ndarray":
        return apply(np.absolute, self)

    def __invert__(self) -> "ndarray":
        return apply(np.invert, self)


# The ufuncs that the package and its tests use, by name; NumPy's operators come here as well.
UFUNCS = {
    name: getattr(np, name)
    for name in (
        *("add", "subtract", "multiply", "true_divide", "divide", "floor_divide", "remainder"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"),
        *("negative", "absolute", "invert", "minimum", "maximum", "isnan", "isfinite"),
        *_COMPARISONS,
    )
}
_OPERATORS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
}


def _define_operators() -> None:
    for name, ufunc in _OPERATORS.items():
        setattr(ndarray, f"__{name}__", lambda x, y, f=ufunc: apply(f, x, y))
        setattr(ndarray, f"__r{name}__", lambda x, y, f=ufunc: apply(f, y, x))
        setattr(ndarray, f"__i{name}__", lambda x, y, f=ufunc: apply(f, x, y, out=x))
    for name in _COMPARISONS:
        short = {"equal": "eq", "not_equal": "ne"}.get(
            name, name[0] + ("e" if "_" in name else "t")
        )
        call = lambda x, y, f=UFUNCS[name]: x.__array_ufunc__(f, "__call__", x, y)  # noqa: E731
        setattr(ndarray, f"__{short}__", call)


_define_operators()


def apply(ufunc: np.ufunc, *inputs: Any, out: "ndarray | None" = None, **options: Any) -> ndarray:
    """Calls a ufunc on arrays and scalars; anything else is refused."""
    assert not options, f"not in the stand-in: {options}"
    for x in inputs:
        if not isinstance(x, ndarray):
            _check_scalar(x)
    if out is not None and not isinstance(out, ndarray):
        raise TypeError(f"Unsupported type {type(out)}")
    arrays = _arrays(inputs)
    shape = np.broadcast_shapes(*[x.shape for x in arrays])
    with np.errstate(all="ignore"):
        model = ufunc(*[_one(x.dtype) if isinstance(x, ndarray) else x for x in inputs])
    if out is None:
        out = ndarray(shape, checked_dtype(model.dtype))
    elif out.shape != shape:
        raise ValueError(f"non-broadcastable output operand with shape {out.shape}: {shape}")
    elif not np.can_cast(model.dtype, out.dtype, "same_kind"):
        raise TypeError(
            f"output (typecode {model.dtype.char!r}) could not be coerced to provided output "
            f"parameter (typecode {out.dtype.char!r}) according to the casting rule 'same_kind'"
        )
    for x in arrays:
        _check_overlap(out, x)

    def run(to: np.ndarray, *views: np.ndarray) -> None:
        rest = iter(views)
        operands = [next(rest) if is_array else x for x, is_array in operators]
        with np.errstate(all="ignore"):
            ufunc(*operands, out=to, casting="unsafe")

    # The stream holds no arrays: they are freed when the host drops them.
    operators = [(None, True) if isinstance(x, ndarray) else (x, False) for x in inputs]
    launch(ufunc.__name__, [out, *arrays], run)
    return out


# ---------------------------------------------------------------- making arrays


def array(obj: Any, dtype: Any = None, copy: bool | None = True) -> ndarray:
    """Returns a copy of an array of CuPy's, or of what NumPy makes an array of.

    What the host has is taken at the call: CuPy copies it into a buffer of its own first.
    """
    if isinstance(obj, ndarray):
        return obj.astype(obj.dtype if dtype is None else dtype, copy=bool(copy))
    if isinstance(obj, (list, tuple)) and any(isinstance(x, ndarray) for x in obj):
        raise NotImplementedError("not in the stand-in: an array of arrays")
    host = np.array(obj, dtype=None if dtype is None else checked_dtype(dtype), order="C")
    out = ndarray(host.shape, checked_dtype(host.dtype))
    if host.size:
        device.count("copies to the device")
        device.count("bytes to the device", host.nbytes)
        to = out._view
        device.enqueue("copy to the device", lambda: _copy(to, host))
    return out


# ---------------------------------------------------------------- inside


def launch(name: str, arrays: Sequence[ndarray], work: Callable[..., None]) -> None:
    """Puts an operation on the stream.

    Args:
      arrays: the first is written, the others are read.
      work: called with NumPy views of them. The stream holds these only: an array is freed, and its
        memory is CuPy's pool's again, when the host drops it.

    Raises:
      ValueError: an array is on another device.
    """
    for x in arrays:
        device.check_device(x.data.device_id)
    if arrays[0].size:
        device.count("array operations")
        device.enqueue(name, partial(work, *[x._view for x in arrays]))


def _read(x: ndarray) -> np.ndarray:
    """Returns what an array has. CuPy reads a number of it, such as how many are not zero."""
    device.check_device(x.data.device_id)
    device.count("copies to the host")
    device.count("bytes to the host", 8)
    device.wait()
    return x._view


def _copy(to: np.ndarray, what: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        np.copyto(to, what, casting="unsafe")


def _view_of(x: ndarray, view: np.ndarray) -> ndarray:
    result = ndarray.__new__(ndarray)
    offset = device.address_of(view) - device.address_of(x._view) if view.size else 0
    place = MemoryPointer(x.data.mem, x.data.offset + offset)
    result._set(place, view, x if x.base is None else x.base)
    return result


@functools.cache
def _one(dtype: np.dtype) -> np.ndarray:
    return np.ones(1, dtype)


def _arrays(items: Iterable[Any]) -> list[ndarray]:
    return [x for x in items if isinstance(x, ndarray)]


def _checked_shape(shape: Any) -> tuple[int, ...]:
    """Returns a shape. An array of the device is none: it would be read from there."""
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    shape = tuple(operator.index(n) for n in shape)
    if shape and min(shape) < 0:
        raise ValueError("Negative dimensions are not allowed")
    return shape


def _check_scalar(x: Any) -> None:
    if type(x) in (int, float, bool, complex):
        return
    if isinstance(x, np.generic) and x.dtype.char in _LETTERS:
        return
    raise TypeError(f"Unsupported type {type(x)}")


def _is_same(a: np.ndarray, b: np.ndarray) -> bool:
    is_alike = a.shape == b.shape and a.strides == b.strides and a.dtype == b.dtype
    return is_alike and device.address_of(a) == device.address_of(b)


def _check_overlap(out: ndarray, x: ndarray) -> None:
    """Refuses what is undefined on a GPU: elements that one thread writes and another reads."""
    if out is x or _is_same(out._view, x._view):
        return
    if np.may_share_memory(out._view, x._view) and np.shares_memory(out._view, x._view):
        raise ValueError("An operation writes elements that it reads in another place.")


def _resolved(x: ndarray, index: Any) -> tuple[ndarray, list[ndarray], int]:
    """Splits an index into a view and the arrays that are left to index it by, side by side.

    Returns:
      (view, arrays, axis of the first array in the view).
    """
    items = list(index) if isinstance(index, tuple) else [index]
    for i, item in enumerate(items):
        if item is None or item is Ellipsis or isinstance(item, (slice, ndarray)):
            continue
        if np.isscalar(item) and not isinstance(item, (bool, np.bool_)):
            continue
        is_list = isinstance(item, (list, tuple))
        items[i] = array(item)  # a copy to the device
        if is_list and items[i].size == 0:
            items[i] = items[i].astype(np.int32)
    for item in items:
        if isinstance(item, slice):
            _check_slice(item)
        elif isinstance(item, ndarray) and item.dtype.kind not in "biu":
            raise IndexError(
                f"arrays used as indices must be of integer or boolean type. ({item.dtype})"
            )
    taken = sum(
        item.ndim if isinstance(item, ndarray) and item.dtype.kind == "b" else item is not None
        for item in items
        if item is not Ellipsis
    )
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    if taken > x.ndim:
        raise IndexError(f"too many indices for array: {x.ndim} dimensions, {taken} were indexed")
    at = next(i for i, item in enumerate(items) if item is Ellipsis)
    items[at : at + 1] = [slice(None)] * (x.ndim - taken)
    basic: list[Any] = []
    arrays: list[ndarray] = []
    places: list[int] = []
    axis = 0
    for item in items:
        if isinstance(item, ndarray):
            arrays.append(item)
            places.append(axis)
            width = item.ndim if item.dtype.kind == "b" else 1
            basic += [slice(None)] * width
            axis += width
        else:
            basic.append(item)
            axis += item is None or isinstance(item, slice)
    view = x._view[tuple(basic)]
    if not isinstance(view, np.ndarray):  # NumPy gives a scalar, CuPy an array
        view = x._view[(*basic, Ellipsis)]
    if len(arrays) > 1:
        assert places == list(range(places[0], places[0] + len(places))), "not in the stand-in"
        assert all(a.dtype.kind != "b" for a in arrays), "not in the stand-in"
    for mask in arrays:
        if mask.dtype.kind == "b" and mask.shape != view.shape[places[0] :][: mask.ndim]:
            raise IndexError("boolean index did not match indexed array")
    return _view_of(x, view), arrays, places[0] if places else 0


def _check_slice(item: slice) -> None:
    for bound in (item.start, item.stop, item.step):
        if bound is not None:
            operator.index(bound)  # an array of the device has none


def _where(x: ndarray, axis: int) -> Callable[..., tuple[Any, ...]]:
    """Returns a function that gives the index of arrays side by side, from `axis` on, for NumPy;
    what is out of bounds wraps around."""
    sizes = x.shape[axis:]

    def where(*arrays: np.ndarray) -> tuple[Any, ...]:
        numbers = [a.astype(np.int64) % max(1, n) for a, n in zip(arrays, sizes, strict=False)]
        return (*[slice(None)] * axis, *numbers)

    return where

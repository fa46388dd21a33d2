"""A module that stands where CuPy stands, on the simulated GPU.

It has the names that the package, its tests and its scripts use, with CuPy's parameters; any other
name is an AttributeError.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tests.support.simt import arrays, device
from tests.support.simt.arrays import launch
from tests.support.simt.cuda import cuda, make_module
from tests.support.simt.indexing import read_now
from tests.support.simt.ndarray import UFUNCS, apply, ndarray

# ---------------------------------------------------------------- functions of arrays


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    out = ndarray(shape, dtype, order=order)
    out.data.memset_async(0, out.nbytes)
    return out


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 1, dtype, order)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    if dtype is None:
        is_ours = isinstance(fill_value, ndarray)
        dtype = fill_value.dtype if is_ours else np.array(fill_value).dtype
    out = ndarray(shape, dtype, order=order)
    out.fill(fill_value)
    return out


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
    launch("arange", [out], lambda to: np.copyto(to, values))
    return out


def array(obj: Any, dtype: Any = None, copy: bool | None = True) -> ndarray:
    return arrays.array(ndarray, obj, dtype, copy)


def asarray(a: Any, dtype: Any = None) -> ndarray:
    return arrays.array(ndarray, a, dtype, copy=False)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    if not isinstance(a, ndarray):  # as CuPy, where `asarray` takes anything
        raise TypeError(f"Argument 'a' must be a CuPy array. Received: {type(a).__name__}.")
    if dtype is not None and np.dtype(dtype) != a.dtype:
        a = a.astype(dtype)
    elif not a.flags.c_contiguous:
        a = a.copy()
    return a.reshape(1) if a.ndim == 0 else a


def asnumpy(a: Any, stream: Any = None, order: str = "C") -> np.ndarray:
    return a.get(stream, order) if isinstance(a, ndarray) else np.asarray(a, order=order)


def concatenate(tup: Sequence[ndarray], axis: int = 0, out: ndarray | None = None) -> ndarray:
    tup = list(tup)
    if not tup:
        raise ValueError("Cannot concatenate from empty tuple")
    for item in tup:
        if not isinstance(item, ndarray):
            raise TypeError("Only cupy arrays can be concatenated")
        if item.ndim == 0:
            raise TypeError("zero-dimensional arrays cannot be concatenated")
    model = np.concatenate([np.broadcast_to(np.zeros((), a.dtype), a.shape) for a in tup], axis)
    if out is None:
        out = ndarray(model.shape, model.dtype)
    elif out.shape != model.shape:
        raise ValueError("Output array is the wrong shape")
    elif not np.can_cast(model.dtype, out.dtype, "same_kind"):
        raise TypeError(f"Cannot cast {model.dtype} to {out.dtype} by the rule 'same_kind'")
    launch(
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
            arrays.check_scalar(item)
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

    launch("where", [out, *inputs], run)
    return out


def flatnonzero(a: ndarray) -> ndarray:
    _check_arrays(a)
    return a.ravel().nonzero()[0]


def argsort(a: ndarray, axis: int = -1, kind: str | None = None) -> ndarray:
    _check_arrays(a)
    return a.argsort(axis, kind)


def sort(a: ndarray, axis: int = -1, kind: str | None = None) -> ndarray:
    assert a.ndim == 1, "not in the stand-in"
    return a[argsort(a, axis, kind)]


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
    launch("searchsorted", [out, a, v], lambda to, a, v: np.copyto(to, np.searchsorted(a, v, side)))
    return out


def unique(ar: ndarray) -> ndarray:
    _check_arrays(ar)
    device.count("array operations", 3)  # sorts, compares neighbours, takes by the mask
    found = np.unique(read_now(ar)) if ar.size else np.empty(0, ar.dtype)
    out = ndarray(found.shape, found.dtype)
    launch("unique", [out, ar], lambda to, _: np.copyto(to, found))
    return out


def cumsum(a: ndarray, axis: int | None = None, dtype: Any = None) -> ndarray:
    _check_arrays(a)
    return a.cumsum(axis, dtype)


def count_nonzero(a: ndarray, axis: int | None = None) -> ndarray:
    _check_arrays(a)
    return a._reduced(np.count_nonzero, axis, None, False)


def _check_arrays(*given: Any) -> None:
    for item in given:
        if not isinstance(item, ndarray):
            raise TypeError(f"Unsupported type {type(item)}")


# ---------------------------------------------------------------- the module


_DTYPES = ("bool_", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_FUNCTIONS = (
    *(empty, zeros, ones, full, zeros_like, arange, array, asarray),
    *(
        ascontiguousarray,
        asnumpy,
        concatenate,
        take,
        where,
        flatnonzero,
        argsort,
        sort,
        searchsorted,
    ),
    *(unique, cumsum, count_nonzero),
)
cupy = make_module(
    "cupy",
    __version__="14.2.0",
    ndarray=ndarray,
    cuda=cuda,
    get_default_memory_pool=device.pool,
    **{function.__name__: function for function in _FUNCTIONS},
    **{name: partial(apply, ufunc) for name, ufunc in UFUNCS.items()},
    **{name: getattr(np, name) for name in (*_DTYPES, "float16", "float32", "float64")},
)

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
from tests.support.simt.ndarray import UFUNCS, apply, deferred, ndarray

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


def concatenate(tup: Sequence[ndarray], axis: int = 0) -> ndarray:
    tup = list(tup)
    if not tup:
        raise ValueError("Cannot concatenate from empty tuple")
    for item in tup:
        if not isinstance(item, ndarray):
            raise TypeError("Only cupy arrays can be concatenated")
    return deferred("concatenate", lambda *parts: np.concatenate(parts, axis), *tup)


def take(a: ndarray, indices: Any, axis: int | None = None) -> ndarray:
    _check_arrays(a)
    return a.take(indices, axis)


def where(condition: ndarray, x: Any = None, y: Any = None) -> Any:
    _check_arrays(condition)
    if (x is None) != (y is None):
        raise ValueError("Must provide both 'x' and 'y' or neither.")
    return condition.nonzero() if x is None else deferred("where", np.where, condition, x, y)


def flatnonzero(a: ndarray) -> ndarray:
    _check_arrays(a)
    return a.ravel().nonzero()[0]


def argsort(a: ndarray, axis: int = -1, kind: str | None = None) -> ndarray:
    _check_arrays(a)
    if kind not in (None, "stable"):
        raise ValueError("kind can only be None or 'stable'")
    return deferred("argsort", partial(np.argsort, axis=axis, kind="stable"), a)


def sort(a: ndarray, axis: int = -1, kind: str | None = None) -> ndarray:
    assert a.ndim == 1, "not in the stand-in"
    return a[argsort(a, axis, kind)]


def searchsorted(a: ndarray, v: Any, side: str = "left") -> ndarray:
    _check_arrays(a, v)
    return deferred("searchsorted", partial(np.searchsorted, side=side), a, v)


def cumsum(a: ndarray, axis: int | None = None, dtype: Any = None) -> ndarray:
    _check_arrays(a)
    return deferred("cumsum", partial(np.cumsum, axis=axis, dtype=dtype), a)


def count_nonzero(a: ndarray, axis: int | None = None) -> ndarray:
    _check_arrays(a)
    return deferred("count_nonzero", partial(np.count_nonzero, axis=axis), a)


def _check_arrays(*given: Any) -> None:
    for item in given:
        if not isinstance(item, ndarray):
            raise TypeError(f"Unsupported type {type(item)}")


# ---------------------------------------------------------------- the module


_DTYPES = ("bool_", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_FUNCTIONS = (
    *(empty, zeros, ones, full, zeros_like, arange, array, asarray, ascontiguousarray, asnumpy),
    *(concatenate, take, where, flatnonzero, argsort, sort, searchsorted, cumsum, count_nonzero),
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

"""CuPy's ndarray: reductions, sorting, and arithmetic on top of indexing.py."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.simt.arrays import arrays_of, check_scalar, checked_dtype, copy_to, launch
from tests.support.simt.indexing import IndexedArray, check_overlap

_COMPARISONS = ("less", "less_equal", "equal", "not_equal", "greater", "greater_equal")


class ndarray(IndexedArray):
    """An array in the memory of the simulated GPU; arguments as of CuPy's."""

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> "ndarray":
        return _reduced(np.max, self, out, axis=axis, keepdims=keepdims)

    def min(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> "ndarray":
        return _reduced(np.min, self, out, axis=axis, keepdims=keepdims)

    def sum(
        self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> "ndarray":
        return _reduced(np.sum, self, out, axis=axis, dtype=dtype, keepdims=keepdims)

    def mean(
        self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> "ndarray":
        return _reduced(np.mean, self, out, axis=axis, dtype=dtype, keepdims=keepdims)

    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> "ndarray":
        return _reduced(np.all, self, out, axis=axis, keepdims=keepdims)

    def any(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> "ndarray":
        return _reduced(np.any, self, out, axis=axis, keepdims=keepdims)

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
            check_scalar(x)
    if out is not None and not isinstance(out, ndarray):
        raise TypeError(f"Unsupported type {type(out)}")
    arrays = arrays_of(inputs)
    shapes = {x.shape for x in arrays}
    shape = shapes.pop() if len(shapes) == 1 else np.broadcast_shapes(*shapes)
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
        check_overlap(out, x)

    def run(to: np.ndarray, *views: np.ndarray) -> None:
        rest = iter(views)
        with np.errstate(all="ignore"):
            operands = [_flushed(next(rest) if is_array else x) for x, is_array in operators]
            ufunc(*operands, out=to, casting="unsafe")
            if to.dtype == np.float32:
                to[...] = _flushed(to)

    # The stream holds no arrays: they are freed when the host drops them.
    operators = [(None, True) if isinstance(x, ndarray) else (x, False) for x in inputs]
    launch(ufunc.__name__, [out, *arrays], run)
    return out


def _flushed(x: Any) -> Any:
    """Returns float32 numbers as CuPy's kernels see them, which have -ftz=true."""
    if getattr(x, "dtype", None) != np.float32:
        return x
    return np.where(np.abs(x) < np.finfo(np.float32).smallest_normal, np.copysign(x * 0, x), x)


def deferred(name: str, function: Callable[..., Any], *given: Any) -> ndarray:
    """Puts a function of arrays and scalars on the stream: of NumPy's, which says what it gives."""
    for x in given:
        if not isinstance(x, ndarray):
            check_scalar(x)
    # The stream holds no arrays: they are freed when the host drops them.
    scalars = [None if isinstance(x, ndarray) else x for x in given]

    def run(*views: np.ndarray) -> Any:
        rest = iter(views)
        with np.errstate(all="ignore"):
            return function(*[next(rest) if x is None else x for x in scalars])

    arrays = arrays_of(given)
    model = np.asarray(run(*[np.broadcast_to(np.ones((), x.dtype), x.shape) for x in arrays]))
    out = ndarray(model.shape, model.dtype)
    launch(name, [out, *arrays], lambda to, *views: copy_to(to, run(*views)))
    return out


def _reduced(function: Callable[..., Any], x: ndarray, out: Any, **options: Any) -> ndarray:
    assert out is None, "not in the stand-in"
    return deferred(function.__name__, functools.partial(function, **options), x)


@functools.cache
def _one(dtype: np.dtype) -> np.ndarray:
    return np.ones(1, dtype)

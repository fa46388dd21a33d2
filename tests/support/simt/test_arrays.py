"""The arrays of the stand-in give what NumPy's do where CuPy's do, and refuse what those refuse.

What CuPy does was read in its source; where it is installed, test_cupy_stand_in.py compares names.
"""

import operator

import numpy as np
import pytest

from tests.support.simt import device

RNG = np.random.default_rng(5)


def host(x):
    return x.get()


def same(actual, expected):
    """Whether an array has the content, shape and dtype of NumPy's."""
    assert not isinstance(actual, np.ndarray)
    expected = np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(host(actual), expected)


# ---------------------------------------------------------------- no array of NumPy's


def test_numpy_makes_no_array_of_one(xp):
    with pytest.raises(TypeError, match="Implicit conversion to a NumPy array"):
        np.asarray(xp.zeros(3))
    assert not isinstance(xp.zeros(3), np.ndarray)


@pytest.mark.parametrize(
    "work",
    [
        lambda x, n: x + n,
        lambda x, n: n + x,
        lambda x, n: n * x,
        lambda x, n: x == n,
        lambda x, n: n < x,
        lambda x, n: operator.iadd(x, n),
        lambda x, n: operator.iadd(n, x),
        lambda x, n: np.maximum(x, n),
    ],
)
def test_it_is_not_mixed_with_numpys(xp, work):
    with pytest.raises(TypeError, match="Unsupported type <class 'numpy.ndarray'>"):
        work(xp.arange(3), np.arange(3))


# ---------------------------------------------------------------- the same as NumPy

OPERATORS = ["add", "sub", "mul", "floordiv", "mod", "truediv", "lt", "le", "eq", "ne", "gt", "ge"]
DTYPES = [np.int32, np.int64, np.uint32, np.uint64, np.float32, np.float16]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arithmetic_gives_what_numpy_gives(xp, name, dtype):
    work = getattr(operator, name)
    a, b = (RNG.integers(1, 50, 33).astype(dtype) for _ in range(2))
    same(work(xp.asarray(a), xp.asarray(b)), work(a, b))
    same(work(xp.asarray(a), 3), work(a, 3))
    other = b.astype(np.uint16)
    same(work(xp.asarray(a), xp.asarray(other)), work(a, other))


def test_reductions_give_arrays(xp):
    n = RNG.integers(-9, 9, (4, 5)).astype(np.int32)
    x = xp.asarray(n)
    for name in ("sum", "max", "min", "any", "all", "mean"):
        for axis in (None, 0, 1, -1):
            same(getattr(x, name)(axis=axis), getattr(n, name)(axis=axis))
    same(xp.count_nonzero(x), np.int64(np.count_nonzero(n)))
    same(xp.cumsum(x.ravel()), np.cumsum(n.ravel()))
    with pytest.raises(TypeError):
        x.max(initial=0)
    with pytest.raises(ValueError, match="no identity"):
        xp.zeros(0).max()
    assert int(x.sum()) == n.sum() and float(x.max()) == n.max() and bool(x.any())


def test_an_array_is_no_index_and_no_size(xp):
    one = xp.arange(2)[1]
    for work in (lambda: range(one), lambda: xp.zeros(one), lambda: np.arange(5)[:one]):
        with pytest.raises(TypeError):
            work()
    with device.counted() as counts:
        same(xp.arange(5)[:one], [0])  # read from the device
    assert counts["waits"] == 2  # and another for the comparison
    with pytest.raises(TypeError, match="unsized"):
        len(one)
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(xp.zeros(2))
    assert not hasattr(one, "ctypes")


# ---------------------------------------------------------------- indices


# ---------------------------------------------------------------- later, and how much


WAITS = [
    (0, lambda xp, x: x[1:] + x[:-1]),
    (0, lambda xp, x: x.sum()),
    (0, lambda xp, x: xp.argsort(x)),
    (0, lambda xp, x: x[xp.arange(3)]),
    (0, lambda xp, x: xp.where(x > 1, x, 0)),
    (0, lambda xp, x: x.fill(3)),
    (1, lambda xp, x: x.get()),
    (1, lambda xp, x: x[0].item()),
    (1, lambda xp, x: int(x[0])),
    (1, lambda xp, x: bool((x > 1).any())),
    (1, lambda xp, x: x.tolist()),
    (1, lambda xp, x: xp.asnumpy(x)),
    (1, lambda xp, x: x[x > 1]),
    (1, lambda xp, x: operator.setitem(x, x > 1, 0)),
    (1, lambda xp, x: xp.flatnonzero(x)),
    (1, lambda xp, x: x.nonzero()),
    (1, lambda xp, x: xp.unique(x)),
    (1, lambda xp, x: 3 in x[:1]),
    (0, lambda xp, x: x[:0].get()),
]


@pytest.mark.parametrize("number", range(len(WAITS)))
def test_waits_are_where_cupy_has_them(xp, number):
    waits, work = WAITS[number]
    x = xp.arange(8)
    with device.counted() as counts:
        work(xp, x)
    assert counts["waits"] == waits

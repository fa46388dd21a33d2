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


def test_functions_take_no_arrays_of_numpys(xp):
    x, n = xp.arange(3), np.arange(3)
    for work in (
        lambda: xp.concatenate([x, n]),
        lambda: xp.where(n > 1, x, x),
        lambda: xp.where(x > 1, x, n),
        lambda: xp.take(n, x),
        lambda: xp.cumsum(n),
        lambda: xp.flatnonzero(n),
        lambda: xp.minimum(x, n),
        lambda: xp.arange(x),
        lambda: xp.ascontiguousarray(n),
    ):
        with pytest.raises(TypeError):
            work()
    for a, v in ((n, x), (x, n), (x, np.int64(1))):
        with pytest.raises(NotImplementedError, match="supported for"):
            xp.searchsorted(a, v)
    with pytest.raises(ValueError, match="non-scalar numpy.ndarray cannot be used for fill"):
        x[:] = n
    with pytest.raises(ValueError, match="non-scalar"):
        x.fill(n)


def test_scalars_of_numpy_and_python_are_taken(xp):
    x, n = xp.arange(5, dtype=np.uint32), np.arange(5, dtype=np.uint32)
    same(x + np.uint32(3), n + np.uint32(3))
    same(np.int64(3) - x, np.int64(3) - n)
    same(x * 2, n * 2)
    same(2.5 * x, 2.5 * n)
    same(x == np.array(3), n == 3)  # an array without dimensions, compared
    with pytest.raises(TypeError, match="Unsupported type"):
        x + "a"


# ---------------------------------------------------------------- the same as NumPy

OPERATORS = ["add", "sub", "mul", "floordiv", "mod", "truediv", "lt", "le", "eq", "ne", "gt", "ge"]
DTYPES = [np.int32, np.int64, np.uint32, np.uint64, np.float32, np.float16]


def test_small_float32_numbers_count_as_0(xp):
    n = np.array([1e-45, -1e-39, 2e-38, np.nan, np.inf], np.float32)
    x = xp.asarray(n)
    same(x, n)  # a copy is one
    same(x == 0, [True, True, False, False, False])
    same(abs(x) < np.float32(1e-44), [False] * 5)
    same(x * np.float32(0.5), np.array([0, 0, 0, np.nan, np.inf], np.float32))
    same(xp.asarray(n.astype(np.float64)[:2]) == 0, [False, False])


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arithmetic_gives_what_numpy_gives(xp, name, dtype):
    work = getattr(operator, name)
    a, b = (RNG.integers(1, 50, 33).astype(dtype) for _ in range(2))
    same(work(xp.asarray(a), xp.asarray(b)), work(a, b))
    same(work(xp.asarray(a), 3), work(a, 3))
    other = b.astype(np.uint16)
    same(work(xp.asarray(a), xp.asarray(other)), work(a, other))


@pytest.mark.parametrize("name", ["and_", "or_", "xor", "lshift", "rshift"])
def test_bitwise_operators_give_what_numpy_gives(xp, name):
    work = getattr(operator, name)
    a, b = (RNG.integers(0, 20, 33) for _ in range(2))
    same(work(xp.asarray(a), xp.asarray(b)), work(a, b))
    same(~xp.asarray(a), ~a)
    same(-xp.asarray(a), -a)
    same(abs(xp.asarray(-a)), a)


def test_shapes_are_broadcast_and_results_in_place_are_cast(xp):
    a, b = RNG.integers(0, 9, (4, 1)), RNG.integers(0, 9, 3)
    same(xp.asarray(a) + xp.asarray(b), a + b)
    x = xp.asarray(b)
    with pytest.raises(TypeError, match="same_kind"):
        x += 0.5
    with pytest.raises(ValueError):
        x += xp.asarray(a)
    x += xp.asarray(b.astype(np.int32))
    same(x, 2 * b)


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


def test_making_arrays(xp):
    same(xp.arange(5), np.arange(5))
    same(xp.arange(np.int32(3)), np.arange(3))  # NumPy's would be int32
    same(xp.arange(2, 9, 3, dtype=np.uint32), np.arange(2, 9, 3, dtype=np.uint32))
    same(xp.full((2, 3), 7, np.int16), np.full((2, 3), 7, np.int16))
    same(xp.full(2, 1.5), np.full(2, 1.5))
    same(xp.ones(3, np.float32), np.ones(3, np.float32))
    same(xp.asarray([[1, 2], [3, 4]]), [[1, 2], [3, 4]])
    same(xp.ascontiguousarray(xp.asarray(np.float32(3))), np.array([3], np.float32))
    x = xp.zeros((3, 2))
    assert xp.asarray(x) is x and xp.ascontiguousarray(x) is x
    assert xp.ascontiguousarray(x.T).flags.c_contiguous
    for bad in ("U3", object):
        with pytest.raises(ValueError, match="Unsupported dtype"):
            xp.zeros(3, bad)
    with pytest.raises(ValueError, match="Unsupported dtype"):
        xp.asarray(["a"])


def test_views_share_memory_and_know_their_layout(xp):
    n = np.arange(24).reshape(4, 6)
    x = xp.asarray(n)
    for cut in (np.s_[1:3], np.s_[:, 2], np.s_[::-1, ::2], np.s_[..., None], np.s_[2, 3]):
        part, other = x[cut], n[cut]
        same(part, other)
        other = np.asarray(other)
        assert part.flags.c_contiguous == other.flags.c_contiguous and part.base is x
        if other.base is not None:
            assert part.strides == other.strides
            assert part.data.ptr - x.data.ptr == other.ctypes.data - n.ctypes.data
    x[:, 2][1:3] = -1
    n[:, 2][1:3] = -1
    same(x, n)
    same(x.view(np.uint32), n.view(np.uint32))
    same(x.T.reshape(3, 8), n.T.reshape(3, 8))
    assert x.reshape(-1).base is x and x.T.reshape(-1).base is not x
    with pytest.raises(ValueError):
        xp.zeros(3, np.uint16).view(np.uint32)
    with pytest.raises(ValueError):
        x.reshape(5, 5)


def test_sorting_and_searching(xp):
    n = RNG.integers(0, 9, 100)
    x = xp.asarray(n)
    same(xp.argsort(x, kind="stable"), np.argsort(n, kind="stable"))
    same(xp.sort(x), np.sort(n))
    for kind in ("quicksort", "mergesort"):
        with pytest.raises(ValueError, match="'stable'"):
            xp.argsort(x, kind=kind)
    for side in ("left", "right"):
        same(xp.searchsorted(xp.asarray(np.sort(n)), x, side), np.searchsorted(np.sort(n), n, side))
    same(xp.unique(x), np.unique(n))
    same(xp.flatnonzero(x > 4), np.flatnonzero(n > 4))
    same(xp.where(x > 4, x, -1), np.where(n > 4, n, -1))
    same(xp.concatenate([x, x.astype(np.int32)]), np.concatenate([n, n]))
    out = xp.empty(200, x.dtype)
    assert xp.concatenate([x, x], out=out) is out
    same(out, np.concatenate([n, n]))
    for wrong, error in ((xp.empty(199, x.dtype), ValueError), (out.astype(bool), TypeError)):
        with pytest.raises(error):
            xp.concatenate([x, x], out=wrong)
    same(xp.take(xp.asarray(n.reshape(20, 5)), x, axis=0), n.reshape(20, 5)[n])


# ---------------------------------------------------------------- indices


def test_indices_that_are_arrays(xp):
    n = RNG.integers(0, 99, (7, 4))
    x, at = xp.asarray(n), RNG.integers(0, 7, 11)
    where = xp.asarray(at)
    same(x[where], n[at])
    same(x[where, 2], n[at, 2])
    same(x[1:, :3][xp.asarray(at % 6)], n[1:, :3][at % 6])
    same(x[where, xp.asarray(at % 4)], n[at, at % 4])
    same(x[x > 50], n[n > 50])
    mask = n[:, 0] > 50
    same(x[xp.asarray(mask)], n[mask])
    same(x[xp.asarray(mask), 1], n[mask, 1])
    same(x[[0, 2]], n[[0, 2]])
    same(x[at], n[at])  # copied to the device
    with pytest.raises(IndexError, match="integer or boolean"):
        x[xp.zeros(2)]
    with pytest.raises(IndexError, match="too many indices"):
        x[0, 0, 0]
    with pytest.raises(IndexError, match="boolean index did not match"):
        x[xp.zeros(6, bool)]


def test_assignments_write_what_numpy_writes(xp):
    n = np.arange(28).reshape(7, 4)
    x = xp.asarray(n)
    at = np.array([5, 1, 3])
    x[xp.asarray(at)] = xp.asarray(n[:3])
    n[at] = n[:3].copy()
    same(x, n)
    x[xp.asarray(at), 2] = xp.asarray([7, 8, 9])
    n[at, 2] = [7, 8, 9]
    same(x, n)
    x[x > 20] = 0
    n[n > 20] = 0
    same(x, n)
    x[-2:] = x[:2]
    n[-2:] = n[:2]
    same(x, n)
    x[2] = 2.7  # cast as C does
    n[2] = 2
    same(x, n)
    with pytest.raises(OverflowError):
        xp.zeros(2, np.int32)[:] = 1 << 40


def test_what_is_out_of_bounds_wraps_around(xp):
    x = xp.asarray(np.arange(5))
    at = xp.asarray([7, -6])
    same(x[at], np.array([2, 4]))
    x[at] = -1
    same(x, np.array([0, 1, -1, 3, -1]))


def test_of_an_index_that_repeats_any_one_wins(xp):
    seen = set()
    for _ in range(40):
        x = xp.zeros(2, np.int64)
        x[xp.zeros(5, np.int64)] = xp.arange(1, 6)
        seen.add(host(x).tolist()[0])
    assert seen == {1, 2, 3, 4, 5}


def test_an_operation_does_not_read_what_it_writes_elsewhere(xp):
    x = xp.arange(5)
    with pytest.raises(ValueError, match="reads in another place"):
        x[1:] = x[:-1]
    with pytest.raises(ValueError, match="reads in another place"):
        x[1:] += x[:-1]
    x += x
    same(x, 2 * np.arange(5))


# ---------------------------------------------------------------- later, and how much


def test_operations_run_when_something_waits(xp):
    x = xp.zeros(3)
    y = x + 1
    assert (y._view.view(np.uint8) == device.POISON).all()
    assert host(y).tolist() == [1, 1, 1]


def test_what_the_host_changes_after_a_copy_is_not_copied(xp):
    n = np.arange(3)
    x = xp.asarray(n)
    n += 5
    same(x, np.arange(3))


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


def test_copies_are_counted_with_their_bytes(xp):
    with device.counted() as counts:
        x = xp.asarray(np.arange(10))
        x[[1, 2]] = 5  # a list and a number
        x.get()
    assert counts["copies to the device"] == 3 and counts["bytes to the device"] == 80 + 16 + 8
    assert counts["copies to the host"] == 1 and counts["bytes to the host"] == 80
    assert counts["kernels"] == 0 and counts["array operations"] == 1

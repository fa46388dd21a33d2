"""Rows of float64 and of integers in both kinds of table, against NumPy, bit for bit.

Lookups and writes of such rows are drawn by the state machines of test_tables.py.
"""

import fractions
import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sok_lite.backend import get_backend
from sok_lite.engine.dtypes import bfloat16_to_float32, row_dtype
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import make_table
from tests.engine.test_alignment import placed
from tests.support.pooled import gather_rows

DTYPES = ["float64", "int32", "int64", "int8"]
INTEGERS = DTYPES[1:]
OPTIONS = {
    "hbm": {},
    "hybrid": {"init_capacity": 64, "max_capacity": 1 << 14},
    "far": {"init_capacity": 64, "max_capacity": 1 << 14, "max_hbm_for_vectors": 0},
}


@pytest.fixture(params=OPTIONS)
def kind(request):
    return request.param


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


def make(backend, kind, dtype, dim=3, first=0, **options):
    initializer = make_initializer(first, dim)
    var_type = "hbm" if kind == "hbm" else "hybrid"
    options = {"dtype": dtype, "initializer": initializer, **OPTIONS[kind], **options}
    return make_table(var_type, backend, dim, **options)


def drawn(dtype, n, dim, seed=0):
    """Numbers from all of the range, most of which float32 does not hold; the ends come first."""
    rng = np.random.default_rng([n, dim, seed])
    if dtype == "float64":
        edges = np.array([1e300, -1e-300, 1 + 2**-52, 5e-324])
        rows = rng.normal(size=(n, dim)) * 10.0 ** rng.integers(-300, 300, (n, dim))
    else:
        info = np.iinfo(dtype)
        edges = np.array([info.min, info.max, -1, 0], dtype)
        rows = rng.integers(info.min, info.max, (n, dim), dtype, endpoint=True)
    rows.reshape(-1)[: len(edges)] = edges[: rows.size]
    return rows


def content(table):
    """{key: bits of its row}, as `export` has them."""
    keys, rows = (table.backend.to_host(array) for array in table.export())
    assert rows.dtype == table.row_dtype.name and rows.shape == (len(keys), table.dim)
    return {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}


def bits(keys, rows):
    return {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}


# -------------------------------------------------------------------- rows as they are


@pytest.mark.parametrize("dim", [1, 3, 16, 33, 36])
def test_dense_arrays_may_begin_at_any_element(backend, dtype, dim):
    rows, keys = drawn(dtype, 50, dim), np.arange(50)
    for shift in (1, 2, 3):
        table = make(backend, "hbm", dtype, dim)
        table.insert_or_assign(keys, placed(backend, rows, shift))
        out = placed(backend, np.zeros_like(rows), shift)
        assert bits(keys, backend.to_host(table.lookup(keys, out=out).values)) == bits(keys, rows)
        table.find_or_insert(keys)
        again = backend.to_host(table.lookup([60, *keys[:-1]], out=out).values)  # rows_deliver
        assert bits(keys, again) == bits(keys, [np.zeros(dim, dtype), *rows[:-1]])
        order = np.random.default_rng(0).permutation(50).astype(np.int32)
        source = placed(backend, rows, shift)
        gathered = gather_rows(backend, source, backend.from_host(order))
        assert bits(keys, backend.to_host(gathered)) == bits(keys, rows[order])


# -------------------------------------------------------------------- sums


def test_a_factor_may_be_any_whole_number_and_any_float(backend):
    table = make(backend, "hbm", "int8", 2)
    table.insert_or_assign([1], np.array([[1, -1]], np.int8))
    table.accumulate([1], np.array([[1, 2]], np.int8), 1e6)  # 1000000 mod 256 is 64
    np.testing.assert_array_equal(backend.to_host(table.export()[1]), [[65, 127]])
    with pytest.raises(ValueError, match="`scale` must be a whole number for rows of int8.*0.5"):
        table.accumulate([1], np.ones((1, 2), np.int8), 0.5)
    table = make(backend, "hbm", "float64", 2, first=1)
    table.find_or_insert([1])
    table.accumulate([1], np.array([[1e-15, 3]]), 0.5)
    np.testing.assert_array_equal(backend.to_host(table.export()[1]), [[1 + 5e-16, 2.5]])


# -------------------------------------------------------------------- what is small


@given(st.data())
@example(data=None)
def test_what_is_below_a_cutoff_is_what_exact_numbers_say(data):
    if data is None:
        pairs = [("int8", -128, 128.0), ("int8", -128, 128.5), ("int8", -128, 1e300)]
        pairs += [("int64", -(2**63), 2.0**63), ("int64", -(2**63), np.inf), ("int8", 0, 1e-320)]
        pairs += [("float32", 1e-45, 1e-50), ("float32", 0.0, 1e-50), ("float32", 1.0, 1 + 1e-9)]
        pairs += [("float16", -6e-8, 1e-7), ("float16", 65504.0, 1e39), ("float32", -1.0, 1.0)]
        pairs += [("bfloat16", -0.3, 0.3), ("bfloat16", 0.25, 0.25), ("bfloat16", -0.25, 0.2501)]
        pairs += [("float64", -5e-324, 5e-324), ("float64", 0.0, 5e-324), ("float64", 1e300, 2e300)]
        assert not row_dtype("float32").is_below(np, np.float32([np.nan]), np.inf)
    else:
        name = data.draw(st.sampled_from([*INTEGERS, "float16", "bfloat16", "float32", "float64"]))
        cutoff = st.floats(min_value=0, exclude_min=True) | st.integers(1, 2**64).map(float)
        if name in INTEGERS:
            info = np.iinfo(name)
            value = st.integers(info.min, info.max)
        else:
            width = 32 if name == "bfloat16" else np.finfo(name).bits
            value = st.floats(width=width, allow_nan=False, allow_infinity=False)
        pairs = [(name, data.draw(value), data.draw(cutoff))]
    for name, value, cutoff in pairs:
        kind = row_dtype(name)
        stored = kind.to_storage(np, np.array([[value]], "f4" if name == "bfloat16" else name))
        kept = bfloat16_to_float32(np, stored) if name == "bfloat16" else stored
        exact = fractions.Fraction(kept.item())
        below = cutoff == np.inf or abs(exact) < fractions.Fraction(cutoff)
        assert kind.is_below(np, stored, cutoff).tolist() == [[below]]


# -------------------------------------------------------------------- what is refused


@pytest.mark.cases("name")
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_take_integers_that_fit(backend, name):
    table, info = make(backend, "hbm", name, 2), np.iinfo(name)
    for given_as in ("int8", "uint8", "int16", "int64", "uint64"):
        table.insert_or_assign([1], backend.from_host(np.array([[1, 100]], given_as)))
        np.testing.assert_array_equal(backend.to_host(table.export()[1]), [[1, 100]])
    before = content(table)
    zeros = np.zeros((1, 2))
    writes = {
        "insert_or_assign": lambda rows: table.insert_or_assign([1], rows),
        "assign": lambda rows: table.assign([1], rows),
        "accumulate": lambda rows: table.accumulate([1], rows),
        "accum_or_assign": lambda rows: table.accum_or_assign(
            [1, 2], np.concatenate([rows, rows]), np.array([True, False])
        ),
    }
    for write, other in itertools.product(writes.values(), ("float32", "float64", "bool")):
        with pytest.raises(TypeError, match=f"values must be {name}.*Received: dtype {other}"):
            write(zeros.astype(other))
    too_large = np.array([[0, info.max + 1]], np.uint64)
    for write in writes.values():
        with pytest.raises(ValueError, match=rf"must fit {name}.*Received: {info.max + 1}\."):
            write(too_large)
    assert content(table) == before


def test_float64_takes_any_float_and_no_integer(backend):
    table = make(backend, "hbm", "float64", 2)
    for given_as in ("float16", "float32", "float64"):
        table.insert_or_assign([1], backend.from_host(np.array([[0.1, 2]], given_as)))
        expected = np.array([[0.1, 2]], given_as).astype(np.float64)
        np.testing.assert_array_equal(backend.to_host(table.export()[1]), expected)
    with pytest.raises(TypeError, match="values must be float64.*Received: dtype int64"):
        table.insert_or_assign([1], np.zeros((1, 2), np.int64))
    with pytest.raises(TypeError, match="floating-point numbers. Received: dtype int32"):
        table.accumulate([1], np.zeros((1, 2), np.int32))


@pytest.mark.parametrize(
    "dtype, first, message",
    [
        ("int32", "random", "Rows of int32 begin with a constant.*a uniform initializer"),
        ("int8", "normal", "Rows of int8 begin with a constant.*a normal initializer"),
        ("int8", 0.5, "of int8 must be a whole number from -128 to 127. Received: 0.5"),
        ("int8", 128, "Received: 128"),
        ("int64", 2.0**63, "of int64 must be a whole number"),
        ("int32", np.array([1, 2, 0.5]), "Received: 0.5"),
        (
            "float32",
            np.array([1, 2, 1e39]),
            "at most 3.40282e.38 in size, the largest number of float32. Received: 1e.39",
        ),
        (
            "float16",
            70000.0,
            "at most 65504 in size, the largest number of float16. .*: 70000, which",
        ),
        ("float16", np.array([1, 2, -1e6]), "at most 65504 in size.*Received: -1e.06"),
        ("bfloat16", 3.4e38, "at most 3.38953e.38 in size"),
    ],
)
def test_initial_values_that_do_not_fit_are_refused_when_a_table_is_made(dtype, first, message):
    for kind in OPTIONS:
        with pytest.raises(ValueError, match=message):
            make(get_backend("cpu"), kind, dtype, first=first)

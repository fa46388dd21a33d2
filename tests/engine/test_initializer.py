"""Initial values: the same bits everywhere, the right distribution."""

from statistics import NormalDist

import numpy as np
import pytest

from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.hashing import hash_keys
from sok_lite.engine.initializer import Initializer, MatrixInitializer, RowInitializer
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.rows.store import NO_ROW, RowStore
from sok_lite.engine.table import make_table
from tests.support import reference_initializer
from tests.support.helpers import initial_values

SEED = -0x123456789ABCDEF
KINDS = [
    Initializer("uniform", -0.05, 0.05),
    Initializer("uniform", 1000.0, 1000.5),
    Initializer("normal", 0.0, 1.0),
    Initializer("normal", 3.0, 0.1),
    Initializer("truncated_normal", 0.0, 0.05),
    Initializer("truncated_normal", -1.0, 2.0),
]
# Both ends are the same float32, and half of the exact values would round to the one above it.
NARROW = Initializer("uniform", 1000.000031, 1000.00009)
I64 = np.iinfo(np.int64)
FORMATS = ["float32", "float16", "bfloat16", "float64", "int32", "int64", "int8"]


def some_keys(n):
    edge = np.array([0, 1, -1, I64.max, I64.min, 1 << 32, -(1 << 32), (1 << 31) - 1], np.int64)
    more = np.random.default_rng(0).integers(I64.min, I64.max, max(n, 1), dtype=np.int64)
    return np.concatenate([edge, more])[:n]


def draw(backend, initializer, keys, dim, seed=SEED):
    return backend.to_host(initial_values(initializer, backend, backend.from_host(keys), dim, seed))


def expected(initializer, keys, dim, seed=SEED):
    twin = getattr(reference_initializer, initializer.kind)
    return twin(keys, dim, seed, initializer.a, initializer.b)


def test_the_twin_passes_the_published_known_answers():
    # kat_vectors of Random123, the library of Philox's authors.
    full = 0xFFFFFFFF
    pi = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
    for counter, key, answer in [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((full,) * 4, (full,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (*pi, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ]:
        assert tuple(int(word) for word in reference_initializer.philox(counter, key)) == answer


@pytest.mark.cases("initializer")
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 31, 100])
@pytest.mark.parametrize("initializer", [*KINDS, NARROW], ids=repr)
def test_values_are_the_twins_bit_for_bit(backend, initializer, dim):
    """By key, column and seed alone: whatever order and company."""
    for n, seed in ((0, SEED), (1, 0), (33, 1 << 63), (1000, SEED)):
        keys = np.random.default_rng(n).permutation(some_keys(n))
        np.testing.assert_array_equal(
            draw(backend, initializer, keys, dim, seed), expected(initializer, keys, dim, seed)
        )


@pytest.mark.cases("initializer")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("initializer", KINDS, ids=repr)
def test_rows_of_every_format_get_the_same_values_rounded(backend, initializer, dtype):
    for dim in (3, 4, 33):
        values = draw(backend, initializer, some_keys(100), dim)
        rounded = row_dtype(dtype).to_storage(np, values)
        check_given_rows(backend, initializer, dtype, dim, 100, rounded)


def table_rows(backend, keys, initializer, **options):
    table = make_table("hbm", backend, 8, initializer=make_initializer(initializer, 8), **options)
    return backend.to_host(table.lookup(backend.from_host(keys)).values)


def test_tables_draw_by_name_and_seed_their_own_or_the_jobs(backend):
    keys, own = some_keys(33), Initializer("normal", 0.0, 1.0, seed=1)
    rows = table_rows(backend, keys, "normal", name="a", seed=1)
    for how, seed in (("normal", 1), (own, 1), (own, 2)):
        again = table_rows(backend, keys, how, name="a", seed=seed)
        np.testing.assert_array_equal(rows, again)
    for other in ({"name": "b", "seed": 1}, {"name": "a", "seed": 2}, {"name": "a"}):
        assert (rows != table_rows(backend, keys, "normal", **other)).mean() > 0.99
    assert (rows != table_rows(backend, keys, own, name="b")).mean() > 0.99


@pytest.mark.parametrize("n, dim", [(1, 3), (33, 1), (1000, 4)])
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_row_is_the_same_for_every_key(backend, dtype, n, dim):
    numbers = (np.arange(dim) * 3 - 5).tolist()
    initializer = RowInitializer(tuple(numbers))
    initializer.check(row_dtype(dtype), dim)
    stored = row_dtype(dtype).to_storage(np, np.array([numbers], dtype if "i" in dtype else "f4"))
    expected = np.repeat(stored, n, axis=0)
    check_given_rows(backend, initializer, dtype, dim, n, expected)


@pytest.mark.parametrize("n, count", [(1, 2), (33, 1), (1000, 7)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_key_takes_one_row_of_a_matrix(backend, dtype, count, n):
    matrix = np.arange(count * 5, dtype=np.float64).reshape(count, 5) - 3
    initializer = MatrixInitializer(matrix)
    initializer.check(row_dtype(dtype), 5)
    mixed = hash_keys(some_keys(n)) ^ np.uint64(SEED & 0xFFFFFFFFFFFFFFFF)
    chosen = hash_keys(mixed.view(np.int64)) % np.uint64(count)
    stored = row_dtype(dtype).to_storage(np, matrix)
    check_given_rows(backend, initializer, dtype, 5, n, stored[chosen.astype(np.int64)])


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="must have 4 numbers, as the table's rows. Received: 3"):
        RowInitializer((1, 2, 3)).check(row_dtype("float32"), 4)
    with pytest.raises(ValueError, match="must be finite. Received: nan"):
        RowInitializer((1, float("nan")))
    for arguments in (
        ("uniform", 1.0, 0.0),
        ("normal", 0.0, -1.0),
        ("constant", float("nan")),
        ("uniform", -3e38, 3e38),
        ("orthogonal",),
    ):
        with pytest.raises(ValueError):
            Initializer(*arguments)
    matrix = MatrixInitializer(np.array([[1.0, 2.0], [3.0, 70000.0]]))
    matrix.check(row_dtype("bfloat16"), 2)
    with pytest.raises(ValueError, match="at most 65504 in size.*Received: 70000"):
        matrix.check(row_dtype("float16"), 2)
    for wrong in (np.zeros(3), np.zeros((0, 3)), np.full((2, 3), 1e39)):
        with pytest.raises(ValueError, match="A matrix of initial values must have"):
            MatrixInitializer(wrong)
    matrix = MatrixInitializer(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="rows of 4 numbers"):
        matrix.check(row_dtype("float32"), 4)
    with pytest.raises(ValueError, match="Rows of int32 begin with a constant"):
        matrix.check(row_dtype("int32"), 3)
    assert repr(matrix) == repr(MatrixInitializer(np.zeros((2, 3))))
    assert repr(matrix) != repr(MatrixInitializer(np.ones((2, 3))))


def check_given_rows(backend, initializer, dtype, dim, n, expected):
    """Compares what `fill_launch` and `draw_launch` write, with rows that they skip, or without."""
    format_of, keys = row_dtype(dtype), backend.from_host(some_keys(n))
    store = RowStore(backend, dim, format_of)
    rows = backend.to_host(store.allocate(n))[::-1]
    given = rows.copy()
    given[::7] = NO_ROW
    nines = np.full((n, dim), 9, format_of.storage)
    kept = expected.copy()
    kept[::7] = 0
    for out in (None, backend.from_host(nines.copy())):  # those of keys without a row, too
        store.write(backend.from_host(rows), backend.xp.zeros_like(backend.from_host(nines)))
        initializer.fill_launch(backend, store, backend.from_host(given), keys, SEED, out)()
        np.testing.assert_array_equal(backend.to_host(store.read(backend.from_host(rows))), kept)
    np.testing.assert_array_equal(backend.to_host(out)[::7], expected[::7])
    out = backend.from_host(nines.copy())
    initializer.draw_launch(backend, format_of, out, keys, SEED, backend.from_host(given))()
    nines[::7] = expected[::7]
    np.testing.assert_array_equal(backend.to_host(out), nines)
    initializer.draw_launch(backend, format_of, out, keys, SEED)()
    np.testing.assert_array_equal(backend.to_host(out), expected)


@pytest.mark.parametrize(
    "dtype, constant",
    [
        ("float32", 13),
        ("float64", 0.1),
        ("int64", 2**62 + 1),
        ("int32", -(2**31)),
        ("int8", -128),
    ],
)
def test_constants_are_exact(backend, dtype, constant):
    initializer = make_initializer(constant, 5)
    check_given_rows(backend, initializer, dtype, 5, 33, np.full((33, 5), constant, dtype))


# What is drawn at most: of N(0, 1) the quantile of half of one of 2**32 equal parts.
REACH = {
    "constant": 1,
    "uniform": 1,
    "truncated_normal": 2,
    "normal": -NormalDist().inv_cdf(2**-33),
}
CASTS = {"float16": np.float16, "bfloat16": None, "float32": np.float32}


@pytest.mark.parametrize("dtype", CASTS)
@pytest.mark.parametrize("kind", REACH)
def test_values_that_would_be_infinities_are_refused(kind, dtype):
    """The oracle is where the cast of NumPy, of bfloat16 that of ml_dtypes, begins to be inf."""
    cast = CASTS[dtype] or pytest.importorskip("ml_dtypes").bfloat16
    ends = {"float16": 65520.0, "bfloat16": (2 - 2**-8) * 2.0**127, "float32": 2.0**128}
    below, above = ends[dtype] * (1 - 1e-3), ends[dtype] * (1 + 1e-3)
    with np.errstate(over="ignore"):
        assert np.isfinite(np.float64(below).astype(cast)) and np.isinf(
            np.float64(above).astype(cast)
        )
    for last, fits in ((below, True), (above, False)):
        # A uniform one that is as wide as the format has no float32 for its width.
        numbers = (last,) if kind == "constant" else (0.0, last / REACH[kind])
        for sign in (1, -1) if kind == "constant" else (1,):
            try:
                Initializer(kind, *(sign * each for each in numbers)).check(row_dtype(dtype), 4)
                assert fits
            except ValueError as error:
                assert not fits and ("at most" in str(error) or "finite float32" in str(error))


def test_parameters_are_floats_whatever_was_given():
    # A GPU kernel tells f32 from i64 by the type of the argument.
    initializer = Initializer("uniform", 0, np.int64(1))
    assert [type(x) for x in (initializer.a, initializer.b)] == [float, float]

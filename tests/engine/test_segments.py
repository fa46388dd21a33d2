"""Groups and sums of rows, of one table and of many, against plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sok_lite.backend.cpu import CpuBackend
from sok_lite.engine.dedup import dedup
from sok_lite.engine.segments import Terms, group, segment_sum, segment_sums
from tests.support.distinct_keys import TABLES, assert_distinct, distinct_of, some_keys
from tests.support.helpers import on, sized
from tests.support.pooled import gather_rows
from tests.support.reference import sum_in_pieces

SIZES = [0, 1, 31, 33, 1000, 100_003]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("num_groups", [1, 2, 40_000])
def test_group_lists_items_in_ascending_order(backend, n, num_groups):
    labels = np.random.default_rng(1).integers(0, num_groups, n).astype(np.int32)
    offsets, order, *_ = group(backend, backend.from_host(labels), (0, n), (0, num_groups))
    expected = np.argsort(labels, kind="stable")
    ends = np.cumsum(np.bincount(labels, minlength=num_groups))
    np.testing.assert_array_equal(backend.to_host(offsets), np.concatenate([[0], ends]))
    np.testing.assert_array_equal(backend.to_host(order), expected)


# ---- many tables


@given(st.lists(st.lists(st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1)), min_size=1))
def test_any_tables_of_any_int64(tables):
    backend = CpuBackend(num_threads=3)
    backend.grain = 1
    begin = np.concatenate([[0], np.cumsum([len(keys) for keys in tables])])
    keys = np.array([key for table in tables for key in table], np.int64)
    result = dedup(backend, keys, begin)
    assert_distinct(backend, result, distinct_of(keys.tolist(), begin.tolist()), keys)
    groups = group(backend, result.inverse, begin, result.starts)
    np.testing.assert_array_equal(groups.order, np.argsort(result.inverse, kind="stable"))


def many_tables(sizes, distinct, dims, seed=0):
    """Terms of tables, each with its own dim, without and with rows and weights; and the oracle.

    Returns:
      (inverse, begin, starts, terms, expected sums of each table).
    """
    rng = np.random.default_rng(seed)
    keys, begin = some_keys(sizes, distinct, seed)
    inverse, _, starts = distinct_of(keys, begin)
    terms, expected = [], []
    for t, n in enumerate(sizes):
        dim, m = dims[t % len(dims)], max(1, n // 2)
        source = rng.normal(size=(n if t % 3 == 0 else m, dim)).astype(np.float32)
        rows = None if t % 3 == 0 else rng.integers(0, m, n).astype(np.int32)
        weights = rng.normal(size=n).astype(np.float32) if t % 3 == 2 else None
        terms.append((source, rows, weights))
        added = source if rows is None else source[rows]
        added = added if weights is None else weights[:, None] * added
        numbers = inverse[begin[t] : begin[t + 1]]
        order = np.argsort(numbers, kind="stable")
        ends = np.cumsum(np.bincount(numbers - starts[t], minlength=starts[t + 1] - starts[t]))
        sums = [sum_in_pieces(part) for part in np.split(added[order], ends[:-1])] if n else []
        expected.append(np.array(sums, np.float32).reshape(-1, dim))
    return inverse.astype(np.int32), begin, np.array(starts), terms, expected


def terms_on(backend, terms):
    return Terms(*(on(backend, *arrays) for arrays in zip(*terms, strict=True)))


def assert_sums(backend, inverse, begin, starts, terms, expected):
    groups = group(backend, backend.from_host(inverse), begin, starts)
    given = terms_on(backend, terms)
    for sums, wanted in zip(segment_sums(backend, groups, given), expected, strict=True):
        assert sums.shape == wanted.shape and sums.dtype == np.float32
        np.testing.assert_array_equal(backend.to_host(sums), wanted)


@pytest.mark.parametrize("distinct", [1, 10, 10_000])
@pytest.mark.parametrize("sizes", TABLES.values(), ids=TABLES)
def test_sums_of_tables_of_any_size_and_dim(backend, sizes, distinct):
    assert_sums(backend, *many_tables(sizes, distinct, dims=(4, 3, 16, 1, 21)))


# Pieces begin anywhere in the 32 positions of a window; their groups end just before, at and just
# behind where the next piece would begin.
@pytest.mark.parametrize("lengths", [[31, 32, 33], [1, 64, 65, 63], [33] * 33, [97, 1, 1, 95, 40]])
def test_pieces_wherever_they_begin(backend, lengths):
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(len(lengths)), lengths)).astype(np.int32)
    rows = rng.normal(size=(labels.size, 8)).astype(np.float32)
    expected = [sum_in_pieces(rows[labels == g]) for g in range(len(lengths))]
    sums = segment_sum(backend, *on(backend, rows, labels), len(lengths))
    np.testing.assert_array_equal(backend.to_host(sums), expected)


def test_groups_without_items_are_zeros(backend):
    # The second table has labels and no items, as has the end of the third.
    begin, starts = np.array([0, 40, 40, 42]), np.array([0, 3, 5, 9])
    labels = np.array([2] * 39 + [0] + [6, 5], np.int32)
    terms = [(np.ones((n, 4), np.float32), None, None) for n in (40, 0, 2)]
    expected = [[[1], [0], [39]], [[0], [0]], [[1], [1], [0], [0]]]
    wanted = [np.repeat(np.array(sums, np.float32), 4, axis=1) for sums in expected]
    assert_sums(backend, labels, begin, starts, terms, wanted)


@pytest.mark.parametrize("threads", range(1, 9))
def test_many_tables_are_the_same_for_any_number_of_threads(backend, threads):
    if backend.name == "cpu":
        backend = CpuBackend(num_threads=threads)
        backend.grain = 1
    hot = sized(backend, 20_000, 500)
    sizes = [hot, 0, 1, *(sized(backend, 31 * t, t) for t in range(36)), hot // 2]
    keys, begin = some_keys(sizes, 300, seed=threads)
    result = dedup(backend, backend.from_host(keys), begin)
    assert_distinct(backend, result, distinct_of(keys, begin), keys)
    assert_sums(backend, *many_tables(sizes, 300, dims=(3, 16), seed=threads))


def test_sums_go_into_memory_that_is_given(backend):
    inverse, begin, starts, terms, expected = many_tables([40, 0, 70], 3, dims=(4, 3))
    groups = group(backend, backend.from_host(inverse), begin, starts)
    given = terms_on(backend, terms)
    out = [backend.xp.full(each.shape, np.nan, np.float32) for each in expected]
    assert segment_sums(backend, groups, given, out) is out
    for sums, wanted in zip(out, expected, strict=True):
        np.testing.assert_array_equal(backend.to_host(sums), wanted)


# ---- one table


def test_infinities_and_nans_of_a_long_sum_stay_what_they_are(backend):
    n = 100
    for values, expected in [
        ({50: np.inf}, np.inf),
        ({50: -np.inf, 99: 3e38}, -np.inf),
        ({0: np.inf, 99: -np.inf}, np.nan),
        ({70: np.nan}, np.nan),
        ({10: 3e38, 50: 3e38}, np.inf),
        ({10: 3e38, 50: -3e38}, n - 2),
    ]:
        rows = np.ones((n, 1), np.float32)
        for place, value in values.items():
            rows[place] = value
        sums = segment_sum(backend, *on(backend, rows, np.zeros(n, np.int32)), 1)
        # Where numbers of 3e38 cancel, the others of their pieces are lost beside them.
        np.testing.assert_allclose(backend.to_host(sums)[0, 0], expected, atol=62)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16, np.int32])
@pytest.mark.parametrize("dim", [1, 3, 64])
def test_gather_rows_is_indexing(backend, dtype, dim):
    rng = np.random.default_rng(3)
    x = rng.integers(0, 1000, (97, dim)).astype(dtype)
    index = rng.integers(0, 97, 1000).astype(np.int32)
    out = gather_rows(backend, backend.from_host(x), backend.from_host(index))
    np.testing.assert_array_equal(backend.to_host(out), x[index])

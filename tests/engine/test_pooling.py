"""combine and its gradients against plain NumPy loops in float64."""

import itertools
import math

import numpy as np
import pytest

from sok_lite.backend.cpu import CpuBackend
from sok_lite.engine.dtypes import bfloat16_to_float32, float32_to_bfloat16
from sok_lite.engine.pooling import normalise_combiner
from sok_lite.engine.segments import segment_sum
from tests.support.helpers import on
from tests.support.pooled import combine, combine_grad, combine_weight_grad
from tests.support.reference import sum_in_pieces

COMBINERS = ["sum", "mean", "sqrtn"]


def divisor_of(weights, combiner):
    if combiner == "sum":
        return 1.0
    return weights.sum() if combiner == "mean" else np.sqrt((weights**2).sum())


def combined(source, inverse, row_splits, weights, combiner):
    """The oracle: out and, for every item, its row and what its row's gradient is multiplied by."""
    n, batch = len(inverse), len(row_splits) - 1
    weights = np.ones(n) if weights is None else weights.astype(np.float64)
    out = np.zeros((batch, source.shape[1]))
    rows, coefficients = np.zeros(n, int), np.zeros(n)
    for b in range(batch):
        items = range(row_splits[b], row_splits[b + 1])
        divisor = divisor_of(weights[row_splits[b] : row_splits[b + 1]], combiner)
        for j in items:
            rows[j] = b
            if divisor != 0:
                coefficients[j] = weights[j] / divisor
                out[b] += coefficients[j] * source[inverse[j]].astype(np.float64)
    return out, rows, coefficients


def a_batch(batch, most_ids, num_unique, dim, seed=0):
    """Ragged ids with empty rows and repeated ids: source, inverse, row_splits, weights."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(most_ids == 1, most_ids + 1, batch)  # of at most one id each has one
    row_splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    n = int(row_splits[-1])
    inverse = rng.integers(0, max(num_unique, 1), n).astype(np.int32)
    source = rng.normal(size=(num_unique, dim)).astype(np.float32)
    weights = rng.uniform(0.1, 2, n).astype(np.float32)
    for begin, length in zip(row_splits, lengths, strict=False):  # of some rows there is nothing
        if length == 2:
            weights[begin : begin + 2] = [2, -2]
        elif begin % 7 == 0:
            weights[begin : begin + length] = 0
    return source, inverse, row_splits, weights


SIZES = [(0, 0), (1, 0), (1, 1), (1, 33), (31, 3), (33, 1), (1000, 1), (1000, 10)]


@pytest.mark.pairs
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("batch, most_ids", SIZES)
@pytest.mark.parametrize("dim", [1, 3, 31, 32, 33, 64, 100])
def test_combine_and_its_gradients(backend, dim, batch, most_ids, combiner, weighted):
    num_unique = max(1, batch // 3)
    source, inverse, row_splits, weights = a_batch(batch, most_ids, num_unique, dim)
    if not weighted:
        weights = None
    expected, rows, coefficients = combined(source, inverse, row_splits, weights, combiner)
    given = on(backend, inverse, row_splits, weights)

    out = combine(backend, *on(backend, source), *given, combiner)
    assert out.dtype == np.float32 and out.shape == (batch, dim)
    # float32 sums of at most 33 numbers of size 1.
    np.testing.assert_allclose(backend.to_host(out), expected, rtol=1e-5, atol=1e-5)

    out_grads = np.random.default_rng(1).normal(size=(batch, dim)).astype(np.float32)
    expected_grads = np.zeros((num_unique, dim))
    np.add.at(expected_grads, inverse, coefficients[:, None] * out_grads[rows])
    grads = combine_grad(backend, *on(backend, out_grads), *given, combiner, num_unique)
    assert grads.dtype == np.float32 and grads.shape == (num_unique, dim)
    np.testing.assert_allclose(backend.to_host(grads), expected_grads, rtol=1e-5, atol=2e-5)
    if not weighted:
        return

    # The slope by weights: what a row changes by, less what the divisor changes by.
    slopes, dots = np.zeros(len(inverse)), (source[inverse] * np.float64(out_grads[rows])).sum(1)
    for begin, end in itertools.pairwise(row_splits):
        w, d = np.float64(weights[begin:end]), dots[begin:end]
        by = divisor_of(w, combiner)
        slope = {"sum": 0.0, "mean": 1.0, "sqrtn": w / (by or 1.0)}[combiner]
        slopes[begin:end] = 0.0 if by == 0 else (d - slope * (w @ d) / by) / by
    items = on(backend, out_grads, source, *(inverse, row_splits, weights))
    grads = combine_weight_grad(backend, *items, combiner)
    # Differences of 100 float32 products, divided by weight sums down to 0.1.
    np.testing.assert_allclose(backend.to_host(grads), slopes, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("exponent", [-100, -66, 70])
def test_sqrtn_takes_weights_whose_squares_no_float32_holds(backend, exponent):
    source, inverse, row_splits, weights = a_batch(40, 5, 11, 7)
    out_grads = np.random.default_rng(1).normal(size=(40, 7)).astype(np.float32)
    scale, results = np.float32(2.0**exponent), []
    for given_weights in (weights, weights * scale):
        given = on(backend, inverse, row_splits, given_weights)
        out = combine(backend, *on(backend, source), *given, "sqrtn")
        grads = combine_grad(backend, *on(backend, out_grads), *given, "sqrtn", 11)
        slopes = combine_weight_grad(backend, *on(backend, out_grads, source), *given, "sqrtn")
        results.append([backend.to_host(part) for part in (out, grads, slopes)])
    (out, grads, slopes), others = results
    # A power of two changes no digit; the slope by a weight is that much steeper.
    for one, other in zip((out, grads, slopes / scale), others, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.abs(out).max() > 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_rows_of_other_floats_are_summed_in_float32(backend, dtype, combiner):
    source, inverse, row_splits, weights = a_batch(100, 5, 50, 33)
    if dtype != "bfloat16":
        # No float32 numbers, where there are more digits.
        stored = (source.astype(np.float64) / 3).astype(dtype)
        exact = stored.astype(np.float32)
    else:
        stored = float32_to_bfloat16(np, source)
        exact = bfloat16_to_float32(np, stored)
    for given_weights in (None, weights):
        items = on(backend, inverse, row_splits, given_weights)
        out = combine(backend, *on(backend, stored), *items, combiner)
        same = combine(backend, *on(backend, exact), *items, combiner)
        np.testing.assert_array_equal(backend.to_host(out), backend.to_host(same))
    out_grads = np.ones((100, 33), np.float32)
    items = on(backend, inverse, row_splits, weights)
    grads = combine_weight_grad(backend, *on(backend, out_grads, stored), *items, combiner)
    same = combine_weight_grad(backend, *on(backend, out_grads, exact), *items, combiner)
    np.testing.assert_array_equal(backend.to_host(grads), backend.to_host(same))


# Around the pieces of 32 items, and long enough for a plain float32 sum to be wrong.
LONG = [0, 1, 31, 33, 1024, 1025, 32**3 + 1, 1_000_000]
PIECE_ERROR = 32 * 2.0**-24  # of a float32 sum of 32 positive numbers, relative


def exact_sums(rows):
    return np.array([math.fsum(column) for column in rows.T.astype(np.float64)])


def one_long_row(n, dim=3, num_unique=1000):
    rng = np.random.default_rng(n)
    source = rng.uniform(0.5, 1.5, (num_unique, dim)).astype(np.float32)
    inverse = rng.integers(0, num_unique, n).astype(np.int32)
    weights = rng.uniform(0.1, 2, n).astype(np.float32)
    return source, inverse, np.array([0, 0, n, n], np.int64), weights


@pytest.mark.parametrize("n", LONG)
def test_a_long_row_is_pooled_as_well_as_a_short_one(backend, n):
    source, inverse, row_splits, weights = one_long_row(n)
    for given in (None, weights):
        used = np.ones(n) if given is None else weights.astype(np.float64)
        total = exact_sums(used[:, None] * source[inverse].astype(np.float64))
        divisors = {
            "sum": 1.0,
            "mean": math.fsum(used) or 1.0,
            "sqrtn": math.sqrt(math.fsum(used**2)) or 1.0,
        }
        for combiner, divisor in divisors.items():
            items = on(backend, source, inverse, row_splits, given)
            out = backend.to_host(combine(backend, *items, combiner))
            np.testing.assert_allclose(out[1], total / divisor, rtol=2 * PIECE_ERROR)
            np.testing.assert_array_equal(out[[0, 2]], 0)


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
@pytest.mark.parametrize("n", LONG)
def test_the_gradient_by_the_weights_of_a_long_row(backend, n, combiner):
    source, inverse, row_splits, weights = one_long_row(n)
    out_grads = np.random.default_rng(1).uniform(0.5, 1.5, (3, 3)).astype(np.float32)
    items = on(backend, out_grads, source, inverse, row_splits, weights)
    grads = backend.to_host(combine_weight_grad(backend, *items, combiner))
    dots = source[inverse].astype(np.float64) @ out_grads[1].astype(np.float64)
    w = weights.astype(np.float64)
    weighted = math.fsum(w * dots)
    if combiner == "mean":
        divisor = math.fsum(w)
        expected = (dots - weighted / (divisor or 1.0)) / (divisor or 1.0)
    else:
        divisor = math.sqrt(math.fsum(w**2))
        expected = dots / (divisor or 1.0) - w * (weighted / (divisor**3 or 1.0))
    # Two numbers of this size are subtracted.
    size = np.abs(dots / (divisor or 1.0)).max(initial=0.0)
    np.testing.assert_allclose(grads, expected, rtol=0, atol=4 * PIECE_ERROR * size)


@pytest.mark.parametrize("dim", [1, 3, 4, 16, 21, 64])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_sums_go_in_pieces_in_one_order_whatever_the_threads(backend, num_threads, dim):
    if backend.name == "cpu":
        backend = CpuBackend(num_threads=num_threads)
        backend.grain = 1
    rng = np.random.default_rng(0)
    lengths = [0, 1, 2, 31, 32, 33, 63, 64, 65, 1025, 0, 100, 20_001]
    row_splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    n = int(row_splits[-1])
    source = rng.normal(size=(50, dim)).astype(np.float32)
    inverse = rng.integers(0, 50, n).astype(np.int32)
    weights = rng.normal(size=n).astype(np.float32)
    out = combine(backend, *on(backend, source, inverse, row_splits, weights), "sum")
    terms = weights[:, None] * source[inverse]
    expected = [sum_in_pieces(part) for part in np.split(terms, row_splits[1:-1])]
    np.testing.assert_array_equal(backend.to_host(out), expected)
    labels = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    shuffled = rng.permutation(n)
    rows = np.empty_like(terms)
    rows[shuffled] = terms
    by_item = np.empty_like(labels)
    by_item[shuffled] = labels
    sums = segment_sum(backend, *on(backend, rows, by_item), len(lengths))
    expected = [sum_in_pieces(rows[by_item == label]) for label in range(len(lengths))]
    np.testing.assert_array_equal(backend.to_host(sums), expected)


def test_rows_need_not_be_contiguous_and_results_go_into_memory_that_is_given(backend):
    source, inverse, row_splits, weights = a_batch(20, 4, 9, 6)
    wide = np.zeros((9, 18), np.float32)
    wide[:, ::3] = source
    rows, items = backend.from_host(wide)[:, ::3], on(backend, inverse, row_splits, weights)
    (source,), out = on(backend, source), backend.xp.full((20, 6), np.nan, np.float32)
    assert combine(backend, rows, *items, "mean", out) is out
    expected = combine(backend, source, *items, "mean")
    np.testing.assert_array_equal(backend.to_host(out), backend.to_host(expected))
    out_grads = backend.from_host(np.ones((20, 6), np.float32))
    grads = combine_weight_grad(backend, out_grads, source, *items, "mean")
    again = combine_weight_grad(backend, out_grads, rows, *items, "mean")
    np.testing.assert_array_equal(backend.to_host(grads), backend.to_host(again))


@pytest.mark.parametrize(
    "name, spellings",
    [
        ("sum", ["sum", "Sum", "SUM"]),
        ("mean", ["mean", "Mean", "MEAN", "average", "Average", "AVERAGE"]),
        ("sqrtn", ["sqrtn", "Sqrtn", "SQRTN"]),
    ],
)
def test_combiners_have_many_spellings(name, spellings):
    assert [normalise_combiner(spelling) for spelling in spellings] == [name] * len(spellings)


@pytest.mark.parametrize("combiner", ["concat", "", "sUm", None, 0, ["sum"]])
def test_unknown_combiners_are_refused(combiner):
    with pytest.raises(ValueError, match="`combiner` must be 'sum', 'mean'"):
        normalise_combiner(combiner)

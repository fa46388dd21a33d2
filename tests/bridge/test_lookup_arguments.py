"""Eager lookups of kinds that were checked before: each is still what it was asked for."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from tests.conftest import QUICK

DIM = 3
NUM_KEYS = 50


def rows_of(seed):
    return np.random.default_rng(seed).standard_normal((NUM_KEYS, DIM)).astype(np.float32)


def table_with(rows, **options):
    table = sok.DynamicVariable(DIM, **options)
    sok.assign(table, np.arange(NUM_KEYS), rows)
    return table


def pooled(rows, ids, combiner):
    """What a lookup of dense ids gives: (batch, k), or (batch,) with one to a row."""
    ids = ids[:, None] if ids.ndim == 1 else ids
    divisor = {"sum": 1, "mean": ids.shape[1], "sqrtn": ids.shape[1] ** 0.5}[combiner]
    return rows[ids].sum(1) / divisor


def test_lookups_of_many_kinds_are_told_apart():
    """Two tables, each of which is the first and the second of a call, and is there twice."""
    rng = np.random.default_rng(0)
    all_rows = rows_of(1), rows_of(2)
    tables = [table_with(rows) for rows in all_rows]
    for _ in range(100 if QUICK else 400):
        numbers = rng.integers(0, 2, rng.integers(1, 3))
        shapes = [(rng.integers(0, 4), *rng.integers(2, 4, rng.integers(0, 2))) for _ in numbers]
        ids = [
            rng.integers(0, NUM_KEYS, shape).astype(rng.choice(["int32", "int64"]))
            for shape in shapes
        ]
        combiners = [str(rng.choice(["sum", "mean", "sqrtn"])) for _ in numbers]
        is_ragged, is_weighted = rng.integers(0, 4, 2) == 0
        of_weights = None
        if is_weighted:
            of_weights = [tf.fill(shape, 2.0) for shape in shapes]
        given = [
            tf.RaggedTensor.from_tensor(its) if is_ragged and its.ndim == 2 else tf.constant(its)
            for its in ids
        ]
        chosen = [tables[i] for i in numbers]
        found = sok.lookup_sparse(chosen, given, of_weights, combiners)
        for i, its, combiner, result in zip(numbers, ids, combiners, found, strict=True):
            expected = pooled(all_rows[i], its, combiner)
            # Of equal weights: a mean and its like are divided by them.
            expected = expected * 2 if is_weighted and combiner == "sum" else expected
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.cases("ids")
@pytest.mark.parametrize(
    ("ids", "combiner", "error", "text"),
    [
        (tf.constant(3), "sum", ValueError, "shape ()"),
        (tf.ones([2, 2, 2], tf.int64), "sum", ValueError, "shape (2, 2, 2)"),
        (tf.ones([2]), "sum", TypeError, "must be integers"),
        (tf.ones([2], tf.int64), "max", ValueError, "must be 'sum'"),
        (tf.ones([2], tf.int64), ["sum"], ValueError, "must be 'sum'"),
        (tf.constant([2**40]), "sum", ValueError, str(2**40)),
    ],
    ids=["scalar", "rank 3", "floats", "combiner", "list", "does not fit"],
)
def test_what_is_refused_is_refused_after_others_have_passed(ids, combiner, error, text):
    table = table_with(rows_of(0), key_type=tf.int32)
    for known in (tf.constant([3]), tf.constant([3], tf.int32), tf.constant([[3, 4]])):
        for _ in range(2):
            sok.lookup_sparse([table], [known], combiners=["sum"])
    with pytest.raises(error) as raised:
        sok.lookup_sparse([table], [ids], combiners=[combiner])
    assert text in str(raised.value)
    assert len(table) == NUM_KEYS


def test_what_is_kept_of_lookups_keeps_no_variable():
    first, second = (table_with(rows_of(seed)) for seed in (1, 2))
    ids = tf.constant([[1, 2]])
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            sok.lookup_sparse([first, second], [ids, ids], combiners="sum")
            tf.nn.embedding_lookup(second, ids)
        gone = [weakref.ref(each) for each in (second, second.table)]
        del second
        assert [each() for each in gone] == [None, None]
        found = sok.lookup_sparse([first], [ids], combiners="sum")
        gone = [weakref.ref(each) for each in (first, first.table)]
        del first
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()
    np.testing.assert_allclose(found[0], rows_of(1)[[1, 2]].sum(0, keepdims=True), rtol=1e-5)


def test_few_kinds_of_lookups_are_kept():
    table = table_with(np.ones((NUM_KEYS, DIM), np.float32))
    for width in range(1, 300):
        found = sok.lookup_sparse(table, tf.zeros([1, width], tf.int64), combiners="sum")
        np.testing.assert_array_equal(found, np.full((1, DIM), width))
    assert len(table.kept) <= 256

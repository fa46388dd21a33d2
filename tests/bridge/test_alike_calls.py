"""A traced lookup of batches that lie alike and of others: nothing of one is left in the next."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

pytestmark = pytest.mark.usefixtures("initialised")

DIMS = (16, 16, 3)
NUM_KEYS = 50


@pytest.fixture
def tables():
    return [sok.DynamicVariable(dim, name=f"t{i}") for i, dim in enumerate(DIMS)]


@pytest.fixture
def rows(tables):
    random = np.random.default_rng(3)
    rows = [random.normal(size=(NUM_KEYS, dim)).astype(np.float32) for dim in DIMS]
    for table, its_rows in zip(tables, rows, strict=True):
        sok.assign(table, np.arange(NUM_KEYS), its_rows)
    return rows


def check(step, rows, ids, inputs):
    outputs, slices = step(*inputs)
    for output, (keys, values), its_rows, its_ids in zip(outputs, slices, rows, ids, strict=True):
        sums = [its_rows[each].sum(0) for each in its_ids]
        wanted = np.reshape(sums, (len(its_ids), its_rows.shape[1]))
        np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-5)
        dense, found = np.zeros_like(its_rows), np.zeros_like(its_rows)
        for each, total in zip(its_ids, wanted, strict=True):
            np.add.at(dense, each, 2 * total)
        found[keys] = values
        np.testing.assert_allclose(found, dense, rtol=1e-4, atol=1e-4)


def traced(tables, signature, training):
    @tf.function(input_signature=signature)
    def step(*ids):
        with tf.GradientTape() as tape:
            outputs = sok.lookup_sparse(tables, list(ids), combiners="sum", training=training)
            loss = tf.add_n([tf.reduce_sum(output**2) for output in outputs])
        slices = tape.gradient(loss, tables)
        return outputs, [(each.indices, each.values) for each in slices]

    return step


@pytest.mark.parametrize("training", [True, False])
def test_dense_ids_of_batches_that_change(tables, rows, training):
    random, widths = np.random.default_rng(4), (1, 4, 2)
    signature = [tf.TensorSpec([None, width], tf.int64) for width in widths]
    step = traced(tables, signature, training)
    for batch in (3, 3, 5, 0, 5, 1, 3):
        ids = [random.integers(0, NUM_KEYS, (batch, width)) for width in widths]
        check(step, rows, ids, ids)
    # As many ids as in the last call, in other rows.
    step = traced(tables, [tf.TensorSpec([None, None], tf.int64)] * 3, training)
    for shape in ((2, 6), (6, 2), (12, 1), (2, 6)):
        ids = [random.integers(0, NUM_KEYS, shape) for _ in DIMS]
        check(step, rows, ids, ids)


@pytest.mark.parametrize("training", [True, False])
def test_ragged_and_sparse_ids_whose_rows_change(tables, rows, training):
    random = np.random.default_rng(5)
    signature = [
        tf.RaggedTensorSpec([None, None], tf.int64, row_splits_dtype=tf.int64),
        tf.TensorSpec([None, 2], tf.int64),
        tf.SparseTensorSpec([None, None], tf.int64),
    ]
    step = traced(tables, signature, training)
    for lengths in ([1, 2, 3], [3, 3, 0], [3, 3, 1], [2, 0, 0, 6], [6], [], [3, 3, 0], [1, 2, 3]):
        keys = random.integers(0, NUM_KEYS, sum(lengths))
        first = tf.RaggedTensor.from_row_lengths(keys, np.array(lengths, np.int64))
        dense = random.integers(0, NUM_KEYS, (len(lengths), 2))
        last = first.with_flat_values(keys[::-1].copy())
        ids = [[np.array(row, int) for row in each.to_list()] for each in (first, last)]
        check(step, rows, [ids[0], dense, ids[1]], [first, dense, last.to_sparse()])

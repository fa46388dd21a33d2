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


def expected(rows, ids):
    return [
        np.stack([its_rows[each].sum(0) for each in its_ids])
        for its_rows, its_ids in zip(rows, ids, strict=True)
    ]


def gradients(rows, ids):
    found = []
    for its_rows, its_ids in zip(rows, ids, strict=True):
        dense = np.zeros_like(its_rows)
        for each in its_ids:
            np.add.at(dense, each, 2 * its_rows[each].sum(0))
        found.append(dense)
    return found


def check(step, rows, ids, inputs):
    outputs, slices = step(*inputs)
    for output, values in zip(outputs, expected(rows, ids), strict=True):
        np.testing.assert_allclose(output, values, rtol=1e-5, atol=1e-5)
    for (keys, values), dense in zip(slices, gradients(rows, ids), strict=True):
        found = np.zeros_like(dense)
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
    random = np.random.default_rng(4)
    widths = (1, 4, 2)
    signature = [tf.TensorSpec([None, width], tf.int64) for width in widths]
    step = traced(tables, signature, training)
    for batch in (3, 3, 5, 0, 5, 1, 3):
        ids = [random.integers(0, NUM_KEYS, (batch, width)) for width in widths]
        if batch:
            check(step, rows, ids, ids)
        else:
            assert [len(output) for output in step(*ids)[0]] == [0, 0, 0]
    # As many ids as in the last call, in other rows.
    step = traced(tables, [tf.TensorSpec([None, None], tf.int64)] * 3, training)
    for shape in ((2, 6), (6, 2), (12, 1), (2, 6)):
        ids = [random.integers(0, NUM_KEYS, shape) for _ in DIMS]
        check(step, rows, ids, ids)


@pytest.mark.parametrize("training", [True, False])
def test_ragged_ids_whose_rows_change(tables, rows, training):
    random = np.random.default_rng(5)
    signature = [
        tf.RaggedTensorSpec([None, None], tf.int64, row_splits_dtype=tf.int64),
        tf.TensorSpec([None, 2], tf.int64),
        tf.RaggedTensorSpec([None, None], tf.int64, row_splits_dtype=tf.int64),
    ]
    step = traced(tables, signature, training)
    for lengths in ([1, 2, 3], [3, 3, 0], [3, 3, 1], [2, 0, 0, 6], [6], [3, 3, 0], [1, 2, 3]):
        batch = len(lengths)
        keys = random.integers(0, NUM_KEYS, sum(lengths))
        first = tf.RaggedTensor.from_row_lengths(keys, lengths)
        dense = random.integers(0, NUM_KEYS, (batch, 2))
        last = tf.RaggedTensor.from_row_lengths(keys[::-1].copy(), lengths[::-1])
        ids = [[np.array(row, int) for row in first.to_list()], dense]
        ids += [[np.array(row, int) for row in last.to_list()]]
        check(step, rows, ids, [first, dense, last])

"""Steps on keys that have no row by then: they get one, in eager mode, functions and sessions."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

KINDS = {"hbm": {}, "hybrid": {"max_capacity": 4096}}
KEYS = [5, -7, 2**40]


def table_of(kind, **options):
    return sok.DynamicVariable(2, "ones", kind, **(KINDS[kind] | options))


def rows_of(variable):
    keys, rows = sok.export(variable)
    return {key: row.tolist() for key, row in zip(keys.numpy().tolist(), rows.numpy(), strict=True)}


def slices(keys, first=1.0):
    rows = np.arange(len(keys), dtype=np.float32)[:, None] + np.full((1, 2), first, np.float32)
    return tf.IndexedSlices(tf.constant(rows), tf.constant(keys, tf.int64))


@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_ones_own_insert_their_keys(mode, kind):
    tables, optimizer = [table_of(kind), table_of("hbm")], sok.SGD(1.0)

    def step():
        optimizer.apply_gradients([(slices([5, 6, 5]), tables[0]), (slices([1]), tables[1])])

    mode(step)()
    assert rows_of(tables[0]) == {5: [-3.0, -3.0], 6: [-1.0, -1.0]}
    assert rows_of(tables[1]) == {1: [0.0, 0.0]}


def adagrad(grads):
    """Where a row ends that began with 1."""
    row, accumulator = 1.0, 0.1
    for grad in grads:
        accumulator += grad**2
        row -= grad / np.sqrt(accumulator + 1e-7)
    return row


@pytest.mark.parametrize("look_up", ["lookup_sparse", "embedding_lookup"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_erased_before_the_step_begins_anew(initialised, mode, kind, look_up):
    """With its states, and beside a dense variable."""
    table, dense = table_of(kind), tf.Variable(1.0)
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adagrad(1.0))

    def step(doomed):
        with tf.GradientTape() as tape:
            if look_up == "lookup_sparse":
                rows = sok.lookup_sparse(table, tf.RaggedTensor.from_tensor([KEYS]), None, "sum")
            else:
                rows = tf.nn.embedding_lookup(table, KEYS)
            loss = tf.reduce_sum(rows) * dense
        gradients = tape.gradient(loss, [table, dense])
        table.erase(doomed)
        optimizer.apply_gradients(zip(gradients, [table, dense], strict=True))

    step = mode(step)
    weights = []
    for doomed in ([], [5], [999]):
        weights.append(float(dense))
        step(tf.constant(doomed, tf.int64))
    rows = rows_of(table)
    assert sorted(rows) == sorted(KEYS)
    np.testing.assert_allclose(rows[-7], adagrad(weights), rtol=1e-5)
    np.testing.assert_allclose(rows[5], adagrad(weights[1:]), rtol=1e-5)
    assert table.statistics().not_updated_total == 0


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_inserted_in_a_session(kind):
    with tf.Graph().as_default():
        table = table_of(kind)
        keys = tf.compat.v1.placeholder(tf.int64, [None])
        gradient = tf.IndexedSlices(tf.ones([tf.size(keys), 2]), keys)
        optimizer = sok.OptimizerWrapper(tf.compat.v1.train.GradientDescentOptimizer(1.0))
        step = optimizer.apply_gradients([(gradient, table)])
        exported = sok.export(table)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for fed in ([5, 6], [6, 7, 7], []):
                session.run(step, {keys: fed})
            held, rows = session.run(exported)
    np.testing.assert_array_equal(held, [5, 6, 7])
    np.testing.assert_array_equal(rows, [[0, 0], [-1, -1], [-1, -1]])


def test_a_step_within_inference_mode_trains(mode):
    table, optimizer = table_of("hbm"), sok.SGD(1.0)
    step = mode(lambda: optimizer.apply_gradients([(slices(KEYS), table)]))
    with sok.inference_mode():
        step()
    assert sorted(rows_of(table)) == sorted(KEYS)


def test_a_step_that_a_dense_variable_refuses_inserts_nothing():
    table, dense = table_of("hbm"), tf.Variable([1.0, 2.0])
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.1))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be equal"):
        optimizer.apply_gradients([(slices(KEYS), table), (tf.ones((3, 5)), dense)])
    assert rows_of(table) == {}


def test_a_step_that_is_not_finite_inserts_nothing(mode):
    table = table_of("hbm")
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.1), on_nonfinite="error")
    step = mode(lambda: optimizer.apply_gradients([(slices(KEYS, np.nan), table)]) and None)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="3 of 3 gradient rows"):
        step()
    assert rows_of(table) == {}


@pytest.mark.parametrize("options", [{"enter_threshold": 2}, {"filter_ratio": 0.0}], ids=str)
def test_what_a_filter_turned_away_stays_out(initialised, mode, options):
    table, optimizer = table_of("hybrid", **options), sok.SGD(1.0)
    has_filter = "filter_ratio" in options

    def step():
        with tf.GradientTape() as tape:
            ids = tf.RaggedTensor.from_tensor([KEYS])
            rows = sok.lookup_sparse(table, ids, None, "sum", use_low_frequency_filter=has_filter)
            loss = tf.reduce_sum(rows)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    mode(step)()
    assert rows_of(table) == {}
    assert table.statistics().not_updated_total == 3

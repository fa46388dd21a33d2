"""tf.nn.embedding_lookup of a table: what comes beside its rows, and where its gradient goes."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok


def test_the_gradient_has_the_keys_as_given_and_the_size(mode):
    table = sok.DynamicVariable(2, initializer="ones")

    @mode
    def gradient():
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, [[5, -7], [5, 2**40]])
        return tape.gradient(rows, table)

    slices = gradient()
    assert slices.indices.dtype == tf.int64
    np.testing.assert_array_equal(slices.indices, [5, -7, 5, 2**40])
    np.testing.assert_array_equal(slices.values, np.ones((4, 2)))
    np.testing.assert_array_equal(slices.dense_shape, [-1, 2])


def test_a_tape_gives_zeros_of_no_rows_for_a_table_that_is_not_connected(mode):
    used, other = sok.DynamicVariable(2, initializer="ones"), sok.DynamicVariable(3)
    dense = tf.Variable(tf.ones([4, 2]))

    @mode
    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(used, [5]) * 2.0)
        return tape.gradient(loss, [used, other, dense], unconnected_gradients="zero")

    of_used, of_other, of_dense = gradients()
    np.testing.assert_array_equal(of_used.values, [[2.0, 2.0]])
    assert isinstance(of_other, tf.IndexedSlices)
    assert (of_other.values.shape, of_other.indices.dtype) == ((0, 3), tf.int64)
    np.testing.assert_array_equal(of_dense, np.zeros([4, 2]))
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
    optimizer.apply_gradients([(of_used, used), (of_other, other)])
    assert (used.table.size, other.table.size) == (1, 0)


@pytest.mark.parametrize("zeros_like", [tf.zeros_like, tf.compat.v1.zeros_like])
def test_zeros_like_a_table_are_refused_elsewhere(zeros_like):
    table = sok.DynamicVariable(2)
    errors = (tf.errors.FailedPreconditionError, NotImplementedError)
    with pytest.raises(errors, match="this is a table|has no dense tensor"):
        zeros_like(table)


def test_static_shapes_are_kept():
    table = sok.DynamicVariable(2)
    shapes = []

    @tf.function(input_signature=[tf.TensorSpec([None, 7], tf.int64)])
    def read(keys):
        shapes.append(tf.nn.embedding_lookup(table, keys).shape.as_list())

    read(tf.zeros([3, 7], tf.int64))
    assert shapes == [[None, 7, 2]]


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_half_precision_rows_have_float32_gradients(dtype, mode):
    table = sok.DynamicVariable(2, initializer="1.5", dtype=dtype)

    @mode
    def run():
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, [1, 1])
            loss = tf.reduce_sum(rows * 2)
        return rows, tape.gradient(loss, table)

    rows, gradient = run()
    assert rows.dtype == dtype
    np.testing.assert_array_equal(tf.cast(rows, tf.float32), np.full((2, 2), 1.5))
    assert gradient.values.dtype == tf.float32
    np.testing.assert_array_equal(gradient.values, np.full((2, 2), 2.0))


@pytest.mark.cases("ids")
@pytest.mark.parametrize("ids", [[1.0], tf.constant([1.5]), [True], ["a"]], ids=str)
def test_ids_that_are_no_integers_are_refused(ids, mode):
    table = sok.DynamicVariable(2)
    with pytest.raises(TypeError, match=r"must be integers \(int64\)"):
        mode(lambda: tf.nn.embedding_lookup(table, ids))()
    assert table.table.size == 0


def test_the_gradient_of_a_table_cannot_leave_a_loop_but_others_can(mode):
    table = sok.DynamicVariable(2, initializer="2", name="looped")
    scale = tf.Variable(3.0)

    @tf.function
    def gradients(sources):
        with tf.GradientTape() as tape:
            loss = tf.constant(0.0)
            for i in tf.range(4):
                loss += tf.reduce_sum(scale * tf.nn.embedding_lookup(table, [i]))
        return tape.gradient(loss, sources)

    assert float(mode(lambda: gradients([scale]))()[0]) == 16.0
    with pytest.raises(tf.errors.UnimplementedError, match="'looped:0' cannot leave the loop"):
        mode(lambda: gradients([table]))()


def test_an_attribute_error_inside_does_not_become_a_dense_read(monkeypatch):
    table = sok.DynamicVariable(2)

    def broken(*args, **kwargs):
        raise AttributeError("broken inside")

    monkeypatch.setattr(table.table, "lookup", broken)
    with pytest.raises(RuntimeError, match="broken inside"):
        tf.gather(table, [1])


KEYS_IN_A_LIST = {
    "vector": (lambda key: [key, 5], [7, 5]),
    "matrix": (lambda key: [[5, key], (key, 2)], [[5, 7], [7, 2]]),
    "rows": (lambda key: [tf.stack([key, key]), np.array([3, 2])], [[7, 7], [3, 2]]),
}


@pytest.mark.cases("keys")
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("keys, expected", KEYS_IN_A_LIST.values(), ids=KEYS_IN_A_LIST.keys())
def test_tensors_in_a_list_of_keys(mode, keys, expected, dtype):
    table = sok.DynamicVariable(1)
    sok.assign(table, np.arange(8), np.arange(8.0)[:, None])
    found = mode(lambda: table.sparse_read(keys(tf.constant(7, dtype))))()
    np.testing.assert_array_equal(found, np.expand_dims(expected, -1))


def test_a_key_in_a_list_must_fit_the_tensor_beside_it():
    table = sok.DynamicVariable(1)

    @tf.function
    def look_up(key):
        return table.sparse_read([key, 2**40])

    with pytest.raises(ValueError, match="fit int32.*Received: 1099511627776"):
        look_up(tf.constant(7))
    assert look_up(tf.constant(7, tf.int64)).shape == (2, 1)
    with pytest.raises(TypeError, match=r"must be integers \(int64\).*Received: float32"):
        look_up(tf.constant(7.0))

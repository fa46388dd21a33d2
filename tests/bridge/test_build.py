"""Tables made in a layer's `build`, eagerly or while a tf.function is traced: once, and trained."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok


def layer_of(keras):
    """Returns a layer class of a Keras that makes its table, and a dense weight, in `build`."""

    class Embedding(keras.layers.Layer):
        num_builds = 0

        def build(self, input_shape):
            self.num_builds += 1
            self.table = sok.DynamicVariable(2, initializer="ones", name="built")
            self.scale = self.add_weight(shape=(2,), initializer="ones", name="scale")

        def call(self, ids):
            return tf.nn.embedding_lookup(self.table, ids) * self.scale

    return Embedding


class Module(tf.Module):
    """Makes its table in its first call, and no other variable."""

    def __init__(self):
        super().__init__()
        self.table = None
        self.num_builds = 0

    def __call__(self, ids):
        if self.table is None:
            self.num_builds += 1
            self.table = sok.DynamicVariable(2, initializer="ones", name="built")
        return tf.nn.embedding_lookup(self.table, ids)


@pytest.fixture(params=["keras", "tf_keras", "tf.Module"])
def layer(request):
    if request.param == "tf.Module":
        return Module()
    return layer_of(pytest.importorskip(request.param))()


def test_a_table_made_in_the_first_call_is_one_and_trains(layer, mode):
    optimizer = sok.SGD(0.5)

    @mode
    def step(ids):
        with tf.GradientTape() as tape:
            rows = layer(ids)
            loss = tf.reduce_sum(rows)
        optimizer.apply_gradients([(tape.gradient(loss, layer.table), layer.table)])
        return rows

    first = step(tf.constant([3, 4, 3]))
    np.testing.assert_array_equal(first, np.ones((3, 2)))
    second = step(tf.constant([4, 3, 5]))
    np.testing.assert_array_equal(second, [[0.5, 0.5], [0.0, 0.0], [1.0, 1.0]])
    step(tf.constant([5]))  # another shape: another trace
    keys, rows = sok.export(layer.table)
    np.testing.assert_array_equal(keys, [3, 4, 5])
    np.testing.assert_array_equal(rows, [[-0.5, -0.5], [0.0, 0.0], [0.0, 0.0]])
    assert layer.num_builds == 1
    assert layer.table.backend_type == "hbm" and "built" in layer.table.name
    assert layer.table.is_initialized()  # its resource is no tensor of the traced graph


def test_a_table_made_in_a_branch_is_made_outside_of_it():
    layer = Module()

    @tf.function
    def step(flag):
        if flag:
            rows = layer([1])
        else:
            rows = tf.zeros((1, 2))
        return rows

    np.testing.assert_array_equal(step(tf.constant(True)), [[1.0, 1.0]])
    assert sok.export(layer.table)[0].shape == [1] and layer.num_builds == 1


def test_a_trace_that_makes_another_table_is_refused_at_once():
    made, tables = [], {}

    @tf.function
    def in_each_trace():
        made.append(sok.DynamicVariable(2))
        return tf.nn.embedding_lookup(made[-1], [1])

    with pytest.raises(ValueError, match="made each time that a tf.function is traced"):
        in_each_trace()
    assert len(made) == 1  # refused before another one was made

    @tf.function
    def by_name(name):
        if name not in tables:
            tables[name] = sok.DynamicVariable(2, initializer="ones", name=name)
        return tf.nn.embedding_lookup(tables[name], [1])

    np.testing.assert_array_equal(by_name("user"), [[1.0, 1.0]])

    @tf.function
    def in_init_scope():
        with tf.init_scope():
            made.append(sok.DynamicVariable(2))
        return made[-1].size

    for later in (lambda: by_name("item"), in_init_scope):
        with pytest.raises(ValueError, match="outside of a tf.function, or once"):
            later()
    assert [*tables] == ["user"]


def test_a_function_that_makes_no_table_is_traced_once():
    num_traces = 0
    table = sok.DynamicVariable(2, initializer="ones")

    @tf.function
    def step():
        nonlocal num_traces
        num_traces += 1
        return tf.nn.embedding_lookup(table, [1])

    step()
    assert num_traces == 1

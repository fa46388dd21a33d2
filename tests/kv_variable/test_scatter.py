"""The seven scatters, by method and by TensorFlow's names, against a dict."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import state_ops

from sok_lite import kv_variable as kv
from sok_lite.kv_variable import get_kv_variable

tf1 = tf.compat.v1
FUNCTIONS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.minimum,
    "max": np.maximum,
    "update": lambda row, value: value,
}
START = 2.0


def scattered(rows, operation, keys, values):
    """Does to a dict of rows what a scatter does, key by key."""
    for key, value in zip(keys, np.float32(values), strict=True):
        row = rows.get(key, np.full(len(value), START, np.float32))
        rows[key] = np.float32(FUNCTIONS[operation](row, value))


def test_halves():
    for operation, function in FUNCTIONS.items():
        for dtype in (tf.float16, tf.bfloat16):
            initializer = tf1.constant_initializer(START)
            name = f"{operation}_{dtype.name}"
            variable = get_kv_variable(name, 3, value_dtype=dtype, initializer=initializer)
            delta = tf.IndexedSlices(tf.constant([[0.5, 2.0, 4.0]], dtype), tf.constant([7]))
            assert getattr(variable, f"scatter_{operation}")(delta) is variable
            wanted = function(np.full(3, START), np.array([0.5, 2.0, 4.0]))
            rows = tf.nn.embedding_lookup(variable, [7])
            assert rows.dtype == dtype
            np.testing.assert_array_equal(tf.cast(rows, tf.float64)[0], wanted)  # exact in halves


def test_a_partition_reaches_any_key():
    variable = get_kv_variable("kv", 1, initializer=0.0, partitioner=tf1.fixed_size_partitioner(2))
    delta = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([4, 7]))
    next(iter(variable)).scatter_add(delta)
    assert variable.value().numpy().ravel().tolist() == [1.0, 2.0]
    assert [part.value().numpy().ravel().tolist() for part in variable] == [[1.0], [2.0]]


def test_arguments_that_do_not_fit():
    variable = get_kv_variable("kv", 2)
    for operation in FUNCTIONS:
        scatter = getattr(variable, f"scatter_{operation}")
        with pytest.raises(TypeError, match=f"scatter_{operation}.*IndexedSlices"):
            scatter(tf.ones([1, 2]))
        for values in (tf.ones([1, 2]), tf.ones([2, 3]), tf.ones([2])):
            with pytest.raises(ValueError, match=f"scatter_{operation}"):
                scatter(tf.IndexedSlices(values, tf.constant([1, 2])))
        with pytest.raises(TypeError, match="integers"):
            scatter(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1.0])))
    with pytest.raises(tf.errors.InvalidArgumentError):  # without a patch
        tf1.scatter_add(variable, tf.constant([1]), tf.ones([1, 2]))
    for method in ("assign_add", "assign_sub", "scatter_nd_add", "count_up_to"):
        with pytest.raises(NotImplementedError, match=f"{method}.*scatter_add"):
            getattr(variable, method)(1)
    assert variable.export()[0].shape == (0,)


@pytest.mark.pairs
@pytest.mark.parametrize("operation", FUNCTIONS)
@pytest.mark.parametrize("module", [tf1, state_ops], ids=["tf1", "state_ops"])
def test_tensorflows_own_names_after_a_patch(here, made, module, operation):
    variable = made(embedding_dim=2, initializer=tf1.constant_initializer(START))
    own = getattr(module, f"scatter_{operation}")
    dense = (
        tf1.get_variable("dense", initializer=np.ones((3, 2), np.float32), use_resource=True)
        if here.is_graph
        else tf.Variable(np.ones((3, 2), np.float32))
    )
    kv.patch_tf(disable_eager=False)
    try:
        keys, values = [5, -1, 5], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
        scatter = getattr(module, f"scatter_{operation}")
        here.run(lambda k, v: scatter(variable, k, v), keys, values)
        rows = {}
        scattered(rows, operation, keys, values)
        found, values = here.run(variable.export)
        assert found.tolist() == [-1, 5]
        np.testing.assert_allclose(values, [rows[-1], rows[5]], rtol=1e-6)
        changed = here.run(lambda: tf.convert_to_tensor(scatter(dense, [1], [[4.0, 4.0]])))
        np.testing.assert_array_equal(changed[1], FUNCTIONS[operation](1.0, 4.0) * np.ones(2))
    finally:
        kv.unpatch_tf()
    assert getattr(module, f"scatter_{operation}") is own


OF_TF1 = ["add", "sub", "update", "mul", "div", "min", "max", "nd_add", "nd_sub", "nd_update"]


def test_without_a_patch_tensorflows_own_names_are_refused_in_a_graph(made):
    with tf.Graph().as_default():
        variable = made(embedding_dim=2)
        keys, rows = tf1.placeholder(tf.int64, None), tf1.placeholder(tf.float32, None)
        for name in (f"scatter_{operation}" for operation in OF_TF1):
            with pytest.raises(NotImplementedError, match=rf"tf.compat.v1.{name}\(\).*patch_tf"):
                getattr(tf1, name)(variable, keys, rows)

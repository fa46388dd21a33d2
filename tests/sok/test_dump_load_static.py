"""sok.dump and sok.load of static variables, beside dynamic ones."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

tf_keras = pytest.importorskip("tf_keras")
pytestmark = pytest.mark.usefixtures("initialised")

OPTIMIZERS = {
    "keras": lambda: keras.optimizers.Adam(0.1),
    "keras, no state": lambda: keras.optimizers.SGD(0.1),
    "tf_keras": lambda: tf_keras.optimizers.Adagrad(0.1),
    "tf_keras, scaled": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
        tf_keras.optimizers.Adam(0.1), dynamic=False, initial_scale=2.0
    ),
    "legacy": lambda: tf_keras.optimizers.legacy.Adam(0.1),
    "v1": lambda: tf.compat.v1.train.MomentumOptimizer(0.1, 0.9),
}


def variables(start, dtype=tf.float32):
    rows = np.arange(start, start + 14).reshape(7, 2)
    return [
        sok.Variable(tf.constant(rows, dtype), name="spread"),
        sok.DynamicVariable(3, "ones", name="dynamic"),
        sok.Variable(tf.constant(rows[:5] + 0.5, dtype), mode="localized:0", name="local"),
    ]


def train(wrapper, tables, steps):
    for step in range(steps):
        ids = tf.ragged.constant([[step % 3, 4], [1]])
        with tf.GradientTape() as tape:
            out = sok.lookup_sparse(tables, [ids] * len(tables), combiners="sum")
            loss = tf.add_n([tf.reduce_sum(tf.cast(each, tf.float32) ** 2) for each in out])
            loss = wrapper.scale_loss(loss)
        gradients = wrapper.get_unscaled_gradients(tape.gradient(loss, tables))
        wrapper.apply_gradients(zip(gradients, tables, strict=True))


def assert_equal(some, others):
    for one, other in zip(some, others, strict=True):
        if isinstance(one, sok.DynamicVariable):
            for expected, got in zip(sok.export(one), sok.export(other), strict=True):
                np.testing.assert_array_equal(got, expected)
        else:
            np.testing.assert_array_equal(other.numpy(), one.numpy())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_where_it_stopped(tmp_path, kind):
    straight, wrapper = variables(0), sok.OptimizerWrapper(OPTIMIZERS[kind]())
    train(wrapper, straight, 3)
    sok.dump(tmp_path, straight, wrapper)
    at_dump = [one.numpy() for one in (straight[0], straight[2])]
    train(wrapper, straight, 4)
    other, new = variables(100), sok.OptimizerWrapper(OPTIMIZERS[kind]())
    if "keras" in kind and "no state" not in kind:
        with pytest.raises(ValueError, match=r"an optimizer with none.*build\(\)"):
            sok.load(tmp_path, other, new)
        inner = getattr(new.optimizer, "inner_optimizer", new.optimizer)
        inner.build([other[0], other[2]])
    sok.load(tmp_path, other, new)
    for one, expected in zip((other[0], other[2]), at_dump, strict=True):
        np.testing.assert_array_equal(one.numpy(), expected)
    train(new, other, 4)
    assert_equal(straight, other)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_without_a_wrapper_goes_on_too(tmp_path, kind):
    """As programs of SOK have it that train static variables alone."""

    def train_by_itself(optimizer, variable, steps):
        for _ in range(steps):
            optimizer.apply_gradients([(tf.ones([7, 2]), variable)])

    (straight, *_), optimizer = variables(0), OPTIMIZERS[kind]()
    train_by_itself(optimizer, straight, 3)
    sok.dump(tmp_path, straight, optimizer)
    train_by_itself(optimizer, straight, 4)
    (other, *_), new = variables(100), OPTIMIZERS[kind]()
    if "keras" in kind and "no state" not in kind:
        getattr(new, "inner_optimizer", new).build([other])
    sok.load(tmp_path, other, [new])
    if kind != "v1":
        assert int(new.iterations) == 3
    train_by_itself(new, other, 4)
    assert_equal([straight], [other])


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_rows_of_half_come_back(tmp_path, dtype):
    one, other = variables(0, dtype), variables(100, dtype)
    one[0].assign_add(tf.fill([7, 2], tf.constant(0.5, dtype)))
    sok.dump(tmp_path, one)
    sok.load(tmp_path, other)
    assert_equal(one, other)
    wide = variables(100)
    with pytest.raises(ValueError, match="cast=True"):
        sok.load(tmp_path, wide)
    sok.load(tmp_path, wide, cast=True)
    np.testing.assert_array_equal(wide[0].numpy(), tf.cast(one[0], tf.float32))


def test_a_load_into_a_variable_that_a_function_reads(tmp_path):
    one = variables(0)[0]
    read = tf.function(lambda: tf.convert_to_tensor(one) + 0)
    read()
    sok.dump(tmp_path, one)
    one.assign(tf.zeros([7, 2]))
    sok.load(tmp_path, one)
    np.testing.assert_array_equal(read(), np.arange(14).reshape(7, 2))

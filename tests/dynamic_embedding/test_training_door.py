"""How TFRA's optimizer trains through the methods that every optimizer has."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from sok_lite import dynamic_embedding as de
from sok_lite.bridge.optimizers import patched_step

v1 = tf.compat.v1
CLASSES = {
    "Keras 3": keras.optimizers.SGD,
    "tf_keras": tf_keras.optimizers.SGD,
    "legacy": tf_keras.optimizers.legacy.SGD,
    "TF1": v1.train.GradientDescentOptimizer,
}
each_family = pytest.mark.parametrize("family", CLASSES)


def table_of(name):
    table = de.Variable(dim=2, name=name, initializer=1.0)
    table.upsert([1], [[1.0, 1.0]])
    return table, table.get_trainable_by_name("t")


def gradient(value=1.0):
    return tf.IndexedSlices(tf.constant([[value, value]]), tf.constant([1], tf.int64))


def own(cls):
    """A class of a program's own, whose methods call those of its base class."""

    class Own(cls):
        def apply_gradients(self, *args, **kwargs):
            return super().apply_gradients(*args, **kwargs)

        if hasattr(cls, "apply"):

            def apply(self, *args, **kwargs):
                return super().apply(*args, **kwargs)

    return Own


@pytest.mark.parametrize("is_own", [False, True], ids=["", "a subclass"])
@each_family
def test_dense_gradients_are_summed_once_and_those_of_tables_never(family, is_own, monkeypatch):
    cls = own(CLASSES[family]) if is_own else CLASSES[family]
    optimizer = de.DynamicEmbeddingOptimizer(cls(0.1), synchronous=True)
    sums = []

    def doubled(pairs):
        sums.append(len(pairs))
        return [
            (grad if hasattr(var, "table") or grad is None else 2 * grad, var)
            for grad, var in pairs
        ]

    monkeypatch.setattr(patched_step, "other_ranks", lambda: True)
    monkeypatch.setattr(patched_step, "sum_over_ranks", doubled)
    table, shadow = table_of(f"{family}{is_own}")
    dense = tf.Variable(1.0)
    optimizer.apply_gradients([(gradient(), shadow), (tf.constant(1.0), dense)])
    np.testing.assert_allclose(dense, 0.8)
    np.testing.assert_allclose(table.lookup([1]), [[0.9, 0.9]])
    optimizer.apply_gradients([(None, shadow), (tf.constant(1.0), dense)])
    np.testing.assert_allclose(dense, 0.6)
    assert len(sums) == 2


def test_summed_leaves_gradients_of_tables(monkeypatch):
    monkeypatch.setattr(patched_step, "allreduce", lambda flat, how: 3 * flat)
    (table, _), dense = table_of("summed"), tf.Variable(1.0)
    given = gradient()
    pairs = patched_step.sum_over_ranks(
        [(given, table.rows), (tf.constant(2.0), dense), (None, dense)]
    )
    assert pairs[0][0] is given and float(pairs[1][0]) == 6.0 and pairs[2][0] is None


@each_family
def test_an_optimizer_that_trains_no_tables_trains_what_is_dense(family):
    optimizer, (_, shadow), dense = CLASSES[family](0.1), table_of(family), tf.Variable(1.0)
    de.DynamicEmbeddingOptimizer(CLASSES[family](0.1))  # another one
    optimizer.apply_gradients([(None, shadow), (tf.constant(1.0), dense)])
    np.testing.assert_allclose(dense, 0.9)
    with pytest.raises(NotImplementedError, match="would not train 't:0'"):
        optimizer.apply_gradients([(gradient(), shadow), (tf.constant(1.0), dense)])
    np.testing.assert_allclose(dense, 0.9)


@pytest.mark.parametrize("package", [keras, tf_keras])
def test_build_takes_its_argument_by_name(package):
    (_, shadow), dense = table_of("built"), package.Variable(1.0) if package is keras else None
    dense = tf.Variable(1.0) if dense is None else dense
    name = "variables" if package is keras else "var_list"
    plain, ours = package.optimizers.Adam(), package.optimizers.Adam()
    de.DynamicEmbeddingOptimizer(ours).build(**{name: [dense, shadow]})
    plain.build(**{name: [dense]})
    count = [len(o.variables if package is keras else o.variables()) for o in (plain, ours)]
    assert count[0] == count[1]


def test_a_step_of_dense_variables_counts_for_adam_of_tf1():
    table, shadow = table_of("counted")
    dense = tf.Variable(1.0)
    optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.1))
    for is_of_rows in (True, False, True):
        pairs = [(tf.constant(1.0), dense)]
        optimizer.apply_gradients([(gradient(2.0), shadow), *pairs] if is_of_rows else pairs)
    # The same, in which the row has no gradient in the second step: its moments stay.
    m = v = np.float64(0)
    row = np.float64(1)
    for step, is_of_rows in enumerate((True, False, True), start=1):
        if is_of_rows:
            m, v = 0.9 * m + 0.1 * 2, 0.999 * v + 0.001 * 4
            rate = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            row -= rate * m / (np.sqrt(v) + 1e-8)
    np.testing.assert_allclose(table.lookup([1]), [[row, row]], rtol=1e-5)

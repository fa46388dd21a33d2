"""`gradient_accumulation_steps` of Keras 3: rows move by the mean of several batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.engine.update import NonFiniteGradientError

DIM = 3
pytestmark = pytest.mark.skipif(
    not hasattr(keras.optimizers.SGD(), "gradient_accumulation_steps"),
    reason="this Keras accumulates no gradients",
)


class Own(keras.optimizers.Optimizer):
    """No rule follows it."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * gradient * 2.0)


def made(cls, **options):
    options = {"learning_rate": 0.5, "gradient_accumulation_steps": 3} | options
    return sok.OptimizerWrapper(cls(**options))


def table_of(name="t"):
    table = sok.DynamicVariable(dimension=DIM, name=name)
    sok.assign(table, np.arange(6), np.ones((6, DIM), np.float32))
    return table


def gradient(table, keys, value):
    keys = tf.constant(keys, tf.int64)
    return tf.IndexedSlices(tf.fill([len(keys), DIM], float(value)), keys)


def rows_of(table):
    return tf.nn.embedding_lookup(table, np.arange(6)).numpy()[:, 0].round(4).tolist()


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("cls, times", [(keras.optimizers.SGD, 1), (Own, 2)])
def test_rows_move_with_the_last_batch_by_the_mean_of_all(cls, times, is_traced):
    table, dense = table_of(), tf.Variable(4.0)
    optimizer = made(cls)

    def step(keys, value):
        optimizer.apply_gradients([(gradient(table, keys, value), table), (value, dense)])

    steps = {keys: tf.function(step) if is_traced else step for keys in ((0, 1, 1), (1, 2), (5,))}
    for round_ in range(2):
        start = rows_of(table)
        for keys, value in (((0, 1, 1), 3.0), ((1, 2), 6.0)):
            steps[keys](keys, tf.constant(value))
            assert rows_of(table) == start
        steps[(5,)]((5,), tf.constant(9.0))
        mean = np.array([3.0, 6 + 6, 6, 0, 0, 9]) / 3
        assert rows_of(table) == (np.array(start) - 0.5 * times * mean).round(4).tolist()
        assert float(dense) == 4 - (1 + round_) * 0.5 * times * 6
    assert int(optimizer.iterations) == 2


def test_states_take_one_step_by_the_mean():
    tables, values = [table_of(name) for name in "ab"], [1.0, 5.0]
    optimizers = [
        made(keras.optimizers.Adam, gradient_accumulation_steps=2),
        made(keras.optimizers.Adam, gradient_accumulation_steps=None),
    ]
    for _ in range(3):
        for value in values:
            optimizers[0].apply_gradients([(gradient(tables[0], [1, 2], value), tables[0])])
        optimizers[1].apply_gradients([(gradient(tables[1], [1, 2], 3.0), tables[1])])
    np.testing.assert_array_equal(rows_of(tables[0]), rows_of(tables[1]))
    states = [sok.export(o.get_slot(t, "v")) for o, t in zip(optimizers, tables, strict=True)]
    np.testing.assert_allclose(states[0][1], states[1][1], rtol=1e-6)


def test_a_table_that_the_last_batch_lacks_moves_too():
    one, other = table_of("one"), table_of("other")
    optimizer = made(keras.optimizers.SGD, gradient_accumulation_steps=2)
    optimizer.apply_gradients([(gradient(one, [1], 2.0), one), (gradient(other, [2], 4.0), other)])
    optimizer.apply_gradients([(gradient(one, [1], 2.0), one), (None, other)])
    assert rows_of(one) == [1, 0, 1, 1, 1, 1] and rows_of(other) == [1, 1, 0, 1, 1, 1]


def test_weight_decay_leaves_the_same_tables_out():
    one, other = table_of("one"), table_of("other")
    inner = keras.optimizers.AdamW(0.5, weight_decay=0.1, gradient_accumulation_steps=2)
    inner.exclude_from_weight_decay(var_list=[other])
    optimizer = sok.OptimizerWrapper(inner)
    none = [(gradient(table, [1], 0.0), table) for table in (one, other)]
    optimizer.apply_gradients(none)
    optimizer.apply_gradients(none[:1])
    assert rows_of(one)[1] == pytest.approx(0.95) and rows_of(other)[1] == 1.0


def test_a_step_that_fails_can_be_taken_again():
    table, dense = table_of(), tf.Variable(1.0)
    inner = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    optimizer = sok.OptimizerWrapper(inner, on_nonfinite="error")
    pairs = [(tf.constant(2.0), dense)]
    optimizer.apply_gradients([(gradient(table, [1], 2.0), table), *pairs])
    with pytest.raises(NonFiniteGradientError):
        optimizer.apply_gradients([(gradient(table, [1], np.nan), table), *pairs])
    assert rows_of(table)[1] == 1.0 and float(dense) == 1.0
    optimizer.apply_gradients([(gradient(table, [1], 4.0), table), *pairs])
    assert rows_of(table)[1] == 1 - 0.5 * 3 and float(dense) == 0.0


@pytest.mark.parametrize("option", [{"clipnorm": 1.0}, {"global_clipnorm": 1.0}, {"clipvalue": 1}])
def test_clipping_is_refused_for_it_is_of_the_mean(option):
    table, optimizer = table_of(), made(keras.optimizers.SGD, **option)
    with pytest.raises(NotImplementedError, match="gradient_accumulation_steps=3 .* with clipping"):
        optimizer.apply_gradients([(gradient(table, [1], 2.0), table)])
    assert rows_of(table) == [1] * 6


def test_a_loss_scale_is_refused():
    table = table_of()
    inner = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    optimizer = sok.OptimizerWrapper(keras.optimizers.LossScaleOptimizer(inner))
    with pytest.raises(NotImplementedError, match="with a LossScaleOptimizer"):
        optimizer.apply_gradients([(gradient(table, [1], 2.0), table)])

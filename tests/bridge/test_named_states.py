"""sok.optimizer_states: what a table's optimizers keep, to look at, set, rename and drop."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from scripts.bench.common.row_steps import ensure_state

tf_keras = pytest.importorskip("tf_keras")
pytestmark = pytest.mark.usefixtures("initialised")
DIM = 3
KEYS = [3, -7, 2**62]


def train(table, *optimizers):
    for optimizer in optimizers:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, KEYS) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])


def adam():
    return sok.OptimizerWrapper(keras.optimizers.Adam(0.1))


def test_states_are_listed_read_set_and_dropped():
    table, one, two = sok.DynamicVariable(DIM, "ones"), adam(), adam()
    assert sok.optimizer_states(table) == {}
    train(table, one, two)
    states = sok.optimizer_states(table)
    assert list(states) == ["m", "v", "m (2)", "v (2)"]
    state = states["m (2)"]
    facts = (state.kind, state.group, state.dimension, state.initial_value, state.num_bytes)
    assert facts == ("m", 2, DIM, 0.0, 4 * DIM * len(KEYS)) and state.is_used
    np.testing.assert_array_equal(state.export()[0], sorted(KEYS))
    np.testing.assert_array_equal(
        tf.nn.embedding_lookup(state, KEYS), two.get_slot(table, "m").sparse_read(KEYS)
    )
    sok.assign(state, [3], tf.fill([1, DIM], 5.0))
    np.testing.assert_array_equal(two.get_slot(table, "m").sparse_read([3]), [[5.0] * DIM])
    assert not np.any(one.get_slot(table, "m").sparse_read([3]).numpy() == 5.0)
    assert "'m (2)'" in repr(state) and "dimension 3" in repr(state)
    # One of another dimension than the rows.
    ensure_state(table.table.store, "count", 0.5, 1)
    count = sok.optimizer_states(table)["count"]
    count.assign(KEYS[:2], [[1.0], [2.0]])
    np.testing.assert_array_equal(count.sparse_read(KEYS), [[1.0], [2.0], [0.5]])
    with pytest.raises(ValueError, match="dimension 1"):
        count.assign(KEYS, tf.ones([3, DIM]))
    count.rename("number")
    assert count.name == count.kind == "number" and not count.is_used
    with pytest.raises(ValueError, match="an optimizer uses it"):
        state.rename("another")
    count.drop()
    states["m"].drop()
    assert list(sok.optimizer_states(table)) == ["v", "m (2)", "v (2)"]
    for use in (states["m"].drop, lambda: states["m"].num_bytes, lambda: states["m"].export()):
        with pytest.raises(ValueError, match=r"no (optimizer )?state 'm'.*'v'"):
            use()
    train(table, one)
    assert sorted(sok.optimizer_states(table)) == ["m", "m (2)", "v", "v (2)"]


@pytest.mark.parametrize("package", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("key_type", ["int64", str])
def test_states_of_a_table_of_keras_are_those_of_its_weight(package, key_type):
    sk = pytest.importorskip("sok_lite.keras").classes_for(package)
    table = sk.Table("item", 2, "ones", key_type)
    ids = package.Input([], dtype=table.key_dtype_name)
    model = package.Model(ids, table(ids))
    model.compile(package.optimizers.Adam(0.1), "mse")
    given = tf.constant([3, 5, 2**40] if key_type == "int64" else ["a", "b", "c"])
    model.fit(given, np.zeros((3, 2)), verbose=0)
    states, expected = sok.optimizer_states(table), sok.optimizer_states(table.variable)
    assert list(states) == list(expected) == ["m", "v"]
    keys = table.export()[0]
    for name, state in states.items():
        rows = tf.nn.embedding_lookup(state, keys).numpy()
        assert rows.all()  # it has been trained
        np.testing.assert_array_equal(rows, tf.nn.embedding_lookup(expected[name], keys))
    sok.assign(states["m"], keys[:1], [[7.0, 7.0]])
    np.testing.assert_array_equal(expected["m"].export()[1][0], [7, 7])


def test_what_has_no_states_is_refused():
    layer = keras.layers.Dense(1)
    for wrong in (sok.Variable(tf.ones([3, 2])), tf.Variable(1.0), "t", layer):
        with pytest.raises(TypeError, match="rows are in this process"):
            sok.optimizer_states(wrong)
    table = sok.DynamicVariable(DIM)
    with pytest.raises(RuntimeError, match="eager mode only"):
        tf.function(lambda: len(sok.optimizer_states(table)))()

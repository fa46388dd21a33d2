"""Operations in graphs: what TensorFlow has in order."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok


def before(operation, by_inputs=True):
    """All operations that an operation waits for: as it says, or for its inputs too."""
    found, waiting = set(), [operation]
    while waiting:
        one = waiting.pop()
        inputs = [each.op for each in one.inputs] if by_inputs else []
        for other in [*one.control_inputs, *inputs]:
            if other not in found and (by_inputs or other.type.startswith("Sok")):
                found.add(other)
                waiting.append(other)
    return found


def test_writes_and_lookups_of_a_function_have_their_order():
    """Within a graph of TF1 as well: test_table_call.py."""
    table, keys = sok.DynamicVariable(2, name="t"), np.array([1], np.int64)

    @tf.function
    def function():
        sok.assign(table, keys, np.full((1, 2), 5, np.float32))
        rows = tf.nn.embedding_lookup(table, keys)
        sok.assign(table, keys, np.full((1, 2), 7, np.float32))
        return rows

    np.testing.assert_array_equal(function(), [[5, 5]])
    graph = function.get_concrete_function().graph
    (lookup,) = (each for each in graph.get_operations() if each.type == "SokLookup")
    first, second = (each for each in graph.get_operations() if each.type == "SokMethod")
    assert first in before(lookup)
    assert lookup in before(second)


@pytest.mark.parametrize("num_tables", [1, 3])
def test_lookups_and_updates_of_a_table_are_ordered_by_its_handle(num_tables):
    """The turn, which all calls take, is not the only thing that has them in order."""
    tables = [sok.DynamicVariable(2, initializer="ones") for _ in range(num_tables)]
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
    keys = tf.constant([1, 2], tf.int64)

    @tf.function
    def function():
        before = tf.nn.embedding_lookup(tables[-1], keys)
        grads = [tf.IndexedSlices(tf.ones([2, 2]), keys) for _ in tables]
        optimizer.apply_gradients(zip(grads, tables, strict=True))
        return before, tf.nn.embedding_lookup(tables[-1], keys)

    graph = function.get_concrete_function().graph
    first, second = (each for each in graph.get_operations() if each.type == "SokLookup")
    (update,) = (each for each in graph.get_operations() if each.type == "SokUpdate")
    assert len([each for each in update.inputs if each.dtype == tf.resource]) == num_tables
    assert first in before(update, by_inputs=False)
    assert update in before(second, by_inputs=False)
    for rows, expected in zip(function(), (1, 0), strict=True):
        np.testing.assert_array_equal(rows, np.full((2, 2), expected))


def test_an_update_in_a_branch_is_ordered_by_the_handle():
    table = sok.DynamicVariable(2, initializer="ones")
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
    keys = tf.constant([1, 2], tf.int64)

    def update():
        optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([2, 2]), keys), table)])

    @tf.function
    def function(flag):
        before = tf.nn.embedding_lookup(table, keys)
        if flag:
            update()
        return before, tf.nn.embedding_lookup(table, keys)

    graph = function.get_concrete_function(tf.TensorSpec([], tf.bool)).graph
    first, second = (each for each in graph.get_operations() if each.type == "SokLookup")
    (branch,) = (each for each in graph.get_operations() if each.type in ("If", "StatelessIf"))
    assert first in branch.control_inputs
    assert branch in second.control_inputs
    for rows, expected in zip(function(True), (1, 0), strict=True):
        np.testing.assert_array_equal(rows, np.full((2, 2), expected))
    for rows in function(False):
        np.testing.assert_array_equal(rows, np.zeros((2, 2)))

"""Operations in graphs: what TensorFlow has in order."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

v1 = tf.compat.v1


def before(operation):
    """All operations that an operation waits for."""
    found, waiting = set(), [operation]
    while waiting:
        one = waiting.pop()
        for other in [*one.control_inputs, *(each.op for each in one.inputs)]:
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found


@pytest.mark.parametrize("is_within_tf1", [False, True])
def test_writes_and_lookups_of_a_function_have_their_order(is_within_tf1):
    """Where a graph of TF1 is outside, there is no variable that could be read for it."""
    keys = np.array([1], np.int64)

    def build():
        table = sok.DynamicVariable(2, name="t")

        @tf.function
        def function():
            sok.assign(table, keys, np.full((1, 2), 5, np.float32))
            rows = tf.nn.embedding_lookup(table, keys)
            sok.assign(table, keys, np.full((1, 2), 7, np.float32))
            return rows

        return table, function

    if is_within_tf1:
        with tf.Graph().as_default():
            _, function = build()
            graph, rows = function.get_concrete_function().graph, function()
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                np.testing.assert_array_equal(session.run(rows), [[5, 5]])
    else:
        _table, function = build()
        graph = function.get_concrete_function().graph
        np.testing.assert_array_equal(function(), [[5, 5]])
    (lookup,) = (each for each in graph.get_operations() if each.type == "SokLookup")
    first, second = (each for each in graph.get_operations() if each.type == "SokMethod")
    assert first in before(lookup)
    assert lookup in before(second)

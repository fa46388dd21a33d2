"""Numbers cross between a graph and Python as shapes of tensors without elements."""

import numpy as np
import pytest
import tensorflow as tf

from sok_lite.bridge.host_numbers import (
    HostNumbers,
    crossing_inputs,
    from_shapes,
    num_shapes,
    numbers_of,
    unzigzag,
    with_shapes,
    zigzag,
)

FLOATS = [1e-3, -0.0, 2.0**60, 5e-324, float("inf"), float("nan"), 0.1]


def ints(count):
    return np.random.default_rng(count).integers(0, 1 << 62, count)


@pytest.mark.parametrize("count", [0, 1, 250, 251, 900])
def test_numbers_of_a_graph_arrive_in_python_and_back(count):
    seen, sent = {}, ints(count)

    @tf.function
    def cross(numbers, floats, other):
        inputs = [HostNumbers(numbers), other, HostNumbers(floats), HostNumbers(np.arange(3))]
        tensors, given_of = crossing_inputs(inputs, by_shape=True)
        assert len(tensors) == num_shapes(count) + 1 + num_shapes(2 * len(FLOATS))

        def run(*crossed):
            seen["elements"] = [int(tf.size(each)) for each in crossed]
            seen["numbers"], _, seen["floats"], seen["known"] = given_of(crossed)
            return with_shapes(sent, num_shapes(count), None)

        back = tf.py_function(run, tensors, [tf.int64] * num_shapes(count))
        return from_shapes(back, count) if count else tf.constant((), tf.int64)

    floats, other = tf.constant(FLOATS, tf.float64), tf.ones([7])
    back = cross(tf.constant(sent), floats, other)
    np.testing.assert_array_equal(back, sent)
    np.testing.assert_array_equal(seen["numbers"], sent)
    assert np.array(seen["floats"]).tobytes() == np.array(FLOATS).tobytes()
    assert seen["known"].tolist() == [0, 1, 2]
    assert sum(seen["elements"]) == 7  # of what is no number


def test_on_a_cpu_numbers_cross_as_they_are_but_those_that_are_known():
    numbers, other = tf.constant([1, 2], tf.int64), tf.ones([7])
    inputs = [HostNumbers(numbers), HostNumbers(np.array([5])), other]
    tensors, given_of = crossing_inputs(inputs, by_shape=False)
    assert tensors[0] is numbers and tensors[1] is other and len(tensors) == 2
    assert [np.asarray(each).tolist() for each in given_of(tensors)] == [[1, 2], [5], [1.0] * 7]


@tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
def of_any_length(numbers):
    (tensor,), given_of = crossing_inputs([HostNumbers(numbers)], by_shape=True)
    assert given_of is None  # it is what crosses
    return tf.py_function(tf.identity, [tensor], tf.int64)


def test_numbers_of_a_length_that_is_not_known_cross_as_a_tensor():
    np.testing.assert_array_equal(of_any_length(tf.constant([4, 5], tf.int64)), [4, 5])


def test_there_may_be_fewer_numbers_than_tensors_for_them():
    assert numbers_of(with_shapes(np.empty(0, np.int64), 2, None)).tolist() == []
    assert numbers_of(with_shapes(np.array([3]), 2, "CPU:0")).tolist() == [3]


def test_negative_numbers_have_a_form_that_is_not():
    numbers = np.array([0, -1, 1, -2, 1 << 60, -(1 << 60)])
    assert zigzag(numbers).min() >= 0
    np.testing.assert_array_equal(unzigzag(zigzag(numbers)), numbers)

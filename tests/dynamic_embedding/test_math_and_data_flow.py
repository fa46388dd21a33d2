"""TFRA's `math` and `data_flow` against NumPy: at once, traced, and in a TF1 graph."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from sok_lite.dynamic_embedding import data_flow  # noqa: E402
from sok_lite.dynamic_embedding import math as de_math  # noqa: E402


def flat(result):
    return tf.nest.flatten(result, expand_composites=True)


def eagerly(function):
    return [np.asarray(each) for each in flat(function())]


def traced(function):
    return [np.asarray(each) for each in flat(tf.function(function)())]


def in_a_graph(function):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return session.run(flat(function()))


@pytest.fixture(params=[eagerly, traced, in_a_graph])
def run(request):
    """Calls a function, and returns the arrays of its result in a list; sparse ones are three."""
    return request.param


@pytest.mark.parametrize("num_segments", [None, 7])
def test_segments_are_sums_of_the_named_rows(run, num_segments):
    data = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    rows, segments = [4, 0, 0, 3, 1], [0, 0, 2, 2, 4]
    expected = np.zeros((num_segments or 5, 3), np.float32)
    np.add.at(expected, segments, data[rows])
    (sums,) = run(
        lambda: de_math.sparse_segment_sum(data, rows, segments, num_segments=num_segments)
    )
    np.testing.assert_allclose(sums, expected, rtol=1e-6)


def test_no_segments_have_no_sums(run):
    data = np.ones((2, 3), np.float32)
    (sums,) = run(lambda: de_math.sparse_segment_sum(data, np.int32([]), np.int32([])))
    assert sums.shape == (0, 3)


def test_the_fourth_argument_is_the_name_as_in_tfra():
    with tf.Graph().as_default():
        sums = de_math.sparse_segment_sum(tf.ones((2, 3)), [0], [0], "sums", 4)
    assert sums.op.name == "sums"
    assert sums.shape[0] in (4, None)


def test_a_gradient_goes_to_the_named_rows():
    data = tf.ones((3, 2))
    with tf.GradientTape() as tape:
        tape.watch(data)
        total = tf.reduce_sum(de_math.sparse_segment_sum(data, [2, 2, 0], [0, 1, 1]))
    gradient = tf.convert_to_tensor(tape.gradient(total, data))
    np.testing.assert_array_equal(gradient, [[1, 1], [0, 0], [2, 2]])


def test_empty_rows_are_filled(run):
    def fill():
        ids = tf.SparseTensor([[0, 1], [2, 0]], tf.constant([7, 9], tf.int64), [4, 2])
        return de_math.sparse_fill_empty_rows(ids, tf.constant(-1, tf.int64))

    indices, values, shape, empty = run(fill)
    np.testing.assert_array_equal(indices, [[0, 1], [1, 0], [2, 0], [3, 0]])
    np.testing.assert_array_equal(values, [7, -1, 9, -1])
    np.testing.assert_array_equal(shape, [4, 2])
    np.testing.assert_array_equal(empty, [False, True, False, True])


def test_sparse_elements_keep_their_places_in_another_shape(run):
    dense = np.zeros((2, 3, 4), np.float32)
    dense[0, 2, 1], dense[1, 0, 3] = 5, 6
    indices, values, shape = run(
        lambda: de_math.sparse_reshape(tf.sparse.from_dense(dense), [-1, 6])
    )
    found = np.zeros(shape, np.float32)
    found[tuple(np.transpose(indices))] = values
    np.testing.assert_array_equal(found, dense.reshape(4, 6))


@pytest.mark.parametrize(
    "call",
    [
        lambda dense: de_math.sparse_fill_empty_rows(dense, 0.0),
        lambda dense: de_math.sparse_reshape(dense, [4]),
    ],
)
def test_a_dense_tensor_is_refused(call):
    with pytest.raises(TypeError, match="SparseTensor"):
        call(tf.ones((2, 2)))


@pytest.mark.parametrize("n", [0, 1, 33])
@pytest.mark.parametrize("use_fast", [True, False])
def test_parts_put_together_are_the_whole(run, n, use_fast):
    data = np.random.default_rng(n).normal(size=(n, 2)).astype(np.float32)
    numbers = np.arange(n, dtype=np.int32) * 5 % 3

    def there_and_back():
        parts = data_flow.dynamic_partition(data, numbers, 3)
        places = data_flow.dynamic_partition(np.arange(n, dtype=np.int32), numbers, 3)
        return [*parts, data_flow.dynamic_stitch(places, parts, use_fast=use_fast)]

    *parts, whole = run(there_and_back)
    for number, part in enumerate(parts):
        np.testing.assert_array_equal(part, data[numbers == number])
    np.testing.assert_array_equal(whole, data)


def test_the_last_element_of_an_index_counts(run):
    (whole,) = run(lambda: data_flow.dynamic_stitch([[0, 2], [2, 1]], [[10, 20], [30, 40]]))
    np.testing.assert_array_equal(whole, [10, 40, 30])


def test_a_number_out_of_range_raises():
    with pytest.raises(tf.errors.InvalidArgumentError):
        data_flow.dynamic_partition([1, 2], [0, 2], 2)

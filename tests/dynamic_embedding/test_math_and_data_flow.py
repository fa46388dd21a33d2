"""TFRA's `math` and `data_flow`: what its recorded answers do not tell of them."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from sok_lite.dynamic_embedding import data_flow  # noqa: E402
from sok_lite.dynamic_embedding import math as de_math  # noqa: E402


def test_segments_of_a_graph_and_of_nothing():
    with tf.Graph().as_default():
        sums = de_math.sparse_segment_sum(tf.ones((2, 3)), [0], [0], "sums", 4)
    assert sums.op.name == "sums"  # the fourth argument is the name, as in TFRA
    assert sums.shape[0] in (4, None)
    sums = de_math.sparse_segment_sum(tf.ones((2, 3)), np.int32([]), np.int32([]))
    assert sums.shape == (0, 3)


def test_a_gradient_goes_to_the_named_rows():
    data = tf.ones((3, 2))
    with tf.GradientTape() as tape:
        tape.watch(data)
        total = tf.reduce_sum(de_math.sparse_segment_sum(data, [2, 2, 0], [0, 1, 1]))
    gradient = tf.convert_to_tensor(tape.gradient(total, data))
    np.testing.assert_array_equal(gradient, [[1, 1], [0, 0], [2, 2]])


def test_a_dense_tensor_is_refused():
    for call in (de_math.sparse_fill_empty_rows, de_math.sparse_reshape):
        with pytest.raises(TypeError, match="SparseTensor"):
            call(tf.ones((2, 2)), [4])


@pytest.mark.parametrize("use_fast", [True, False])
def test_parts_put_together(use_fast):
    def stitch(*given):
        return data_flow.dynamic_stitch(*given, use_fast=use_fast).numpy().tolist()

    assert stitch([[0, 2], [2, 1]], [[10, 20], [30, 40]]) == [10, 40, 30]  # the last one counts
    assert stitch(data_flow.dynamic_partition(np.int32([]), np.int32([]), 3), [[]] * 3) == []
    with pytest.raises(tf.errors.InvalidArgumentError):
        data_flow.dynamic_partition([1, 2], [0, 2], 2)

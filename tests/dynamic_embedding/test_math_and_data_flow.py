"""TFRA's `math` and `data_flow`: arguments that its recorded answers do not have."""

import pytest

tf = pytest.importorskip("tensorflow")

from sok_lite.dynamic_embedding import data_flow  # noqa: E402
from sok_lite.dynamic_embedding import math as de_math  # noqa: E402


def test_arguments_have_the_places_of_tfra():
    with tf.Graph().as_default():
        sums = de_math.sparse_segment_sum(tf.ones((2, 3)), [0], [0], "sums", 4)
    assert sums.op.name == "sums"  # the fourth argument is the name
    assert sums.shape[0] in (4, None)
    for use_fast in (True, False):
        parts = [[0, 2], [2, 1]], [[10, 20], [30, 40]]
        found = data_flow.dynamic_stitch(*parts, use_fast=use_fast)
        assert found.numpy().tolist() == [10, 40, 30]  # the last one counts

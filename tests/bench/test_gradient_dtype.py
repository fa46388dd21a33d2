"""ranks/gradient_dtype.py trains once."""

import pytest

from tests.support.benchmarks import run


@pytest.mark.full_only("trains the click model")
def test_training_by_gradients_of_16_bits_is_measured():
    pytest.importorskip("tensorflow")
    args = "--rows 600 --batch 400 --dim 2 --seeds 1 --cases bfloat16".split()
    results, _ = run("ranks gradient_dtype", *args, are_positive=False)
    assert [each["case"] for each in results] == ["bfloat16"]

"""Formats of rows."""

import numpy as np
import pytest

from sok_lite.engine.dtypes import bfloat16_to_float32, float32_to_bfloat16, row_dtype


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(4)
    values = rng.integers(0, 2**32, 100_003, dtype=np.uint32).view(np.float32)
    bits = float32_to_bfloat16(np, values)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    nan = np.isnan(values)
    np.testing.assert_array_equal(bits[~nan], expected.view(np.uint16)[~nan])
    assert np.isnan(bfloat16_to_float32(np, bits[nan])).all()


def test_values_of_another_kind_are_refused(backend):
    with pytest.raises(TypeError, match=r"must be float32.*int64"):
        row_dtype("float32").to_storage(backend.xp, backend.from_host(np.ones((1, 3), np.int64)))

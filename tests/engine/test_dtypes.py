"""Formats of rows."""

import numpy as np
import pytest

from sok_lite.engine.dtypes import (
    as_float,
    bfloat16_to_float32,
    float32_to_bfloat16,
    key_dtype,
    row_dtype,
)


def test_a_number_that_no_float_holds_is_infinite():
    assert [as_float(n) for n in (10**400, -(10**400), 2**53)] == [np.inf, -np.inf, 2.0**53]


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


def test_float64_and_integers_are_kept_as_they_are(backend):
    for name in ("float64", "int32", "int64", "int8"):
        values = np.array([[1, -2, 100]], name)
        stored = row_dtype(name).to_storage(backend.xp, backend.from_host(values)[:, ::2])
        assert stored.dtype == name and stored.flags.c_contiguous
        np.testing.assert_array_equal(backend.to_host(stored), values[:, ::2])
    # One rounding less than by way of float32, which has 1 + 2**-24 as 1.
    halves = np.array([[1 + 2**-24, 1 + 2**-11 + 2**-24]], np.float64)
    stored = row_dtype("float16").to_storage(np, halves)
    np.testing.assert_array_equal(stored, np.array([[1, 1 + 2**-10]], np.float16))


def test_values_of_another_kind_are_refused(backend):
    with pytest.raises(TypeError, match=r"must be float32.*int64"):
        row_dtype("float32").to_storage(backend.xp, backend.from_host(np.ones((1, 3), np.int64)))


@pytest.mark.parametrize(
    "keys", [[2**63 + 7, 5], [[2**64 - 1], [0]], 2**63 + 7, [], [7, 5]], ids=str
)
def test_integers_of_python_become_keys_with_each_bit(backend, keys):
    found = backend.to_host(key_dtype("uint64").to_int64(backend.xp, keys))
    expected = np.array(keys, np.uint64).view(np.int64)
    assert found.dtype == np.int64 and found.shape == np.shape(keys)
    np.testing.assert_array_equal(found, expected)


def test_integers_of_python_that_do_not_fit_are_refused(backend):
    for keys, text in (([2**63 + 7, 5], "key type that holds"), ([2**64], "more than 64 bits")):
        with pytest.raises(ValueError, match=f"keys must fit int64.*{max(keys)}.*{text}"):
            key_dtype("int64").to_int64(backend.xp, keys)

"""unique, group, last_of_each and gather_rows against plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sok_lite.backend import get_backend
from sok_lite.backend.cpu import CpuBackend
from sok_lite.engine.segments import gather_rows, group, last_of_each, unique
from tests import reference

SIZES = [0, 1, 31, 33, 1000, 100_003]


def random_keys(n, distinct, seed=0):
    return np.random.default_rng(seed).integers(-distinct, distinct, n)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("distinct", [1, 7, 50_000])
def test_unique_keeps_the_order_of_first_occurrence(backend, n, distinct):
    keys = random_keys(n, distinct)
    result = unique(backend, backend.from_host(keys))
    expected_keys, expected_inverse = reference.unique(keys)
    np.testing.assert_array_equal(backend.to_host(result.unique_keys), expected_keys)
    np.testing.assert_array_equal(backend.to_host(result.inverse), expected_inverse)


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)))
def test_unique_of_any_int64(keys):
    backend = get_backend("cpu")
    result = unique(backend, np.array(keys, np.int64))
    expected_keys, expected_inverse = reference.unique(keys)
    assert result.unique_keys.tolist() == expected_keys
    assert result.inverse.tolist() == expected_inverse


def test_unique_is_the_same_for_any_number_of_threads():
    keys = random_keys(100_003, 30_000)
    expected = unique(CpuBackend(num_threads=1), keys)
    for threads in (2, 3, 7):
        result = unique(CpuBackend(num_threads=threads), keys)
        np.testing.assert_array_equal(result.unique_keys, expected.unique_keys)
        np.testing.assert_array_equal(result.inverse, expected.inverse)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("num_groups", [1, 2, 40_000])
def test_group_lists_items_in_ascending_order(backend, n, num_groups):
    labels = np.random.default_rng(1).integers(0, num_groups, n).astype(np.int32)
    offsets, order, *_ = group(backend, backend.from_host(labels), (0, n), (0, num_groups))
    expected = np.argsort(labels, kind="stable")
    ends = np.cumsum(np.bincount(labels, minlength=num_groups))
    np.testing.assert_array_equal(backend.to_host(offsets), np.concatenate([[0], ends]))
    np.testing.assert_array_equal(backend.to_host(order), expected)


def test_group_is_the_same_for_any_number_of_threads():
    labels = np.random.default_rng(2).integers(0, 999, 100_003).astype(np.int32)
    expected = group(CpuBackend(num_threads=1), labels, (0, labels.size), (0, 999))
    for threads in (2, 5):
        result = group(CpuBackend(num_threads=threads), labels, (0, labels.size), (0, 999))
        np.testing.assert_array_equal(result.offsets, expected.offsets)
        np.testing.assert_array_equal(result.order, expected.order)


@pytest.mark.parametrize("n", [0, 1, 33, 5000])
def test_last_of_each_is_the_last_item(backend, n):
    inverse = np.array(reference.unique(random_keys(n, 100))[1], np.int32)
    num_unique = int(inverse.max(initial=-1)) + 1
    last = last_of_each(backend, backend.from_host(inverse), num_unique)
    expected = [max(np.flatnonzero(inverse == u)) for u in range(num_unique)]
    np.testing.assert_array_equal(backend.to_host(last), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16, np.int32])
@pytest.mark.parametrize("dim", [1, 3, 64])
def test_gather_rows_is_indexing(backend, dtype, dim):
    rng = np.random.default_rng(3)
    x = rng.integers(0, 1000, (97, dim)).astype(dtype)
    index = rng.integers(0, 97, 1000).astype(np.int32)
    out = gather_rows(backend, backend.from_host(x), backend.from_host(index))
    np.testing.assert_array_equal(backend.to_host(out), x[index])

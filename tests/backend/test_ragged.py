"""Offsets, views and table numbers of many arrays in one, against plain Python."""

import numpy as np
import pytest

from sok_lite.backend import ragged
from sok_lite.backend.ragged import items_of_tables, numbers_of_tables, split, split_offsets


@pytest.mark.parametrize("count", [0, 1, 26, 255, 256, 257, 5000])
@pytest.mark.parametrize("kind", [list, np.asarray, lambda sizes: np.asarray(sizes, np.int32)])
def test_where_arrays_start_and_views_of_each(kind, count):
    sizes = np.random.default_rng(count).integers(0, 9, count).tolist()
    offsets = split_offsets(kind(sizes))
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [sum(sizes[:i]) for i in range(count + 1)]
    whole = np.arange(sum(sizes))
    parts = split(whole, kind(sizes))
    assert [len(part) for part in parts] == sizes
    assert all(np.shares_memory(part, whole) for part in parts if len(part))
    np.testing.assert_array_equal(np.concatenate([whole[:0], *parts]), whole)


@pytest.mark.parametrize("sizes", [[0], [5], [3, 0, 2], [0, 0, 70, 0], [33, 1] * 20])
def test_items_get_the_numbers_of_their_tables(backend, sizes):
    numbers, sizes = np.arange(-3, 5 * len(sizes) - 3, 5), np.array(sizes)
    is_wanted = [t % 3 != 1 for t in range(len(sizes))]
    of_each, some = np.repeat(numbers, sizes), np.flatnonzero(np.repeat(is_wanted, sizes))
    found = numbers_of_tables(backend, numbers, sizes), items_of_tables(backend, is_wanted, sizes)
    assert [backend.to_host(each).tolist() for each in found] == [of_each.tolist(), some.tolist()]
    # By the kernel, on a CPU too.
    ascending = [first + i for first, n in zip(numbers, sizes, strict=True) for i in range(n)]
    for step, expected in ((0, of_each.tolist()), (1, ascending)):
        made = backend.to_host(ragged._ascending(backend, numbers, sizes, step))
        assert (made.dtype, made.tolist()) == (np.int32, expected)

"""Offsets, views and table numbers of many arrays in one, against plain Python."""

import numpy as np
import pytest

from sok_lite.backend import ragged
from sok_lite.backend.ragged import (
    LINE,
    contiguous,
    items_of_tables,
    new_results,
    repeat_values,
    split,
    split_offsets,
)


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
    found = repeat_values(backend, numbers, sizes), items_of_tables(backend, is_wanted, sizes)
    assert [backend.to_host(each).tolist() for each in found] == [of_each.tolist(), some.tolist()]
    # By the kernel, on a CPU too.
    ascending = [first + i for first, n in zip(numbers, sizes, strict=True) for i in range(n)]
    for step, expected in ((0, of_each.tolist()), (1, ascending)):
        made = backend.to_host(ragged._ascending(backend, numbers, sizes, step))
        assert (made.dtype, made.tolist()) == (np.int32, expected)


@pytest.mark.parametrize("is_given", [False, True])
def test_new_results_begin_on_lines_or_where_they_are_wanted(backend, is_given):
    shapes = list(zip([3, 0, 1, 40, 0], [5, 3, 16, 1, 8], strict=True))
    given = []

    def allocate(shapes):
        given.extend(backend.xp.empty(shape, np.float32) for shape in shapes)
        return given

    results = new_results(backend, shapes, allocate if is_given else None)
    expected = [np.full(shape, i, np.float32) for i, shape in enumerate(shapes)]
    for array, values in zip(results, expected, strict=True):
        assert array.shape == values.shape and array.dtype == np.float32
        array[...] = backend.from_host(values)
    for array, values in zip(results, expected, strict=True):  # none is in another's memory
        np.testing.assert_array_equal(backend.to_host(array), values)
    if is_given:
        assert results is given
    else:
        places = [backend.address(each) for each in results if each.size]
        assert {(place - places[0]) % (4 * LINE) for place in places} == {0}


def test_what_is_not_contiguous_becomes_so(backend):
    array = backend.from_host(np.arange(12, dtype=np.float32).reshape(3, 4))
    first, second = contiguous(backend, [array[:, ::2], array])
    assert first.flags.c_contiguous and second is array
    np.testing.assert_array_equal(backend.to_host(first), [[0, 2], [4, 6], [8, 10]])

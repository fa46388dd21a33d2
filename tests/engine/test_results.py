"""Memory for results lies where it is wanted."""

import numpy as np
import pytest

from sok_lite.engine.results import LINE, contiguous, new_results


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

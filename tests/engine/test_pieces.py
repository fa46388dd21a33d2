"""Many arrays, wherever they lie, count as a list of them."""

import numpy as np
import pytest

from sok_lite.backend.base import F32, I64
from sok_lite.engine.pieces import (
    LINE,
    Pieces,
    Scattered,
    addresses_of,
    contiguous,
    dtypes_of,
    new_results,
    shapes_of,
)

SIZES = [3, 0, 1, 40, 0]


def assert_like_arrays(backend, pieces, expected, dtype):
    assert len(pieces) == len(expected)
    for array, values in zip(pieces, expected, strict=True):
        np.testing.assert_array_equal(backend.to_host(array), values)
    arrays = [pieces[i] for i in range(len(pieces))]
    assert list(shapes_of(pieces)) == shapes_of(arrays) == [each.shape for each in expected]
    assert dtypes_of(pieces) == dtypes_of(arrays) == {dtype}
    told, of_arrays = (addresses_of(backend, each, dtype) for each in (pieces, arrays))
    # An empty array may say anything.
    some = [i for i, each in enumerate(expected) if each.size]
    np.testing.assert_array_equal(told[some], of_arrays[some])
    assert contiguous(backend, pieces) is pieces
    wrong = F32 if dtype == I64 else I64
    with pytest.raises(TypeError, match=rf"array of {wrong}"):
        addresses_of(backend, pieces, wrong)


@pytest.mark.parametrize("as_array", [False, True])
def test_pieces_of_one_dimension(backend, as_array):
    values = np.arange(sum(SIZES))
    sizes = np.array(SIZES) if as_array else SIZES
    pieces = Pieces.of_sizes(backend.from_host(values), sizes)
    assert_like_arrays(backend, pieces, np.split(values, np.cumsum(SIZES)[:-1]), I64)


def test_pieces_of_two_dimensions_fill_an_array(backend):
    expected = [np.full((n, 3), i, np.float32) for i, n in enumerate(SIZES)]
    whole = np.concatenate([each.reshape(-1) for each in expected])
    pieces = Pieces.of(backend.from_host(whole), [each.shape for each in expected])
    assert_like_arrays(backend, pieces, expected, F32)


@pytest.mark.parametrize("is_given", [False, True])
def test_new_results_begin_on_lines_or_where_they_are_wanted(backend, is_given):
    dims = [5, 3, 16, 1, 8]
    expected = [
        np.full((n, dim), i, np.float32) for i, (n, dim) in enumerate(zip(SIZES, dims, strict=True))
    ]
    shapes = [each.shape for each in expected]
    given = []

    def allocate(shapes):
        given.extend(backend.xp.empty(shape, np.float32) for shape in shapes)
        places = np.array([backend.address(each) for each in given], np.int64)
        made = dict(zip(places.tolist(), given, strict=True))
        return Scattered(places, shapes, F32, lambda place, shape: made[place].reshape(shape))

    pieces = new_results(backend, shapes, allocate if is_given else None)
    if not is_given:
        assert all(start % LINE == 0 for start in pieces.starts)
        assert pieces.whole.size % LINE == 0
    some = [piece for piece, each in zip(pieces, expected, strict=True) if each.size]
    for piece, values in zip(some, [each for each in expected if each.size], strict=True):
        piece[...] = backend.from_host(values)
    if is_given:
        for array, values in zip(given, expected, strict=True):
            np.testing.assert_array_equal(backend.to_host(array), values)
    else:
        assert_like_arrays(backend, pieces, expected, F32)
    assert pieces[-2].shape == (40, 1) and [each.shape for each in pieces[1:3]] == shapes[1:3]


def test_what_is_not_contiguous_becomes_so(backend):
    array = backend.from_host(np.arange(12, dtype=np.float32).reshape(3, 4))
    first, second = contiguous(backend, [array[:, ::2], array])
    assert first.flags.c_contiguous and second is array
    np.testing.assert_array_equal(backend.to_host(first), [[0, 2], [4, 6], [8, 10]])


def test_no_array_has_address_0(backend):
    assert addresses_of(backend, None, F32) == 0
    assert addresses_of(backend, [None, None], F32).tolist() == [0, 0]
    assert addresses_of(backend, [], F32).shape == (0,)

"""Arrays that lie in one array count as those that are cut out of it."""

import numpy as np
import pytest

from sok_lite.backend.base import F32, I64
from sok_lite.engine.pieces import (
    LINE,
    Pieces,
    addresses_of,
    contiguous,
    dtypes_of,
    places_of,
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


@pytest.mark.parametrize("has_buffer", [False, True])
def test_new_pieces_begin_on_lines(backend, has_buffer):
    dims = [5, 3, 16, 1, 8]
    places = places_of(np.array(SIZES), np.array(dims))
    assert all(start % LINE == 0 for start in places.starts) and places.size % LINE == 0
    given = []

    def buffer(size):
        given.append(backend.xp.empty(size, np.float32))
        return given[0]

    pieces = Pieces.new(backend, places, buffer if has_buffer else None)
    assert [pieces.whole is each for each in given] == [True] * has_buffer
    expected = [
        np.full((n, dim), i, np.float32) for i, (n, dim) in enumerate(zip(SIZES, dims, strict=True))
    ]
    for piece, values in zip(pieces, expected, strict=True):
        piece[...] = backend.from_host(values)
    assert_like_arrays(backend, pieces, expected, F32)


def test_what_is_not_contiguous_becomes_so(backend):
    array = backend.from_host(np.arange(12, dtype=np.float32).reshape(3, 4))
    first, second = contiguous(backend, [array[:, ::2], array])
    assert first.flags.c_contiguous and second is array
    np.testing.assert_array_equal(backend.to_host(first), [[0, 2], [4, 6], [8, 10]])


def test_no_array_has_address_0(backend):
    assert addresses_of(backend, None, F32) == 0
    assert addresses_of(backend, [None, None], F32).tolist() == [0, 0]
    assert addresses_of(backend, [], F32).shape == (0,)

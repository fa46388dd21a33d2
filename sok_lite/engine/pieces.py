"""Arrays that lie in one array, such as the results of all parts of a call.

What a kernel is told of them are addresses: these are reckoned for all of them at once, and no part
is cut out unless somebody asks for it. A call may have a thousand parts.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm.protocol import split_offsets

Shape = tuple[int, ...]
# Gives (size,) float32, not initialised.
OutputBuffer = Callable[[int], Array]

# Elements of 4 bytes in a line of memory: each result begins on one.
LINE = 16


def up_to_line(size: Any) -> Any:
    """Returns how many elements a result of `size` takes; also of arrays and tensors."""
    return -(-size // LINE) * LINE


class Places(NamedTuple):
    """Where results lie in one array.

    Attributes:
      shapes: of the results.
      starts: (n,) int64, where each begins, in elements.
      size: of all of them.
    """

    shapes: Sequence[Shape]
    starts: np.ndarray
    size: int


def places_of(num_rows: np.ndarray, dims: np.ndarray) -> Places:
    """Returns the places of results (num_rows, dim) that lie one after the other."""
    offsets = split_offsets(up_to_line(num_rows * dims))
    shapes = list(zip(num_rows.tolist(), dims.tolist(), strict=True))
    return Places(shapes, offsets[:-1], int(offsets[-1]))


class Pieces(Sequence[Array]):
    """Arrays that lie in one array.

    Attributes:
      whole: (n,), C-contiguous.
      shapes: of the pieces.
      starts: (n,) int64, where each begins, in elements.
      address: of `whole`; None: nobody has asked yet.
    """

    __slots__ = ("address", "shapes", "starts", "whole")

    def __init__(self, whole: Array, shapes: Sequence[Shape], starts: np.ndarray) -> None:
        self.whole, self.shapes, self.starts = whole, shapes, starts
        self.address: int | None = None

    @staticmethod
    def new(backend: Backend, places: Places, buffer: OutputBuffer | None) -> "Pieces":
        """Returns memory for float32 results.

        Args:
          places: where they lie.
          buffer: gives the memory; None: the backend.
        """
        shapes, starts, size = places
        whole = backend.xp.empty(size, np.float32) if buffer is None else buffer(size)
        return Pieces(whole, shapes, starts)

    @staticmethod
    def of(whole: Array, shapes: Sequence[Shape]) -> "Pieces":
        """Returns pieces that fill an array, one after the other."""
        return Pieces(whole, shapes, split_offsets(list(map(math.prod, shapes)))[:-1])

    @staticmethod
    def of_sizes(whole: Array, sizes: Sequence[int] | np.ndarray) -> "Pieces":
        """Returns pieces of one dimension that fill an array, one after the other."""
        numbers = sizes.tolist() if type(sizes) is np.ndarray else sizes
        return Pieces(whole, list(zip(numbers)), split_offsets(numbers)[:-1])

    def __len__(self) -> int:
        return len(self.shapes)

    @overload
    def __getitem__(self, i: int) -> Array: ...
    @overload
    def __getitem__(self, i: slice) -> list[Array]: ...
    def __getitem__(self, i: int | slice) -> Array | list[Array]:
        if isinstance(i, slice):
            return [self[number] for number in range(*i.indices(len(self)))]
        start, shape = self.starts[i], self.shapes[i]
        return self.whole[start : start + math.prod(shape)].reshape(shape)


def chosen(columns: Iterable[Sequence[Any]], numbers: Sequence[int]) -> list[Any]:
    """Returns what stands in some places of each column."""
    return [[column[i] for i in numbers] for column in columns]


def shapes_of(arrays: Sequence[Array]) -> Sequence[Shape]:
    """Returns the shape of each array."""
    return arrays.shapes if type(arrays) is Pieces else [array.shape for array in arrays]


def dtypes_of(arrays: Sequence[Array]) -> set[np.dtype]:
    """Returns the dtypes that arrays have."""
    return {arrays.whole.dtype} if type(arrays) is Pieces else {each.dtype for each in arrays}


def contiguous(backend: Backend, arrays: Sequence[Array]) -> Sequence[Array]:
    """Returns arrays as C-contiguous ones."""
    if type(arrays) is Pieces or not [a for a in arrays if not a.flags.c_contiguous]:
        return arrays
    return list(map(backend.xp.ascontiguousarray, arrays))


def addresses_of(
    backend: Backend, arrays: Sequence[Array | None] | None, dtype: np.dtype
) -> np.ndarray | int:
    """Returns what `Backend.addresses` does; of None, which stands for no array at all, 0."""
    if arrays is None:
        return 0
    if type(arrays) is not Pieces:
        return backend.addresses(arrays, dtype)
    if arrays.whole.dtype != dtype:
        backend.addresses([arrays.whole], dtype)  # raises
    if arrays.address is None:
        arrays.address = backend.address(arrays.whole)
    return arrays.address + dtype.itemsize * arrays.starts

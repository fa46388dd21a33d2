"""Arrays that lie in one array, such as the results of all parts of a call.

Kernels take their addresses: these are computed for all parts at once, and a part is cut out only
when somebody reads it. A call may have a thousand parts.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm.protocol import split_offsets

Shape = tuple[int, ...]
# Allocates (size,) float32, not initialised.
OutputBuffer = Callable[[int], Array]

# Elements of 4 bytes in a line of memory: each result begins on one.
LINE = 16


def up_to_line(size: Any) -> Any:
    """Returns how many elements a result of `size` takes; also of arrays and tensors."""
    return -(-size // LINE) * LINE


class Places(NamedTuple):
    """The layout of results in one array.

    Attributes:
      shapes: of the results.
      starts: (n,) int64, the first element of each.
      size: elements of the array.
    """

    shapes: Sequence[Shape]
    starts: np.ndarray
    size: int


def places_of(num_rows: np.ndarray, dims: np.ndarray) -> Places:
    """Returns the layout of results (num_rows, dim), each of which begins on a line of 64 bytes."""
    offsets = split_offsets(up_to_line(num_rows * dims))
    shapes = list(zip(num_rows.tolist(), dims.tolist(), strict=True))
    return Places(shapes, offsets[:-1], int(offsets[-1]))


class Pieces(Sequence[Array]):
    """Arrays that lie in one array.

    Attributes:
      whole: (n,), C-contiguous.
      shapes: of the pieces.
      starts: (n,) int64, the first element of each.
      address: of `whole`, in bytes; None: not read yet.
    """

    __slots__ = ("address", "shapes", "starts", "whole")

    def __init__(self, whole: Array, shapes: Sequence[Shape], starts: np.ndarray) -> None:
        self.whole, self.shapes, self.starts = whole, shapes, starts
        self.address: int | None = None

    @staticmethod
    def new(backend: Backend, places: Places, buffer: OutputBuffer | None) -> "Pieces":
        """Returns memory for float32 results.

        Args:
          places: their layout.
          buffer: allocates the memory, (size,) float32; None: the backend does.
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
    """Returns the entries with these numbers of each column, a list for each column."""
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
    """Returns the address of each array, (n,) int64, 0 for None; for no arrays at all (None) 0.

    Raises:
      TypeError: one is no C-contiguous array of this backend with that dtype.
    """
    if arrays is None:
        return 0
    if type(arrays) is not Pieces:
        return backend.addresses(arrays, dtype)
    if arrays.whole.dtype != dtype:
        backend.addresses([arrays.whole], dtype)  # raises
    if arrays.address is None:
        arrays.address = backend.address(arrays.whole)
    return arrays.address + dtype.itemsize * arrays.starts

"""Many arrays of one dtype, such as the results of all parts of a call.

Kernels take their addresses: these are computed for all parts at once, and an array is made only
when somebody reads it. A call may have a thousand parts.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm.protocol import split_offsets

Shape = tuple[int, ...]
# Allocates float32 arrays of some shapes, not initialised.
Allocate = Callable[[Sequence[Shape]], "Sequence[Array]"]

# Elements of 4 bytes in a line of memory: each result begins on one.
LINE = 16


def up_to_line(size: Any) -> Any:
    """Returns how many elements a result of `size` takes; also of arrays."""
    return -(-size // LINE) * LINE


class ManyArrays(Sequence[Array]):
    """C-contiguous arrays of one dtype, each of which is made when somebody reads it.

    Attributes:
      shapes: of the arrays.
      dtype: of all of them.
    """

    __slots__ = ("dtype", "shapes")

    def __init__(self, shapes: Sequence[Shape], dtype: np.dtype) -> None:
        self.shapes, self.dtype = shapes, dtype

    @abstractmethod
    def addresses(self, backend: Backend) -> np.ndarray:
        """Returns the address of each, (n,) int64."""

    @abstractmethod
    def _array(self, i: int) -> Array:
        """Returns one of them."""

    def __len__(self) -> int:
        return len(self.shapes)

    @overload
    def __getitem__(self, i: int) -> Array: ...
    @overload
    def __getitem__(self, i: slice) -> list[Array]: ...
    def __getitem__(self, i: int | slice) -> Array | list[Array]:
        if isinstance(i, slice):
            return [self._array(number) for number in range(*i.indices(len(self)))]
        return self._array(range(len(self.shapes))[i])


class Pieces(ManyArrays):
    """Arrays that lie in one array.

    Attributes:
      whole: (n,), C-contiguous.
      starts: (n,) int64, the first element of each.
    """

    __slots__ = ("_address", "starts", "whole")

    def __init__(self, whole: Array, shapes: Sequence[Shape], starts: np.ndarray) -> None:
        super().__init__(shapes, whole.dtype)
        self.whole, self.starts = whole, starts
        self._address: int | None = None  # of `whole`, in bytes; None: not read yet

    @staticmethod
    def on_lines(shapes: Sequence[Shape], empty: Callable[[int], Array]) -> "Pieces":
        """Returns memory for results, each of which begins on a line of 64 bytes.

        Args:
          empty: allocates (size,) float32, not initialised.
        """
        offsets = split_offsets(up_to_line(np.array(list(map(math.prod, shapes)), np.int64)))
        return Pieces(empty(int(offsets[-1])), shapes, offsets[:-1])

    @staticmethod
    def of(whole: Array, shapes: Sequence[Shape]) -> "Pieces":
        """Returns pieces that fill an array, one after the other."""
        return Pieces(whole, shapes, split_offsets(list(map(math.prod, shapes)))[:-1])

    @staticmethod
    def of_sizes(whole: Array, sizes: Sequence[int] | np.ndarray) -> "Pieces":
        """Returns pieces of one dimension that fill an array, one after the other."""
        numbers = sizes.tolist() if type(sizes) is np.ndarray else sizes
        return Pieces(whole, list(zip(numbers)), split_offsets(numbers)[:-1])

    def addresses(self, backend: Backend) -> np.ndarray:
        if self._address is None:
            (self._address,) = backend.addresses([self.whole], self.dtype).tolist()
        return self._address + self.dtype.itemsize * self.starts

    def _array(self, i: int) -> Array:
        start, shape = self.starts[i], self.shapes[i]
        return self.whole[start : start + math.prod(shape)].reshape(shape)


class Scattered(ManyArrays):
    """Arrays that lie anywhere.

    Args:
      places: the address of each, (n,) int64.
      shapes, dtype: of the arrays.
      make: makes the array of an address and a shape, which owns the memory; it is kept with it.
    """

    __slots__ = ("_make", "_places")

    def __init__(
        self,
        places: np.ndarray,
        shapes: Sequence[Shape],
        dtype: np.dtype,
        make: Callable[[int, Shape], Array],
    ) -> None:
        super().__init__(shapes, dtype)
        self._places, self._make = places, make

    def addresses(self, backend: Backend) -> np.ndarray:
        return self._places

    def _array(self, i: int) -> Array:
        return self._make(int(self._places[i]), self.shapes[i])


def new_results(
    backend: Backend, shapes: Sequence[Shape], allocate: Allocate | None = None
) -> Sequence[Array]:
    """Returns memory for float32 results, not initialised.

    Args:
      allocate: of whom it is had; None: of the backend, as one array.
    """
    if allocate is not None:
        return allocate(shapes)
    return Pieces.on_lines(shapes, lambda size: backend.xp.empty(size, np.float32))


def chosen(columns: Iterable[Sequence[Any]], numbers: Sequence[int]) -> list[Any]:
    """Returns the entries with these numbers of each column, a list for each column."""
    return [[column[i] for i in numbers] for column in columns]


def shapes_of(arrays: Sequence[Array]) -> Sequence[Shape]:
    """Returns the shape of each array."""
    return arrays.shapes if isinstance(arrays, ManyArrays) else [array.shape for array in arrays]


def dtypes_of(arrays: Sequence[Array]) -> set[np.dtype]:
    """Returns the dtypes that arrays have."""
    return {arrays.dtype} if isinstance(arrays, ManyArrays) else {each.dtype for each in arrays}


def contiguous(backend: Backend, arrays: Sequence[Array]) -> Sequence[Array]:
    """Returns arrays as C-contiguous ones."""
    if isinstance(arrays, ManyArrays) or not [a for a in arrays if not a.flags.c_contiguous]:
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
    if not isinstance(arrays, ManyArrays):
        return backend.addresses(arrays, dtype)
    if arrays.dtype != dtype:
        backend.addresses(list(arrays), dtype)  # raises
    return arrays.addresses(backend)

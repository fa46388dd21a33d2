"""Arrays of several dtypes as one array of int64, which a graph carries as one tensor."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend

Empty = Callable[[tuple[int, ...]], Array]


class Packing(NamedTuple):
    """How arrays are packed.

    Attributes:
      empty: allocates int64 memory of a shape; None: the backend does.
      at_hand: (n,) each, that `Unpacking` will have too: an array that lies in the memory of one,
        and has its dtype, is not copied.
      has_splits: of a `PoolingContext`: whether its row splits are packed.
      keep_header: takes the header, (k,) int64 on the host, which the array then does not have;
        None: the array has it.
    """

    empty: Empty | None = None
    at_hand: Sequence[Array] = ()
    has_splits: bool = True
    keep_header: Callable[[np.ndarray], None] | None = None


class Unpacking(NamedTuple):
    """What is known of packed arrays when they are unpacked.

    Attributes:
      at_hand: equal to those of `Packing`.
      splits_of: where `Packing` left the row splits out: gives those of all parts, by the items of
        each.
      header: what `keep_header` took; None: the array has it, and reading it waits.
    """

    at_hand: Sequence[Array] = ()
    splits_of: Callable[[list[int]], Array] | None = None
    header: np.ndarray | None = None


WHOLE, OF_WHOLE = Packing(), Unpacking()

# Of what `pack_arrays` writes: another form gets another number.
_VERSION = 10
# Dtypes that the arrays may have, by their number in a packed one.
_DTYPES = tuple(
    np.dtype(name)
    for name in ("int64", "int32", "float32", "float16", "uint16", "uint32", "float64")
)
# Per array: number of its dtype, length, row length (-1: one dimension).
_HEADER = 3
# In place of the dtype: there is no such array; or it is a piece of an array at hand, -2 for the
# first, -3 for the second and so on, and the row length says where it starts there.
_NONE, _AT_HAND = -1, -2
_NOTHING = (_NONE, _NONE, _NONE)


def pack_arrays(
    backend: Backend,
    num_ranks: int,
    numbers: np.ndarray,
    arrays: Sequence[Array | None],
    packing: Packing,
) -> Array:
    """Returns numbers and arrays as one int64 array: a header, then all bytes, padded to 8.

    Args:
      num_ranks: of the job, which `unpack_arrays` compares.
      numbers: int64, on the host: the host reads them when they are unpacked.
      arrays: of one or two dimensions; None stands for a missing one.
    """
    empty, keep_header = packing.empty, packing.keep_header
    known = [(backend.address(each), each.nbytes, each.dtype) for each in packing.at_hand]
    numbers = numbers.reshape(-1)
    first = 2 + numbers.size
    # `header_size`, written out here and below: each step comes here, and its calls are counted.
    size = first + _HEADER * len(arrays) if keep_header is None else 0
    lengths: list[int] = []
    copies = []
    for array in arrays:
        if array is None:
            lengths += _NOTHING
            continue
        found = _found_in(backend, known, array)
        if found is None:
            code, last = _DTYPES.index(array.dtype), array.shape[1] if array.ndim == 2 else -1
            copies.append((size, array))
            size += -(-array.nbytes // 8)
        else:
            code, last = _AT_HAND - found[0], found[1]
        lengths += (code, array.shape[0], last)
    packed = backend.xp.empty(size, np.int64) if empty is None else empty((size,))
    end = first + len(lengths)
    header = np.empty(end, np.int64)
    header[:2] = _VERSION, num_ranks
    header[2:first], header[first:] = numbers, lengths
    if keep_header is None:
        packed[:end] = backend.from_host(header)
    else:
        keep_header(header)
    for start, array in copies:
        if array.size:
            flat = backend.xp.ascontiguousarray(array).reshape(-1)
            packed[start:].view(array.dtype)[: array.size] = flat
    return packed


def header_size(num_numbers: int, num_arrays: int) -> int:
    """Returns the length of the header of so many numbers and arrays."""
    return 2 + num_numbers + _HEADER * num_arrays


def _found_in(
    backend: Backend, at_hand: Sequence[tuple[int, int, np.dtype]], array: Array
) -> tuple[int, int] | None:
    """Returns in which array at hand an array lies, and where in it; None: in none.

    Args:
      at_hand: address, bytes and dtype of each.
    """
    if at_hand and array.ndim == 1 and array.size:
        address = backend.address(array)
        for i, (start, num_bytes, dtype) in enumerate(at_hand):
            if array.dtype == dtype and start <= address < start + num_bytes:
                return i, (address - start) // array.itemsize
    return None


def unpack_arrays(
    backend: Backend,
    num_ranks: int,
    packed: Array,
    num_numbers: int,
    num_arrays: int,
    unpacking: Unpacking,
) -> tuple[np.ndarray, list[Any]]:
    """Returns what `pack_arrays` packed; the arrays are views of `packed` and of those at hand.

    Args:
      num_ranks: of the job.

    Returns:
      ((num_numbers,) int64 on the host, num_arrays arrays or None).

    Raises:
      ValueError: another version wrote it, or another number of ranks.
    """
    first, start, header = 2 + num_numbers, 0, unpacking.header
    size = first + _HEADER * num_arrays
    if header is None:
        start, header = size, backend.to_host(packed[:size])
    if header[:2].tolist() != [_VERSION, num_ranks] or header.size < size:
        version = f"version {header[0]}" if len(header) else "nothing"
        ranks = f" of {header[1]} ranks" if len(header) > 1 else ""
        raise ValueError(
            f"Arrays packed by version {_VERSION} of {num_ranks} ranks were expected. "
            f"Received: {version}{ranks}, {len(header)} numbers."
        )
    arrays: list[Any] = [None] * num_arrays
    for i, (code, length, row_length) in enumerate(header[first:].reshape(-1, _HEADER).tolist()):
        if code == _NONE:
            continue
        if code <= _AT_HAND:
            arrays[i] = unpacking.at_hand[_AT_HAND - code][row_length : row_length + length]
            continue
        dtype = _DTYPES[code]
        size = length if row_length < 0 else length * row_length
        words = -(-size * dtype.itemsize // 8)
        flat = packed[start : start + words]
        flat = flat if code == 0 else flat.view(dtype)[:size]
        arrays[i] = flat if row_length < 0 else flat.reshape(length, row_length)
        start += words
    return header[2:first], arrays

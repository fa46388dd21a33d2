"""What the way back of a lookup needs, and how it becomes one array."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm import Communicator
from sok_lite.engine.exchange import Route
from sok_lite.engine.segments import cut

Empty = Callable[[tuple[int, ...]], Array]

# Of what `pack` writes: another form gets another number.
_VERSION = 3
# Dtypes that a trail may hold, by their number in a packed one.
_DTYPES = tuple(
    np.dtype(name) for name in ("int64", "int32", "float32", "float16", "uint16", "uint32")
)
# Per array: number of its dtype, length, row length (-1: one dimension).
_HEADER = 3
# In place of the dtype: there is no such array; or it is a piece of an array at hand, -2 for the
# first, -3 for the second and so on, and the row length says where it starts there.
_NONE, _AT_HAND = -1, -2


class Trail(NamedTuple):
    """What the way back of a lookup needs. Parts lie one after another in its arrays.

    Attributes:
      route: how the keys travelled.
      numbers: (4, num_parts) int64, on the host: of each part the items of this rank's batch, its
        rows, the keys that this rank was asked, and the generation of the table when it gave their
        row numbers.
      row_splits: (rows + num_parts,) int64, those of each part from 0 on.
      inverse: (items,) int32, which of the keys that this rank asked for each item has, numbered
        over all parts; None: each item asked by itself, as on one rank.
      keys: (m,) int64, the keys that this rank was asked; they may repeat.
      rows: (m,) uint32, their row numbers, or absent.
      sources: of each part (u, dim), the rows of the keys that this rank asked for; None where
        there are no weights.
    """

    route: Route
    numbers: np.ndarray
    row_splits: Array
    inverse: Array | None
    keys: Array
    rows: Array
    sources: list[Array | None]

    @property
    def num_items(self) -> np.ndarray:
        """Items of this rank's batch, for each part."""
        return self.numbers[0]

    @property
    def batch_sizes(self) -> np.ndarray:
        """Rows of this rank's batch, for each part."""
        return self.numbers[1]

    @property
    def num_owned(self) -> np.ndarray:
        """Keys that this rank was asked, for each part; one that repeats each time."""
        return self.numbers[2]

    @property
    def generations(self) -> np.ndarray:
        """Of the table of each part."""
        return self.numbers[3]

    def splits_of_parts(self) -> list[Array]:
        """Returns the row splits of each part, (its rows + 1,) int64."""
        return cut(self.row_splits, self.batch_sizes + 1)


def pack(
    backend: Backend, trail: Trail, empty: Empty | None = None, at_hand: Sequence[Array] = ()
) -> Array:
    """Returns a trail as one int64 array: a header, then each array's bytes, padded to 8.

    Args:
      empty: gives int64 memory of a shape; None: the backend's.
      at_hand: (n,) int64 each, that `unpack` is given as well: what lies in their memory is not
        copied.
    """
    arrays: list[Array | None] = [backend.from_host(trail.route.pack())]
    arrays += [trail.row_splits, trail.inverse, trail.keys, trail.rows, *trail.sources]
    first = 1 + trail.numbers.size
    size = first + _HEADER * len(arrays)
    header = np.full(size, _NONE, np.int64)
    header[0], header[1:first] = _VERSION, trail.numbers.reshape(-1)
    copies = []
    for i, array in enumerate(arrays):
        if array is None:
            continue
        found = _found_in(backend, at_hand, array)
        if found is None:
            code, last = _DTYPES.index(array.dtype), array.shape[1] if array.ndim == 2 else -1
            copies.append((size, array))
            size += -(-array.nbytes // 8)
        else:
            code, last = _AT_HAND - found[0], found[1]
        at = first + _HEADER * i
        header[at : at + _HEADER] = code, array.shape[0], last
    packed = backend.xp.empty(size, np.int64) if empty is None else empty((size,))
    packed[: len(header)] = backend.from_host(header)
    for start, array in copies:
        if array.size:
            target = packed[start:].view(np.uint8)[: array.nbytes]
            target[...] = backend.xp.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def _found_in(backend: Backend, at_hand: Sequence[Array], array: Array) -> tuple[int, int] | None:
    """Returns in which array at hand an array lies, and where in it; None: in none."""
    if array.dtype == np.int64 and array.size:
        for i, whole in enumerate(at_hand):
            place = backend.address(array) - backend.address(whole)
            if 0 <= place < whole.nbytes:
                return i, place // 8
    return None


def unpack(
    backend: Backend,
    comm: Communicator,
    packed: Array,
    num_parts: int,
    at_hand: Sequence[Array] = (),
) -> Trail:
    """Returns the trail that `pack` wrote; its arrays are views of `packed` and of `at_hand`.

    Args:
      at_hand: equal to what `pack` was given.

    Raises:
      ValueError: another version wrote it.
    """
    first = 1 + 4 * num_parts
    start = first + _HEADER * (5 + num_parts)
    header = backend.to_host(packed[:start])
    if int(header[0]) != _VERSION:
        raise ValueError(
            f"A packed trail of version {_VERSION} was expected. Received: version {header[0]}."
        )
    arrays: list[Any] = []
    for code, length, row_length in header[first:].reshape(-1, _HEADER).tolist():
        if code == _NONE:
            arrays.append(None)
            continue
        if code <= _AT_HAND:
            arrays.append(at_hand[_AT_HAND - code][row_length : row_length + length])
            continue
        shape = (length,) if row_length < 0 else (length, row_length)
        num_bytes = _DTYPES[code].itemsize * length * max(1, abs(row_length))
        words = -(-num_bytes // 8)
        flat = packed[start : start + words].view(np.uint8)[:num_bytes]
        arrays.append(flat.view(_DTYPES[code]).reshape(shape))
        start += words
    route, row_splits, inverse, keys, rows, *sources = arrays
    numbers = header[1:first].reshape(4, num_parts)
    unpacked = Route.unpack(backend.to_host(route), backend, comm)
    return Trail(unpacked, numbers, row_splits, inverse, keys, rows, sources)

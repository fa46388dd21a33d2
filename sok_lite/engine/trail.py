"""What the way back of a lookup needs, and how it becomes one array."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm import Communicator
from sok_lite.engine.exchange import Route
from sok_lite.engine.segments import cut

Empty = Callable[[tuple[int, ...]], Array]
# Gives memory for float32 results of some shapes.
Room = Callable[[Sequence[tuple[int, ...]]], Sequence[Array]]

# Of what `pack` writes: another form gets another number.
_VERSION = 2
# Dtypes that a trail may hold, by their number in a packed one.
_DTYPES = tuple(
    np.dtype(name) for name in ("int64", "int32", "float32", "float16", "uint16", "uint32")
)
# Per array: number of its dtype (-1: no array), length, row length (-1: one dimension).
_HEADER = 3


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


def pack(backend: Backend, trail: Trail, empty: Empty | None = None) -> Array:
    """Returns a trail as one int64 array: a header, then each array's bytes, padded to 8.

    Args:
      empty: gives int64 memory of a shape; None: the backend's.
    """
    arrays: list[Array | None] = [backend.from_host(trail.route.pack())]
    arrays += [trail.row_splits, trail.inverse, trail.keys, trail.rows, *trail.sources]
    header, words = [_VERSION, *trail.numbers.reshape(-1).tolist()], []
    for array in arrays:
        if array is None:
            header += [-1, 0, -1]
            words.append(0)
            continue
        row_length = array.shape[1] if array.ndim == 2 else -1
        header += [_DTYPES.index(array.dtype), array.shape[0], row_length]
        words.append(-(-array.nbytes // 8))
    size = len(header) + sum(words)
    packed = backend.xp.empty(size, np.int64) if empty is None else empty((size,))
    packed[: len(header)] = backend.from_host(np.array(header, np.int64))
    start = len(header)
    for array, length in zip(arrays, words, strict=True):
        if array is not None and array.size:
            target = packed[start : start + length].view(np.uint8)[: array.nbytes]
            target[...] = backend.xp.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += length
    return packed


def unpack(backend: Backend, comm: Communicator, packed: Array, num_parts: int) -> Trail:
    """Returns the trail that `pack` wrote; its arrays are views of `packed`.

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
        if code < 0:
            arrays.append(None)
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

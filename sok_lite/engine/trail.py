"""What the way back of a lookup needs, and how it becomes one array."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm import Communicator
from sok_lite.engine.exchange import Route

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
_ARRAYS_PER_TABLE = 5


class TableTrail(NamedTuple):
    """What the gradient of one table needs.

    Attributes:
      inverse: (n,) int32, which of the keys that this rank asked for each item has; None: each item
        asked by itself, as on one rank.
      row_splits: (batch + 1,) int64.
      keys: (m,) int64, the keys that ranks asked of this one; they may repeat.
      rows: (m,) uint32, their row numbers, or absent.
      source: (u, dim), the rows of the keys that this rank asked for; None where there are no
        weights.
      generation: of the table when it gave the row numbers.
    """

    inverse: Array | None
    row_splits: Array
    keys: Array
    rows: Array
    source: Array | None
    generation: int

    @property
    def num_items(self) -> int:
        """Items of this rank's batch."""
        return len(self.keys) if self.inverse is None else len(self.inverse)


class Trail(NamedTuple):
    """What the way back needs: how the keys travelled, and each table's part."""

    route: Route
    tables: list[TableTrail]


def pack(backend: Backend, trail: Trail, empty: Empty | None = None) -> Array:
    """Returns a trail as one int64 array: a header, then each array's bytes, padded to 8.

    Args:
      empty: gives int64 memory of a shape; None: the backend's.
    """
    arrays: list[Array | None] = [backend.from_host(trail.route.pack())]
    generations = []
    for *way, generation in trail.tables:
        arrays.extend(way)
        generations.append(generation)
    header, words = [_VERSION, *generations], []
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


def unpack(backend: Backend, comm: Communicator, packed: Array, num_tables: int) -> Trail:
    """Returns the trail that `pack` wrote; its arrays are views of `packed`.

    Raises:
      ValueError: another version wrote it.
    """
    count = 1 + _ARRAYS_PER_TABLE * num_tables
    start = 1 + num_tables + _HEADER * count
    version, *numbers = backend.to_host(packed[:start]).tolist()
    if version != _VERSION:
        raise ValueError(
            f"A packed trail of version {_VERSION} was expected. Received: version {version}."
        )
    generations, numbers = numbers[:num_tables], numbers[num_tables:]
    arrays: list[Any] = []
    for i in range(0, len(numbers), _HEADER):
        code, length, row_length = numbers[i : i + _HEADER]
        if code < 0:
            arrays.append(None)
            continue
        shape = (length,) if row_length < 0 else (length, row_length)
        num_bytes = _DTYPES[code].itemsize * length * max(1, abs(row_length))
        words = -(-num_bytes // 8)
        flat = packed[start : start + words].view(np.uint8)[:num_bytes]
        arrays.append(flat.view(_DTYPES[code]).reshape(shape))
        start += words
    route = Route.unpack(backend.to_host(arrays[0]), backend, comm)
    tables = []
    for i, generation in enumerate(generations):
        inverse, row_splits, keys, rows, source = arrays[1 + i * _ARRAYS_PER_TABLE :][
            :_ARRAYS_PER_TABLE
        ]
        tables.append(TableTrail(inverse, row_splits, keys, rows, source, generation))
    return Trail(route, tables)

"""The context that a lookup leaves for its gradient, also packed into one array."""

from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm import Communicator
from sok_lite.engine.packed import OF_WHOLE, WHOLE, Packing, Unpacking
from sok_lite.engine.pooling_context import (
    PoolingContext,
    header_size_alone,
    pack_pooling,
    unpack_pooling,
)

# What is packed beside the pooling: rows of numbers, and arrays.
_NUMBERS, _ARRAYS = 3, 2


class BackwardContext(NamedTuple):
    """The context that a lookup leaves for its gradient. Parts lie one after another in its arrays.

    Attributes:
      pooling: how rows were pooled and keys were sent to their owners.
      found: (3, num_parts) int64, on the host: of the table of each part its row_epoch when the
        row numbers were found, how many of the keys of this call had no row, and the number of the
        lookup, 0 if it inserts nothing.
      keys: (m,) int64, the keys that this rank received, `pooling.route.num_received` of each
        part; they may repeat.
      rows: (m,) uint32, their row numbers, or NO_ROW.
    """

    pooling: PoolingContext
    found: np.ndarray
    keys: Array
    rows: Array


def pack(backend: Backend, context: BackwardContext, packing: Packing = WHOLE) -> Array:
    """Returns a context as one int64 array, a header and then the bytes of all arrays."""
    arrays = [context.keys, context.rows]
    return pack_pooling(backend, context.pooling, context.found, arrays, packing)


def header_size(num_parts: int) -> int:
    """Returns the length of the header of a context of one rank."""
    return header_size_alone(num_parts, _NUMBERS, _ARRAYS)


def unpack(
    backend: Backend,
    comm: Communicator,
    packed: Array,
    num_parts: int,
    unpacking: Unpacking = OF_WHOLE,
) -> BackwardContext:
    """Returns the context that `pack` wrote; its arrays are views of `packed` and of those at hand.

    Raises:
      ValueError: another version wrote it, or another number of ranks.
    """
    pooling, found, arrays = unpack_pooling(
        backend, comm, packed, num_parts, _NUMBERS, _ARRAYS, unpacking
    )
    return BackwardContext(pooling, found, *arrays)

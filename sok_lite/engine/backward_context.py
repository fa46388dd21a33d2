"""What the way back of a lookup needs, and how it becomes one array."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm import Communicator
from sok_lite.engine.packed import Empty
from sok_lite.engine.pooling_context import (
    PoolingContext,
    SplitsOf,
    pack_pooling,
    unpack_pooling,
)


class BackwardContext(NamedTuple):
    """What the way back of a lookup needs. Parts lie one after another in its arrays.

    Attributes:
      pooling: the way to the owners of the keys.
      found: (3, num_parts) int64, on the host: of the table of each part its row_epoch when it
        gave the row numbers, how many of the keys it was asked in this call had no row, and the
        number of that lookup, 0 if it inserted none.
      keys: (m,) int64, the keys that this rank was asked, `pooling.route.num_received` of each
        part; they may repeat.
      rows: (m,) uint32, their row numbers, or NO_ROW.
    """

    pooling: PoolingContext
    found: np.ndarray
    keys: Array
    rows: Array


def pack(
    backend: Backend,
    context: BackwardContext,
    empty: Empty | None = None,
    at_hand: Sequence[Array] = (),
    has_splits: bool = True,
) -> Array:
    """Returns a context as one int64 array; see `pack_pooling`."""
    arrays = [context.keys, context.rows]
    return pack_pooling(backend, context.pooling, context.found, arrays, empty, at_hand, has_splits)


def unpack(
    backend: Backend,
    comm: Communicator,
    packed: Array,
    num_parts: int,
    at_hand: Sequence[Array] = (),
    splits_of: SplitsOf | None = None,
) -> BackwardContext:
    """Returns the context that `pack` wrote; its arrays are views of `packed` and of `at_hand`.

    Args:
      at_hand: equal to what `pack` was given.
      splits_of: gives the row splits where they were not packed; see `unpack_pooling`.

    Raises:
      ValueError: another version wrote it, or another number of ranks.
    """
    pooling, found, arrays = unpack_pooling(
        backend, comm, packed, num_parts, 3, 2, at_hand, splits_of
    )
    return BackwardContext(pooling, found, *arrays)

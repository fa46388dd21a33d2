"""The context that a lookup leaves for its gradient, also packed into one array."""

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
    """What the gradient of a lookup needs. Parts lie one after another in its arrays.

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


def pack(
    backend: Backend,
    context: BackwardContext,
    empty: Empty | None = None,
    at_hand: Sequence[Array] = (),
    has_splits: bool = True,
) -> Array:
    """Returns a context as one int64 array, a header and then the bytes of all arrays.

    Args:
      empty: allocates int64 memory of a shape; None: the backend does.
      at_hand: (n,) int64 each, that `unpack` will be given too: arrays of the context that lie in
        their memory are not copied.
      has_splits: whether the row splits are packed; if not, `unpack` takes them from its caller.
    """
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
      at_hand: equal to the `at_hand` of `pack`.
      splits_of: returns the row splits; called where they were not packed.

    Raises:
      ValueError: another version wrote it, or another number of ranks.
    """
    pooling, found, arrays = unpack_pooling(
        backend, comm, packed, num_parts, 3, 2, at_hand, splits_of
    )
    return BackwardContext(pooling, found, *arrays)

"""The context that a lookup leaves for its gradient, also packed into one array."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm import Communicator
from sok_lite.engine.packed import Empty, KeepHeader
from sok_lite.engine.pooling_context import (
    PoolingContext,
    SplitsOf,
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


def pack(
    backend: Backend,
    context: BackwardContext,
    empty: Empty | None = None,
    at_hand: Sequence[Array] = (),
    has_splits: bool = True,
    keep_header: KeepHeader | None = None,
) -> Array:
    """Returns a context as one int64 array, a header and then the bytes of all arrays.

    Args:
      empty: allocates int64 memory of a shape; None: the backend does.
      at_hand: (n,) each, that `unpack` will be given too: arrays of the context that lie in their
        memory are not copied.
      has_splits: whether the row splits are packed; if not, `unpack` takes them from its caller.
      keep_header: takes the header, (k,) int64 on the host, which the array then does not have.
    """
    arrays, more = [context.keys, context.rows], (empty, at_hand, has_splits, keep_header)
    return pack_pooling(backend, context.pooling, context.found, arrays, *more)


def header_size(num_parts: int) -> int:
    """Returns the length of the header of a context of one rank."""
    return header_size_alone(num_parts, _NUMBERS, _ARRAYS)


def unpack(
    backend: Backend,
    comm: Communicator,
    packed: Array,
    num_parts: int,
    at_hand: Sequence[Array] = (),
    splits_of: SplitsOf | None = None,
    header: np.ndarray | None = None,
) -> BackwardContext:
    """Returns the context that `pack` wrote; its arrays are views of `packed` and of `at_hand`.

    Args:
      at_hand: equal to the `at_hand` of `pack`.
      splits_of: returns the row splits; called where they were not packed.
      header: what `keep_header` took; None: the packed array has it, and reading it waits.

    Raises:
      ValueError: another version wrote it, or another number of ranks.
    """
    pooling, found, arrays = unpack_pooling(
        backend, comm, packed, num_parts, _NUMBERS, _ARRAYS, at_hand, splits_of, header
    )
    return BackwardContext(pooling, found, *arrays)

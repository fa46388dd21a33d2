"""The context of a pooled batch: what takes its gradient to the owners of the keys, also packed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm import Communicator
from sok_lite.engine.batch import Batch
from sok_lite.engine.packed import Packing, Unpacking, header_size, pack_arrays, unpack_arrays
from sok_lite.engine.pieces import Pieces
from sok_lite.engine.route import Route


class PoolingContext(NamedTuple):
    """How rows were pooled and keys were sent. Parts lie one after another in its arrays.

    Attributes:
      route: how the keys were sent to their owners.
      numbers: (2, num_parts) int64, on the host: items and rows of each part of this rank's batch.
      row_splits: (rows + num_parts,) int64, those of all parts, each of which begins with 0.
      inverse: (items,) int32, the number of the key of each item among those that this rank sent,
        over all parts; None on one rank, where no key is sent.
      sources: of each part with weights (u, dim), the rows of the keys that this rank sent, or, on
        one rank, (n, dim), the rows of its items; None of the others.
    """

    route: Route
    numbers: np.ndarray
    row_splits: Array
    inverse: Array | None
    sources: list[Array | None]

    @staticmethod
    def of(
        route: Route, batch: Batch, inverse: Array | None, sources: list[Array | None]
    ) -> "PoolingContext":
        """Returns the context of a batch."""
        numbers = np.array([batch.layout.sizes, batch.layout.num_rows], np.int64)
        return PoolingContext(route, numbers, batch.row_splits, inverse, sources)

    def splits_of_parts(self) -> Pieces:
        """Returns the row splits of each part, (its rows + 1,) int64."""
        return Pieces.of_sizes(self.row_splits, self.numbers[1] + 1)


def pack_pooling(
    backend: Backend,
    pooling: PoolingContext,
    numbers: np.ndarray,
    arrays: Sequence[Array],
    packing: Packing,
) -> Array:
    """Returns a context, with further numbers and arrays, as one int64 array.

    Args:
      numbers: (k, num_parts) int64 on the host.
    """
    route, told, order = pooling.route, [pooling.numbers.reshape(-1), numbers.reshape(-1)], None
    if route.comm.size > 1:  # of one rank the other numbers tell it
        told.append(route.numbers)
        order = route.order
    row_splits = pooling.row_splits if packing.has_splits else None
    arrays = [order, row_splits, pooling.inverse, *arrays, *pooling.sources]
    return pack_arrays(backend, route.comm.size, np.concatenate(told), arrays, packing)


def header_size_alone(num_parts: int, num_numbers: int, num_arrays: int) -> int:
    """Returns the length of the header of `pack_pooling` on one rank.

    Args:
      num_numbers, num_arrays: as of `unpack_pooling`.
    """
    return header_size((2 + num_numbers) * num_parts, 3 + num_arrays + num_parts)


def unpack_pooling(
    backend: Backend,
    comm: Communicator,
    packed: Array,
    num_parts: int,
    num_numbers: int,
    num_arrays: int,
    unpacking: Unpacking,
) -> tuple[PoolingContext, np.ndarray, list[Array]]:
    """Returns the arguments of `pack_pooling`; arrays are views of `packed` and of those at hand.

    Args:
      num_numbers: k.
      num_arrays: number of arrays beside the context.

    Raises:
      ValueError: another version wrote it, or another number of ranks.
    """
    own = (2 + num_numbers) * num_parts
    of_route = 0 if comm.size == 1 else Route.num_numbers(comm.size, num_parts)
    told, (order, row_splits, inverse, *arrays) = unpack_arrays(
        backend, comm.size, packed, own + of_route, 3 + num_arrays + num_parts, unpacking
    )
    numbers = told[:own].reshape(2 + num_numbers, num_parts)
    if comm.size == 1:
        route = Route.alone(backend, comm, numbers[0])
    else:
        route = Route.of(backend, comm, told[own:], order)
    if unpacking.splits_of is not None:
        row_splits = unpacking.splits_of(numbers[0].tolist())
    pooling = PoolingContext(route, numbers[:2], row_splits, inverse, arrays[num_arrays:])
    return pooling, numbers[2:], arrays[:num_arrays]

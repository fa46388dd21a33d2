"""What the way back of a lookup needs, and how it becomes one array."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm import Communicator
from sok_lite.engine.exchange import Route
from sok_lite.engine.packed import Empty, pack_arrays, unpack_arrays
from sok_lite.engine.segments import cut

NUM_NUMBERS = 6


class Trail(NamedTuple):
    """What the way back of a lookup needs. Parts lie one after another in its arrays.

    Attributes:
      route: how the keys travelled.
      numbers: (NUM_NUMBERS, num_parts) int64, on the host: of each part the items of this rank's
        batch, its rows, the keys that this rank was asked, the generation of the table when it gave
        their row numbers, how many of what the table was asked in this call had no row, and the
        number of that lookup, 0 if it inserted none.
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

    @property
    def num_absent(self) -> np.ndarray:
        """Of the table of each part."""
        return self.numbers[4]

    @property
    def stamps(self) -> np.ndarray:
        """Of the table of each part."""
        return self.numbers[5]

    def splits_of_parts(self) -> list[Array]:
        """Returns the row splits of each part, (its rows + 1,) int64."""
        return cut(self.row_splits, self.batch_sizes + 1)


def pack(
    backend: Backend, trail: Trail, empty: Empty | None = None, at_hand: Sequence[Array] = ()
) -> Array:
    """Returns a trail as one int64 array; see `pack_arrays`."""
    route, numbers = trail.route, trail.numbers.reshape(-1)
    order = None
    if route.comm.size > 1:  # of one rank the other numbers tell it
        numbers, order = np.concatenate([numbers, route.numbers]), route.order
    arrays = [order, trail.row_splits, trail.inverse, trail.keys, trail.rows, *trail.sources]
    return pack_arrays(backend, route.comm.size, numbers, arrays, empty, at_hand)


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
      ValueError: another version wrote it, or another number of ranks.
    """
    own = NUM_NUMBERS * num_parts
    of_route = 0 if comm.size == 1 else Route.num_numbers(comm.size, num_parts)
    told, (order, *arrays) = unpack_arrays(
        backend, comm.size, packed, own + of_route, 5 + num_parts, at_hand
    )
    numbers = told[:own].reshape(NUM_NUMBERS, num_parts)
    if comm.size == 1:
        route = Route.alone(backend, comm, numbers[0])
    else:
        route = Route.of(backend, comm, told[own:], order)
    row_splits, inverse, keys, rows, *sources = arrays
    return Trail(route, numbers, row_splits, inverse, keys, rows, sources)

"""The context of a pooled batch: what takes its gradient to the owners of the keys."""

from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.ragged import split
from sok_lite.engine.batch import Batch
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

    def splits_of_parts(self) -> list[Array]:
        """Returns the row splits of each part, (its rows + 1,) int64."""
        return split(self.row_splits, self.numbers[1] + 1)

"""The trips of a lookup without its arithmetic: rows to whoever asked for their keys, and back.

Both are linear, and each is the other's transpose: what derivatives of derivatives are made of.
"""

from collections.abc import Sequence

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.combine import segment_sum
from sok_lite.engine.exchange import return_rows, send_grads
from sok_lite.engine.lookup import deduplicated
from sok_lite.engine.trail import TableTrail, Trail
from sok_lite.engine.unique import gather_rows

__all__ = ["collect", "items", "spread"]


def spread(backend: Backend, trail: Trail, local_rows: Sequence[Array]) -> list[Array]:
    """Brings rows of the keys of this rank to the ranks that asked. Every rank must call it.

    Args:
      local_rows: per table (k, dim) float32, one row per distinct key that was asked of this rank.

    Returns:
      Per table (u, dim) float32, one row per key that this rank asked for.
    """
    asked = [
        gather_rows(backend, rows, deduplicated(backend, way).inverse)
        for rows, way in zip(local_rows, trail.tables, strict=True)
    ]
    return return_rows(trail.route, asked)


def collect(backend: Backend, trail: Trail, rows: Sequence[Array]) -> list[Array]:
    """Brings rows to the owners of their keys and sums those of one key. Every rank must call it.

    Args:
      rows: per table (u, dim) float32, one row per key that this rank asked for.

    Returns:
      Per table (k, dim) float32, one row per distinct key that was asked of this rank.
    """
    received = send_grads(trail.route, rows)
    sums = []
    for array, way in zip(received, trail.tables, strict=True):
        owned = deduplicated(backend, way)
        sums.append(segment_sum(backend, array, owned.inverse, int(owned.keys.size)))
    return sums


def items(backend: Backend, way: TableTrail) -> tuple[Array, Array]:
    """Returns of each item, (n,) int64, which of the keys that were asked it has, and its row of
    the batch."""
    xp, row_splits = backend.xp, way.row_splits
    numbers = xp.arange(int(row_splits[-1]), dtype=np.int64)
    rows = (xp.searchsorted(row_splits, numbers, side="right") - 1).astype(np.int64)
    return (numbers if way.inverse is None else way.inverse.astype(np.int64)), rows

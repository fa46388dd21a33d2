"""The trips of a lookup without its arithmetic: rows to whoever asked for their keys, and back.

Both are linear, and each is the other's transpose: what derivatives of derivatives are made of.
"""

from collections.abc import Sequence

from sok_lite.backend import Array, Backend
from sok_lite.engine.exchange import return_rows, send_grads
from sok_lite.engine.segments import gather_rows, segment_sum
from sok_lite.engine.step import Trail

__all__ = ["collect", "item_rows", "spread"]


def spread(backend: Backend, trail: Trail, local_rows: Sequence[Array]) -> list[Array]:
    """Brings rows of the keys of this rank to the ranks that asked. Every rank must call it.

    Args:
      local_rows: per table (k, dim) float32, one row per local key of the trail.

    Returns:
      Per table (u, dim) float32, one row per distinct key that this rank asked for.
    """
    asked = [
        rows if way.local_inverse is None else gather_rows(backend, rows, way.local_inverse)
        for rows, way in zip(local_rows, trail.tables, strict=True)
    ]
    return return_rows(trail.route, asked)


def collect(backend: Backend, trail: Trail, rows: Sequence[Array]) -> list[Array]:
    """Brings rows to the owners of their keys and sums those of one key. Every rank must call it.

    Args:
      rows: per table (u, dim) float32, one row per distinct key that this rank asked for.

    Returns:
      Per table (k, dim) float32, one row per local key of the trail.
    """
    received = send_grads(trail.route, rows)
    return [
        array
        if way.local_inverse is None
        else segment_sum(backend, array, way.local_inverse, len(way.local_keys))
        for array, way in zip(received, trail.tables, strict=True)
    ]


def item_rows(backend: Backend, row_splits: Array) -> Array:
    """Returns the batch row of each item, (n,) int64, of (batch + 1,) row splits."""
    xp = backend.xp
    numbers = xp.arange(int(row_splits[-1]), dtype=row_splits.dtype)
    return (xp.searchsorted(row_splits, numbers, side="right") - 1).astype(row_splits.dtype)

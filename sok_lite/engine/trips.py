"""The trips of a lookup without its arithmetic: rows to whoever asked for their keys, and back.

Both are linear, and each is the other's transpose: what derivatives of derivatives are made of.
"""

from collections.abc import Sequence

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.exchange import return_rows, send_grads
from sok_lite.engine.lookup import deduplicated
from sok_lite.engine.segments import Terms, cut, gather_rows, group, segment_sums
from sok_lite.engine.trail import Trail

__all__ = ["collect", "items", "spread"]


def spread(backend: Backend, trail: Trail, local_rows: Sequence[Array]) -> list[Array]:
    """Brings rows of the keys of this rank to the ranks that asked. Every rank must call it.

    Args:
      local_rows: per table (k, dim) float32, one row per distinct key that was asked of this rank.

    Returns:
      Per table (u, dim) float32, one row per key that this rank asked for.
    """
    owned = deduplicated(backend, trail)
    inverses = cut(owned.distinct.inverse, trail.num_owned)
    asked = [
        gather_rows(backend, rows, inverses[i] - np.int32(owned.distinct.starts[i]))
        for i, rows in enumerate(local_rows)
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
    owned = deduplicated(backend, trail)
    groups = group(backend, owned.distinct.inverse, owned.begin, owned.distinct.starts)
    return segment_sums(backend, groups, [Terms(array) for array in received])


def items(backend: Backend, trail: Trail) -> list[tuple[Array, Array]]:
    """Returns of each item of each part, (n,) int64, which of the keys that were asked it has, and
    its row of the batch."""
    xp = backend.xp
    starts = split_offsets(trail.route.num_sent)
    inverses = None if trail.inverse is None else cut(trail.inverse, trail.num_items)
    results = []
    for i, row_splits in enumerate(trail.splits_of_parts()):
        numbers = xp.arange(int(trail.num_items[i]), dtype=np.int64)
        rows = (xp.searchsorted(row_splits, numbers, side="right") - 1).astype(np.int64)
        inverse = numbers if inverses is None else inverses[i].astype(np.int64) - starts[i]
        results.append((inverse, rows))
    return results

"""How often each key of a call comes, of all tables together."""

from collections.abc import Sequence

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.ragged import split, split_offsets
from sok_lite.engine.dedup import dedup
from sok_lite.engine.segments import group


def occurrences(
    backend: Backend,
    keys: Sequence[Array],
    item_counts: Sequence[Array | None],
    counting: Sequence[int],
) -> list[Array | None]:
    """Returns how often the key of each item comes in the batch of its table. It waits once.

    Args:
      keys: of each table (n,) int64.
      item_counts: of each table (n,) uint64, how often each item counts; None: once.
      counting: numbers of the tables that want to know.

    Returns:
      `item_counts`, but of those tables (n,) uint64, the same for all items of a key; None: none
      repeats, and each counts once.
    """
    result = list(item_counts)
    sizes = [int(keys[i].size) for i in counting]
    if not sum(sizes):
        return result
    xp, begin = backend.xp, split_offsets(sizes)
    distinct = dedup(backend, xp.concatenate([keys[i] for i in counting]), begin)
    num_distinct = int(distinct.keys.size)
    if num_distinct == sum(sizes):
        return result
    groups = group(backend, distinct.inverse, begin, distinct.starts)
    first, end = groups.offsets[:-1], groups.offsets[1:]
    totals = end - first
    if any(item_counts[i] is not None for i in counting):
        each = [item_counts[i] for i in counting]
        counts = [
            xp.ones(n, np.int64) if c is None else c.view(np.int64)
            for n, c in zip(sizes, each, strict=True)
        ]
        sums = xp.zeros(sum(sizes) + 1, np.int64)
        sums[1:] = xp.cumsum(xp.take(xp.concatenate(counts), groups.order))
        totals = xp.take(sums, end) - xp.take(sums, first)
    of_items = xp.take(totals.astype(np.uint64), distinct.inverse)
    for i, its in zip(counting, split(of_items, sizes), strict=True):
        result[i] = its
    return result

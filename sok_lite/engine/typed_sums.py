"""Sums of rows of equal keys in a type of their own, for formats that float32 does not hold."""

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.dtypes import as_words
from sok_lite.engine.segments import group


def sum_of_each(backend: Backend, rows: Array, inverse: Array, num_unique: int) -> Array:
    """Sums `rows[j]` over the items j with `inverse[j] == u`, in ascending order, for every u.

    Simpler than `segment_sum`, and slower where one key has most items.

    Args:
      backend: where the arrays live.
      rows: (n, dim) float64, int64, int32 or int8, C-contiguous.
      inverse: (n,) int32, each in [0, num_unique).
      num_unique: u.

    Returns:
      (u, dim) of the dtype of the rows. Integers wrap around, as NumPy's do.
    """
    out = backend.xp.empty((num_unique, rows.shape[1]), rows.dtype)
    groups = group(backend, inverse, (0, len(inverse)), (0, num_unique))
    suffix, source, target = "f64", rows, out
    if rows.dtype != np.float64:
        # Sums of two's complements have the same bits, and no overflow that is undefined in C++.
        (suffix, source), (_, target) = as_words(rows), as_words(out)
    arguments = (source, rows.shape[1], groups.offsets, groups.order, target, num_unique)
    backend.launch(f"sum_groups_{suffix}", num_unique, *arguments)
    return out

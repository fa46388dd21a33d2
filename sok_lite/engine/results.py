"""Memory for the results of all parts of a call."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from sok_lite.backend import Array, Backend

Shape = tuple[int, ...]
# Allocates float32 arrays of some shapes, not initialised.
Allocate = Callable[[Sequence[Shape]], Sequence[Array]]

# Elements of 4 bytes in a line of memory: each result begins on one.
LINE = 16


def new_results(
    backend: Backend, shapes: Sequence[Shape], allocate: Allocate | None = None
) -> Sequence[Array]:
    """Returns memory for float32 results, not initialised.

    Args:
      allocate: of whom it is had; None: of the backend, as one array.
    """
    if allocate is not None:
        return allocate(shapes)
    sizes = list(map(math.prod, shapes))
    *starts, end = itertools.accumulate((-(-size // LINE) * LINE for size in sizes), initial=0)
    whole = backend.xp.empty(end, np.float32)
    of_results = zip(starts, sizes, shapes, strict=True)
    return [whole[start : start + size].reshape(shape) for start, size, shape in of_results]


def contiguous(backend: Backend, arrays: Sequence[Array]) -> Sequence[Array]:
    """Returns arrays as C-contiguous ones."""
    return [a if a.flags.c_contiguous else backend.xp.ascontiguousarray(a) for a in arrays]

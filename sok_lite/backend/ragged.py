"""Many arrays in one: where each begins, views of each, and which of them an item is in.

The arrays of all tables or ranks lie one after another: one launch or one message takes them.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from sok_lite.backend.base import Array, Backend, Work, as_words
from sok_lite.backend.launches import launch_all

_FEW = 256  # sizes that Python adds faster than NumPy begins to

Shape = tuple[int, ...]
# Allocates float32 arrays of some shapes, not initialised.
Allocate = Callable[[Sequence[Shape]], Sequence[Array]]

# Elements of 4 bytes in a line of memory: each result begins on one.
LINE = 16


def split_offsets(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns (n + 1,) int64: where each of n arrays starts, and the end of the last."""
    if type(sizes) is np.ndarray and sizes.size > _FEW:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    # NumPy takes longer to begin than Python to add so few.
    numbers = sizes.tolist() if type(sizes) is np.ndarray else sizes
    return np.array(list(itertools.accumulate(numbers, initial=0)), np.int64)


def split(array: Array, sizes: Sequence[int] | np.ndarray) -> list[Array]:
    """Returns views of an array (n, ...), one after the other, of the given lengths."""
    numbers = sizes.tolist() if isinstance(sizes, np.ndarray) else sizes
    ends = itertools.accumulate(numbers, initial=0)
    return [array[start:end] for start, end in itertools.pairwise(ends)]


def numbers_of_tables(
    backend: Backend, numbers: np.ndarray, sizes: Sequence[int] | np.ndarray
) -> Array:
    """Returns for each item the number of its table, (n,).

    On a GPU they are made there, as int32: what is copied has no entry for each item.

    Args:
      numbers: (T,) integers on the host, which int32 can hold.
      sizes: (T,) how many items each table has.
    """
    if backend.name == "cuda":
        return _ascending(backend, numbers, np.asarray(sizes, np.int64), 0)
    return np.repeat(numbers, sizes)


def items_of_tables(backend: Backend, is_wanted: Sequence[bool], sizes: np.ndarray) -> Array:
    """Returns the items of some tables, ascending, (m,) integers.

    On a GPU they are made there.

    Args:
      is_wanted: (T,) whether a table is one of them.
      sizes: (T,) int64 on the host, how many items each table has.
    """
    if backend.name == "cuda":
        tables = np.flatnonzero(is_wanted)
        return _ascending(backend, split_offsets(sizes)[tables], sizes[tables], 1)
    return np.flatnonzero(np.repeat(is_wanted, sizes))


def _ascending(backend: Backend, numbers: np.ndarray, sizes: np.ndarray, step: int) -> Array:
    """Returns the number of each item's table, and `step` more for each item of it before."""
    out = backend.xp.empty(int(sizes.sum()), np.int32)
    of_tables = zip(numbers.tolist(), sizes.tolist(), split(out, sizes), strict=True)
    parts = [Work(size, (number, step, its, size)) for number, size, its in of_tables]
    backend.launch_parts("table_numbers", parts)
    return out


def gather_split(
    backend: Backend,
    values: Array,
    index: Array,
    sizes: Sequence[int],
    outs: Sequence[Array],
) -> None:
    """Gathers elements of an array, those of each table into an array of its own.

    Args:
      values: (n,) int64.
      index: (m,) int32, which of them, those of each table after those of the one before.
      sizes: how many each table has; they sum to m.
      outs: of each table (its size,) integers of 64 bits or, for values that fit, of 32.
    """
    words = [as_words(out) for out in outs]
    sources = {"u64": values.view(np.uint64)}
    if "u32" in dict(words):
        sources["u32"] = values.astype(np.int32).view(np.uint32)
    of_tables = zip(words, split(index, sizes), sizes, strict=True)
    launch_all(
        *(
            [backend.prepared(f"dense_gather_{suffix}", size, sources[suffix], 1, its, out, size)]
            for (suffix, out), its, size in of_tables
        )
    )


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

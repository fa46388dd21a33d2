"""Jagged arrays: those of all tables or ranks lie end to end in one, for one launch or message."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from sok_lite.backend.base import Array, Backend, LaunchArgs, as_words
from sok_lite.backend.launches import launch_all

_FEW = 256  # sizes that Python adds up faster than NumPy

Shape = tuple[int, ...]
# Returns uninitialized float32 arrays of the shapes.
Allocate = Callable[[Sequence[Shape]], Sequence[Array]]

LINE = 16  # float32 elements of a cache line


def split_offsets(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the offsets of arrays of these sizes, (n + 1,) int64: 0, then the running sums."""
    if type(sizes) is np.ndarray and sizes.size > _FEW:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    numbers = sizes.tolist() if type(sizes) is np.ndarray else sizes
    return np.array(list(itertools.accumulate(numbers, initial=0)), np.int64)


def split(array: Array, sizes: Sequence[int] | np.ndarray) -> list[Array]:
    """Returns consecutive views of an array (n, ...), of the given lengths."""
    numbers = sizes.tolist() if isinstance(sizes, np.ndarray) else sizes
    ends = itertools.accumulate(numbers, initial=0)
    return [array[start:end] for start, end in itertools.pairwise(ends)]


def repeat_values(
    backend: Backend, numbers: np.ndarray, sizes: Sequence[int] | np.ndarray
) -> Array:
    """Returns `np.repeat(numbers, sizes)`, computed on a GPU as int32 without a copy of (n,).

    Args:
      numbers: (num_tables,) integers on the host that fit int32.
      sizes: (num_tables,) items of each table.
    """
    if backend.name == "cuda":
        return _ascending(backend, numbers, np.asarray(sizes, np.int64), 0)
    return np.repeat(numbers, sizes)


def items_of_tables(backend: Backend, is_wanted: Sequence[bool], sizes: np.ndarray) -> Array:
    """Returns the indices of the items of some tables, ascending, (m,); computed on the device.

    Args:
      is_wanted: (num_tables,) bool.
      sizes: (num_tables,) int64 on the host, items of each table.
    """
    if backend.name == "cuda":
        tables = np.flatnonzero(is_wanted)
        return _ascending(backend, split_offsets(sizes)[tables], sizes[tables], 1)
    return np.flatnonzero(np.repeat(is_wanted, sizes))


def _ascending(backend: Backend, numbers: np.ndarray, sizes: np.ndarray, step: int) -> Array:
    """Returns `numbers[t] + step * i` for the i-th item of each table t, (n,) int32."""
    out = backend.xp.empty(int(sizes.sum()), np.int32)
    of_tables = zip(numbers.tolist(), sizes.tolist(), split(out, sizes), strict=True)
    parts = [LaunchArgs(size, (number, step, its, size)) for number, size, its in of_tables]
    backend.launch_tables("table_numbers", parts)
    return out


def gather_split(
    backend: Backend,
    values: Array,
    index: Array,
    sizes: Sequence[int],
    outs: Sequence[Array],
) -> None:
    """Writes `values[index]` into one array per table.

    Args:
      values: (n,) int64.
      index: (m,) int32, table by table.
      sizes: elements of each table; they sum to m.
      outs: (size,) integers per table, of 64 bits or, if the values fit, of 32.
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
    """Returns uninitialized float32 arrays: from `allocate`, else parts of one array, each of
    which begins on a cache line."""
    if allocate is not None:
        return allocate(shapes)
    sizes = list(map(math.prod, shapes))
    *starts, end = itertools.accumulate((-(-size // LINE) * LINE for size in sizes), initial=0)
    whole = backend.xp.empty(end, np.float32)
    of_results = zip(starts, sizes, shapes, strict=True)
    return [whole[start : start + size].reshape(shape) for start, size, shape in of_results]


def contiguous(backend: Backend, arrays: Sequence[Array]) -> Sequence[Array]:
    return [a if a.flags.c_contiguous else backend.xp.ascontiguousarray(a) for a in arrays]

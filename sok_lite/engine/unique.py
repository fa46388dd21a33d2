"""Distinct keys in order of first occurrence, and the items of each group, on any backend."""

from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.dtypes import as_words

# Items per counter when first occurrences are numbered: a CPU worker walks long blocks, a GPU
# thread short ones.
_BLOCK = {"cpu": 4096, "cuda": 32}


class Unique(NamedTuple):
    """Distinct keys and where each came from: `unique_keys[inverse] == keys`.

    Attributes:
      unique_keys: (u,) int64, in order of first occurrence.
      inverse: (n,) int32.
    """

    unique_keys: Array
    inverse: Array


class Groups(NamedTuple):
    """The items of each group: `order[offsets[g]:offsets[g + 1]]`, ascending.

    Attributes:
      offsets: (num_groups + 1,) int64.
      order: (n,) int32.
    """

    offsets: Array
    order: Array


def unique(backend: Backend, keys: Array) -> Unique:
    """Finds the distinct keys of a batch. The result never depends on thread timing.

    Args:
      keys: (n,) int64.

    Raises:
      ValueError: more than 2**30 keys, which int32 item numbers could not address.
    """
    xp = backend.xp
    n = keys.size
    if n > 1 << 30:
        raise ValueError(f"A batch must have at most 2**30 keys. Received: {n}. Split it.")
    if n == 0:
        return Unique(xp.empty(0, np.int64), xp.empty(0, np.int32))
    mask = (1 << max(4, (2 * n - 1).bit_length())) - 1
    heads = xp.full(mask + 1, -1, np.int32)
    slots = xp.empty(n, np.int32)
    backend.launch("unique_insert", n, keys, heads, mask, slots, n)
    block = _BLOCK[backend.name]
    num_blocks = -(-n // block)
    counts = xp.empty(num_blocks, np.int64)
    # A block is worth many items: the launch is told their number, not the blocks'.
    backend.launch("unique_count", n, slots, heads, counts, block, n)
    ends = xp.cumsum(counts)
    num_unique = int(ends[-1])
    unique_keys = xp.empty(num_unique, np.int64)
    backend.launch("unique_emit", n, keys, slots, heads, ends - counts, unique_keys, block, n)
    backend.launch("unique_inverse", n, slots, heads, slots, n)
    return Unique(unique_keys, slots)


def group(backend: Backend, labels: Array, num_groups: int) -> Groups:
    """Lists the items of each label, ascending within a group.

    Args:
      labels: (n,) int32, each in [0, num_groups).
    """
    xp = backend.xp
    n = labels.size
    counts = xp.zeros(num_groups + 1, np.int64)
    if n == 0:
        return Groups(counts, xp.empty(0, np.int32))
    if backend.name == "cuda":
        # A thread that reads every label, as the CPU's workers do, would be far too much reading
        # for thousands of threads.
        order = xp.argsort(labels, kind="stable")
        # Not bincount: it waits for the GPU, and keeps a count of every label for each block.
        bounds = xp.arange(num_groups + 1, dtype=np.int32)
        return Groups(xp.searchsorted(labels[order], bounds), order.astype(np.int32))
    backend.launch("group_count", max(n, num_groups), labels, counts, num_groups, n)
    offsets = xp.cumsum(counts)
    order = xp.empty(n, np.int32)
    cursor = offsets[:-1].copy()
    backend.launch("group_fill", max(n, num_groups), labels, cursor, order, num_groups, n)
    return Groups(offsets, order)


def last_of_each(backend: Backend, inverse: Array, num_unique: int) -> Array:
    """Returns the last item of every distinct key, (num_unique,) int32."""
    last = backend.xp.full(num_unique, -1, np.int32)
    backend.launch("last_occurrence", inverse.size, inverse, last, inverse.size)
    return last


def gather_rows(backend: Backend, x: Array, index: Array) -> Array:
    """Returns `x[index]` for rows of 16- or 32-bit elements.

    Args:
      x: (m, dim), C-contiguous.
      index: (n,) int32, each in [0, m).

    Returns:
      (n, dim) of x's dtype.
    """
    out = backend.xp.empty((index.size, x.shape[1]), x.dtype)
    suffix, words = as_words(x)
    _, out_words = as_words(out)
    backend.launch(
        f"dense_gather_{suffix}", index.size, words, x.shape[1], index, out_words, index.size
    )
    return out

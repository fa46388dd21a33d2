"""Groups of items with equal labels, and sums of their rows, for all tables of a call at once.

The items of the tables lie end to end; `begin`, (num_tables + 1,) on the host, has the offsets of
the tables. The number of launches does not depend on the number of tables.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import LaunchArgs
from sok_lite.backend.ragged import new_results, split_offsets
from sok_lite.engine.sort import sort_items

_PIECE = 32  # kPiece of kernels/pooling.cuh
_TASK_ITEMS = 1024  # fewer are not worth a task of their own


class Groups(NamedTuple):
    """The items of group g: `order[offsets[g]:offsets[g + 1]]`, ascending.

    Attributes:
      offsets: (num_groups + 1,) int64.
      order: (n,) int32.
      labels: (n,) int32, the group of each item.
      begin, starts: (num_tables + 1,) int64 on the host, the offsets of the tables' items and of
        their groups.
    """

    offsets: Array
    order: Array
    labels: Array
    begin: np.ndarray
    starts: np.ndarray


class Terms(NamedTuple):
    """The summands of groups: item i of table t adds `weights[t][i] * sources[t][rows[t][i]]`.

    Attributes:
      sources: of each table (m, dim) float32, C-contiguous.
      rows: of each table (its items,) int32, each in [0, m); None, or None of a table: item i adds
        sources[t][i].
      weights: of each table (its items,) float32, only with `rows`; None, or None of a table: all
        1.
    """

    sources: Sequence[Array]
    rows: Sequence[Array | None] | None = None
    weights: Sequence[Array | None] | None = None


def group(
    backend: Backend,
    labels: Array,
    begin: Sequence[int] | np.ndarray,
    starts: Sequence[int] | np.ndarray,
) -> Groups:
    """Lists the items of each label, ascending. It does not wait for the device.

    Args:
      labels: (n,) int32; those of table t are in [starts[t], starts[t + 1]).
      begin, starts: (num_tables + 1,), see `Groups`.
    """
    xp = backend.xp
    n = labels.size
    if type(begin) is not np.ndarray or type(starts) is not np.ndarray:
        begin, starts = np.array(begin, np.int64), np.array(starts, np.int64)
    num_groups = int(starts[-1])
    if n == 0:
        offsets, order = xp.zeros(num_groups + 1, np.int64), xp.empty(0, np.int32)
        return Groups(offsets, order, labels, begin, starts)
    offsets = xp.empty(num_groups + 1, np.int64)
    if backend.name == "cuda":
        order, by_label = sort_items(backend, labels, num_groups)
        backend.launch("group_sorted", n, by_label, offsets, num_groups, n)
    else:
        order = xp.empty(n, np.int32)
        num_tasks = min(backend.num_threads, n // _TASK_ITEMS) or 1
        tables = (begin, starts, offsets, order, begin.size - 1, num_tasks)
        backend.launch("group_items", n, labels, *tables)
    return Groups(offsets, order, labels, begin, starts)


def segment_sums(
    backend: Backend, groups: Groups, terms: Terms, out: Sequence[Array] | None = None
) -> Sequence[Array]:
    """Sums the terms of each group, in ascending order of its items. It does not wait.

    Sums are taken in pieces of 32 items: a long sum is as exact as a short one and computed by many
    threads, and its bits do not depend on the processor or the number of threads.

    Args:
      out: (groups of the table, dim) float32 of each table, to write into; None: new memory.

    Returns:
      One (groups of the table, dim) float32 array per table; a group without items is zeros.
    """
    num_items = groups.begin[1:] - groups.begin[:-1]
    num_groups = groups.starts[1:] - groups.starts[:-1]
    counts, dims = num_groups.tolist(), [source.shape[1] for source in terms.sources]
    if out is None:
        out = new_results(backend, list(zip(counts, dims, strict=True)))
    # Rounded up: each table's pieces begin where four columns can be moved at a time.
    pieces = split_offsets(-(-(num_items // _PIECE) * np.array(dims, np.int64) // 4) * 4).tolist()
    scratch = backend.xp.empty(pieces[-1], np.float32)
    none: list[Array | None] = [None] * len(dims)
    of_tables = zip(
        *(terms.sources, dims, terms.rows or none, terms.weights or none, counts, out),
        *(groups.starts[:-1].tolist(), groups.begin[:-1].tolist(), num_items.tolist(), pieces[:-1]),
        strict=True,
    )
    summing, adding = [], []
    for source, dim, rows, weights, count, sums, start, begin, size, piece in of_tables:
        if not count:
            continue
        arguments = (
            *(source, dim, rows, weights, groups.offsets, groups.order, groups.labels),
            *(start, count, begin, size, scratch[piece:] if size >= _PIECE else None, sums, None),
        )
        # The larger number: a few groups may have many items, which are worth more threads.
        summing.append(LaunchArgs(max(count, size), arguments))
        if size > _PIECE:
            adding.append(LaunchArgs(size, arguments))
    # The second launch adds the sums of pieces.
    backend.launch_tables("segment_sums", summing)
    backend.launch_tables("segment_add_pieces", adding)
    return out


def segment_sum(backend: Backend, rows: Array, inverse: Array, num_unique: int) -> Array:
    """Sums `rows[j]` over the items j with `inverse[j] == u`, in ascending order, for every u.

    Args:
      rows: (n, dim) float32, C-contiguous.
      inverse: (n,) int32, each in [0, num_unique).

    Returns:
      (num_unique, dim) float32; zeros where no item belongs.
    """
    groups = group(backend, inverse, (0, len(inverse)), (0, num_unique))
    return segment_sums(backend, groups, Terms([rows]))[0]

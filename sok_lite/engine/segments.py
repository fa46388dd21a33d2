"""Items of equal keys, for all tables of a call at once: deduplication, groups, sums of rows.

The items of the tables lie one after another: `begin`, (T + 1,) on the host, has the first item of
each table. Distinct keys are numbered by first occurrence, and so lie table by table too. The
number of launches does not depend on the number of tables.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import F32, I32, Words
from sok_lite.backend.publish import Action
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.dtypes import as_words
from sok_lite.engine.hashing import seed_of_process
from sok_lite.engine.pieces import OutputBuffer, Pieces, addresses_of, places_of, shapes_of

_PIECE = 32  # kPiece of kernels/pooling.cuh
# First occurrences are counted in blocks of so many items, or larger ones where there would be too
# many: each block reads what was counted in all before it. On a GPU a warp has a block, and goes
# through its items 32 at a time.
_BLOCK, _WARP_BLOCK = 1024, 128
_MOST_BLOCKS = 4096


class Distinct(NamedTuple):
    """The distinct keys of a call.

    Attributes:
      inverse: (n,) int32, the number of the distinct key of each item; -1 of an item left out.
      first: (u,) int32, the first item with each distinct key.
      keys: (u,) int64, the distinct keys.
      starts: (T + 1,) int64 on the host, the first distinct key of each table.
    """

    inverse: Array
    first: Array
    keys: Array
    starts: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """The number of distinct keys of each table, (T,) int64 on the host."""
        return self.starts[1:] - self.starts[:-1]


class Missing(NamedTuple):
    """Which items have no row.

    Attributes:
      rows: (n,) uint32, the row number of each item, or NO_ROW.
      counts: (T,) on the host, number of items without a row of each table.
    """

    rows: Array
    counts: Sequence[int] | np.ndarray


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
      labels: (n,) int32, the group of each item.
      begin: (T + 1,) int64 on the host, where the items of each table start.
      starts: (T + 1,) int64 on the host, where its groups start.
    """

    offsets: Array
    order: Array
    labels: Array
    begin: np.ndarray
    starts: np.ndarray


class Terms(NamedTuple):
    """The summands of the groups of tables.

    Item i of table t adds `weights[t][i] * sources[t][rows[t][i]]`.

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


def dedup(
    backend: Backend,
    keys: Array,
    begin: Sequence[int] | np.ndarray,
    missing: Missing | None = None,
    repeat: bool = True,
) -> Distinct:
    """Finds the distinct keys of each table, in order of first occurrence.

    It waits for the device once. The result never depends on thread timing.

    Args:
      keys: (n,) int64.
      begin: (T + 1,), the first item of each table, from 0 to n, ascending.
      missing: only items without a row take part; None: all do.
      repeat: whether keys may repeat; if not, it is less work.

    Raises:
      ValueError: more than 2**30 keys, which int32 numbers could not address.
    """
    xp = backend.xp
    n, num_tables = keys.size, len(begin) - 1
    if n > 1 << 30:
        raise ValueError(f"A batch must have at most 2**30 keys. Received: {n}. Split it.")
    if n == 0:
        empty = xp.empty(0, np.int32)
        return Distinct(empty, empty, keys, np.zeros(num_tables + 1, np.int64))
    begin = np.asarray(begin, np.int64)
    rows, heads_of = None, begin  # where the heads of each table start
    if missing is not None:
        rows, heads_of = missing.rows, split_offsets(missing.counts)
    where, head_starts = backend.from_host(np.array([begin, heads_of], np.int64))
    starts = xp.empty(num_tables + 1, np.int64)
    heads = xp.empty(2 * int(heads_of[-1]) or 1 if repeat else n, np.int32)
    if repeat:
        heads.fill(-1)
    slots, first = xp.empty(n, np.int32), xp.empty(n, np.int32)
    distinct = xp.empty(n, np.int64)
    block = _WARP_BLOCK if backend.name == "cuda" else _BLOCK
    words = (block if n <= block * _MOST_BLOCKS else -(-n // _MOST_BLOCKS)) // 32
    num_blocks = -(-n // (32 * words))
    marks, counts = xp.empty(-(-n // 32), np.uint32), xp.empty(num_blocks, np.int32)
    tables = (where, head_starts, num_tables)
    insert = (keys, rows, *tables, int(repeat), seed_of_process(), heads, slots, n)
    backend.launch("dedup_insert", n, *insert)
    # A block is worth many items: the launch is told their number, not the blocks'.
    blocks = (words, num_blocks, n)
    backend.launch("dedup_count", n, slots, heads, marks, counts, *blocks)
    total = starts[num_tables:]
    number = (keys, slots, heads, marks, counts, first, distinct, total, *blocks)
    backend.launch("dedup_number", n, *number)
    told = (slots, heads, rows, first, where, slots, starts, num_tables, n)
    backend.launch("dedup_inverse", n, *told)
    on_host = backend.to_host(starts)
    count = int(on_host[-1])
    return Distinct(slots, first[:count], distinct[:count], on_host)


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
    begin, num_tables = split_offsets(sizes), sizes.size
    n = int(begin[-1])
    out = backend.xp.empty(n, np.int32)
    if n:
        words = backend.from_host(np.concatenate([begin, numbers], dtype=np.int64))
        tables = (words, words[num_tables + 1 :], num_tables)
        backend.launch("table_numbers", n, *tables, step, out, n)
    return out


def unique(backend: Backend, keys: Array) -> Unique:
    """Finds the distinct keys of one table. The result never depends on thread timing.

    Args:
      keys: (n,) int64.

    Raises:
      ValueError: more than 2**30 keys.
    """
    distinct = dedup(backend, keys, (0, keys.size))
    return Unique(distinct.keys, distinct.inverse)


def group(
    backend: Backend,
    labels: Array,
    begin: Sequence[int] | np.ndarray,
    starts: Sequence[int] | np.ndarray,
) -> Groups:
    """Lists the items of each label, ascending within a group. It waits for nothing.

    Args:
      labels: (n,) int32; those of table t are in [starts[t], starts[t + 1]).
      begin: (T + 1,), where the items of each table start.
      starts: (T + 1,), where the labels of each table start.
    """
    xp = backend.xp
    n = labels.size
    if type(begin) is not np.ndarray or type(starts) is not np.ndarray:
        begin, starts = np.array(begin, np.int64), np.array(starts, np.int64)
    num_groups = int(starts[-1])
    if n == 0:
        offsets, order = xp.zeros(num_groups + 1, np.int64), xp.empty(0, np.int32)
        return Groups(offsets, order, labels, begin, starts)
    offsets, order = xp.empty(num_groups + 1, np.int64), xp.empty(n, np.int32)
    if backend.name == "cuda":
        by_label = xp.argsort(labels, kind="stable")
        backend.launch("group_sorted", n, labels, by_label, offsets, order, num_groups, n)
    else:
        num_tasks = min(backend.num_threads, n // _BLOCK) or 1
        tables = (begin, starts, offsets, order, begin.size - 1, num_tasks)
        backend.launch("group_items", n, labels, *tables)
    return Groups(offsets, order, labels, begin, starts)


def segment_sums(
    backend: Backend, groups: Groups, terms: Terms, buffer: OutputBuffer | None = None
) -> Pieces:
    """Sums the rows of each group, in ascending order of its items. It waits for nothing.

    Sums are taken in pieces of 32 items: a long sum is as exact as a short one and computed by many
    threads, and its bits do not depend on the processor or the number of threads.

    Args:
      groups: of T tables.
      terms: the summands of each table.
      buffer: allocates all sums, (size,) float32; None: the backend does.

    Returns:
      One (groups of the table, dim) float32 array for each table; a group without items is zeros.

    Raises:
      ValueError: a table without `rows` has weights, or other than one source row for each item.
    """
    sources, rows, weights = terms
    num_items = groups.begin[1:] - groups.begin[:-1]
    num_groups = groups.starts[1:] - groups.starts[:-1]
    shapes = shapes_of(sources)
    if not isinstance(rows, Pieces):
        _check_one_each(terms, num_items.tolist())
    dims = np.array([dim for _, dim in shapes], np.int64)
    outs = Pieces.new(backend, places_of(num_groups, dims), buffer)
    # Rounded up: each table's pieces begin where four columns can be moved at a time.
    pieces = split_offsets(-(-(num_items // _PIECE) * dims // 4) * 4)
    scratch = backend.xp.empty(int(pieces[-1]), np.float32)
    address = backend.address
    columns: list[Words] = [
        *(addresses_of(backend, sources, F32), dims),
        *(addresses_of(backend, rows, I32), addresses_of(backend, weights, F32)),
        *(address(groups.offsets), address(groups.order), address(groups.labels)),
        *(groups.starts[:-1], num_groups, groups.begin[:-1], num_items),
        (num_items >= _PIECE) * (address(scratch) + 4 * pieces[:-1]),
        addresses_of(backend, outs, F32),
    ]
    arrays = (groups, terms, scratch, outs)
    # A few groups may have many items: the work is worth as many threads as there are items.
    summing = (num_groups > 0) * np.maximum(num_groups, num_items)
    adding = ((num_groups > 0) & (num_items > _PIECE)) * num_items
    for kernel, work in (("segment_sums", summing), ("segment_add_pieces", adding)):
        backend.launch_columns(kernel, work.tolist(), columns, arrays)
    return outs


def _check_one_each(terms: Terms, num_items: Sequence[int]) -> None:
    """Raises ValueError for a table without `rows` that has weights or not a row for each item."""
    shapes, nothing = shapes_of(terms.sources), [None] * len(num_items)
    tables = zip(shapes, num_items, terms.rows or nothing, terms.weights or nothing, strict=True)
    wrong = [
        (t, shape[0], n, "" if weights is None else " and weights")
        for t, (shape, n, rows, weights) in enumerate(tables)
        if rows is None and (weights is not None or shape[0] != n)
    ]
    for t, num_rows, n, and_weights in wrong:
        raise ValueError(
            f"Without `rows` a table sums one row for each of its {n} items, without weights. "
            f"Received: table {t} with {num_rows} rows{and_weights}. Give `rows`."
        )


def segment_sum(
    backend: Backend,
    rows: Array,
    inverse: Array,
    num_unique: int,
) -> Array:
    """Sums `rows[j]` over the items j with `inverse[j] == u`, in ascending order, for every u.

    Args:
      backend: where the arrays live.
      rows: (n, dim) float32.
      inverse: (n,) int32, each in [0, num_unique).
      num_unique: u.

    Returns:
      (u, dim) float32; a row that no item belongs to is zeros.

    Raises:
      ValueError: shapes that do not fit.
      TypeError: a dtype.
    """
    rows = checked_rows(backend, "rows", rows)
    inverse = checked_labels(backend, inverse)
    if len(rows) != len(inverse):
        raise ValueError(
            "`rows` and `inverse` must be equally long. "
            f"Received: rows {rows.shape}, inverse {inverse.shape}."
        )
    groups = group(backend, inverse, (0, len(inverse)), (0, num_unique))
    return segment_sums(backend, groups, Terms([rows]))[0]


def checked_rows(backend: Backend, name: str, array: Array) -> Array:
    """Returns float32 rows as a C-contiguous array. Raises TypeError, ValueError: they are none."""
    if array.dtype != np.float32:
        raise TypeError(f"`{name}` must be float32. Received: {array.dtype}.")
    if array.ndim != 2:
        raise ValueError(f"`{name}` must have two dimensions. Received: shape {array.shape}.")
    return backend.xp.ascontiguousarray(array)


def checked_labels(backend: Backend, inverse: Array) -> Array:
    """Returns int32 labels as a C-contiguous array. Raises TypeError, ValueError: they are none."""
    if inverse.dtype != np.int32:
        raise TypeError(f"`inverse` must be int32. Received: {inverse.dtype}.")
    if inverse.ndim != 1:
        raise ValueError(f"`inverse` must have one dimension. Received: shape {inverse.shape}.")
    return backend.xp.ascontiguousarray(inverse)


def cut(array: Array, sizes: Sequence[int] | np.ndarray) -> list[Array]:
    """Returns views of an array (n, ...), one after the other, of the given lengths."""
    numbers = sizes.tolist() if isinstance(sizes, np.ndarray) else sizes
    ends = itertools.accumulate(numbers, initial=0)
    return [array[start:end] for start, end in itertools.pairwise(ends)]


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
    out, action = plan_gather(backend, x, index)
    action()
    return out


def plan_gather(backend: Backend, x: Array, index: Array) -> tuple[Array, Action]:
    """Prepares `gather_rows`; returns its result, not written yet, and the action."""
    out = backend.xp.empty((index.size, x.shape[1]), x.dtype)
    suffix, words = as_words(x)
    where = (words, x.shape[1], index, as_words(out)[1], index.size)
    return out, backend.prepared(f"dense_gather_{suffix}", index.size, *where)

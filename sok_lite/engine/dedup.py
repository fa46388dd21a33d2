"""The distinct keys of items, for all tables of a call at once.

The items of the tables lie one after another: `begin`, (T + 1,) on the host, has the first item of
each table. Distinct keys are numbered by first occurrence, and so lie table by table too. The
number of launches does not depend on the number of tables.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.hashing import seed_of_process

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


def unique(backend: Backend, keys: Array) -> Unique:
    """Finds the distinct keys of one table. The result never depends on thread timing.

    Args:
      keys: (n,) int64.

    Raises:
      ValueError: more than 2**30 keys.
    """
    distinct = dedup(backend, keys, (0, keys.size))
    return Unique(distinct.keys, distinct.inverse)


def last_of_each(backend: Backend, inverse: Array, num_unique: int) -> Array:
    """Returns the last item of every distinct key, (num_unique,) int32."""
    last = backend.xp.full(num_unique, -1, np.int32)
    backend.launch("last_occurrence", inverse.size, inverse, last, inverse.size)
    return last

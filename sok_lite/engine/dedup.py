"""The distinct keys of items, for all tables of a call at once; see kernels/segments.cu.

The items of the tables lie end to end; `begin`, (num_tables + 1,) on the host, has the offsets of
the tables. Distinct keys are numbered by first occurrence, and so lie table by table too. The
number of launches does not depend on the number of tables, the result not on thread timing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import LaunchArgs
from sok_lite.backend.ragged import split_offsets
from sok_lite.engine.hashing import seed_of_process
from sok_lite.engine.segments import Groups, group
from sok_lite.engine.sort import Sort, Tiles

# A CPU counts first occurrences in blocks of `_BLOCK` items, or larger ones: each block reads the
# counts of all blocks before it.
_BLOCK, _MOST_BLOCKS = 1024, 4096


class Distinct(NamedTuple):
    """The distinct keys of a call.

    Attributes:
      inverse: (n,) int32, the index of each item's distinct key; -1 of an item left out.
      first: (u,) int32, the first item with each distinct key.
      keys: (u,) int64, the distinct keys.
      starts: (num_tables + 1,) int64 on the host, the offsets of the tables' distinct keys.
      rows: (u,) uint32, the row numbers of the first items, if any were given.
    """

    inverse: Array
    first: Array
    keys: Array
    starts: np.ndarray
    rows: Array | None = None

    @property
    def sizes(self) -> np.ndarray:
        """The number of distinct keys of each table, (num_tables,) int64 on the host."""
        return self.starts[1:] - self.starts[:-1]


class Missing(NamedTuple):
    """Which items have no row.

    Attributes:
      rows: (n,) uint32, the row number of each item, or NO_ROW.
      counts: (num_tables,) on the host, items without a row of each table.
    """

    rows: Array
    counts: Sequence[int] | np.ndarray


def dedup(
    backend: Backend,
    keys: Array,
    begin: Sequence[int] | np.ndarray,
    missing: Missing | None = None,
    repeat: bool = True,
    rows: Array | None = None,
) -> Distinct:
    """Finds the distinct keys of each table, in order of first occurrence. It waits once.

    Args:
      keys: (n,) int64.
      begin: (num_tables + 1,), the offsets of the tables' items.
      missing: leaves out items that have a row; None: all take part.
      repeat: whether keys may repeat; if not, it is less work.
      rows: (n,) uint32, row numbers of which `Distinct.rows` gets those of the first items.

    Raises:
      ValueError: more than 2**30 keys, which int32 numbers could not address.
    """
    run = _Dedup(backend, keys, begin, rows, missing, repeat)
    if not keys.size:
        empty = backend.xp.empty(0, np.int32)
        return Distinct(empty, empty, keys, np.zeros(run.begin.size, np.int64), rows)
    run.number_keys(run.new_work())
    run.launch_per_table("dedup_inverse", run.sizes, [None if missing is None else missing.rows])
    return run.distinct()


def dedup_and_group(
    backend: Backend, keys: Array, begin: Sequence[int] | np.ndarray, rows: Array
) -> tuple[Distinct, Groups]:
    """Does `dedup`, and `group` of the items by distinct key.

    It waits for the device once: on a GPU after the last launch.
    """
    n = keys.size
    if backend.name == "cpu" or n == 0:
        distinct = dedup(backend, keys, begin, rows=rows)
        return distinct, group(backend, distinct.inverse, begin, distinct.starts)
    run = _Dedup(backend, keys, begin, rows, None, True)
    # The host does not know the number of distinct keys yet: it is at most n.
    sort = Sort(backend, n, n, run.num_words)
    run.number_keys(sort.work)
    teams = -(-run.sizes // sort.tiles.items)
    run.launch_per_table("dedup_labels", teams, [], sort.counting)
    order, by_number = sort.sorted(run.slots)
    offsets = backend.xp.empty(n + 1, np.int64)
    backend.launch("group_sorted", n, by_number, offsets, 0, n)
    distinct = run.distinct()
    offsets = offsets[: distinct.keys.size + 1]
    return distinct, Groups(offsets, order, distinct.inverse, run.begin, distinct.starts)


class _Dedup:
    """The launches of one deduplication, with the arguments of `dedup`.

    Attributes:
      begin: (num_tables + 1,) int64 on the host.
      sizes: (num_tables,) int64, items of each table.
      slots: (n,) int32, the scratch hash slot of each item, and then the number of its key.
      num_words: zeroed words that it needs: of the tiles of a GPU, and the scratch hash.
    """

    def __init__(
        self,
        backend: Backend,
        keys: Array,
        begin: Sequence[int] | np.ndarray,
        rows: Array | None,
        missing: Missing | None,
        repeat: bool,
    ) -> None:
        n = keys.size
        if n > 1 << 30:
            raise ValueError(f"A batch must have at most 2**30 keys. Received: {n}. Split it.")
        self._backend, self._keys, self._rows, self._missing = backend, keys, rows, missing
        self._repeat = repeat
        self.begin = begin = np.asarray(begin, np.int64)
        self.sizes = begin[1:] - begin[:-1]
        self._num_slots = self.sizes
        if repeat:
            self._num_slots = 2 * (self.sizes if missing is None else np.asarray(missing.counts))
        self._tiles = Tiles.of(n)
        self._num_tile_words = 1 + self._tiles.number if backend.name == "cuda" else 0
        # At least one slot: items that take no part read it.
        self.num_words = self._num_tile_words + max(1, int(self._num_slots.sum()))

    def new_work(self) -> Array:
        """Returns (num_words,) uint32 zeros."""
        if self._backend.name == "cuda":
            return self._backend.xp.zeros(self.num_words, np.uint32)
        # Not np.zeros: its pages would be mapped one by one, in the order of hashes.
        work = np.empty(self.num_words, np.uint32)
        work.fill(0)
        return work

    def number_keys(self, work: Array) -> None:
        """Numbers the distinct keys, without a wait; work: uint32 that begins with zeros."""
        backend, xp, n = self._backend, self._backend.xp, self._keys.size
        self.slots = xp.empty(n, np.int32)
        self._first, self._distinct = xp.empty(n, np.int32), xp.empty(n, np.int64)
        self._starts = xp.empty(self.begin.size, np.int64)
        self._rows_out = None if self._rows is None else xp.empty(n, np.uint32)
        self._heads = work[self._num_tile_words :].view(np.int32)
        missing = None if self._missing is None else self._missing.rows
        scratch = (int(self._repeat), seed_of_process(), self._heads, self.slots)
        first_slots = split_offsets(self._num_slots)[:-1]
        columns = np.stack([self.begin[:-1], first_slots, self._num_slots, self.sizes], axis=1)
        parts = [
            LaunchArgs(size, (self._keys, missing, begin, first, num_slots, *scratch, size))
            for begin, first, num_slots, size in columns.tolist()
        ]
        backend.launch_tables("dedup_insert", parts)
        items = (self._keys, self._rows, self.slots, self._heads)
        out = (self._first, self._distinct, self._rows_out, self._starts[-1:])
        if backend.name == "cuda":
            num_tiles = self._tiles.number
            tiles = (work, work[1:], *self._tiles, n)
            backend.launch("dedup_number_tiles", num_tiles, *items, *out, *tiles)
            return
        words = (_BLOCK if n <= _BLOCK * _MOST_BLOCKS else -(-n // _MOST_BLOCKS)) // 32
        num_blocks = -(-n // (32 * words))
        marks, counts = np.empty(-(-n // 32), np.uint32), np.empty(num_blocks, np.int32)
        # Launched for n items, not num_blocks: the number of threads follows the work.
        blocks = (marks, counts, words, num_blocks, n)
        backend.launch("dedup_count", n, self.slots, self._heads, *blocks)
        backend.launch("dedup_number", n, *items, *out, *blocks)

    def launch_per_table(
        self,
        kernel: str,
        num_items: np.ndarray,
        before: Sequence[Any],
        after: Sequence[Any] = (),
    ) -> None:
        """Launches a kernel that writes the number of each item's key, and each table's offset.

        Args:
          num_items: of the launch for each table; at least one is launched, for the offset.
          before, after: additional arguments, behind the scratch hash and before the size.
        """
        slots, starts = self.slots, self._starts
        shared = (slots, self._heads, *before, self._first, starts[-1:])
        columns = np.stack([num_items, self.begin[:-1], self.sizes], axis=1)
        parts = [
            LaunchArgs(max(1, count), (*shared, begin, slots, starts[table:], *after, size))
            for table, (count, begin, size) in enumerate(columns.tolist())
        ]
        self._backend.launch_tables(kernel, parts)

    def distinct(self) -> Distinct:
        """Waits for the number of distinct keys, and returns them."""
        starts = self._backend.to_host(self._starts)
        count = int(starts[-1])
        rows = None if self._rows_out is None else self._rows_out[:count]
        return Distinct(self.slots, self._first[:count], self._distinct[:count], starts, rows)


def unique(backend: Backend, keys: Array) -> tuple[Array, Array]:
    """Returns the distinct keys of one table, (u,) int64, and the index of each item's, (n,) int32.

    Raises:
      ValueError: more than 2**30 keys.
    """
    distinct = dedup(backend, keys, (0, keys.size))
    return distinct.keys, distinct.inverse


def last_of_each(backend: Backend, inverse: Array, num_unique: int) -> Array:
    """Returns the last item of every distinct key, (num_unique,) int32."""
    last = backend.set_bits(num_unique, np.dtype(np.int32))
    backend.launch("last_occurrence", inverse.size, inverse, last, inverse.size)
    return last

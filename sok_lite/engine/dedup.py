"""The distinct keys of items, for all tables of a call at once.

The items of the tables lie one after another: `begin`, (T + 1,) on the host, has the first item of
each table. Distinct keys are numbered by first occurrence, and so lie table by table too. The
number of launches does not depend on the number of tables.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import Work
from sok_lite.backend.ragged import split_offsets
from sok_lite.engine.hashing import seed_of_process
from sok_lite.engine.segments import Groups, group
from sok_lite.engine.sort import Sort, Tiles

# On a CPU first occurrences are counted in blocks of so many items, or larger ones where there
# would be too many: each block reads what was counted in all before it.
_BLOCK, _MOST_BLOCKS = 1024, 4096


class Distinct(NamedTuple):
    """The distinct keys of a call.

    Attributes:
      inverse: (n,) int32, the number of the distinct key of each item; -1 of an item left out.
      first: (u,) int32, the first item with each distinct key.
      keys: (u,) int64, the distinct keys.
      starts: (T + 1,) int64 on the host, the first distinct key of each table.
      rows: (u,) uint32, what the first items have of what was to be taken along; else None.
    """

    inverse: Array
    first: Array
    keys: Array
    starts: np.ndarray
    rows: Array | None = None

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
    rows: Array | None = None,
) -> Distinct:
    """Finds the distinct keys of each table, in order of first occurrence.

    It waits for the device once. The result never depends on thread timing.

    Args:
      keys: (n,) int64.
      begin: (T + 1,), the first item of each table, from 0 to n, ascending.
      missing: only items without a row take part; None: all do.
      repeat: whether keys may repeat; if not, it is less work.
      rows: (n,) uint32, of which each distinct key takes that of its first item along; None: none.

    Raises:
      ValueError: more than 2**30 keys, which int32 numbers could not address.
    """
    numbering = _Numbering(backend, keys, begin, rows, missing, repeat)
    if not keys.size:
        return numbering.none()
    numbering.launch(numbering.new_work())
    rows_missing = None if missing is None else missing.rows
    numbering.launch_of_tables("dedup_inverse", numbering.sizes, [rows_missing])
    return numbering.distinct()


def dedup_and_group(
    backend: Backend, keys: Array, begin: Sequence[int] | np.ndarray, rows: Array
) -> tuple[Distinct, Groups]:
    """Finds the distinct keys of each table, and the items of each: see `dedup` and `group`.

    It waits for the device once: on a GPU when all of it is launched.

    Args:
      keys, begin, rows: as of `dedup`.

    Raises:
      ValueError: more than 2**30 keys.
    """
    n = keys.size
    if backend.name == "cpu" or n == 0:
        distinct = dedup(backend, keys, begin, rows=rows)
        return distinct, group(backend, distinct.inverse, begin, distinct.starts)
    numbering = _Numbering(backend, keys, begin, rows, None, True)
    # Nobody knows yet how many numbers there are: at most as many as items.
    sort = Sort(backend, n, n, numbering.num_words)
    numbering.launch(sort.work)
    teams = -(-numbering.sizes // sort.tiles.items)
    numbering.launch_of_tables("dedup_labels", teams, [], sort.counting)
    order, by_number = sort.sorted(numbering.slots)
    offsets = backend.xp.empty(n + 1, np.int64)
    backend.launch("group_sorted", n, by_number, offsets, 0, n)
    distinct = numbering.distinct()
    offsets = offsets[: distinct.keys.size + 1]
    return distinct, Groups(offsets, order, distinct.inverse, numbering.begin, distinct.starts)


class _Numbering:
    """Distinct keys that are given numbers; how many they are the host learns at the end.

    Args:
      The arguments of `dedup`.

    Attributes:
      begin: (T + 1,) int64 on the host.
      sizes: (T,) int64, items of each table.
      slots: (n,) int32, the scratch slot of each item, and then its number.
      num_words: that have to be 0: what the tiles of a GPU tell, and the scratch slots.
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
        self._num_told = 1 + self._tiles.number if backend.name == "cuda" else 0
        # Items that take no part look at the first slot, whether or not others have any.
        self.num_words = self._num_told + max(1, int(self._num_slots.sum()))

    def none(self) -> Distinct:
        """Returns the distinct ones of no keys."""
        empty = self._backend.xp.empty(0, np.int32)
        return Distinct(empty, empty, self._keys, np.zeros(self.begin.size, np.int64), self._rows)

    def new_work(self) -> Array:
        """Returns the words that have to be 0, uint32."""
        if self._backend.name == "cuda":
            return self._backend.xp.zeros(self.num_words, np.uint32)
        # Not zeros: the system would give the memory page by page, in the order of hashes.
        work = np.empty(self.num_words, np.uint32)
        work.fill(0)
        return work

    def launch(self, work: Array) -> None:
        """Gives numbers to keys. It waits for nothing.

        Args:
          work: uint32, of which `num_words` are 0.
        """
        backend, xp, n = self._backend, self._backend.xp, self._keys.size
        self.slots = xp.empty(n, np.int32)
        self._first, self._distinct = xp.empty(n, np.int32), xp.empty(n, np.int64)
        self._starts = xp.empty(self.begin.size, np.int64)
        self._rows_out = None if self._rows is None else xp.empty(n, np.uint32)
        self._heads = work[self._num_told :].view(np.int32)
        missing = None if self._missing is None else self._missing.rows
        how = (int(self._repeat), seed_of_process(), self._heads, self.slots)
        first_slots = split_offsets(self._num_slots)[:-1]
        columns = np.stack([self.begin[:-1], first_slots, self._num_slots, self.sizes], axis=1)
        parts = [
            Work(size, (self._keys, missing, begin, first, num_slots, *how, size))
            for begin, first, num_slots, size in columns.tolist()
        ]
        backend.launch_parts("dedup_insert", parts)
        if backend.name == "cpu":
            self._launch_in_blocks()
            return
        out = (self._first, self._distinct, self._rows_out, self._starts[-1:])
        items = (self._keys, self._rows, self.slots, self._heads)
        backend.launch(
            "dedup_number_tiles", self._tiles.number, *items, *out, work, work[1:], *self._tiles, n
        )

    def _launch_in_blocks(self) -> None:
        n = self._keys.size
        words = (_BLOCK if n <= _BLOCK * _MOST_BLOCKS else -(-n // _MOST_BLOCKS)) // 32
        num_blocks = -(-n // (32 * words))
        marks, counts = np.empty(-(-n // 32), np.uint32), np.empty(num_blocks, np.int32)
        heads, launch = self._heads, self._backend.launch
        # A block is worth many items: the launch is told their number, not the blocks'.
        blocks = (marks, counts, words, num_blocks, n)
        launch("dedup_count", n, self.slots, heads, *blocks)
        out = (self._first, self._distinct, self._rows_out, self._starts[-1:])
        launch("dedup_number", n, self._keys, self._rows, self.slots, heads, *out, *blocks)

    def launch_of_tables(
        self,
        kernel: str,
        num_items: np.ndarray,
        before: Sequence[Any],
        after: Sequence[Any] = (),
    ) -> None:
        """Launches a kernel that tells each item its number, and each table where its keys start.

        Args:
          num_items: of each table. One without any is told, too.
          before, after: what it takes behind the scratch slots, and before the number of items.
        """
        slots, starts = self.slots, self._starts
        told = (slots, self._heads, *before, self._first, starts[-1:])
        columns = np.stack([num_items, self.begin[:-1], self.sizes], axis=1)
        parts = [
            Work(max(1, count), (*told, begin, slots, starts[table:], *after, size))
            for table, (count, begin, size) in enumerate(columns.tolist())
        ]
        self._backend.launch_parts(kernel, parts)

    def distinct(self) -> Distinct:
        """Waits for the number of keys, and returns them."""
        starts = self._backend.to_host(self._starts)
        count = int(starts[-1])
        rows = None if self._rows_out is None else self._rows_out[:count]
        return Distinct(self.slots, self._first[:count], self._distinct[:count], starts, rows)


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
    last = backend.set_bits(num_unique, np.dtype(np.int32))
    backend.launch("last_occurrence", inverse.size, inverse, last, inverse.size)
    return last

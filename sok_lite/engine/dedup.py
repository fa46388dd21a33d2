"""The distinct keys of items, for all tables of a call at once.

The items of the tables lie one after another: `begin`, (T + 1,) on the host, has the first item of
each table. Distinct keys are numbered by first occurrence, and so lie table by table too. The
number of launches does not depend on the number of tables.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import I64, U32, Words
from sok_lite.comm.protocol import split_offsets
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
    begin, n = _checked(keys, begin)
    if n == 0:
        return _none(backend, keys, begin, rows)
    work = backend.xp.zeros(_num_words(begin, missing, repeat), np.uint32)
    numbered = _number(backend, keys, begin, work, rows, missing, repeat)
    slots, heads, *others = numbered.words(backend, begin)
    are_missing = 0 if missing is None else _address(backend, missing.rows, U32)
    columns = [slots, heads, are_missing, *others, np.diff(begin)]
    _launch_tables(backend, "dedup_inverse", np.diff(begin), columns, (numbered, missing))
    return numbered.distinct(backend)


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
    begin, n = _checked(keys, begin)
    if backend.name == "cpu" or n == 0:
        distinct = dedup(backend, keys, begin, rows=rows)
        return distinct, group(backend, distinct.inverse, begin, distinct.starts)
    # Nobody knows yet how many numbers there are: at most as many as items.
    sort = Sort(backend, n, n, _num_words(begin, None, True))
    numbered = _number(backend, keys, begin, sort.work, rows)
    columns = [*numbered.words(backend, begin), *sort.counting, np.diff(begin)]
    teams = -(-np.diff(begin) // sort.tiles.items)
    _launch_tables(backend, "dedup_labels", teams, columns, (numbered, sort.work))
    order, by_number = sort.sorted(numbered.inverse)
    offsets = backend.xp.empty(n + 1, np.int64)
    backend.launch("group_sorted", n, by_number, offsets, 0, n)
    distinct = numbered.distinct(backend)
    offsets = offsets[: distinct.keys.size + 1]
    return distinct, Groups(offsets, order, distinct.inverse, begin, distinct.starts)


class _Numbered(NamedTuple):
    """Distinct keys that have numbers; how many they are is not known on the host.

    Attributes:
      inverse, first, keys, starts, rows: as of Distinct, or yet to be written, with room for as
        many keys as items; starts: on the device. Until `inverse` is written it has the scratch
        slot of each item.
      work: what tiles tell and the scratch slots, see `_num_words`.
    """

    inverse: Array
    first: Array
    keys: Array
    starts: Array
    rows: Array | None
    work: Array

    def words(self, backend: Backend, begin: np.ndarray) -> list[Words]:
        """Returns what a kernel is told that tells each item its number, but for rows and sizes."""
        num_tables, address = begin.size - 1, backend.address
        slots, starts = address(self.inverse), address(self.starts)
        heads = address(self.work) + U32.itemsize * _num_told(self.inverse.size)
        return [
            *(slots, heads, address(self.first), starts + I64.itemsize * num_tables),
            *(begin[:-1], slots, starts + I64.itemsize * np.arange(num_tables)),
        ]

    def distinct(self, backend: Backend) -> Distinct:
        """Waits for the number of keys, and cuts what has room for more."""
        starts = backend.to_host(self.starts)
        count = int(starts[-1])
        rows = None if self.rows is None else self.rows[:count]
        return Distinct(self.inverse, self.first[:count], self.keys[:count], starts, rows)


def _checked(keys: Array, begin: Sequence[int] | np.ndarray) -> tuple[np.ndarray, int]:
    """Returns where tables begin, and how many keys there are."""
    if keys.size > 1 << 30:
        raise ValueError(f"A batch must have at most 2**30 keys. Received: {keys.size}. Split it.")
    return np.asarray(begin, np.int64), keys.size


def _none(backend: Backend, keys: Array, begin: np.ndarray, rows: Array | None) -> Distinct:
    empty = backend.xp.empty(0, np.int32)
    return Distinct(empty, empty, keys, np.zeros(begin.size, np.int64), rows)


def _num_slots(begin: np.ndarray, missing: Missing | None, repeat: bool) -> np.ndarray:
    """Returns how many scratch slots each table has."""
    if not repeat:
        return np.diff(begin)
    return 2 * (np.diff(begin) if missing is None else np.asarray(missing.counts, np.int64))


def _num_words(begin: np.ndarray, missing: Missing | None, repeat: bool) -> int:
    """Returns how many words have to be 0: what the tiles of a GPU tell, and the slots."""
    # Items that take no part look at the first slot, whether or not others have any.
    num_slots = max(1, int(_num_slots(begin, missing, repeat).sum()))
    return _num_told(int(begin[-1])) + num_slots


def _num_told(n: int) -> int:
    """Returns how many words the tiles of a GPU have: of how many were taken, and one for each."""
    return 1 + Tiles.of(n).number


def _number(
    backend: Backend,
    keys: Array,
    begin: np.ndarray,
    work: Array,
    rows: Array | None = None,
    missing: Missing | None = None,
    repeat: bool = True,
) -> _Numbered:
    """Gives numbers to distinct keys. It waits for nothing.

    Args:
      work: uint32, `_num_words` or more of them 0.
      The others: as of `dedup`; at least one key.
    """
    xp, n, address = backend.xp, keys.size, backend.address
    sizes, num_slots = np.diff(begin), _num_slots(begin, missing, repeat)
    slots, first, starts = xp.empty(n, np.int32), xp.empty(n, np.int32), xp.empty(begin.size, I64)
    numbered = _Numbered(
        slots, first, xp.empty(n, I64), starts, rows if rows is None else xp.empty(n, U32), work
    )
    at_keys, told, at_slots = _address(backend, keys, I64), address(work), address(slots)
    heads = told + U32.itemsize * _num_told(n)
    are_missing = 0 if missing is None else _address(backend, missing.rows, U32)
    slots_of_tables = (begin[:-1], split_offsets(num_slots)[:-1], num_slots)
    columns: list[Words] = [at_keys, are_missing, *slots_of_tables, int(repeat), seed_of_process()]
    columns += [heads, at_slots, sizes]
    arrays = (keys, missing, numbered, rows)
    backend.launch_columns("dedup_insert", sizes.tolist(), columns, arrays)
    total = starts[begin.size - 1 :]
    if backend.name == "cuda":
        tiles = Tiles.of(n)
        at_rows = (0, 0) if rows is None else (_address(backend, rows, U32), address(numbered.rows))
        columns = [at_keys, at_rows[0], at_slots, heads, address(first), address(numbered.keys)]
        columns += [at_rows[1], address(total), told, told + U32.itemsize, *tiles, n]
        backend.launch_columns("dedup_number_tiles", [tiles.number], columns, arrays)
        return numbered
    words = (_BLOCK if n <= _BLOCK * _MOST_BLOCKS else -(-n // _MOST_BLOCKS)) // 32
    num_blocks = -(-n // (32 * words))
    marks, counts = xp.empty(-(-n // 32), np.uint32), xp.empty(num_blocks, np.int32)
    # A block is worth many items: the launch is told their number, not the blocks'.
    blocks, of_slots = (words, num_blocks, n), work[_num_told(n) :].view(np.int32)
    backend.launch("dedup_count", n, slots, of_slots, marks, counts, *blocks)
    out = (first, numbered.keys, numbered.rows, total)
    backend.launch("dedup_number", n, keys, rows, slots, of_slots, *out, marks, counts, *blocks)
    return numbered


def _launch_tables(
    backend: Backend, kernel: str, num_items: np.ndarray, columns: list[Words], arrays: Any
) -> None:
    """Launches a kernel for all tables: also those without items, for what is told of them."""
    backend.launch_columns(kernel, np.maximum(1, num_items).tolist(), columns, arrays)


def _address(backend: Backend, array: Array, dtype: np.dtype) -> int:
    """Returns the address of an array. Raises TypeError if kernels cannot take it as that dtype."""
    return int(backend.addresses([array], dtype)[0])


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

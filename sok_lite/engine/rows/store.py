"""The rows of a table and their optimizer states, in columns that share one row number.

A column is a list of equally long chunks, so a store grows without moving a row, and a row number
is valid as long as its key lives. Column "value" has the table's row format; every optimizer state
is a float32 column beside it. The states of free rows have their initial value, so that a new key
needs no pass over the state columns.

A store may have two tiers. Rows below `near_rows` are near: in the memory of the backend's device.
The others are far: on a GPU in pinned memory of the host, which kernels read and write in place; on
a CPU in ordinary memory or in a file. A kernel sees chunks and cannot tell. Rows move only where
`swap` exchanges two of them in all columns; engine/rows/tiers.py decides which.

Reading and writing rows is in engine/rows/access.py; this module allocates and frees them.
"""

import contextlib
import copy
import itertools
import os
from collections.abc import Collection, Iterable
from ctypes import addressof
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import Launch, launch_all
from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.dtypes import RowDtype
from sok_lite.engine.rows.access import RowAccess
from sok_lite.engine.rows.allocator import Claim, RowAllocator
from sok_lite.engine.rows.column import Column, Kinds, StateGroups, StateOwner, States, kinds_of
from sok_lite.engine.rows.far_file import FarFile
from sok_lite.engine.rows.record import AccessRecord, FillRecord, StoreRecord
from sok_lite.engine.rows.slabs import Chunks, Slabs, TierBytes

_state_versions = itertools.count(1)
NO_ROW = 0xFFFFFFFF  # the row number of a key that has no row; SOK_NO_ROW in kernels/platform.cuh


class SoleStates(NamedTuple):
    """All states of a store, where they have one owner; None: there are no states."""

    owner: StateOwner | None
    states: States
    kinds: Kinds


class RowStore(RowAccess):
    """Rows by number: their memory, and which of them are free.

    Args:
      near_rows: how many rows may be near; None: all of them. A store keeps the largest number of
        whole chunks: all of them below 32 rows, more than 31/32 of them above.
      far_path: only on the cpu backend, only with `near_rows`: keeps far rows in a scratch file
        instead of memory; a folder or the name of a new file, see FarFile.
      whose: owner of the rows, for errors.

    Attributes:
      slabs: how much memory is allocated at a time, and returned.
      chunks: chunks of every column, by tier.
      record: the store as native code sees it.
      accesses: access counts of the rows (tiers.py); None: accesses are not counted.
      near_rows: rows below this number are near; None: all are.
      known_groups: the last result of `state_groups`; None: a change has made it stale.
      sole_states: the states, where all have one owner; valid while `known_groups` is not None.

    Raises:
      ValueError: a `far_path` with another backend, or without `near_rows`.
      OSError: the file cannot be made.
    """

    def __init__(
        self,
        backend: Backend,
        dim: int,
        row_dtype: RowDtype,
        *,
        near_rows: int | None = None,
        far_path: str | os.PathLike[str] | None = None,
        whose: str = "a table",
    ) -> None:
        if far_path is not None and (near_rows is None or backend.name != "cpu"):
            raise ValueError(
                "far_path is where the cpu backend keeps rows that are not near. "
                f"Received: far_path={os.fspath(far_path)!r} with backend {backend.name!r} and "
                f"near_rows={near_rows}. Give near_rows, or leave far_path out."
            )
        self.slabs = Slabs.of(backend, dim, near_rows)
        super().__init__(backend, dim, row_dtype, self.slabs.chunk_shift)
        self.known_groups: StateGroups | None = None
        self.sole_states: SoleStates | None = None
        self.near_rows = self.slabs.near_rows
        self._first_far = NO_ROW if self.near_rows is None else self.near_rows
        self._far_file = None if far_path is None else FarFile(far_path, whose)
        self.has_far_file = self._far_file is not None
        self.chunks = Chunks(0, 0)
        self.record = StoreRecord()
        self.accesses: AccessRecord | None = None
        self._far_bytes = 0  # of the far file, that the columns use
        self._allocator: RowAllocator
        self._fills: Any = None  # memory of `record.fills`
        self._set_allocator(RowAllocator.none(backend.xp, self._first_far))
        self._add_columns([self._value_column()])

    # ---------------------------------------------------------------- columns

    def _value_column(self) -> Column:
        what = ("value", self.dim, self.row_dtype.storage, 0.0)
        return Column(
            self.backend, *what, self.chunk_shift, self._far_file, self.row_dtype.number, "value"
        )

    def _add_columns(self, columns: list[Column]) -> None:
        """Allocates memory for all rows in new columns and adds these, all or none.

        Raises:
          MemoryError: the store is as it was.
        """
        memory, far_bytes = self._new_memory(columns, self.chunks)
        for column, parts in zip(columns, memory, strict=True):
            if column.initial != 0:
                self._fill_memory(column, parts)
            column.attach(column.with_memory(parts))  # nobody has these columns yet
        _return_blocks(columns, self.allocator.returned)
        by_name = {**self.columns, **{column.name: column for column in columns}}
        with uninterrupted():
            self.set_columns(by_name)
            self._far_bytes = far_bytes

    def set_columns(self, columns: dict[str, Column]) -> None:
        """Replaces the columns; also to be called when a state gets another name or owner."""
        filled = [each for each in columns.values() if each.initial != 0]
        fills = (FillRecord * len(filled))()
        for fill, column in zip(fills, filled, strict=True):
            fill.column = addressof(column.record)
            fill.value = int(np.float32(column.initial).view(np.uint32))
        self.record.value = addressof(columns["value"].record)
        self.record.states, self.record.num_fills = 0, len(filled)
        self.record.fills = addressof(fills) if filled else None
        self.columns, self.known_groups, self._fills = columns, None, fills

    def _fill_memory(self, column: Column, memory: list[Array]) -> None:
        """Writes the initial value to all rows handed out so far; other memory is not touched."""
        left = self.num_rows * column.dim
        for part in memory:
            elements = part.view(column.dtype)
            elements[:left].fill(column.initial)
            left = max(0, left - int(elements.size))

    def _new_memory(self, columns: list[Column], chunks: Chunks) -> tuple[list[list[Array]], int]:
        """Returns memory for more chunks of columns, and the new length of the far file."""
        if self._far_file is None:
            return [column.new_memory(chunks) for column in columns], 0
        self.trim()  # what a failed call left there
        try:
            memory = [column.new_memory(chunks) for column in columns]
        except BaseException:
            self.trim()
            raise
        return memory, self._far_file.num_bytes

    def unused_name(self, state: str, others: Collection[str] = ()) -> str:
        """Returns a column name for a state: the state's name, with a number if it is taken.

        Args:
          others: column names that are taken besides those of the store.
        """
        names = itertools.chain([state], (f"{state} ({i})" for i in itertools.count(2)))
        return next(name for name in names if name not in self.columns and name not in others)

    def add_states(self, kinds: Kinds, owner: StateOwner | None) -> list[Column]:
        """Adds float32 columns for the states of an owner, all or none; None: free states.

        Raises:
          MemoryError: the store is as it was.
        """
        where, dtype = (self.chunk_shift, self._far_file, 0), np.dtype(np.float32)
        columns: list[Column] = []
        for name, (dim, initial) in kinds.items():
            unused = self.unused_name(name, [column.name for column in columns])
            columns.append(Column(self.backend, unused, dim, dtype, initial, *where, name, owner))
        self._add_columns(columns)
        return columns

    @property
    def state_groups(self) -> StateGroups:
        """The states of each owner, in the order in which they were made; see StateGroups."""
        groups = self.known_groups
        if groups is None:
            made: dict[StateOwner | None, dict[str, Column]] = {}
            for name in self.state_names:
                column = self.columns[name]
                made.setdefault(column.owner, {})[column.state] = column
            groups, self.sole_states = dict(made), None
            if not made:
                self.sole_states = SoleStates(None, {}, {})
            elif len(made) == 1 and None not in made:
                ((owner, states),) = made.items()
                self.sole_states = SoleStates(owner, states, kinds_of(states))
            self.known_groups = groups
        return groups

    def number_states(self) -> None:
        """Gives the set of states a version in the record, which their next change resets."""
        if self.record.states == 0:
            _ = self.state_groups  # made now, so that it tells of every change from here on
            self.record.states = next(_state_versions)

    @property
    def states_with_values(self) -> list[str]:
        """The states whose initial value is not 0: new memory must be filled."""
        return [name for name in self.state_names if self.columns[name].initial != 0]

    # ---------------------------------------------------------------- sizes

    @property
    def row_bytes(self) -> int:
        """Memory of one row and its states."""
        return sum(column.row_bytes for column in self.columns.values())

    @property
    def used_bytes(self) -> int:
        """Memory of the rows and states handed out so far, free ones included.

        Memory that was returned to the system does not count.
        """
        return (self.num_rows - self.allocator.num_returned) * self.row_bytes

    @property
    def num_bytes(self) -> int:
        """Memory allocated for rows and states. On a CPU untouched pages of it cost nothing."""
        tiers = self.tier_bytes()
        return tiers.near + tiers.far

    def tier_bytes(self) -> TierBytes:
        """Returns `used_bytes` and `num_bytes` by tier."""
        near_gone, far_gone = self.allocator.returned_by_tier
        num_far = self.num_far_rows
        near, far = (count << self.chunk_shift for count in self.chunks)
        used = (self.num_rows - num_far - near_gone, num_far - far_gone)
        rows = (*used, near - near_gone, far - far_gone)
        return TierBytes(*(count * self.row_bytes for count in rows))

    @property
    def num_rows(self) -> int:
        """Rows handed out so far, free ones included: every row number is below it."""
        return self.record.num_rows

    @property
    def num_far_rows(self) -> int:
        """Far rows handed out so far, free ones included."""
        return self.allocator.num_far

    # ---------------------------------------------------------------- row numbers

    @property
    def allocator(self) -> RowAllocator:
        """The allocator of row numbers, which native code advances too."""
        known, its = self._allocator, self.record
        if its.num_rows == known.num_rows and its.num_free == known.free_near.size:
            return known
        # Native code has taken rows meanwhile: free ones from the end, then new ones.
        return known._replace(num_rows=its.num_rows, free_near=known.free_near[: its.num_free])

    def _set_allocator(self, allocator: RowAllocator) -> None:
        free, record = allocator.free_near, self.record
        record.num_rows, record.num_far = allocator.num_rows, allocator.num_far
        record.free_rows = self.backend.address(free) if free.size else None
        record.num_free = int(free.size)
        self._allocator = allocator
        record.room = 0
        if self.near_rows is None:
            # Rows whose memory was returned are taken before new ones, by Python.
            is_new = not allocator.returned
            record.room = self.chunks.total << self.chunk_shift if is_new else allocator.num_rows

    def has_room(self, count: int) -> bool:
        """Whether `count` rows can be claimed without more memory."""
        num_new = max(0, count - self.allocator.num_listed)
        most = self.chunks.total << self.chunk_shift
        return not num_new or (not self.allocator.returned and self.num_rows + num_new <= most)

    def claim(self, count: int) -> Claim:
        """Chooses `count` rows and allocates memory for them. They stay free until `take`.

        Raises:
          MemoryError: the store is as it was.
        """
        self._regain(count)
        claim = self.allocator.claim(self.backend.xp, count)
        self._grow(claim.after().num_rows)
        return claim

    def give_rows_launches(self, claim: Claim, placed: Array | None = None) -> list[Launch]:
        """Returns the launches that write the rows of the last claim, and the states of new ones.

        Args:
          placed: (count,) int64, the slots of the keys that get the rows; None: there are none yet.
        """
        return [
            claim.list_launch(self.backend, placed),
            *(self.fill_launch(name, claim.fresh_rows) for name in self.states_with_values),
        ]

    def take(self, claim: Claim, count: int | None = None) -> None:
        """Takes the first `count` rows of the last claim; None: all."""
        self._set_allocator(claim.after(count))

    def allocate(self, count: int) -> Array:
        """Takes `count` rows: near ones as long as there are any, freed ones before new ones.

        Returns:
          (count,) uint32, distinct.

        Raises:
          MemoryError: the store is as it was.
        """
        claim = self.claim(count)
        launch_all(self.give_rows_launches(claim))
        self.take(claim)
        return claim.rows

    def free_near(self, count: int) -> Array:
        """Returns free near rows, `count` or as many as there are: (m,) uint32."""
        allocator = self.allocator
        self._regain(min(count, int(allocator.free_near.size) + allocator.returned_by_tier[0]))
        free = self.allocator.free_near
        return free[max(0, int(free.size) - count) :]

    def exchange_free(self, near: Array, far: Array) -> None:
        """Frees far rows (m,) in place of the result of `free_near`."""
        allocator = self.allocator
        if near.size:
            free_near = allocator.free_near[: allocator.free_near.size - near.size]
            free_far = self.backend.xp.concatenate([allocator.free_far, far])
            self._set_allocator(allocator._replace(free_near=free_near, free_far=free_far))

    def release(self, rows: Array) -> None:
        """Frees rows, distinct and none NO_ROW, and resets their states."""
        allocator = self.allocator.after_free(self.backend.xp, rows)
        launch_all(self.fill_launch(name, rows) for name in self.state_names)
        self._set_allocator(allocator)

    # ---------------------------------------------------------------- memory

    def reserve(self, count: int) -> None:
        """Allocates memory so that `count` more rows can be taken.

        Raises:
          MemoryError: the store is as it was.
        """
        self._grow(self.num_rows + max(0, count - self.allocator.num_free))

    def _grow(self, num_rows: int) -> None:
        if num_rows > NO_ROW:
            raise MemoryError(
                f"A table holds at most {NO_ROW:,} rows on one rank. Received: "
                f"{self.num_rows:,} rows and {num_rows - self.num_rows:,} more. Use more ranks."
            )
        num_chunks = (num_rows + (1 << self.chunk_shift) - 1) >> self.chunk_shift
        least = num_chunks - self.chunks.total
        if least <= 0:
            return
        columns = list(self.columns.values())
        max_near = (self._first_far >> self.chunk_shift) - self.chunks.near
        chunks = self.slabs.more(self.chunks, least, max_near, spare=True)
        made = None
        with contextlib.suppress(MemoryError):
            made = self._new_memory(columns, chunks)
        if made is None:
            # Spare rows are no reason to fail. What the first try did get is free again.
            chunks = self.slabs.more(self.chunks, least, max_near, spare=False)
            made = self._new_memory(columns, chunks)
        memory, far_bytes = made
        grown = [each.with_memory(parts) for each, parts in zip(columns, memory, strict=True)]
        before, allocator = self.chunks, self.allocator
        with uninterrupted():
            for column, its in zip(columns, grown, strict=True):
                column.attach(its)
            self.chunks = Chunks(before.near + chunks.near, before.far + chunks.far)
            self._far_bytes = far_bytes
            self._set_allocator(allocator)

    def give_back(self) -> None:
        """Returns memory of free rows to the system where that pays; called after `release`.

        All memory goes if no row is in use; else blocks whose rows are all free, which get memory
        again when they are taken. Some free rows keep theirs: the next keys would otherwise pay for
        pages again and again. Free rows of a far file and of a GPU keep theirs too.
        """
        allocator, shift = self.allocator, self.slabs.block_shift
        if not allocator.is_worth_a_search(shift):
            return
        with contextlib.suppress(MemoryError):  # for lists of rows: then nothing goes
            if allocator.num_free == allocator.num_rows:
                self.clear()
            elif self.backend.gives_back:
                blocks = allocator.empty_blocks(shift, not self.has_far_file)
                self._set_allocator(allocator.after_return(blocks, shift))
                _return_blocks(self.columns.values(), blocks)

    def _regain(self, count: int) -> None:
        """Gives memory back to free rows, so that `count` rows with memory can be claimed."""
        blocks = self.allocator.blocks_to_regain(count)
        if not blocks:
            return
        xp = self.backend.xp
        listed = [xp.arange(rows.start, rows.stop, dtype=np.uint32) for rows in blocks]
        allocator = self.allocator.after_regain(xp, blocks, listed)
        # Pages come with the first touch, full of zeros.
        launch_all(
            self.fill_launch(name, rows) for name in self.states_with_values for rows in listed
        )
        self._set_allocator(allocator)

    def clear(self) -> None:
        """Frees all rows and their memory. The state columns stay, empty."""
        columns = {name: column.empty_copy() for name, column in self.columns.items()}
        allocator = RowAllocator.none(self.backend.xp, self._first_far)
        if self.num_far_rows:
            self.backend.synchronize()  # kernels that still use pinned memory or the file
        with uninterrupted():
            self.set_columns(columns)
            self.chunks, self._far_bytes = Chunks(0, 0), 0
            self._set_allocator(allocator)
        self.trim()

    def trim(self) -> None:
        """Cuts the far file behind the last row.

        Raises:
          OSError: another program has cut the file shorter.
        """
        if self._far_file:
            self._far_file.trim(self._far_bytes)

    def close_far(self) -> None:
        """Frees the far file of a store that is not used any more."""
        if self._far_file:
            self._far_file.close()

    # ---------------------------------------------------------------- copies

    def for_reading(self) -> "RowStore":
        """Returns a store with the present columns, which can be read after this one is cleared."""
        other = copy.copy(self)
        other.record, other._allocator = StoreRecord(self.record.value), self.allocator
        other._set_allocator(other._allocator)
        if self._far_file:
            # A read behind the end of a file would kill the process.
            self._far_file.keep(self._far_bytes, other)
        return other

    def empty_copy(self) -> "RowStore":
        """Returns a store like this one without rows and states.

        Raises:
          OSError: another far file cannot be made.
        """
        other = copy.copy(self)
        other._far_file = None if self._far_file is None else self._far_file.sibling()
        other.columns, other.known_groups = {}, None
        other.record, other.accesses = StoreRecord(), None
        other.chunks, other._far_bytes = Chunks(0, 0), 0
        other._set_allocator(RowAllocator.none(self.backend.xp, self._first_far))
        other._add_columns([other._value_column()])
        return other


def _return_blocks(columns: Iterable[Column], blocks: Iterable[range]) -> None:
    """Returns the memory of blocks of rows to the system, in all of some columns."""
    for column, rows in itertools.product(columns, blocks):
        column.give_back(rows)

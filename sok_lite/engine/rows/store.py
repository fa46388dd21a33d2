"""The rows of a table and their optimizer state, in columns that share one row number.

A column is a list of equally long chunks, so a store grows without moving a row and a row number
is valid for as long as its key lives. Column `value` has the table's row format; every optimizer
state is a float32 column beside it. The states of free rows have their initial value: a new key
then needs no pass over state columns.

A store may have two tiers. Rows below `near_rows` are near: in the memory of the backend's device.
The others are far: on a GPU in pinned memory of the host, which kernels read and write in place; on
a CPU in ordinary memory or in a file. A kernel sees chunks and cannot tell. Rows do not move by
themselves: `swap` exchanges two of them in all columns, and engine/rows/tiers.py says which.

Reading and writing rows is in engine/rows/access.py; this module allocates and frees them.
"""

import contextlib
import copy
import itertools
import os
from ctypes import addressof
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import Launch, launch_all
from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.dtypes import RowDtype
from sok_lite.engine.rows.access import RowAccess
from sok_lite.engine.rows.allocator import Claim, RowNumbers
from sok_lite.engine.rows.column import Column, Kinds, StateGroups, StateOwner, States, kinds_of
from sok_lite.engine.rows.far_file import FarFile
from sok_lite.engine.rows.memory import give_back, regain, return_blocks, tier_bytes
from sok_lite.engine.rows.record import AccessRecord, FillRecord, StoreRecord
from sok_lite.engine.rows.slabs import Chunks, Slabs

_serial = itertools.count(1)  # of what states stores have had
NO_ROW = 0xFFFFFFFF  # the row number of a key that has no row; SOK_NO_ROW in kernels/platform.cuh


class SoleStates(NamedTuple):
    """All states of a store, where they have one owner.

    Attributes:
      owner: of all states; None: there are no states.
      states, kinds: of the store.
    """

    owner: StateOwner | None
    states: States
    kinds: Kinds


class RowStore(RowAccess):
    """Rows by number: their memory, and who may take which.

    Args:
      near_rows: how many rows may be near; None: all of them. A store keeps the largest number of
        whole chunks: all of them below 32 rows, more than 31/32 of them above.
      far_path: only on the cpu backend, only with `near_rows`: keeps far rows in a scratch file
        instead of memory; a folder or the name of a new file, see FarFile.
      whose: rows they are, for errors.

    Attributes:
      backend: where the rows are.
      dim: elements of a value row.
      row_dtype: format of the value rows.
      chunk_shift: a chunk holds 2**chunk_shift rows.
      slabs: how much memory is allocated at a time, and returned.
      chunks: how many every column has, by tier.
      record: where its columns are, as native code sees it.
      accesses: how often rows were accessed, of which the record has the address; None: nobody
        counts (tiers.py).
      near_rows: rows below this number are near; None: all are.
      known_groups: what `state_groups` gave last; None: it is to be made anew.
      sole_states: the states, where all have one owner; good as long as `known_groups` is there.

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
        self._far_bytes = 0  # of the far file, that belong to them
        self._numbers: RowNumbers
        self._fills: Any = None  # of the record
        self.set_numbers(RowNumbers.none(backend.xp, self._first_far))
        self.add_columns([self._value_column()])

    # ---------------------------------------------------------------- columns

    def new_column(
        self,
        name: str,
        dim: int,
        dtype: np.dtype,
        initial: float,
        state: str = "",
        owner: StateOwner | None = None,
    ) -> Column:
        """Returns a column without rows, for `add_columns`; of a state with its name and owner."""
        format_number = self.row_dtype.number if name == "value" else 0
        where = (self.chunk_shift, self._far_file, format_number)
        return Column(self.backend, name, dim, dtype, initial, *where, state, owner)

    def _value_column(self) -> Column:
        return self.new_column("value", self.dim, self.row_dtype.storage, 0.0)

    def add_columns(self, columns: list[Column]) -> None:
        """Gives new columns memory for all rows, and the store these columns: all or none.

        Raises:
          MemoryError: no memory for them; the store is as it was.
        """
        memory, far_bytes = self._new_memory(columns, self.chunks)
        for column, parts in zip(columns, memory, strict=True):
            if column.initial != 0:
                self._fill_memory(column, parts)
            column.attach(column.grown(parts))  # nobody has these columns yet
        return_blocks(columns, self.numbers.returned)
        by_name = {**self.columns, **{column.name: column for column in columns}}
        with uninterrupted():
            self.set_columns(by_name)
            self._far_bytes = far_bytes

    def set_columns(self, columns: dict[str, Column]) -> None:
        """Has these columns, among them one of values; or the same, with other owners or names."""
        begun = [each for each in columns.values() if each.initial != 0]
        fills = (FillRecord * len(begun))()
        for fill, column in zip(fills, begun, strict=True):
            fill.column = addressof(column.record)
            fill.value = int(np.float32(column.initial).view(np.uint32))
        self.record.value = addressof(columns["value"].record)
        self.record.states, self.record.num_fills = 0, len(begun)
        self.record.fills = addressof(fills) if begun else None
        self.columns, self.known_groups, self._fills = columns, None, fills

    def _fill_memory(self, column: Column, memory: list[Array]) -> None:
        """Gives all rows handed out so far the initial value. Memory of others is not touched."""
        left = self.num_rows * column.dim
        for part in memory:
            elements = part.view(column.dtype)
            elements[:left].fill(column.initial)
            left = max(0, left - int(elements.size))

    def _new_memory(self, columns: list[Column], chunks: Chunks) -> tuple[list[list[Array]], int]:
        """Returns the memory of chunks for all of some columns, and the length of the far file."""
        if self._far_file is None:
            return [column.new_memory(chunks) for column in columns], 0
        self.trim()  # what was made for rows that did not come
        try:
            memory = [column.new_memory(chunks) for column in columns]
        except BaseException:
            self.trim()
            raise
        return memory, self._far_file.num_bytes

    def unused_name(self, state: str) -> str:
        """Returns a name for the column of a state that no column has."""
        names = itertools.chain([state], (f"{state} ({i})" for i in itertools.count(2)))
        return next(name for name in names if name not in self.columns)

    def add_states(self, kinds: Kinds, owner: StateOwner | None) -> list[Column]:
        """Makes float32 columns for states, all of them or none, whatever others there are.

        Args:
          owner: of all of them; None: they are free.

        Raises:
          MemoryError: no memory for them; the store is as it was.
        """
        columns = [
            self.new_column(self.unused_name(name), dim, np.dtype(np.float32), first, name, owner)
            for name, (dim, first) in kinds.items()
        ]
        self.add_columns(columns)
        return columns

    @property
    def state_groups(self) -> StateGroups:
        """The states of each owner, in the order in which they were made.

        Those of None have no owner that keeps them together.
        """
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
        """Gives the states that there are a number in the record, by which native code knows them.

        Their first change takes it away.
        """
        if self.record.states == 0:
            _ = self.state_groups  # made now, so that it tells of every change from here on
            self.record.states = next(_serial)

    @property
    def states_with_values(self) -> list[str]:
        """The states that do not begin with zeros, as new memory does."""
        return [name for name in self.state_names if self.columns[name].initial != 0]

    @property
    def row_bytes(self) -> int:
        """Memory of one row and its states."""
        return sum(column.row_bytes for column in self.columns.values())

    @property
    def used_bytes(self) -> int:
        """Memory of the rows and states that were handed out so far, free ones included.

        Memory that was returned to the system does not count.
        """
        return (self.num_rows - self.numbers.num_returned) * self.row_bytes

    @property
    def num_bytes(self) -> int:
        """Memory allocated for rows and states. On a CPU untouched pages of it cost nothing."""
        tiers = self.tier_bytes()
        return tiers.near + tiers.far

    tier_bytes = tier_bytes

    # ---------------------------------------------------------------- row numbers

    @property
    def numbers(self) -> RowNumbers:
        """Which rows are handed out and which of those are free."""
        known, its = self._numbers, self.record
        if its.num_rows == known.num_rows and its.num_free == known.free_near.size:
            return known
        # Native code has taken some meanwhile: free ones from the end, then new ones.
        return known._replace(num_rows=its.num_rows, free_near=known.free_near[: its.num_free])

    @property
    def num_rows(self) -> int:
        """Rows handed out so far, free ones included: every row number is below it."""
        return self.record.num_rows

    @property
    def num_far_rows(self) -> int:
        """How many of them are far."""
        return self.numbers.num_far

    def has_room(self, count: int) -> bool:
        """Whether `count` rows can be claimed of the memory that there is."""
        num_new = max(0, count - self.numbers.num_listed)
        most = self.chunks.total << self.chunk_shift
        return not num_new or (not self.numbers.returned and self.num_rows + num_new <= most)

    def set_numbers(self, numbers: RowNumbers) -> None:
        """Hands out other rows from now on."""
        free, record = numbers.free_near, self.record
        record.num_rows, record.num_far = numbers.num_rows, numbers.num_far
        record.free_rows = self.backend.address(free) if free.size else None
        record.num_free = int(free.size)
        self._numbers = numbers
        self._set_room()

    def _set_room(self) -> None:
        """Says below which number native code may take new rows; 0: no rows at all."""
        room = 0
        if self.near_rows is None:
            # Before there are new ones Python takes those whose memory was returned.
            is_new = not self._numbers.returned
            room = self.chunks.total << self.chunk_shift if is_new else self._numbers.num_rows
        self.record.room = room

    def claim(self, count: int) -> Claim:
        """Chooses `count` rows and allocates memory for them. They stay free until `take`.

        Raises:
          MemoryError: no memory for them; the store is as it was.
        """
        regain(self, count)
        claim = self.numbers.claim(self.backend.xp, count)
        self._grow(claim.left().num_rows)
        return claim

    def list_launches(self, claim: Claim, placed: Array | None = None) -> list[Launch]:
        """Returns the launches that write which rows the last claim has, and the states of new
        ones.

        Args:
          placed: (its rows,) int64, the slots of keys that get them; None: there are none yet.
        """
        return [
            claim.list_launch(self.backend, placed),
            *(self.fill_launch(name, claim.fresh_rows) for name in self.states_with_values),
        ]

    def take(self, claim: Claim, count: int | None = None) -> None:
        """Takes the first `count` rows of the last claim; None: all."""
        self.set_numbers(claim.left(count))

    def allocate(self, count: int) -> Array:
        """Takes `count` rows: near ones as long as there are any, freed ones before new ones.

        Returns:
          (count,) uint32, distinct.

        Raises:
          MemoryError: no memory for them; the store is as it was.
        """
        claim = self.claim(count)
        launch_all(self.list_launches(claim))
        self.take(claim)
        return claim.rows

    def free_near(self, count: int) -> Array:
        """Returns near rows that were freed, `count` or as many as there are: (m,) uint32."""
        regain(self, min(count, self.numbers.num_near_free))
        free = self.numbers.free_near
        return free[max(0, int(free.size) - count) :]

    def exchange_free(self, near: Array, far: Array) -> None:
        """Frees far rows (m,) in place of what `free_near` returned."""
        self.set_numbers(self.numbers.exchanging(self.backend.xp, int(near.size), far))

    def reserve(self, count: int) -> None:
        """Makes sure that `count` rows can be taken later without running out of memory.

        Raises:
          MemoryError: no memory for them; the store is as it was.
        """
        self._grow(self.num_rows + max(0, count - self.numbers.num_free))

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
        grown = [column.grown(parts) for column, parts in zip(columns, memory, strict=True)]
        before, numbers = self.chunks, self.numbers
        with uninterrupted():
            for column, its in zip(columns, grown, strict=True):
                column.attach(its)
            self.chunks = Chunks(before.near + chunks.near, before.far + chunks.far)
            self._far_bytes = far_bytes
            self.set_numbers(numbers)

    def release(self, rows: Array) -> None:
        """Frees rows, distinct and none NO_ROW, and resets their states."""
        numbers = self.numbers.releasing(self.backend.xp, rows)
        launch_all(self.fill_launch(name, rows) for name in self.state_names)
        self.set_numbers(numbers)

    give_back = give_back

    def clear(self) -> None:
        """Frees all rows and their memory. The state columns stay, empty."""
        columns = {name: column.emptied() for name, column in self.columns.items()}
        numbers = RowNumbers.none(self.backend.xp, self._first_far)
        if self.num_far_rows:
            self.backend.synchronize()  # kernels that still use pinned memory or the file
        with uninterrupted():
            self.set_columns(columns)
            self.chunks, self._far_bytes = Chunks(0, 0), 0
            self.set_numbers(numbers)
        self.trim()

    def trim(self) -> None:
        """Cuts the far file behind the last row.

        Raises:
          OSError: somebody has cut the file short.
        """
        if self._far_file:
            self._far_file.trim(self._far_bytes)

    def close_far(self) -> None:
        """Frees the far file of a store that is not used any more."""
        if self._far_file:
            self._far_file.close()

    def for_reading(self) -> "RowStore":
        """Returns a store with the present columns: they can be read after this one is cleared."""
        other = copy.copy(self)
        other.record, other._numbers = StoreRecord(self.record.value), self.numbers
        other.set_numbers(other._numbers)
        if self._far_file:
            # To read behind the end of a file would end the process.
            self._far_file.keep(self._far_bytes, other)
        return other

    def emptied(self) -> "RowStore":
        """Returns a store like this one without rows and states.

        Raises:
          OSError: no place for another far file.
        """
        other = copy.copy(self)
        other._far_file = None if self._far_file is None else self._far_file.sibling()
        other.columns, other.known_groups = {}, None
        other.record, other.accesses = StoreRecord(), None
        other.chunks, other._far_bytes = Chunks(0, 0), 0
        other.set_numbers(RowNumbers.none(self.backend.xp, self._first_far))
        other.add_columns([other._value_column()])
        return other

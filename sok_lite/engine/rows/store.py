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
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, plan_set, publish
from sok_lite.engine.dtypes import RowDtype
from sok_lite.engine.rows.access import RowAccess
from sok_lite.engine.rows.allocator import Claim, RowNumbers
from sok_lite.engine.rows.column import Column
from sok_lite.engine.rows.far_file import FarFile
from sok_lite.engine.rows.slabs import Chunks, Slabs
from sok_lite.engine.rows.state_owner import Kinds, SoleStates, StateGroups, StateOwner, States

NO_ROW = 0xFFFFFFFF  # the row number of a key that has no row; SOK_NO_ROW in kernels/platform.cuh
_PIECE = 1 << 16  # rows that are copied at once


class TierBytes(NamedTuple):
    """Memory of a store by tier.

    Attributes:
      near_used, far_used: rows and states that were handed out so far, free ones included.
      near, far: memory allocated. Memory that was returned to the system is in none of the four.
    """

    near_used: int
    far_used: int
    near: int
    far: int


class RowStore(RowAccess):
    """Rows by number: their memory, and who may take which.

    Args:
      near_rows: how many rows may be near; None: all of them. A store keeps the largest number of
        whole chunks: all of them below 32 rows, more than 31/32 of them above.
      far_path: only on the cpu backend, only with `near_rows`: keeps far rows in a scratch file
        instead of memory; a folder or the name of a new file, see FarFile.

    Attributes:
      backend: where the rows are.
      dim: elements of a value row.
      row_dtype: format of the value rows.
      chunk_shift: a chunk holds 2**chunk_shift rows.
      near_rows: rows below this number are near; None: all are.
      numbers: which rows are handed out and which of those are free.
      known_groups: what `state_groups` gave last; None: it is to be made anew.
      sole_states: the states, where all have one owner; good as long as `known_groups` is there.

    Raises:
      ValueError: an argument is not as described here.
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
    ) -> None:
        if dim < 1:
            raise ValueError(f"dimension must be at least 1. Received: {dim}.")
        if near_rows is not None and near_rows < 0:
            raise ValueError(f"near_rows must be at least 0. Received: {near_rows}.")
        if far_path is not None and (near_rows is None or backend.name != "cpu"):
            raise ValueError(
                "far_path is where the cpu backend keeps rows that are not near. "
                f"Received: far_path={os.fspath(far_path)!r} with backend {backend.name!r} and "
                f"near_rows={near_rows}. Give near_rows, or leave far_path out."
            )
        self._slabs = Slabs.of(backend, dim, near_rows)
        super().__init__(backend, dim, row_dtype, self._slabs.chunk_shift)
        self.known_groups: StateGroups | None = None
        self.sole_states: SoleStates | None = None
        self.near_rows = self._slabs.near_rows
        self._first_far = NO_ROW if self.near_rows is None else self.near_rows
        self._far_file = None if far_path is None else FarFile(far_path)
        self.has_far_file = self._far_file is not None
        self._chunks = Chunks(0, 0)  # of every column
        self._far_bytes = 0  # of the far file, that belong to them
        self.numbers = RowNumbers.none(backend.xp, self._first_far)
        self._add_columns([self._value_column()])

    # ---------------------------------------------------------------- columns

    def _value_column(self) -> Column:
        storage, shift = self.row_dtype.storage, self.chunk_shift
        return Column(self.backend, "value", self.dim, storage, 0.0, shift, self._far_file)

    def _state_column(
        self, state: str, dim: int, initial: float, owner: StateOwner | None
    ) -> Column:
        name = self._unused(state)
        dtype, shift = np.dtype(np.float32), self.chunk_shift
        rest = (dim, dtype, initial, shift, self._far_file, state, owner)
        return Column(self.backend, name, *rest)

    def _unused(self, state: str) -> str:
        """Returns a name for the column of a state that no column has."""
        names = itertools.chain([state], (f"{state} ({i})" for i in itertools.count(2)))
        return next(name for name in names if name not in self.columns)

    def _add_columns(self, columns: list[Column]) -> None:
        memory, far_bytes = self._new_memory(columns, self._chunks)
        for column, parts in zip(columns, memory, strict=True):
            if column.initial != 0:
                self._fill_memory(column, parts)
            publish(column.plan_attach(parts))
        self._give_back(columns, self.numbers.returned)
        # Not `__setitem__`: a first key makes a dict ask for memory.
        by_name = {**self.columns, **{column.name: column for column in columns}}
        publish(plan_set(self, columns=by_name, known_groups=None, _far_bytes=far_bytes))

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

    def add_states(self, kinds: Kinds, owner: StateOwner | None) -> list[Column]:
        """Makes float32 columns for states, all of them or none, whatever others there are.

        Args:
          kinds: by name, elements of a row and their initial value.
          owner: of all of them; None: they are free.

        Raises:
          MemoryError: no memory for them; the store is as it was.
        """
        columns = [self._state_column(name, *kind, owner) for name, kind in kinds.items()]
        self._add_columns(columns)
        return columns

    @property
    def state_groups(self) -> StateGroups:
        """The states of each owner, in the order in which they were made."""
        groups = self.known_groups
        if groups is None:
            made: dict[StateOwner | None, dict[str, Column]] = {}
            for name in self.state_names:
                column = self.columns[name]
                made.setdefault(column.owner, {})[column.state] = column
            groups = dict(made)
            self.sole_states, self.known_groups = SoleStates.of(groups), groups
        return groups

    def plan_give(self, columns: Iterable[Column], owner: StateOwner) -> list[Action]:
        """Prepares to make an owner the owner of free states."""
        setting = [action for column in columns for action in plan_set(column, owner=owner)]
        return [*setting, *plan_set(self, known_groups=None)]

    def copy_states(self, states: States, columns: Iterable[Column]) -> None:
        """Writes the rows of states into columns that are called as they are, piece by piece."""
        xp = self.backend.xp
        for start in range(0, self.num_rows, _PIECE):
            rows = xp.arange(start, min(start + _PIECE, self.num_rows), dtype=np.uint32)
            for column in columns:
                self.write(rows, self.read(rows, states[column.state].name), column.name)

    def plan_rename(self, column: Column, state: str) -> list[Action]:
        """Prepares to rename a state."""
        name = self._unused(state)
        columns = {name if each is column else key: each for key, each in self.columns.items()}
        renamed = plan_set(self, columns=columns, known_groups=None)
        return [*plan_set(column, name=name, state=state), *renamed]

    def drop_states(self, columns: Sequence[Column]) -> None:
        """Drops states that are not used any more, and frees their memory."""
        gone = {column.name for column in columns}
        left = {name: column for name, column in self.columns.items() if name not in gone}
        if self.num_far_rows:
            self.backend.synchronize()  # kernels that still use pinned memory
        publish(plan_set(self, columns=left, known_groups=None))
        for column in columns:
            column.discard()

    def ensure_state(self, name: str, initial: float, dim: int | None = None) -> Column:
        """Returns a float32 state column of this name and makes it on first use. It is free.

        Args:
          name: of the state, such as "m".
          initial: the value of every element before the first update.
          dim: elements of a row; None: as many as a value row.

        Raises:
          ValueError: the column exists with another dim or initial value.
        """
        dim = self.dim if dim is None else dim
        column = self.state_groups.get(None, {}).get(name)
        if column is None:
            (column,) = self.add_states({name: (dim, initial)}, None)
        elif (column.dim, column.initial) != (dim, initial):
            raise ValueError(
                f"State {name!r} exists with dim {column.dim} and initial value {column.initial}. "
                f"Received: dim {dim}, initial value {initial}. Give it another name."
            )
        return column

    @property
    def _with_values(self) -> list[str]:
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

    def tier_bytes(self) -> TierBytes:
        """Returns `used_bytes` and `num_bytes` by tier."""
        near_gone, far_gone = self.numbers.returned_by_tier
        far_used = self.num_far_rows - far_gone
        near_used = self.num_rows - self.num_far_rows - near_gone
        near, far = (count << self.chunk_shift for count in self._chunks)
        rows = (near_used, far_used, near - near_gone, far - far_gone)
        return TierBytes(*(count * self.row_bytes for count in rows))

    # ---------------------------------------------------------------- row numbers

    @property
    def num_rows(self) -> int:
        """Rows handed out so far, free ones included: every row number is below it."""
        return self.numbers.num_rows

    @property
    def num_far_rows(self) -> int:
        """How many of them are far."""
        return self.numbers.num_far

    def claim(self, count: int) -> Claim:
        """Chooses `count` rows and allocates memory for them. They stay free until `plan_take`.

        Raises:
          MemoryError: no memory for them; the store is as it was.
        """
        self._regain(count)
        claim = self.numbers.claim(self.backend.xp, count)
        self._grow(claim.left().num_rows)
        return claim

    def plan_list(self, claim: Claim) -> list[Action]:
        """Prepares to write which rows the last claim has, and the states of new ones."""
        return [
            claim.plan_list(self.backend),
            *(self.plan_fill(name, claim.fresh_rows) for name in self._with_values),
        ]

    def plan_take(self, claim: Claim, count: int | None = None) -> list[Action]:
        """Prepares to take the first `count` rows of the last claim; None: all."""
        return plan_set(self, numbers=claim.left(count))

    def allocate(self, count: int) -> Array:
        """Takes `count` rows: near ones as long as there are any, freed ones before new ones.

        Returns:
          (count,) uint32, distinct.

        Raises:
          MemoryError: no memory for them; the store is as it was.
        """
        claim = self.claim(count)
        publish([*self.plan_list(claim), *self.plan_take(claim)])
        return claim.rows

    def free_near(self, count: int) -> Array:
        """Returns near rows that were freed, `count` or as many as there are: (m,) uint32."""
        self._regain(min(count, self.numbers.num_near_free))
        free = self.numbers.free_near
        return free[max(0, int(free.size) - count) :]

    def plan_exchange_free(self, near: Array, far: Array) -> list[Action]:
        """Prepares to free far rows (m,) in place of what `free_near` returned."""
        numbers = self.numbers.exchanging(self.backend.xp, int(near.size), far)
        return plan_set(self, numbers=numbers)

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
        least = num_chunks - self._chunks.total
        if least <= 0:
            return
        columns = list(self.columns.values())
        max_near = (self._first_far >> self.chunk_shift) - self._chunks.near
        chunks = self._slabs.more(self._chunks, least, max_near, spare=True)
        made = None
        with contextlib.suppress(MemoryError):
            made = self._new_memory(columns, chunks)
        if made is None:
            # Spare rows are no reason to fail. What the first try did get is free again.
            chunks = self._slabs.more(self._chunks, least, max_near, spare=False)
            made = self._new_memory(columns, chunks)
        memory, far_bytes = made
        attaching = [
            column.plan_attach(parts) for column, parts in zip(columns, memory, strict=True)
        ]
        before = self._chunks
        total = Chunks(before.near + chunks.near, before.far + chunks.far)
        publish(
            [
                *itertools.chain.from_iterable(attaching),
                *plan_set(self, _chunks=total, _far_bytes=far_bytes),
            ]
        )

    def plan_release(self, rows: Array) -> list[Action]:
        """Prepares to free rows, distinct and none NO_ROW, and to reset their states."""
        return [
            *(self.plan_fill(name, rows) for name in self.state_names),
            *plan_set(self, numbers=self.numbers.releasing(self.backend.xp, rows)),
        ]

    def release(self, rows: Array) -> None:
        """Frees rows, distinct and none NO_ROW, and resets their states."""
        publish(self.plan_release(rows))

    def give_back(self) -> None:
        """Returns memory of free rows to the system, after some were released; it may find none.

        Where little could be returned nothing is. Otherwise all memory is if no row is in use, or
        else blocks whose rows are all free, which get memory again when they are taken. Some free
        rows keep theirs, for the next keys, which would otherwise pay for pages again and again.
        Free rows of a far file and of a GPU keep theirs too.
        """
        numbers, shift = self.numbers, self._slabs.block_shift
        if not numbers.is_worth_a_look(shift):
            return
        with contextlib.suppress(MemoryError):  # for lists of rows: then nothing goes
            if numbers.num_free == numbers.num_rows:
                self.clear()
            elif self.backend.gives_back:
                blocks = numbers.empty_blocks(shift, not self.has_far_file)
                publish(plan_set(self, numbers=numbers.returning(blocks, shift)))
                self._give_back(self.columns.values(), blocks)

    @staticmethod
    def _give_back(columns: Iterable[Column], blocks: Iterable[range]) -> None:
        for column, rows in itertools.product(columns, blocks):
            column.give_back(rows)

    def _regain(self, count: int) -> None:
        """Makes sure that `count` rows can be claimed which have memory."""
        blocks = self.numbers.needed(count)
        if not blocks:
            return
        xp = self.backend.xp
        listed = [xp.arange(rows.start, rows.stop, dtype=np.uint32) for rows in blocks]
        publish(
            [
                # Its pages come with the first touch, full of zeros.
                *(self.plan_fill(name, rows) for name in self._with_values for rows in listed),
                *plan_set(self, numbers=self.numbers.regaining(xp, blocks, listed)),
            ]
        )

    def plan_clear(self) -> list[Action]:
        """Prepares to free all rows and their memory. The state columns stay, empty."""
        columns = {name: column.emptied() for name, column in self.columns.items()}
        if self.num_far_rows:
            self.backend.synchronize()  # kernels that still use pinned memory or the file
        numbers = RowNumbers.none(self.backend.xp, self._first_far)
        memory = plan_set(
            self, columns=columns, known_groups=None, _chunks=Chunks(0, 0), _far_bytes=0
        )
        return [*memory, *plan_set(self, numbers=numbers)]

    def clear(self) -> None:
        """Frees all rows and their memory. The state columns stay, empty."""
        publish(self.plan_clear())
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
        other._chunks, other._far_bytes = Chunks(0, 0), 0
        other.numbers = RowNumbers.none(self.backend.xp, self._first_far)
        other._add_columns([other._value_column()])
        return other

"""A column of rows, in chunks that never move, and the owner of an optimizer state.

Columns with the same owner are the states of one optimizer. States whose optimizer is gone are
orphaned: they will be dropped. Free states, for example from a checkpoint, have no optimizer yet.
States that a restore gave to a living optimizer belong to it; until its next step, another
optimizer with the same states may get a copy: a program may have made the optimizer again, and
still refer to the old one.
"""

import copy
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.rows.far_file import FarFile
from sok_lite.engine.rows.record import ColumnRecord
from sok_lite.engine.rows.slabs import Chunks


@dataclass(frozen=True, eq=False)
class StateOwner:
    """The owner of the states of one optimizer, compared by identity.

    Attributes:
      reference: to the optimizer; None: the states are free.
      is_restored: whether a restore gave it the states, and it has taken no step since.
    """

    reference: "weakref.ref[Any] | None" = None
    is_restored: bool = False

    @classmethod
    def of(cls, optimizer: Any) -> "StateOwner":
        """Returns a new owner; if the optimizer is None, its states are free."""
        return cls(None if optimizer is None else weakref.ref(optimizer))

    @property
    def optimizer(self) -> Any:
        """The optimizer; None: the states are free, or it is gone."""
        return None if self.reference is None else self.reference()

    @property
    def is_gone(self) -> bool:
        """Whether the optimizer has used the states and is gone."""
        return self.reference is not None and not self.is_restored and self.optimizer is None

    @property
    def is_free(self) -> bool:
        """Whether the next optimizer that needs the same states may take them over."""
        return self.optimizer is None and not self.is_gone


class Column:
    """A column of rows, in chunks.

    Attributes:
      name: "value", or a name of the state that is unique in the store.
      state: the optimizer's name of the state; several optimizers may use the same.
      dim: elements of a row.
      dtype: storage dtype of an element.
      initial: the value of every element of free rows.
      row_bytes: memory of one row.
      pointers: (at least num_chunks,) uint64, on the backend: the chunks' addresses, for kernels.
      record: the column as native code sees it, with the address of `pointers`.
      owner: of a state; None: the state is free and in no group with others.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        dim: int,
        dtype: np.dtype,
        initial: float,
        shift: int,
        far_file: FarFile | None,
        format_number: int,
        state: str,
        owner: StateOwner | None = None,
    ) -> None:
        self.name = name
        self.state = state
        self.dim = dim
        self.dtype = dtype
        self.initial = initial
        self.num_chunks = 0
        self.owner = owner
        self._backend = backend
        self.row_bytes = dim * dtype.itemsize
        self._chunk_bytes = self.row_bytes << shift
        self._far_file = far_file
        self._memory: list[Array] = []
        self.pointers = backend.xp.zeros(0, np.uint64)
        self.record = ColumnRecord(0, shift, dim, format_number)

    @property
    def is_used(self) -> bool:
        """Whether it is a state of a living optimizer."""
        return self.owner is not None and self.owner.optimizer is not None

    @property
    def is_gone(self) -> bool:
        """Whether it is a state of an optimizer that has used it and is gone."""
        return self.owner is not None and self.owner.is_gone

    def new_memory(self, chunks: Chunks) -> list[Array]:
        """Returns zeroed memory for `attach`, a slab for each tier."""
        memory: list[Array] = []
        if chunks.near:
            near = self._backend.zeros_chunk if self._memory else self._backend.first_chunk
            memory.append(near(chunks.near * self._chunk_bytes))
        if chunks.far:
            far = self._far_file.zeros if self._far_file else self._backend.far_chunk
            memory.append(far(chunks.far * self._chunk_bytes))
        return memory

    def with_memory(self, memory: list[Array]) -> tuple[Array, int, list[Array]]:
        """Returns pointers, number of chunks and memory for `attach`, with more memory."""
        addresses = [
            self._backend.address(part)
            + self._chunk_bytes * np.arange(part.nbytes // self._chunk_bytes, dtype=np.int64)
            for part in memory
        ]
        start = self.num_chunks
        end = start + sum(part.size for part in addresses)
        pointers = self.pointers
        if end > pointers.size:
            # Doubled: a large table has tens of thousands of chunks and gets them a few at a time.
            pointers = self._backend.xp.zeros(max(end, 2 * pointers.size), np.uint64)
            pointers[:start] = self.pointers[:start]
        if addresses:
            # Nobody looks behind `num_chunks`.
            pointers[start:end] = self._backend.from_host(np.concatenate(addresses).view(np.uint64))
        return pointers, end, [*self._memory, *memory]

    def attach(self, chunks: tuple[Array, int, list[Array]]) -> None:
        """Makes the result of `with_memory` the chunks of the column."""
        self.pointers, self.num_chunks, self._memory = chunks
        self.record.chunks = self._backend.address(self.pointers) if self.num_chunks else 0

    def give_back(self, rows: range) -> None:
        """Returns the memory of free rows to the system, until it is touched."""
        first, last = rows.start * self.row_bytes, rows.stop * self.row_bytes
        start = 0
        for part in self._memory:
            end = start + part.nbytes
            if first < end and start < last:
                self._backend.give_back(part[max(first - start, 0) : last - start])
            start = end

    def discard(self) -> None:
        """Frees the disk space of far rows; the column must not be used any more."""
        if self._far_file:
            for part in self._memory:
                self._far_file.discard(part)

    def empty_copy(self) -> "Column":
        """Returns an empty column like this one."""
        other = copy.copy(self)
        other.num_chunks = 0
        other._memory = []
        other.pointers = self._backend.xp.zeros(0, np.uint64)
        other.record = ColumnRecord(0, self.record.shift, self.dim, self.record.format)
        return other


# The states of one optimizer, by the optimizer's names.
States: TypeAlias = Mapping[str, Column]
# The same as (elements of a row, initial value).
Kinds: TypeAlias = Mapping[str, tuple[int, float]]
# By owner; under None the states that are in no group.
StateGroups: TypeAlias = Mapping[StateOwner | None, States]


def kinds_of(states: States) -> dict[str, tuple[int, float]]:
    """Returns the kinds of some states."""
    return {name: (column.dim, column.initial) for name, column in states.items()}

"""One array of rows, in chunks that never move."""

import copy
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.rows.far_file import FarFile
from sok_lite.engine.rows.record import ColumnRecord
from sok_lite.engine.rows.slabs import Chunks


class Grown(NamedTuple):
    """What a column has when memory is attached to it: its attributes of these names."""

    pointers: Array
    num_chunks: int
    memory: list[Array]


class Column:
    """One array of rows, in chunks.

    Attributes:
      name: "value", or the name of a state, unique in the store.
      state: the name of a state in its optimizer; states of several optimizers may have the same.
      dim: elements of a row.
      dtype: storage dtype of an element.
      initial: the value of every element of free rows.
      row_bytes: memory of one row.
      pointers: (at least num_chunks,) uint64, on the backend: the chunks' addresses, for kernels.
      record: where it is, as native code sees it: the address of `pointers`.
      owner: of a state, a StateOwner (engine/rows/state_owner.py); None: the state is free and in
        no group with others.
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
        format_number: int = 0,
        state: str = "",
        owner: Any = None,
    ) -> None:
        self.name = name
        self.state = state or name
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

    def new_memory(self, chunks: Chunks) -> list[Array]:
        """Returns memory that is not part of this column yet, zeroed: a slab for each tier."""
        memory: list[Array] = []
        if chunks.near:
            near = self._backend.zeros_chunk if self._memory else self._backend.first_chunk
            memory.append(near(chunks.near * self._chunk_bytes))
        if chunks.far:
            far = self._far_file.zeros if self._far_file else self._backend.far_chunk
            memory.append(far(chunks.far * self._chunk_bytes))
        return memory

    def grown(self, memory: list[Array]) -> Grown:
        """Returns what `attach` takes to make memory part of the column; nothing changes yet."""
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
        return Grown(pointers, end, [*self._memory, *memory])

    def attach(self, grown: Grown) -> None:
        """Makes memory part of the column."""
        self.pointers, self.num_chunks, self._memory = grown
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
        """Returns the disk space of far rows of a column that is not used any more."""
        if self._far_file:
            for part in self._memory:
                self._far_file.discard(part)

    def emptied(self) -> "Column":
        """Returns a column like this one without rows."""
        other = copy.copy(self)
        other.num_chunks = 0
        other._memory = []
        other.pointers = self._backend.xp.zeros(0, np.uint64)
        other.record = ColumnRecord(0, self.record.shift, self.dim, self.record.format)
        return other

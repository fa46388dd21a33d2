"""The rows of a table and their optimizer state, in columns that share one row number.

A column is a list of equally long chunks, so a store grows without moving a row and a row number
stays good for as long as its key lives. Column `value` has the table's row format; every optimizer
state is a float32 column beside it. Rows that nobody holds keep their state at its initial value:
a new key then needs no pass over state columns.
"""

from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.dtypes import RowDtype, as_words

ABSENT = 0xFFFFFFFF  # the row number of a key that has no row; SOK_ABSENT in kernels/platform.cuh


class Column:
    """One array of rows, in chunks.

    Attributes:
      name: "value" or a state's name.
      dim: elements of a row.
      dtype: storage dtype of an element.
      initial: what unheld rows hold.
      pointers: (at least num_chunks,) uint64, on the backend: the chunks' addresses, for kernels.
    """

    def __init__(
        self, backend: Backend, name: str, dim: int, dtype: np.dtype, initial: float, shift: int
    ) -> None:
        self.name = name
        self.dim = dim
        self.dtype = dtype
        self.initial = initial
        self._backend = backend
        self._shift = shift
        self._chunks: list[Array] = []
        self.pointers = backend.xp.zeros(0, np.uint64)

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    @property
    def num_bytes(self) -> int:
        return sum(int(chunk.nbytes) for chunk in self._chunks)

    def new_chunks(self, count: int) -> list[Array]:
        """Returns chunks for this column that are not part of it yet."""
        chunk_rows = 1 << self._shift
        chunks = []
        for _ in range(count):
            memory = self._backend.zeros_chunk(chunk_rows * self.dim * self.dtype.itemsize)
            if self.initial != 0:
                memory.view(self.dtype).fill(self.initial)
            chunks.append(memory)
        return chunks

    def attach(self, chunks: list[Array]) -> None:
        """Makes chunks part of the column."""
        start, end = len(self._chunks), len(self._chunks) + len(chunks)
        if end > self.pointers.size:
            # Doubled: a large table has tens of thousands of chunks and gets them one by one.
            grown = self._backend.xp.zeros(max(end, 2 * self.pointers.size), np.uint64)
            grown[:start] = self.pointers[:start]
            self.pointers = grown
        addresses = [self._backend.address(chunk) for chunk in chunks]
        self.pointers[start:end] = self._backend.from_host(np.array(addresses, np.uint64))
        self._chunks.extend(chunks)


class RowStore:
    """Rows by number.

    Attributes:
      backend: where the rows are.
      dim: elements of a value row.
      row_dtype: format of the value rows.
      chunk_shift: a chunk holds 2**chunk_shift rows.
    """

    def __init__(self, backend: Backend, dim: int, row_dtype: RowDtype) -> None:
        if dim < 1:
            raise ValueError(f"dimension must be at least 1. Received: {dim}.")
        self.backend = backend
        self.dim = dim
        self.row_dtype = row_dtype
        rows = max(1, backend.chunk_bytes // (4 * dim))
        self.chunk_shift = rows.bit_length() - 1
        self._columns: dict[str, Column] = {}
        self._num_rows = 0  # handed out so far, free ones included
        self._free = backend.xp.empty(0, np.uint32)
        self._add_column("value", dim, row_dtype.storage, 0.0)

    # ---------------------------------------------------------------- columns

    def _add_column(self, name: str, dim: int, dtype: np.dtype, initial: float) -> Column:
        column = Column(self.backend, name, dim, dtype, initial, self.chunk_shift)
        if self._columns:
            column.attach(column.new_chunks(self._columns["value"].num_chunks))
        self._columns[name] = column
        return column

    def ensure_state(self, name: str, initial: float, dim: int | None = None) -> Column:
        """Returns a float32 state column and makes it on first use.

        Args:
          name: of the state, such as "m".
          initial: what a row holds that no update has touched.
          dim: elements of a row; None: as many as a value row.

        Raises:
          ValueError: the column exists with another dim or initial value.
        """
        dim = self.dim if dim is None else dim
        column = self._columns.get(name)
        if column is None:
            return self._add_column(name, dim, np.dtype(np.float32), initial)
        if (column.dim, column.initial) != (dim, initial):
            raise ValueError(
                f"State {name!r} exists with dim {column.dim} and initial value {column.initial}. "
                f"Received: dim {dim}, initial value {initial}. Use one optimizer per table."
            )
        return column

    def column(self, name: str = "value") -> Column:
        """Returns a column.

        Raises:
          KeyError: there is none of that name.
        """
        return self._columns[name]

    @property
    def state_names(self) -> list[str]:
        """The optimizer states, in the order in which they were made."""
        return [name for name in self._columns if name != "value"]

    @property
    def used_bytes(self) -> int:
        """Memory of the rows and states that were handed out so far, free ones included."""
        row_bytes = sum(column.dim * column.dtype.itemsize for column in self._columns.values())
        return self._num_rows * row_bytes

    @property
    def num_bytes(self) -> int:
        """Memory set aside for rows and states. On a CPU untouched pages of it cost nothing."""
        return sum(column.num_bytes for column in self._columns.values())

    # ---------------------------------------------------------------- row numbers

    def allocate(self, count: int) -> Array:
        """Takes `count` rows, freed ones first.

        Returns:
          (count,) uint32, distinct.

        Raises:
          MemoryError: no memory for them; the store is as it was.
        """
        xp = self.backend.xp
        reused = min(count, int(self._free.size))
        fresh = count - reused
        if self._num_rows + fresh > ABSENT:
            raise MemoryError(
                f"A table holds at most {ABSENT:,} rows on one rank. Received: "
                f"{self._num_rows:,} rows and {fresh:,} more. Use more ranks."
            )
        self._grow(self._num_rows + fresh)
        first = self._num_rows
        rows = xp.arange(first, first + fresh, dtype=np.uint32)
        if reused:
            kept = self._free.size - reused
            rows = xp.concatenate([self._free[kept:], rows])
            self._free = self._free[:kept]
        self._num_rows += fresh
        return rows

    def _grow(self, num_rows: int) -> None:
        needed = (num_rows + (1 << self.chunk_shift) - 1) >> self.chunk_shift
        # All columns or none: memory may run out between two of them.
        new = [
            (column, column.new_chunks(needed - column.num_chunks))
            for column in self._columns.values()
            if needed > column.num_chunks
        ]
        for column, chunks in new:
            column.attach(chunks)

    def release(self, rows: Array) -> None:
        """Gives rows back, distinct and none absent; their state returns to its initial value."""
        for name in self.state_names:
            self.fill(name, rows)
        self._free = self.backend.xp.concatenate([self._free, rows])

    def clear(self) -> None:
        """Gives all rows and their memory back. The state columns stay, empty."""
        columns = list(self._columns.values())
        self._columns = {}
        for old in columns:
            self._add_column(old.name, old.dim, old.dtype, old.initial)
        self._num_rows = 0
        self._free = self.backend.xp.empty(0, np.uint32)

    # ---------------------------------------------------------------- rows

    def read(self, rows: Array, column: str = "value", out: Array | None = None) -> Array:
        """Copies rows out.

        Args:
          rows: (n,) uint32; an absent one gives zeros.
          column: which column.
          out: (n, dim) C-contiguous, to write into; None: a new array.

        Returns:
          (n, dim) of the column's storage dtype.

        Raises:
          ValueError: `out` is not such an array.
        """
        col = self._columns[column]
        shape = (rows.size, col.dim)
        if out is None:
            out = self.backend.xp.empty(shape, col.dtype)
        elif out.shape != shape or out.dtype != col.dtype or not out.flags.c_contiguous:
            raise ValueError(
                f"`out` must be a C-contiguous {col.dtype} array of shape {shape}. "
                f"Received: {out.dtype}, shape {out.shape}, strides {out.strides}."
            )
        suffix, words = as_words(out)
        self.backend.launch(
            f"rows_read_{suffix}",
            rows.size,
            col.pointers,
            self.chunk_shift,
            col.dim,
            rows,
            words,
            rows.size,
        )
        return out

    def write(
        self, rows: Array, values: Array, column: str = "value", source: Array | None = None
    ) -> None:
        """Copies rows in.

        Args:
          rows: (n,) uint32, distinct; an absent one is skipped.
          values: (m, dim) of the column's storage dtype, C-contiguous.
          source: (n,) int32, row i takes values[source[i]]; None: values[i].
        """
        col = self._columns[column]
        suffix, words = as_words(values)
        self.backend.launch(
            f"rows_write_{suffix}",
            rows.size,
            col.pointers,
            self.chunk_shift,
            col.dim,
            rows,
            words,
            source,
            rows.size,
        )

    def add(self, rows: Array, deltas: Array, scale: float = 1.0) -> None:
        """Adds `scale * deltas` to value rows.

        Args:
          rows: (n,) uint32, distinct; an absent one is skipped.
          deltas: (n, dim) float32, C-contiguous.
        """
        self.backend.launch(
            f"rows_add_{self.row_dtype.suffix}",
            rows.size,
            self._columns["value"].pointers,
            self.chunk_shift,
            self.dim,
            rows,
            deltas,
            float(scale),
            rows.size,
        )

    def fill(self, state: str, rows: Array) -> None:
        """Sets rows of a state column to its initial value."""
        col = self._columns[state]
        self.backend.launch(
            "rows_fill",
            rows.size,
            col.pointers,
            self.chunk_shift,
            col.dim,
            rows,
            float(col.initial),
            rows.size,
        )

    def to_storage(self, values: Any) -> Array:
        """Returns an array-like of rows in the storage format of the value column.

        Accepts the storage dtype itself, and any real floating dtype for float32 and float16 rows;
        bfloat16 rows are taken as uint16 bits, as an array whose dtype is named bfloat16, or as
        float32, rounded to nearest even.

        Raises:
          TypeError: the dtype cannot become this row format.
        """
        xp = self.backend.xp
        values = xp.asarray(values)
        if self.row_dtype.name != "bfloat16":
            if values.dtype.kind == "f" or values.dtype.name == "bfloat16":
                return xp.ascontiguousarray(values.astype(self.row_dtype.storage, copy=False))
        elif values.dtype == np.uint16:
            return xp.ascontiguousarray(values)
        elif values.dtype.name == "bfloat16":
            return xp.ascontiguousarray(values).view(np.uint16)
        elif values.dtype.kind == "f":
            return float32_to_bfloat16(xp, values.astype(np.float32))
        raise TypeError(
            f"values must be {self.row_dtype.name}, as the table's rows are. "
            f"Received: dtype {values.dtype}. Cast them first."
        )


def float32_to_bfloat16(xp: Any, values: Array) -> Array:
    """Returns the uint16 bits of float32 values rounded to bfloat16, nearest even."""
    bits = xp.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return xp.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def bfloat16_to_float32(xp: Any, bits: Array) -> Array:
    """Returns float32 values of bfloat16 bits (uint16)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)

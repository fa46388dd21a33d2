"""Kernels that read and write the rows of a column by row number.

A method `..._launch` only prepares the launch: several tables make theirs as one.
"""

from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import as_words
from sok_lite.backend.launches import Launch, launch_all
from sok_lite.engine.dtypes import RowDtype
from sok_lite.engine.rows.column import Column


class RowCopy(NamedTuple):
    """Arguments of a kernel that copies value rows into `out`, (n * row_bytes,) uint8.

    `gives_zeros` says whether zeros are written where there is no row.
    """

    pointers: Array
    chunk_shift: int
    row_bytes: int
    out: Array
    gives_zeros: int


class NewRows(NamedTuple):
    """The rows of keys that were missing in a lookup.

    Attributes:
      number: (n,) int32, of each item the number of its key among the missing ones, counted from
        `first`; -1: its key was not missing.
      first: number of the first missing key.
      rows: (u,) uint32, row numbers, or NO_ROW; None: no key got one.
      values: (u, dim) storage, the result for keys that have no row; None: zeros.
    """

    number: Array
    first: int
    rows: Array | None
    values: Array | None


class RowAccess:
    """Columns of rows, read and written by row number.

    Attributes:
      backend: where the rows are.
      dim: elements of a value row.
      row_dtype: format of the value rows.
      chunk_shift: a chunk holds 2**chunk_shift rows.
      columns: by name; "value" first, then the optimizer states, the oldest first.
    """

    def __init__(self, backend: Backend, dim: int, row_dtype: RowDtype, chunk_shift: int) -> None:
        self.backend = backend
        self.dim = dim
        self.row_dtype = row_dtype
        self.chunk_shift = chunk_shift
        self.columns: dict[str, Column] = {}

    def column(self, name: str = "value") -> Column:
        """Returns a column; raises KeyError if there is none of that name."""
        return self.columns[name]

    @property
    def state_names(self) -> list[str]:
        """Names of the optimizer states, the oldest first."""
        return [name for name in self.columns if name != "value"]

    def _rows_launch(self, kernel: str, column: Column, count: int, *arguments: Any) -> Launch:
        """Returns the launch of a kernel over `count` rows of a column."""
        place = (column.pointers, self.chunk_shift, column.dim)
        return self.backend.prepared(kernel, count, *place, *arguments, count)

    # ---------------------------------------------------------------- read

    def output(self, num_rows: int, column: str = "value", out: Array | None = None) -> Array:
        """Returns memory for `num_rows` rows of a column: `out`, or new.

        Raises:
          ValueError: `out` has another shape or dtype, or is not C-contiguous.
        """
        col = self.column(column)
        shape = (num_rows, col.dim)
        if out is None:
            return self.backend.xp.empty(shape, col.dtype)
        if out.shape != shape or out.dtype != col.dtype or not out.flags.c_contiguous:
            raise ValueError(
                f"`out` must be a C-contiguous {col.dtype} array of shape {shape}. "
                f"Received: {out.dtype}, shape {out.shape}, strides {out.strides}."
            )
        return out

    def copying(self, out: Array, gives_zeros: bool) -> RowCopy:
        """Returns the arguments of a kernel that copies value rows into `out`, of `output`."""
        col = self.column()
        flat = out.reshape(-1).view(np.uint8)
        return RowCopy(col.pointers, self.chunk_shift, col.row_bytes, flat, int(gives_zeros))

    def place(self) -> tuple[Array, int, int, int]:
        """Returns where the value rows are: pointers, chunk_shift, dim, number of the format."""
        return self.column().pointers, self.chunk_shift, self.dim, self.row_dtype.number

    def read(self, rows: Array, column: str = "value", out: Array | None = None) -> Array:
        """Returns rows (n,) uint32 of a column, (n, dim) of its storage dtype; NO_ROW gives zeros.

        Args:
          out: of `output`, to write into; None: a new array.
        """
        out = self.output(int(rows.size), column, out)
        self.read_launch(rows, out, column)()
        return out

    def read_launch(self, rows: Array, out: Array, column: str = "value") -> Launch:
        """Returns the launch that copies rows into `out`, as `read` does."""
        suffix, words = as_words(out)
        kernel = f"rows_read_{suffix}"
        return self._rows_launch(kernel, self.column(column), int(rows.size), rows, words)

    def deliver_launch(
        self, got: NewRows, rows: Array, out: Array | None, num_without_row: Array
    ) -> Launch:
        """Returns the launch that writes the results of items whose keys were missing.

        Args:
          got: the rows of these keys.
          rows: (n,) uint32, gets their row numbers.
          out: (n, dim) of `output`, gets their rows; None: nobody wants them.
          num_without_row: (1,) int64, grows by such items without a row.
        """
        col, n = self.column(), int(rows.size)
        words = None if out is None else as_words(out)[1]
        values = None if got.values is None else as_words(got.values)[1]
        kernel = f"rows_deliver_u{8 * col.dtype.itemsize}"
        where = (got.number, got.first, got.rows, values)
        return self._rows_launch(kernel, col, n, *where, rows, words, num_without_row)

    # ---------------------------------------------------------------- write

    def write_launch(
        self, rows: Array, values: Array, column: str = "value", source: Array | None = None
    ) -> Launch:
        """Returns the launch that writes rows of a column.

        Args:
          rows: (n,) uint32, distinct; NO_ROW is skipped.
          values: (m, dim) of the column's storage dtype, C-contiguous.
          source: (n,) int32, row i takes values[source[i]]; None: values[i].
        """
        suffix, words = as_words(values)
        kernel = f"rows_write_{suffix}"
        return self._rows_launch(kernel, self.column(column), int(rows.size), rows, words, source)

    def write(self, rows: Array, values: Array, column: str = "value") -> None:
        """Writes rows; see `write_launch`."""
        self.write_launch(rows, values, column)()

    def add_launch(self, rows: Array, deltas: Array, scale: float = 1.0) -> Launch:
        """Returns the launch that adds `scale * deltas` to value rows.

        Nothing else may change these rows before it is made.

        Args:
          rows: (n,) uint32, distinct; NO_ROW is skipped.
          deltas: (n, dim) of `row_dtype.delta_dtype`, C-contiguous. Integers wrap around.
          scale: a whole number for rows of integers.
        """
        if self.row_dtype.delta_dtype != np.float32:
            return self.write_launch(rows, self.read(rows) + self._scale(deltas, scale))
        kernel = f"rows_add_{self.row_dtype.suffix}"
        return self._rows_launch(kernel, self.column(), int(rows.size), rows, deltas, float(scale))

    def _scale(self, deltas: Array, scale: float) -> Array:
        """Returns `scale * deltas` for deltas that are not float32, in their dtype."""
        if scale == 1:
            return deltas
        if not self.row_dtype.is_integer:
            return deltas * np.float64(scale)
        return deltas * np.array(int(scale) % (1 << 64), np.uint64).astype(deltas.dtype)[()]

    def fill_launch(self, state: str, rows: Array) -> Launch:
        """Returns the launch that resets rows of a state to its initial value."""
        col = self.column(state)
        return self._rows_launch("rows_fill", col, int(rows.size), rows, float(col.initial))

    def swap(self, rows: Array, others: Array) -> None:
        """Exchanges rows[i] and others[i], (n,) uint32, in every column.

        All of them must be distinct and none NO_ROW.
        """
        launch_all(
            self._rows_launch(
                f"rows_swap_u{8 * column.dtype.itemsize}", column, int(rows.size), rows, others
            )
            for column in self.columns.values()
        )

    def to_storage(self, values: Any) -> Array:
        """Returns an array-like in the storage format of the value rows."""
        return self.row_dtype.to_storage(self.backend.xp, values)

"""Reads and writes rows of a column by row number: the kernels over rows.

A method `..._launch` returns a launch that is not made yet: several tables make theirs as one.
"""

from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import as_words
from sok_lite.backend.launches import Launch, launch_all
from sok_lite.engine.dtypes import RowDtype
from sok_lite.engine.rows.column import Column


class Copying(NamedTuple):
    """The arguments of a kernel that copies value rows into an array.

    Attributes:
      pointers: (at least num_chunks,) uint64, addresses of the chunks.
      chunk_shift: a chunk holds 2**chunk_shift rows.
      row_bytes: of a row.
      out: (n * row_bytes,) uint8, to write into.
      gives_zeros: whether zeros are written where there is no row.
    """

    pointers: Array
    chunk_shift: int
    row_bytes: int
    out: Array
    gives_zeros: int


class NewRows(NamedTuple):
    """The rows of keys that were missing in a lookup.

    Attributes:
      number: (n,) int32, the number of an item's key among the missing ones, counted from `first`;
        -1: its key was not missing.
      first: the number of the first missing key.
      rows: (u,) uint32, row numbers, or NO_ROW; None: no key got one.
      values: (u, dim) storage, the result of a key that has no row; None: zeros.
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
        """Returns a column.

        Raises:
          KeyError: there is none of that name.
        """
        return self.columns[name]

    @property
    def state_names(self) -> list[str]:
        """The optimizer states, in the order in which they were made."""
        return [name for name in self.columns if name != "value"]

    def _rows_launch(self, kernel: str, column: Column, count: int, *arguments: Any) -> Launch:
        """Returns the launch of a kernel that takes rows of a column, `count` of them."""
        place = (column.pointers, self.chunk_shift, column.dim)
        return self.backend.prepared(kernel, count, *place, *arguments, count)

    # ---------------------------------------------------------------- read

    def output(self, num_rows: int, column: str = "value", out: Array | None = None) -> Array:
        """Returns memory that `read` can write `num_rows` rows of a column into: `out`, or new.

        Raises:
          ValueError: `out` is not such an array.
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

    def copying(self, out: Array, gives_zeros: bool) -> Copying:
        """Returns what a kernel needs that copies value rows into memory from `output`."""
        col = self.column()
        flat = out.reshape(-1).view(np.uint8)
        return Copying(col.pointers, self.chunk_shift, col.row_bytes, flat, int(gives_zeros))

    def place(self, column: str = "value") -> tuple[Array, int, int, int]:
        """Returns where a column is, as kernels take it: pointers, chunk_shift, dim, format."""
        col = self.column(column)
        format_number = self.row_dtype.number if column == "value" else 0
        return col.pointers, self.chunk_shift, col.dim, format_number

    def read(self, rows: Array, column: str = "value", out: Array | None = None) -> Array:
        """Copies rows out.

        Args:
          rows: (n,) uint32; NO_ROW gives zeros.
          column: which column.
          out: (n, dim) C-contiguous, to write into; None: a new array.

        Returns:
          (n, dim) of the column's storage dtype.

        Raises:
          ValueError: `out` is not such an array.
        """
        out = self.output(int(rows.size), column, out)
        self.read_launch(rows, out, column)()
        return out

    def read_launch(self, rows: Array, out: Array, column: str = "value") -> Launch:
        """Returns the launch that copies rows (n,) into `out`, of `output`; NO_ROW gives zeros."""
        suffix, words = as_words(out)
        kernel = f"rows_read_{suffix}"
        return self._rows_launch(kernel, self.column(column), int(rows.size), rows, words)

    def deliver_launch(
        self, got: NewRows, rows: Array, out: Array | None, num_without_row: Array
    ) -> Launch:
        """Returns the launch that writes row numbers and rows of items whose keys were missing.

        Args:
          got: the rows of these keys.
          rows: (n,) uint32, the row numbers of such items are written to it.
          out: (n, dim) from `output`, their rows are written to it; None: they are not.
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
        """Returns the launch that copies rows in.

        Args:
          rows: (n,) uint32, distinct; NO_ROW is skipped.
          values: (m, dim) of the column's storage dtype, C-contiguous.
          source: (n,) int32, row i takes values[source[i]]; None: values[i].
        """
        suffix, words = as_words(values)
        kernel = f"rows_write_{suffix}"
        return self._rows_launch(kernel, self.column(column), int(rows.size), rows, words, source)

    def write(
        self, rows: Array, values: Array, column: str = "value", source: Array | None = None
    ) -> None:
        """Copies rows in, as `write_launch` says."""
        self.write_launch(rows, values, column, source)()

    def add_launch(self, rows: Array, deltas: Array, scale: float = 1.0) -> Launch:
        """Returns the launch that adds `scale * deltas` to value rows, which nothing may change
        until then.

        Args:
          rows: (n,) uint32, distinct; NO_ROW is skipped.
          deltas: (n, dim) of the dtype that rows are added in, C-contiguous. Integers wrap around.
          scale: of rows of integers a whole number.
        """
        if self.row_dtype.added_in != np.float32:
            return self.write_launch(rows, self.read(rows) + self._scale(deltas, scale))
        kernel = f"rows_add_{self.row_dtype.suffix}"
        return self._rows_launch(kernel, self.column(), int(rows.size), rows, deltas, float(scale))

    def _scale(self, deltas: Array, scale: float) -> Array:
        """Returns deltas that are no float32 times a number, in their dtype."""
        if scale == 1:
            return deltas
        if not self.row_dtype.is_integer:
            return deltas * np.float64(scale)
        return deltas * np.array(int(scale) % (1 << 64), np.uint64).astype(deltas.dtype)[()]

    def fill_launch(self, state: str, rows: Array) -> Launch:
        """Returns the launch that sets rows of a state to its initial value; NO_ROW is skipped."""
        col = self.column(state)
        return self._rows_launch("rows_fill", col, int(rows.size), rows, float(col.initial))

    def swap(self, rows: Array, others: Array) -> None:
        """Exchanges rows[i] and others[i] in every column.

        Args:
          rows, others: (n,) uint32, all of them distinct and none NO_ROW.
        """
        launch_all(
            self._rows_launch(
                f"rows_swap_u{8 * column.dtype.itemsize}", column, int(rows.size), rows, others
            )
            for column in self.columns.values()
        )

    def to_storage(self, values: Any) -> Array:
        """Returns an array-like of rows in the format of the value rows, as RowDtype says."""
        return self.row_dtype.to_storage(self.backend.xp, values)

"""Initial values that are rows of numbers: the same for every key, or one of several."""

import math
import zlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import as_words
from sok_lite.backend.launches import Launch
from sok_lite.engine.dtypes import RowDtype
from sok_lite.engine.rows.store import RowStore


class GivesFirstRows(Protocol):
    """An initializer, as a table calls it."""

    def check(self, row_dtype: RowDtype, dim: int) -> None:
        """Raises ValueError if rows of that format and length cannot begin as it says."""

    def fill_launch(
        self,
        backend: Backend,
        store: RowStore,
        rows: Array,
        keys: Array,
        table_seed: int,
        out: Array | None = None,
    ) -> Launch:
        """Returns the launch that writes the initial values of rows into the `value` column.

        Args:
          backend: where the arrays live.
          store: the row store.
          rows: (n,) uint32, distinct, or NO_ROW. They are read when it is made.
          keys: (n,) int64, the key of each row.
          table_seed: 64 bits that stand for the seed and the table's name.
          out: (n, dim) storage, C-contiguous, gets those of keys without a row, and of others
            anything; None: they are skipped.
        """

    def draw_launch(
        self,
        backend: Backend,
        row_dtype: RowDtype,
        out: Array,
        keys: Array,
        table_seed: int,
        rows: Array | None = None,
    ) -> Launch:
        """Returns the launch that writes the initial values of keys, without a table.

        Args:
          backend: where the arrays live.
          row_dtype: format of the values.
          out: (n, dim) storage, C-contiguous.
          keys: (n,) int64.
          table_seed: 64 bits that stand for the seed and the table's name.
          rows: (n,) uint32; a key whose row is not NO_ROW is skipped; None: none is.
        """


@dataclass(frozen=True)
class RowInitializer(GivesFirstRows):
    """The rows of new keys start as one row, whatever the key, in tables of every row format.

    Attributes:
      values: the elements of the row; for rows of integers whole numbers that fit.
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        for value in self.values:
            if not math.isfinite(value):
                raise ValueError(f"A row of initial values must be finite. Received: {value}.")

    def check(self, row_dtype: RowDtype, dim: int) -> None:
        if len(self.values) != dim:
            raise ValueError(
                f"A row of initial values must have {dim} numbers, as the table's rows. "
                f"Received: {len(self.values)}."
            )
        if not row_dtype.is_integer:
            row_dtype.check_finite(self.values, "Initial values of rows")
            return
        limits = np.iinfo(row_dtype.storage)
        fits = [int(x) == x and limits.min <= x <= limits.max for x in self.values]
        if not all(fits):
            raise ValueError(
                f"An initial value of {row_dtype.name} must be a whole number from {limits.min} to "
                f"{limits.max}. Received: {self.values[fits.index(False)]}."
            )

    def constant_row(self, dim: int) -> tuple[float, ...]:
        """Returns the row that every key starts with."""
        return self.values

    def fill_launch(
        self,
        backend: Backend,
        store: RowStore,
        rows: Array,
        keys: Array,
        table_seed: int,
        out: Array | None = None,
    ) -> Launch:
        suffix, row = as_words(self._in_format(backend, store.row_dtype))
        place = _place(store, rows, out)
        return backend.prepared(f"init_row_{suffix}", len(rows), *place, row, len(rows))

    def draw_launch(
        self,
        backend: Backend,
        row_dtype: RowDtype,
        out: Array,
        keys: Array,
        table_seed: int,
        rows: Array | None = None,
    ) -> Launch:
        n, dim = out.shape
        suffix, words = as_words(out)
        row = as_words(self._in_format(backend, row_dtype))[1]
        return backend.prepared(f"draw_row_{suffix}", n, words, dim, rows, row, n)

    def _in_format(self, backend: Backend, row_dtype: RowDtype) -> Array:
        """Returns the row in a format, (1, dim)."""
        # Integers by themselves: as floats large ones would be others.
        row = np.array([self.values], row_dtype.storage if row_dtype.is_integer else np.float64)
        return backend.from_host(row_dtype.to_storage(np, row))


class MatrixInitializer(GivesFirstRows):
    """The rows of new keys start as rows of a matrix: which one, is a function of seed and key.

    Args:
      matrix: (count, dim), finite numbers that float32 holds.

    Raises:
      ValueError: another shape, or a number that is not finite.
    """

    def __init__(self, matrix: np.ndarray) -> None:
        self._matrix = np.ascontiguousarray(matrix, np.float64)
        if self._matrix.ndim != 2 or not self._matrix.shape[0]:
            raise ValueError(
                "A matrix of initial values must have shape (rows, dim), of one row at least. "
                f"Received: shape {self._matrix.shape}."
            )
        if not (np.abs(self._matrix) <= np.finfo(np.float32).max).all():
            raise ValueError("A matrix of initial values must have finite float32 numbers.")
        self._digest = zlib.crc32(self._matrix.tobytes())
        self._copies: dict[tuple[int, str], Array] = {}

    def __repr__(self) -> str:
        """Says the same on every rank that has the same matrix."""
        return f"MatrixInitializer(shape={self._matrix.shape}, crc32={self._digest})"

    def check(self, row_dtype: RowDtype, dim: int) -> None:
        if self._matrix.shape[1] != dim:
            raise ValueError(
                f"A matrix of initial values must have rows of {dim} numbers, as the table. "
                f"Received: shape {self._matrix.shape}."
            )
        if row_dtype.is_integer:
            raise ValueError(
                f"Rows of {row_dtype.name} begin with a constant, or a row of numbers. "
                "Received: a matrix."
            )
        row_dtype.check_finite(self._matrix, "Initial values of rows")

    def fill_launch(
        self,
        backend: Backend,
        store: RowStore,
        rows: Array,
        keys: Array,
        table_seed: int,
        out: Array | None = None,
    ) -> Launch:
        suffix, matrix = as_words(self._in_format(backend, store.row_dtype))
        place = _place(store, rows, out)
        source = (keys, as_i64(table_seed), matrix, len(self._matrix))
        return backend.prepared(f"init_matrix_{suffix}", len(rows), *place, *source, len(rows))

    def draw_launch(
        self,
        backend: Backend,
        row_dtype: RowDtype,
        out: Array,
        keys: Array,
        table_seed: int,
        rows: Array | None = None,
    ) -> Launch:
        n, dim = out.shape
        suffix, words = as_words(out)
        matrix = as_words(self._in_format(backend, row_dtype))[1]
        source = (keys, as_i64(table_seed), matrix, len(self._matrix))
        return backend.prepared(f"draw_matrix_{suffix}", n, words, dim, rows, *source, n)

    def _in_format(self, backend: Backend, row_dtype: RowDtype) -> Array:
        """Returns the matrix in a format; one copy is kept for each backend and format."""
        key = (id(backend), row_dtype.name)
        if key not in self._copies:
            self._copies[key] = backend.from_host(row_dtype.to_storage(np, self._matrix))
        return self._copies[key]


def _place(store: RowStore, rows: Array, out: Array | None) -> tuple[Any, ...]:
    """Returns what a kernel is told first that fills rows, as `fill_launch` is given them."""
    return (*store.place()[:3], rows, None if out is None else as_words(out)[1])


def as_i64(seed: int) -> int:
    """Returns 64 bits as the signed number that a kernel takes."""
    seed = int(seed) & 0xFFFFFFFFFFFFFFFF
    return seed - (1 << 64) if seed >> 63 else seed

"""An initial value that is the same row for every key."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action
from sok_lite.engine.dtypes import RowDtype, as_words


@dataclass(frozen=True)
class RowInitializer:
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
        """Raises ValueError if rows of that format and length cannot begin as it says."""
        if len(self.values) != dim:
            raise ValueError(
                f"A row of initial values must have {dim} numbers, as the table's rows. "
                f"Received: {len(self.values)}."
            )
        if row_dtype.is_integer:
            limits = np.iinfo(row_dtype.storage)
            expected = f"a whole number from {limits.min} to {limits.max}"
            fits = [int(x) == x and limits.min <= x <= limits.max for x in self.values]
        else:
            wide = row_dtype.name == "float64"
            limit = float(np.finfo(np.float64 if wide else np.float32).max)
            expected = f"at most {limit:g} in size"
            fits = [abs(x) <= limit for x in self.values]
        if not all(fits):
            raise ValueError(
                f"An initial value of {row_dtype.name} must be {expected}. "
                f"Received: {self.values[fits.index(False)]}."
            )

    def constant_row(self, dim: int) -> tuple[float, ...]:
        """Returns the row that every key starts with."""
        return self.values

    def filling(
        self, backend: Backend, store: Any, rows: Array, keys: Array, table_seed: int
    ) -> Action:
        """Prepares to write the row into the `value` column; see GivesFirstRows."""
        source = backend.xp.zeros(rows.size, np.int32)
        return store.writing(rows, self._stored(backend, store.row_dtype), source=source)

    def drawing(
        self,
        backend: Backend,
        row_dtype: RowDtype,
        out: Array,
        keys: Array,
        table_seed: int,
        rows: Array | None = None,
    ) -> Action:
        """Prepares to write the row for every key, without a table; see GivesFirstRows."""
        n, dim = out.shape
        suffix, words = as_words(out)
        row = as_words(self._stored(backend, row_dtype))[1]
        return backend.prepared(f"draw_row_{suffix}", n, words, dim, rows, row, n)

    def _stored(self, backend: Backend, row_dtype: RowDtype) -> Array:
        """Returns the row in a format, (1, dim)."""
        # Integers by themselves: as floats large ones would be others.
        row = np.array([self.values], row_dtype.storage if row_dtype.is_integer else np.float64)
        return backend.from_host(row_dtype.to_storage(np, row))

"""Initial values of rows, as pure functions of (seed, table name, key, column).

The value does not depend on which rank holds the key, on the order in which keys arrive, on the
other columns, or on the processor: kernels/initializer.cu draws it from a counter-based generator
and rounds the same way everywhere.
"""

import math
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import as_words
from sok_lite.backend.launches import Launch
from sok_lite.engine.dtypes import RowDtype, is_integer
from sok_lite.engine.rows.store import RowStore

# Parameters (a, b) of each distribution; a constant has no b.
_PARAMETERS = {
    "constant": "value",
    "uniform": "low, high",
    "normal": "mean, stddev",
    "truncated_normal": "mean, stddev; cut at 2 stddev",
}
# The largest of the 2**32 values of N(0, 1) that one word of random bits chooses from: the kernel
# takes the inverse of its distribution function at (word + 0.5) / 2**32.
_FARTHEST = 6.338


class AnyInitializer(Protocol):
    """An initializer, as a table calls it."""

    def check(self, row_dtype: RowDtype, dim: int) -> None:
        """Raises ValueError if rows of that format and length cannot have its values."""

    def fill_launch(
        self,
        backend: Backend,
        store: RowStore,
        rows: Array,
        keys: Array,
        table_seed: int,
        out: Array | None = None,
    ) -> Launch:
        """Returns the launch that writes initial values into the `value` column.

        Args:
          rows: (n,) uint32, distinct, or NO_ROW. They are read when the launch is made.
          keys: (n,) int64, the key of each row.
          table_seed: 64 bits, made from the seed and the table's name.
          out: (n, dim) storage, C-contiguous: gets the values of keys without a row, and is
            undefined elsewhere; None: keys without a row are skipped.
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
          out: (n, dim) storage, C-contiguous.
          keys: (n,) int64.
          table_seed: 64 bits, made from the seed and the table's name.
          rows: (n,) uint32; keys with a row, other than NO_ROW, are skipped; None: none is.
        """


class _KernelInitializer(AnyInitializer, ABC):
    """An initializer with two kernels, init_<name> and draw_<name> in kernels/initializer.cu."""

    @abstractmethod
    def kernel_of(
        self, backend: Backend, row_dtype: RowDtype, dim: int, keys: Array, table_seed: int
    ) -> tuple[str, Any, tuple[Any, ...]]:
        """Returns the kernels' name, the dtype of their `out`, and the arguments of their own."""

    def fill_launch(
        self,
        backend: Backend,
        store: RowStore,
        rows: Array,
        keys: Array,
        table_seed: int,
        out: Array | None = None,
    ) -> Launch:
        pointers, shift, dim, _ = store.place()
        name, out_type, arguments = self.kernel_of(backend, store.row_dtype, dim, keys, table_seed)
        words, n = None if out is None else out.view(out_type), len(rows)
        return backend.prepared(f"init_{name}", n, pointers, shift, dim, rows, words, *arguments, n)

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
        name, out_type, arguments = self.kernel_of(backend, row_dtype, dim, keys, table_seed)
        return backend.prepared(f"draw_{name}", n, out.view(out_type), dim, rows, *arguments, n)


@dataclass(frozen=True)
class Initializer(_KernelInitializer):
    """The distribution of the initial values of rows.

    Random values are drawn as float32, also for rows of float64. Rows of integers have constants.

    Attributes:
      kind: "constant" (value a), "uniform" (from a to b), "normal" or "truncated_normal" (mean a,
        standard deviation b; the latter cut at two standard deviations).
      a, b: the parameters; an integer stays one as a constant.
      seed: replaces the table's seed; None: the table's is used.
    """

    kind: str
    a: float = 0.0
    b: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in _PARAMETERS:
            raise ValueError(
                f"`kind` must be one of {', '.join(_PARAMETERS)}. Received: kind={self.kind!r}."
            )
        # Finite as float32 too: 1e39 would be an infinity in the rows.
        largest = float(np.finfo(np.float32).max)
        ordered = self.kind != "uniform" or self.a <= self.b
        spread = self.kind not in ("normal", "truncated_normal") or self.b >= 0
        bounded = all(abs(x) <= largest for x in (self.a, self.b, self.b - self.a))
        if not (ordered and spread and bounded):
            raise ValueError(
                f"A {self.kind} initializer takes finite float32 numbers "
                f"({_PARAMETERS[self.kind]}), low <= high, stddev >= 0. "
                f"Received: {self.a}, {self.b}."
            )
        # As a float a large integer, for rows of int64, would be another one.
        stays = self.kind == "constant" and is_integer(self.a)
        object.__setattr__(self, "a", int(self.a) if stays else float(self.a))
        object.__setattr__(self, "b", float(self.b))

    def check(self, row_dtype: RowDtype, dim: int) -> None:
        if row_dtype.is_integer and self.kind != "constant":
            raise ValueError(
                f"Rows of {row_dtype.name} begin with a constant, or a row of numbers. "
                f"Received: a {self.kind} initializer. Give an integer, such as 0."
            )
        if self._is_row(row_dtype):
            self._as_row(dim).check(row_dtype, dim)
        elif not row_dtype.is_integer:
            # Numbers are drawn as float32, where they may be infinities already.
            with np.errstate(over="ignore"):
                ends = np.array(self._range(), np.float32)
            row_dtype.check_finite(ends, f"Values of a {self.kind} initializer")

    def _range(self) -> tuple[float, float]:
        """Returns the lowest and the highest value that is drawn."""
        if self.kind in ("constant", "uniform"):
            return self.a, self.b if self.kind == "uniform" else self.a
        reach = (2.0 if self.kind == "truncated_normal" else _FARTHEST) * self.b
        return self.a - reach, self.a + reach

    def constant_row(self, dim: int) -> tuple[float, ...] | None:
        """Returns the initial row of every key; None: keys have different ones."""
        return (self.a,) * dim if self.kind == "constant" else None

    def kernel_of(
        self, backend: Backend, row_dtype: RowDtype, dim: int, keys: Array, table_seed: int
    ) -> tuple[str, Any, tuple[Any, ...]]:
        if self._is_row(row_dtype):
            return self._as_row(dim).kernel_of(backend, row_dtype, dim, keys, table_seed)
        name = f"{self.kind}_{row_dtype.suffix}"
        if self.kind == "constant":
            return name, np.uint8, (float(self.a),)
        scalars: tuple[float, ...] = (self.a, self.b)
        if self.kind == "uniform":
            scalars = (self.a, self.b - self.a, self.b)
        return name, np.uint8, (keys, as_i64(table_seed), *scalars)

    def _is_row(self, row_dtype: RowDtype) -> bool:
        """Whether it is a constant for a format whose numbers float32, as kernels take them, may
        not hold exactly."""
        return self.kind == "constant" and row_dtype.delta_dtype != np.float32

    def _as_row(self, dim: int) -> "RowInitializer":
        return RowInitializer((self.a,) * dim)


@dataclass(frozen=True)
class RowInitializer(_KernelInitializer):
    """Every key starts with the same row, in tables of every row format.

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
        """Returns the initial row of every key."""
        return self.values

    def kernel_of(
        self, backend: Backend, row_dtype: RowDtype, dim: int, keys: Array, table_seed: int
    ) -> tuple[str, Any, tuple[Any, ...]]:
        # Integers by themselves: as floats large ones would be others.
        row = np.array([self.values], row_dtype.storage if row_dtype.is_integer else np.float64)
        suffix, words = as_words(backend.from_host(row_dtype.to_storage(np, row)))
        return f"row_{suffix}", words.dtype, (words,)


class MatrixInitializer(_KernelInitializer):
    """Every key starts with a row of a matrix, chosen by seed and key.

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
        """Returns a text that is the same on every rank with the same matrix."""
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

    def kernel_of(
        self, backend: Backend, row_dtype: RowDtype, dim: int, keys: Array, table_seed: int
    ) -> tuple[str, Any, tuple[Any, ...]]:
        key = (id(backend), row_dtype.name)
        if key not in self._copies:
            self._copies[key] = backend.from_host(row_dtype.to_storage(np, self._matrix))
        suffix, words = as_words(self._copies[key])
        source = (keys, as_i64(table_seed), words, len(self._matrix))
        return f"matrix_{suffix}", words.dtype, source


def as_i64(seed: int) -> int:
    """Returns 64 bits as the signed number that a kernel takes."""
    seed = int(seed) & 0xFFFFFFFFFFFFFFFF
    return seed - (1 << 64) if seed >> 63 else seed

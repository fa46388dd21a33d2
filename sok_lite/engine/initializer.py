"""Initial values of rows, as a pure function of (seed, table name, key, column).

The value does not depend on which rank holds the key, on the order in which keys arrive, on the
other columns, or on the processor: kernels/initializer.cu draws it from a counter-based generator
and rounds the same way everywhere.
"""

from dataclasses import dataclass

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import Launch
from sok_lite.engine.dtypes import RowDtype, is_integer
from sok_lite.engine.row_initializer import GivesFirstRows, RowInitializer, as_i64
from sok_lite.engine.rows.store import RowStore

# Parameters (a, b) of each distribution; a constant has no b.
_PARAMETERS = {
    "constant": "value",
    "uniform": "low, high",
    "normal": "mean, stddev",
    "truncated_normal": "mean, stddev; cut at 2 stddev",
}


# Of 2**32 values of N(0, 1), which one word of random bits chooses from, the largest: the kernel
# takes the inverse of its distribution function at (word + 0.5) / 2**32.
_FARTHEST = 6.338


@dataclass(frozen=True)
class Initializer(GivesFirstRows):
    """The distribution of the initial values of rows.

    Random values are drawn as float32, whatever the row format: rows of float64 start with float32
    numbers. Rows of integers start with a constant.

    Attributes:
      kind: "constant" (value a), "uniform" (from a to b), "normal" or "truncated_normal" (mean a,
        standard deviation b; the latter cut at two standard deviations).
      a, b: the parameters; an integer stays one as a constant.
      seed: the seed of the user's initializer, which replaces the seed of the table; None: it has
        none.
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
        bounded = (
            abs(self.a) <= largest and abs(self.b) <= largest and abs(self.b - self.a) <= largest
        )
        if not (ordered and spread and bounded):
            raise ValueError(
                f"A {self.kind} initializer takes finite float32 numbers "
                f"({_PARAMETERS[self.kind]}), low <= high, stddev >= 0. "
                f"Received: {self.a}, {self.b}."
            )
        # A kernel takes a float for f32 and an int for i64. As a float a large integer, for rows of
        # int64, would be another one.
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
                ends = np.array(self._ends(), np.float32)
            row_dtype.check_finite(ends, f"Values of a {self.kind} initializer")

    def _ends(self) -> tuple[float, float]:
        """Returns the lowest and the highest value that is drawn."""
        if self.kind in ("constant", "uniform"):
            return self.a, self.b if self.kind == "uniform" else self.a
        reach = (2.0 if self.kind == "truncated_normal" else _FARTHEST) * self.b
        return self.a - reach, self.a + reach

    def constant_row(self, dim: int) -> tuple[float, ...] | None:
        """Returns the row that every key starts with; None: they start with rows of their own."""
        return (self.a,) * dim if self.kind == "constant" else None

    def fill_launch(
        self,
        backend: Backend,
        store: RowStore,
        rows: Array,
        keys: Array,
        table_seed: int,
        out: Array | None = None,
    ) -> Launch:
        if self._is_row(store.row_dtype):
            return self._as_row(store.dim).fill_launch(backend, store, rows, keys, table_seed, out)
        name = f"init_{self.kind}_{store.row_dtype.suffix}"
        *column, _ = store.place()
        place = (*column, rows, None if out is None else out.reshape(-1).view(np.uint8))
        source = () if self.kind == "constant" else (keys, as_i64(table_seed))
        return backend.prepared(name, len(rows), *place, *source, *self._scalars(), len(rows))

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
        if self._is_row(row_dtype):
            return self._as_row(dim).draw_launch(backend, row_dtype, out, keys, table_seed, rows)
        source = () if self.kind == "constant" else (keys, as_i64(table_seed))
        words = out.reshape(-1).view(np.uint8)
        name = f"draw_{self.kind}_{row_dtype.suffix}"
        return backend.prepared(name, n, words, dim, rows, *source, *self._scalars(), n)

    def _is_row(self, row_dtype: RowDtype) -> bool:
        """Whether it is a constant for a format whose numbers float32, as kernels take them, may
        not hold exactly."""
        return self.kind == "constant" and row_dtype.added_in != np.float32

    def _as_row(self, dim: int) -> RowInitializer:
        return RowInitializer((self.a,) * dim)

    def _scalars(self) -> tuple[float, ...]:
        if self.kind == "constant":
            return (float(self.a),)
        if self.kind == "uniform":
            return self.a, self.b - self.a, self.b
        return self.a, self.b

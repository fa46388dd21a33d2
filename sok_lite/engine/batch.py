"""The input of a lookup: the items of all tables of a call, one table after another."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.ragged import split, split_offsets
from sok_lite.engine.dtypes import KeyDtype, RowDtype
from sok_lite.engine.owner import OwnerRule


class ShardedTable(Protocol):
    """A table whose keys are sent to their owners, whoever stores its rows."""

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def key_dtype(self) -> KeyDtype: ...
    @property
    def row_dtype(self) -> RowDtype: ...
    @property
    def owner(self) -> OwnerRule: ...
    @property
    def rounds_gradients(self) -> bool: ...


class Layout:
    """The layout of a batch, whose parts lie one after another. It is immutable and holds no table.

    Most batches of a program have the same sizes, and for 26 tables Python takes as long to compute
    a layout as a kernel to look them up: so it is computed once for all batches of the same sizes.

    Attributes:
      combiners: "sum", "mean" or "sqrtn" of each part.
      sizes, num_rows: items and rows of each part.
      shapes: of the result of each part, (its rows, dim).
      numbers_of: the numbers of the parts of each table, in the order in which tables first occur:
        the parts of one table are looked up together.
      order: all numbers of `numbers_of`, one table after another.
      is_ordered: whether `order` is 0, 1, 2, ...
    """

    def __init__(
        self, tables: Sequence[Any], combiners: Sequence[str], sizes: list[int], num_rows: list[int]
    ) -> None:
        self.combiners, self.sizes, self.num_rows = combiners, sizes, num_rows
        self.shapes = [(n, table.dim) for n, table in zip(num_rows, tables, strict=True)]
        numbers: dict[int, list[int]] = {}
        for i, table in enumerate(tables):
            numbers.setdefault(id(table), []).append(i)
        self.numbers_of = list(numbers.values())
        self.order = [i for numbers in self.numbers_of for i in numbers]
        self.is_ordered = self.order == list(range(len(sizes)))

    def is_of(self, sizes: list[int], num_rows: list[int]) -> bool:
        """Whether it is the layout of the same tables with these numbers of items and rows."""
        return self.sizes == sizes and self.num_rows == num_rows

    @cached_property
    def num_items(self) -> np.ndarray:
        """`sizes` as an array (num_parts,) int64."""
        return np.array(self.sizes, np.int64)

    @cached_property
    def begin(self) -> np.ndarray:
        """The first key of each part, and the number of all keys: (num_parts + 1,) int64."""
        return split_offsets(self.num_items)


class Batch(NamedTuple):
    """All parts of a call. What is a list has one entry for each part.

    Attributes:
      tables: of this rank.
      layout: combiners and numbers of all parts.
      keys: (n,) int64, those of each part after those of the part before; of uint64 tables their
        bits.
      row_splits: (rows + num_parts,) int64, those of all parts, each of which begins with 0.
      weights: (n,) float32, C-contiguous; None: all 1.
      inserts: of dynamic tables, whether keys without a row get one.
      missing: of dynamic tables, what a key without a row returns: "initial" or "zeros".
      filter_ratios: of dynamic tables, the probability that a key without a row gets one.
    """

    tables: Sequence[ShardedTable]
    layout: Layout
    keys: Array
    row_splits: Array
    weights: Sequence[Array | None]
    inserts: Sequence[bool] = ()
    missing: Sequence[str] = ()
    filter_ratios: Sequence[float] = ()

    def splits_of_parts(self) -> list[Array]:
        """Returns the row splits of each part, (its rows + 1,) int64."""
        return split(self.row_splits, [n + 1 for n in self.layout.num_rows])

    def check_splits(self) -> None:
        """Raises ValueError where row splits do not fit the keys. On a GPU it waits."""
        for i, splits in enumerate(self.splits_of_parts()):
            self._check_splits(i, splits)

    def check_splits_of_no_rows(self) -> None:
        """Does `check_splits` for parts without rows, whose splits no kernel looks at."""
        if 0 in self.layout.num_rows:
            for i, splits in enumerate(self.splits_of_parts()):
                if len(splits) == 1:
                    self._check_splits(i, splits)

    def _check_splits(self, number: int, splits: Array) -> None:
        num_keys, ends = self.layout.sizes[number], (int(splits[0]), int(splits[-1]))
        if ends != (0, num_keys) or bool((splits[1:] < splits[:-1]).any()):
            raise ValueError(
                f"`row_splits` of table {self.tables[number].name!r} must rise from 0 to the "
                f"number of its keys, {num_keys}. Received: {ends[0]} to {ends[1]}"
                f"{' with a fall between them' if ends == (0, num_keys) else ''}."
            )


def check_pooled(table: ShardedTable) -> None:
    """Raises TypeError for a table with rows of integers, which are not pooled."""
    table.row_dtype.require_floats(table.name, "pooled", "Look its rows up one by one.")


def row_splits_of(backend: Backend, row_numbers: Array, batch: int) -> Array:
    """Returns the row splits of items that name their row, as a sparse matrix does.

    Args:
      row_numbers: (n,) int64, ascending, each in [0, batch).
      batch: number of rows.

    Returns:
      (batch + 1,) int64.

    Raises:
      ValueError: they fall, or leave [0, batch).
    """
    xp = backend.xp
    if row_numbers.size:
        if bool((row_numbers[1:] < row_numbers[:-1]).any()):
            raise ValueError(
                "The entries of a SparseTensor must be in row-major order. Received: row numbers "
                "that fall. Use tf.sparse.reorder first."
            )
        first, last = int(row_numbers[0]), int(row_numbers[-1])
        if first < 0 or last >= batch:
            raise ValueError(
                f"The rows of a SparseTensor must be in [0, {batch}), by its dense_shape. "
                f"Received: rows {first} to {last}."
            )
    return xp.searchsorted(row_numbers, xp.arange(batch + 1, dtype=np.int64)).astype(np.int64)

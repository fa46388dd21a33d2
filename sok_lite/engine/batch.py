"""The input of a lookup: a batch of features, which lie end to end in its arrays.

A feature is one input of a call, as in FBGEMM's table-batched embeddings: keys of one table with
row splits, a combiner and optional weights. Several features may share a table.
"""

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


class BatchLayout:
    """The sizes of a batch. Batches of equal sizes share one: computing it takes Python long.

    Attributes:
      combiners: "sum", "mean" or "sqrtn" of each feature.
      sizes, num_rows: items and rows of each feature.
      shapes: of the result of each feature, (rows, dim).
      features_of_tables: the indices of the features of each table, which are looked up together;
        tables in the order in which they first occur.
      order: all of `features_of_tables` in one list.
      is_ordered: whether `order` is 0, 1, 2, ...
    """

    def __init__(
        self, tables: Sequence[Any], combiners: Sequence[str], sizes: list[int], num_rows: list[int]
    ) -> None:
        self.combiners, self.sizes, self.num_rows = combiners, sizes, num_rows
        self.shapes = [(n, table.dim) for n, table in zip(num_rows, tables, strict=True)]
        features: dict[int, list[int]] = {}
        for i, table in enumerate(tables):
            features.setdefault(id(table), []).append(i)
        self.features_of_tables = list(features.values())
        self.order = [i for features in self.features_of_tables for i in features]
        self.is_ordered = self.order == list(range(len(sizes)))

    def is_of(self, sizes: list[int], num_rows: list[int]) -> bool:
        """Whether it fits a batch of the same tables with these sizes."""
        return self.sizes == sizes and self.num_rows == num_rows

    @cached_property
    def num_items(self) -> np.ndarray:
        """`sizes` as an array (num_features,) int64."""
        return np.array(self.sizes, np.int64)

    @cached_property
    def begin(self) -> np.ndarray:
        """The offsets of the features' items, (num_features + 1,) int64."""
        return split_offsets(self.num_items)


class Batch(NamedTuple):
    """All features of a call; sequences have one entry per feature.

    Attributes:
      tables: of this rank.
      keys: (n,) int64, feature by feature; of uint64 tables as bit patterns.
      row_splits: (rows + num_features,) int64, feature by feature; those of each begin with 0.
      weights: (n,) float32, C-contiguous; None: all 1.
      inserts: of dynamic tables, whether keys without a row get one.
      missing: of dynamic tables, what a key without a row returns: "initial" or "zeros".
      filter_ratios: of dynamic tables, the probability that a key without a row gets one.
    """

    tables: Sequence[ShardedTable]
    layout: BatchLayout
    keys: Array
    row_splits: Array
    weights: Sequence[Array | None]
    inserts: Sequence[bool] = ()
    missing: Sequence[str] = ()
    filter_ratios: Sequence[float] = ()

    def splits_per_feature(self) -> list[Array]:
        """Returns the row splits of each feature, (its rows + 1,) int64."""
        return split(self.row_splits, [n + 1 for n in self.layout.num_rows])

    def check_splits(self) -> None:
        """Raises ValueError if row splits do not fit the keys. On a GPU it waits."""
        for i, splits in enumerate(self.splits_per_feature()):
            self._check_splits(i, splits)

    def check_splits_of_no_rows(self) -> None:
        """Does `check_splits` for features without rows, whose splits no kernel reads."""
        if 0 in self.layout.num_rows:
            for i, splits in enumerate(self.splits_per_feature()):
                if len(splits) == 1:
                    self._check_splits(i, splits)

    def _check_splits(self, feature: int, splits: Array) -> None:
        num_keys, ends = self.layout.sizes[feature], (int(splits[0]), int(splits[-1]))
        if ends != (0, num_keys) or bool((splits[1:] < splits[:-1]).any()):
            raise ValueError(
                f"`row_splits` of table {self.tables[feature].name!r} must rise from 0 to the "
                f"number of its keys, {num_keys}. Received: {ends[0]} to {ends[1]}"
                f"{' with a fall between them' if ends == (0, num_keys) else ''}."
            )


def check_pooled(table: ShardedTable) -> None:
    """Raises TypeError for a table with integer rows, which are not pooled."""
    table.row_dtype.require_floats(table.name, "pooled", "Look its rows up one by one.")


def row_splits_of(backend: Backend, row_numbers: Array, batch: int) -> Array:
    """Returns the row splits of a sparse matrix, (batch + 1,) int64.

    Args:
      row_numbers: (n,) int64, the row of each item: ascending, each in [0, batch).
      batch: number of rows.

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

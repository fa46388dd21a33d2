"""What a lookup is asked: the items of all tables of a call, one table after another."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import Part as LaunchPart
from sok_lite.backend.base import joined_launches
from sok_lite.backend.publish import publish
from sok_lite.engine.layout import Layout
from sok_lite.engine.pooling import normalise_combiner
from sok_lite.engine.segments import cut
from sok_lite.engine.static_table import AnyTable, GivenRows, StaticTable


class Part(NamedTuple):
    """One table's part of a call.

    Attributes:
      table: the table of this rank.
      keys: (n,) integers.
      row_splits: (batch + 1,) int64, where each row of the batch begins and ends.
      weights: (n,) float32; None: all 1.
      combiner: "sum", "mean" or "sqrtn".
      insert, missing, filter_ratio: of the table's `lookup`.
      given: of a static table, what this rank is asked for; None of any other.
    """

    table: AnyTable
    keys: Array
    row_splits: Array
    weights: Array | None
    combiner: str
    insert: bool = True
    missing: str = "initial"
    filter_ratio: float = 1.0
    given: GivenRows | None = None


class Batch(NamedTuple):
    """All parts of a call. What is a list has one entry for each part.

    Attributes:
      tables, inserts, missing, filter_ratios, given: as of `Part`.
      layout: combiners and numbers of all parts.
      keys: (n,) int64, those of each part after those of the part before; of uint64 tables their
        bits.
      row_splits: (rows + num_parts,) int64, likewise, those of each part from 0 on.
      weights: (n,) float32, C-contiguous; None: all 1.
    """

    tables: list[AnyTable]
    inserts: list[bool]
    missing: list[str]
    filter_ratios: list[float]
    layout: Layout
    keys: Array
    row_splits: Array
    weights: list[Array | None]
    given: list[GivenRows | None]

    @property
    def combiners(self) -> Sequence[str]:
        """As of `Part`."""
        return self.layout.combiners

    @property
    def sizes(self) -> list[int]:
        """Items of each part."""
        return self.layout.sizes

    @property
    def num_rows(self) -> list[int]:
        """Rows of each part."""
        return self.layout.num_rows

    def splits_of_parts(self) -> list[Array]:
        """Returns the row splits of each part, (its rows + 1,) int64."""
        return cut(self.row_splits, [n + 1 for n in self.num_rows])

    def check(self) -> None:
        """Raises ValueError where row splits or row numbers do not fit. On a GPU it waits."""
        self.check_splits()
        self.check_rows()

    def check_splits(self) -> None:
        """Raises ValueError where row splits do not fit the keys. On a GPU it waits."""
        for i, splits in enumerate(self.splits_of_parts()):
            self._check_splits(i, splits)

    def check_splits_of_no_rows(self) -> None:
        """Does `check_splits` for parts without rows, whose splits no kernel looks at."""
        if 0 in self.num_rows:
            for i, splits in enumerate(self.splits_of_parts()):
                if len(splits) == 1:
                    self._check_splits(i, splits)

    def outside(self, count: Array) -> Array:
        """Adds to a count the row numbers that static tables have not, by one launch.

        Args:
          count: (1,) int64. It is returned.
        """
        parts = []
        for table, keys in self._static():
            part = LaunchPart(len(keys), (keys, table.num_rows, count, len(keys)))
            parts.append((table.backend, "keys_count_outside", part))
        publish(joined_launches(parts))
        return count

    def check_rows(self) -> None:
        """Raises ValueError where a static table has no such row. On a GPU it waits."""
        for table, keys in self._static():
            table.check_rows(keys)

    def _static(self) -> list[tuple[StaticTable, Array]]:
        """Returns the static tables, and the keys of each part of them."""
        if not any(table.is_static for table in self.tables):
            return []  # as in most calls: nothing is cut apart
        pieces = zip(self.tables, cut(self.keys, self.sizes), strict=True)
        return [(cast(StaticTable, table), keys) for table, keys in pieces if table.is_static]

    def _check_splits(self, number: int, splits: Array) -> None:
        num_keys, ends = self.sizes[number], (int(splits[0]), int(splits[-1]))
        if ends != (0, num_keys) or bool((splits[1:] < splits[:-1]).any()):
            raise ValueError(
                f"`row_splits` of table {number} must rise from 0 to the number of its keys, "
                f"{num_keys}. Received: {ends[0]} to {ends[1]}"
                f"{' with a fall between them' if ends == (0, num_keys) else ''}."
            )


def batch_of(backend: Backend, parts: Sequence[Part]) -> Batch:
    """Returns parts as a batch.

    Raises:
      TypeError, ValueError: keys, row splits, weights or combiner do not fit.
    """
    parts = [_checked(backend, i, part) for i, part in enumerate(parts)]
    tables = [part.table for part in parts]
    return Batch(
        tables=tables,
        inserts=[part.insert for part in parts],
        missing=[part.missing for part in parts],
        filter_ratios=[part.filter_ratio for part in parts],
        layout=Layout(
            tables,
            [part.combiner for part in parts],
            [int(part.keys.size) for part in parts],
            [len(part.row_splits) - 1 for part in parts],
        ),
        keys=_joined(backend, [part.keys for part in parts]),
        row_splits=_joined(backend, [part.row_splits for part in parts]),
        weights=[part.weights for part in parts],
        given=[part.given for part in parts],
    )


def _joined(backend: Backend, arrays: Sequence[Array]) -> Array:
    """Returns int64 arrays (n,) as one, C-contiguous."""
    if len(arrays) == 1:
        return backend.xp.ascontiguousarray(arrays[0])
    return backend.xp.concatenate([backend.xp.empty(0, np.int64), *arrays])


def check_pooled(table: AnyTable) -> None:
    """Raises TypeError for a table with rows of integers, which are not pooled."""
    table.row_dtype.require_floats(table.name, "pooled", "Look its rows up one by one.")


def _checked(backend: Backend, number: int, part: Part) -> Part:
    """Returns the part with engine keys, or raises."""
    check_pooled(part.table)
    keys = part.table.engine_keys(part.keys)
    if keys.ndim != 1:
        raise ValueError(f"Keys of table {number} must have shape (n,). Received: {keys.shape}.")
    splits = part.row_splits
    if splits.ndim != 1 or len(splits) == 0:
        raise ValueError(
            f"`row_splits` of table {number} must have shape (batch + 1,). "
            f"Received: {splits.shape}."
        )
    if splits.dtype != np.int64:
        raise TypeError(f"`row_splits` of table {number} must be int64. Received: {splits.dtype}.")
    if part.weights is not None:
        if part.weights.shape != keys.shape:
            raise ValueError(
                f"Table {number} must have one weight for each of its {len(keys)} keys. "
                f"Received: weights of shape {part.weights.shape}."
            )
        if part.weights.dtype != np.float32:
            raise TypeError(
                f"Weights of table {number} must be float32. Received: {part.weights.dtype}."
            )
    weights = None if part.weights is None else backend.xp.ascontiguousarray(part.weights)
    return part._replace(keys=keys, weights=weights, combiner=normalise_combiner(part.combiner))


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

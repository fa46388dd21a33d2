"""The layout of a batch, whose parts lie one after another.

Most batches of a program have the same sizes, and for 26 tables Python takes as long to compute a
layout as a kernel to look them up: so it is computed once for all batches of the same sizes.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.pooling import COMBINERS
from sok_lite.engine.table.lookups import PooledParts


class Layout:
    """The layout of a batch, whose parts lie one after another. It is immutable and holds no table.

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

    @cached_property
    def pooled(self) -> PooledParts:
        numbers = np.array([self.sizes, self.num_rows], np.int64)
        splits = split_offsets(numbers[1] + 1)[:-1]
        combiner = np.array([COMBINERS[each] for each in self.combiners], np.int64)
        if not self.is_ordered:
            numbers, splits = numbers[:, self.order], splits[self.order]
            combiner = combiner[self.order]
        return PooledParts(
            table=[t for t, numbers in enumerate(self.numbers_of) for _ in numbers],
            num_rows=numbers[1].tolist(),
            numbers=numbers,
            first=split_offsets(numbers[0])[:-1],
            row_splits=8 * splits,
            combiner=combiner,
            no_weights=np.zeros(len(self.order), np.int64),
        )

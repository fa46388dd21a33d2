"""Rows of a table of one rank or all ranks, in the order of an exported model, in pieces.

They are ordered by the keys' products (tables.py). Each rank sorts its own keys and reads its own
rows. A piece is the rows of a range of products, agreed by all ranks: it is read, sent to rank 0
and sorted there before the next one is read. So no rank holds more than a piece of rows beside its
table, and only rank 0 writes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from sok_lite.backend.aligned import aligned_empty
from sok_lite.bridge.serving import files
from sok_lite.bridge.serving.together import Ranks
from sok_lite.engine.table import EmbeddingTable

# The golden ratio as an odd fraction of 2**64: neighboring keys get distant products.
FACTOR = np.uint64(0x9E3779B97F4A7C15)
LARGEST = np.iinfo(np.int64).max

# Takes row numbers, (n,), and memory for the rows; returns the rows, there or elsewhere.
_Read = Callable[[np.ndarray, np.ndarray], np.ndarray]


def products_of(keys: np.ndarray) -> np.ndarray:
    """Returns the products that order keys, (n,) int64, distinct for distinct keys (n,) int64."""
    return (keys.view(np.uint64) * FACTOR).view(np.int64)


class RowsInOrder:
    """The exported rows of a table. Every rank must make it and iterate alike.

    Args:
      table: locked by this thread.
      ranks: export the tables of all ranks as one; None: only this rank's table.
      is_exported: False: export nothing of this rank.

    Attributes:
      num_keys: of all ranks together; 0 on ranks that do not write.
    """

    def __init__(
        self, table: Any, ranks: Ranks | None, is_exported: bool, cutoff: float | None
    ) -> None:
        self._ranks = ranks
        self._row_shape, self._dtype = (table.dim,), table.row_dtype.storage
        keys, numbers, self._read = _contents(table) if is_exported else _nothing()
        if ranks is not None:
            assert ranks.comm is not None
            owners = table.owner.owners(keys, ranks.comm.size, table.key_dtype)
            is_own = owners == ranks.comm.rank
            keys, numbers = keys[is_own], numbers[is_own]
        if cutoff is not None:
            is_kept = self._is_above(table, numbers, cutoff)
            keys, numbers = keys[is_kept], numbers[is_kept]
        products = products_of(keys)
        del keys
        order = np.argsort(products)
        self._products, self._numbers = products[order], numbers[order]
        num_keys = len(products) if ranks is None else ranks.reduce(len(products), "sum")
        self.num_keys = num_keys if ranks is None or ranks.is_first else 0

    def products(self) -> Iterator[np.ndarray]:
        """Yields all products, ascending, in pieces; empty ones on other ranks."""
        for part in self._parts(self._products.itemsize):
            products = self._products[part]
            if self._ranks is not None:
                products = np.sort(self._ranks.to_first(products))
            yield products

    def pieces(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (products (n,), their rows (n, dim) as stored), like `products`."""
        row_bytes = int(np.prod(self._row_shape)) * self._dtype.itemsize
        for part in self._parts(row_bytes + self._products.itemsize):
            products, rows = self._products[part], self._rows(self._numbers[part])
            if self._ranks is not None:
                products, rows = self._ranks.to_first(products), self._ranks.to_first(rows)
                order = np.argsort(products)
                rows = np.take(rows, order, axis=0, out=self._empty(len(rows)), mode="clip")
                products = products[order]
            yield products, rows

    def _parts(self, item_bytes: int) -> Iterator[slice]:
        """Yields the slice of this rank's keys in each piece.

        A piece ends at the smallest end among the ranks' full shares; the other shares are smaller.
        """
        num_ranks = 1 if self._ranks is None or self._ranks.comm is None else self._ranks.comm.size
        most = max(1, files.PIECE_BYTES // item_bytes // num_ranks)
        first, end = 0, 0
        while end < LARGEST:
            share = self._products[first : first + most]
            is_last = first + most >= len(self._products)
            end = LARGEST if is_last else int(share[-1])
            if self._ranks is not None:
                end = self._ranks.reduce(end, "min")
            last = first + int(np.searchsorted(share, end, side="right"))
            yield slice(first, last)
            first = last

    def _rows(self, numbers: np.ndarray) -> np.ndarray:
        return self._read(numbers, self._empty(len(numbers)))

    def _empty(self, num_rows: int) -> np.ndarray:
        return aligned_empty((num_rows, *self._row_shape), self._dtype)

    def _is_above(self, table: Any, numbers: np.ndarray, cutoff: float) -> np.ndarray:
        result = np.empty(len(numbers), bool)
        for part in files.parts(len(numbers), table.dim * self._dtype.itemsize):
            rows = self._rows(numbers[part])
            result[part] = ~table.row_dtype.is_below(np, rows, cutoff).all(axis=1)
        return result


def _contents(table: Any) -> tuple[np.ndarray, np.ndarray, _Read]:
    """Returns the keys of a table, (n,) int64, the numbers of their rows, and a reader of rows."""
    backend = table.backend
    if table.var_type == "remote":  # its rows are not in this process
        keys, rows = table.export()
        numbers, read = np.arange(len(keys)), partial(_take_rows, backend.to_host(rows))
    else:
        keys, numbers = table.export_rows()
        numbers, read = backend.to_host(numbers), partial(_read, table)
    keys = backend.to_host(keys)
    return keys.view(np.int64) if keys.dtype == np.uint64 else keys.astype(np.int64), numbers, read


def _nothing() -> tuple[np.ndarray, np.ndarray, _Read]:
    return np.empty(0, np.int64), np.empty(0, np.uint32), lambda numbers, out: out


def _take_rows(rows: np.ndarray, numbers: np.ndarray, out: np.ndarray) -> np.ndarray:
    return np.take(rows, numbers, axis=0, out=out, mode="clip")


def _read(table: EmbeddingTable, numbers: np.ndarray, out: np.ndarray) -> np.ndarray:
    backend = table.backend
    if backend.name == "cpu":
        return table.store.read(numbers, "value", out)
    return backend.to_host(table.store.read(backend.from_host(numbers)))

"""Rows as numbers that NumPy has a dtype for: those of bfloat16 as float32, which is exact."""

from collections.abc import Iterator

import numpy as np

from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.files.source import Column, Source, column_of, columns_of


def plain(source: Source, column: str, rows: np.ndarray) -> np.ndarray:
    """Returns what `source.read(column)` yields, as numbers."""
    if column == "values" and source.dtype == "bfloat16":
        return row_dtype(source.dtype).to_float32(np, rows)
    return rows


def plain_column(source: Source, name: str) -> Column:
    """Returns what `read_plain` yields of a column."""
    column = column_of(source, name)
    return column._replace(dtype=plain(source, name, np.empty(0, column.dtype)).dtype)


def plain_columns(source: Source) -> list[Column]:
    """Returns all columns with an entry for each key, the keys first."""
    return [plain_column(source, column.name) for column in columns_of(source)]


def read_plain(source: Source, name: str) -> Iterator[np.ndarray]:
    """Yields a column in pieces, as numbers."""
    for piece in source.read(name):
        yield plain(source, name, piece)

"""Parquet: a column `key`, a column `value` of lists of one length, and other columns."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sok_lite.cli.plain import plain_columns, read_plain
from sok_lite.cli.wrapped import only_one
from sok_lite.engine.files.source import Column, Source


def write(path: str, sources: Sequence[Source]) -> None:
    """Writes one table, piece by piece. Rows of bfloat16 become float32."""
    source = only_one(sources, "a Parquet file")
    arrow, parquet = _pyarrow()
    columns = plain_columns(source)
    schema = arrow.schema([(_name(column), _type(arrow, column)) for column in columns])
    with open(path, "xb") as file, parquet.ParquetWriter(file, schema) as writer:
        for pieces in zip(*(read_plain(source, column.name) for column in columns), strict=True):
            arrays = [
                _array(arrow, column, piece) for column, piece in zip(columns, pieces, strict=True)
            ]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            f"Parquet files need pyarrow, which cannot be imported ({error}). Install it with "
            '`pip install "sok_lite[parquet]"`.'
        ) from error
    return pyarrow, pyarrow.parquet


def _name(column: Column) -> str:
    return {"keys": "key", "values": "value"}.get(column.name, column.name)


def _type(arrow: Any, column: Column) -> Any:
    kind = arrow.from_numpy_dtype(column.dtype)
    return kind if column.dim is None else arrow.list_(kind, column.dim)


def _array(arrow: Any, column: Column, piece: np.ndarray) -> Any:
    flat = arrow.array(np.ascontiguousarray(piece).reshape(-1))
    if column.dim is None:
        return flat
    return arrow.FixedSizeListArray.from_arrays(flat, column.dim)

"""Comma-separated text: a line for each key, and a line of names above. Written only."""

from collections.abc import Sequence

import numpy as np

from sok_lite.cli.errors import WrongUse
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.files.source import Column, Source, columns_of


def write(path: str, sources: Sequence[Source]) -> None:
    """Writes one table: its key, the elements of its row as value_0 and so on, and other columns.

    A float is the shortest number that reads back as the same float32, float16 or float64; those of
    bfloat16 are written as float32.
    """
    if len(sources) != 1:
        raise WrongUse(f"a CSV file has one table, and there are {len(sources)}")
    (source,) = sources
    columns = columns_of(source)
    with open(path, "x", encoding="utf-8", newline="") as file:
        file.write(",".join(name for column in columns for name in _names(column)) + "\n")
        for pieces in zip(*(source.read(column.name) for column in columns), strict=True):
            texts = [
                _texts(source, column, piece) for column, piece in zip(columns, pieces, strict=True)
            ]
            for line in np.concatenate(texts, axis=1).tolist():
                file.write(",".join(line) + "\n")


def _names(column: Column) -> list[str]:
    name = {"keys": "key", "values": "value"}.get(column.name, column.name)
    names = [name] if column.dim is None else [f"{name}_{i}" for i in range(column.dim)]
    return [_quoted(each) for each in names]


def _quoted(name: str) -> str:
    if not set(name) & set(',"\r\n'):
        return name
    return '"' + name.replace('"', '""') + '"'


def _texts(source: Source, column: Column, piece: np.ndarray) -> np.ndarray:
    if column.name == "values" and source.dtype == "bfloat16":
        piece = row_dtype(source.dtype).to_float32(np, piece)
    return piece.reshape(len(piece), -1).astype(str).astype(object)

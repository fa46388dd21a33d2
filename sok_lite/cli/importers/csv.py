"""Comma-separated text: a line for each key, and a line of names above. Written only."""

from collections.abc import Sequence

import numpy as np

from sok_lite.cli.wrapped import only_one, plain_columns, read_plain
from sok_lite.engine.files.source import Column, Source


def write(path: str, sources: Sequence[Source]) -> None:
    """Writes one table: its key, the elements of its row as value_0 and so on, and other columns.

    A float is the shortest number that reads back as the same float32, float16 or float64; those of
    bfloat16 are written as float32.
    """
    source = only_one(sources, "a CSV file")
    columns = plain_columns(source)
    with open(path, "x", encoding="utf-8", newline="") as file:
        file.write(",".join(name for column in columns for name in _names(column)) + "\n")
        for pieces in zip(*(read_plain(source, column.name) for column in columns), strict=True):
            texts = [piece.reshape(len(piece), -1).astype(str).astype(object) for piece in pieces]
            for line in np.concatenate(texts, axis=1).tolist():
                file.write(",".join(line) + "\n")


def _names(column: Column) -> list[str]:
    name = {"keys": "key", "values": "value"}.get(column.name, column.name)
    names = [name] if column.dim is None else [f"{name}_{i}" for i in range(column.dim)]
    return [_quote(each) for each in names]


def _quote(name: str) -> str:
    if not set(name) & set(',"\r\n'):
        return name
    return '"' + name.replace('"', '""') + '"'

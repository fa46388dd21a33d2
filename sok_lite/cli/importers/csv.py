"""Comma-separated text: a header, and a line per key. Written only."""

from collections.abc import Iterator, Sequence

import numpy as np

from sok_lite.cli.text_column import texts_beside
from sok_lite.cli.wrapped import only_one, plain_columns, read_plain
from sok_lite.engine.files.source import Column, Source
from sok_lite.reports.text import readable

HOLDS_TEXTS = True


def write(path: str, sources: Sequence[Source]) -> None:
    """Writes one table: its key, the elements of its row as value_0 and so on, and other columns.

    A float is the shortest number that reads back as the same float32, float16 or float64; bfloat16
    is written as float32. The string of an unknown key is left empty, "" is quoted.
    """
    source = only_one(sources, "a CSV file")
    columns, texts = plain_columns(source), texts_beside(source)
    names = [_names(column) for column in columns]
    cells = [_cells(read_plain(source, column.name)) for column in columns]
    if texts is not None:
        names.insert(1, ["text"])
        cells.insert(1, _cells_of_texts(texts))
    with open(path, "x", encoding="utf-8", newline="") as file:
        file.write(",".join(name for its in names for name in its) + "\n")
        for pieces in zip(*cells, strict=True):
            for line in np.concatenate(pieces, axis=1).tolist():
                file.write(",".join(line) + "\n")


def _cells(pieces: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    for piece in pieces:
        yield piece.reshape(len(piece), -1).astype(str).astype(object)


def _cells_of_texts(pieces: Iterator[list[bytes | None]]) -> Iterator[np.ndarray]:
    for piece in pieces:
        quoted = ["" if text is None else _quote(readable(text)) or '""' for text in piece]
        yield np.array(quoted, object).reshape(-1, 1)


def _names(column: Column) -> list[str]:
    name = {"keys": "key", "values": "value"}.get(column.name, column.name)
    names = [name] if column.dim is None else [f"{name}_{i}" for i in range(column.dim)]
    return [_quote(each) for each in names]


def _quote(name: str) -> str:
    if not set(name) & set(',"\r\n'):
        return name
    return '"' + name.replace('"', '""') + '"'

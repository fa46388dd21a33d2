"""The strings of a table's keys as a further column, for tables that keep them.

All strings of the table are in memory: they are stored in the order of arrival.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sok_lite.engine.files.source import Source


def texts_beside(source: Source) -> Iterator[list[bytes | None]] | None:
    """Yields strings (or None) in the pieces of `source.read`; returns None if none are kept."""
    texts = source.texts()
    if not texts:
        return None
    return ([texts.get(key) for key in keys.tolist()] for keys in source.read("keys"))


class TextArray(NamedTuple):
    """An array of numbers, for files that hold only these."""

    name: str  # in the file
    dtype: np.dtype
    size: int  # number of elements
    pieces: Iterator[np.ndarray]  # its content, in order


def text_arrays(source: Source) -> list[TextArray]:
    """Returns the strings of all keys as arrays; [] without any.

    `text_ends` has the end of each key's string in `text_bytes`, in bytes. An unknown one is empty.
    """
    texts = source.texts()
    if not texts:
        return []

    def each() -> Iterator[list[bytes]]:
        for keys in source.read("keys"):
            yield [texts.get(key, b"") for key in keys.tolist()]

    def ends() -> Iterator[np.ndarray]:
        end = 0
        for some in each():
            piece = np.cumsum([end, *map(len, some)])[1:]
            yield piece
            end = int(piece[-1]) if some else end

    num_bytes = sum(len(text) for some in each() for text in some)
    data = (np.frombuffer(b"".join(some), np.uint8) for some in each())
    return [
        TextArray("text_ends", np.dtype(np.int64), source.num_keys, ends()),
        TextArray("text_bytes", np.dtype(np.uint8), num_bytes, data),
    ]

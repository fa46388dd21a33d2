"""The texts of a table's keys as a column beside them. A table that keeps none has no such column.

All texts of the table are in memory for it: they lie in the order in which they came.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sok_lite.engine.files.source import Source


def texts_beside(source: Source) -> Iterator[list[bytes | None]] | None:
    """Returns the texts of all keys, in pieces as `source.read` has them; None: it has no texts.

    The text of a key that nobody knows is None.
    """
    texts = source.texts()
    if not texts:
        return None
    return ([texts.get(key) for key in keys.tolist()] for keys in source.read("keys"))


class TextArray(NamedTuple):
    """An array of numbers, for files that hold nothing else.

    Attributes:
      name: in the file.
      dtype: of its elements.
      size: number of elements.
      pieces: all of it, one after the other.
    """

    name: str
    dtype: np.dtype
    size: int
    pieces: Iterator[np.ndarray]


def text_arrays(source: Source) -> list[TextArray]:
    """Returns the texts of all keys as arrays; []: it has no texts.

    `text_ends` says where the text of each key ends in `text_bytes`, in bytes. One that nobody
    knows is empty.
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

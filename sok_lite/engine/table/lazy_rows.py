"""Rows that come in pieces, so that never all of them are in memory: those of a file."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array


class LazyRows(NamedTuple):
    """Rows of a table, on its backend, or of a `Content`, on the host.

    Attributes:
      shape: (n, dim), that of all of them together.
      read: begins to read. It gives (at, rows): (k,) int64, their places in the order of the keys,
        and (k, dim), C-contiguous. Each place comes once at most; a state's row that does not come
        is its initial value.
    """

    shape: tuple[int, int]
    read: Callable[[], Iterator[tuple[Array, Array]]]


def in_pieces(rows: np.ndarray, num_bytes: int) -> LazyRows:
    """Returns an array as rows of which so many bytes come at a time."""
    step = max(1, num_bytes // max(1, rows.itemsize * rows.shape[1]))

    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first in range(0, len(rows), step):
            some = np.ascontiguousarray(rows[first : first + step])
            yield np.arange(first, first + len(some)), some

    return LazyRows((len(rows), rows.shape[1]), read)


def moved(rows: LazyRows, places: np.ndarray, n: int) -> LazyRows:
    """Returns rows of the host at other places, some of them left out.

    Args:
      places: (number of rows,) int64, where each comes; -1: nowhere.
      n: how many places there are then.
    """

    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for at, some in rows.read():
            to = places[at]
            is_kept = to >= 0
            yield (to, some) if is_kept.all() else (to[is_kept], some[is_kept])

    return LazyRows((n, rows.shape[1]), read)


def chained(parts: Sequence[LazyRows]) -> LazyRows:
    """Returns the rows of several parts, one part after the other."""
    begins = np.cumsum([0, *(part.shape[0] for part in parts)]).tolist()

    def read() -> Iterator[tuple[Array, Array]]:
        for begin, part in zip(begins, parts, strict=False):
            for at, some in part.read():
                yield at + begin, some

    return LazyRows((begins[-1], parts[0].shape[1]), read)


def whole(rows: LazyRows, dtype: np.dtype, initial: float) -> np.ndarray:
    """Returns all of some rows of the host.

    Args:
      dtype: theirs.
      initial: of places that do not come.
    """
    result = np.full(rows.shape, initial, dtype)
    for at, some in rows.read():
        result[at] = some
    return result

"""Linear search for a few keys in a file, which is read in pieces until all are found."""

from collections.abc import Collection, Iterable, Iterator

import numpy as np


def first_positions(pieces: Iterable[np.ndarray], keys: Collection[int]) -> dict[int, int]:
    """Returns the first position of each key, ascending, without missing keys.

    Args:
      pieces: all keys of the file, consumed as far as needed.
      keys: distinct, and within the type of the pieces.
    """
    found: dict[int, int] = {}
    begin = 0
    if not keys:
        return found
    for piece in pieces:
        wanted = np.array(list(keys), piece.dtype)
        for at in np.flatnonzero(np.isin(piece, wanted)).tolist():
            found.setdefault(int(piece[at]), begin + at)
        if len(found) == len(keys):
            break
        begin += len(piece)
    return found


def entries_at(pieces: Iterable[np.ndarray], places: Iterable[int]) -> Iterator[np.ndarray]:
    """Yields copies of the entries of a column at `places`, which ascend.

    Args:
      pieces: the column, consumed as far as needed.
    """
    begin = end = 0
    left, piece = iter(pieces), np.empty(0)
    for place in places:
        while place >= end:
            piece = next(left)
            begin, end = end, end + len(piece)
        yield piece[place - begin].copy()

"""Files whose rows are in the order of their keys, made of sources that have another one."""

import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sok_lite.engine.dtypes import key_dtype
from sok_lite.engine.files.source import Source


class Places(NamedTuple):
    """The order of a source's keys in the sorted file.

    Attributes:
      keys: (n,) ascending.
      at: (n,) int64, the place of the i-th key that the source reads.
    """

    keys: np.ndarray
    at: np.ndarray

    @classmethod
    def of(cls, source: Source) -> "Places":
        """Sorts the keys of a source. Takes 32 bytes a key while it runs, and keeps 16.

        Raises:
          ValueError: a key repeats.
        """
        none = np.empty(0, key_dtype(source.key_type).dtype)
        keys = np.concatenate([none, *source.read("keys")])
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        repeated = np.flatnonzero(keys[1:] == keys[:-1])
        if repeated.size:
            raise ValueError(f"Table {source.name!r} has key {keys[repeated[0]]} more than once.")
        at = np.empty(keys.size, np.int64)
        at[order] = np.arange(keys.size)
        return cls(keys, at)

    @property
    def least(self) -> int | None:
        """The least key; None: there is none."""
        return int(self.keys[0]) if self.keys.size else None

    def has(self, key: int) -> bool:
        """Returns whether a key, which need not be of their type, is among them."""
        limits = np.iinfo(self.keys.dtype)
        if not limits.min <= key <= limits.max:
            return False
        found = np.searchsorted(self.keys, self.keys.dtype.type(key))
        return bool(found < self.keys.size and self.keys[found] == key)


def write_sorted(
    path: str,
    head: bytes,
    pieces: Iterator[np.ndarray],
    dtype: np.dtype,
    shape: tuple[int, ...],
    places: Places,
) -> None:
    """Writes a column of a source into a new file, each row at the place of its key.

    Args:
      head: what comes before the rows.
      pieces: of the column.
      dtype: of its elements.
      shape: of a row.

    Raises:
      OSError: the file cannot be written. ValueError: there are more rows than keys, or fewer.
    """
    n, first = int(places.at.size), 0
    with open(path, "xb+") as file:
        file.write(head)
        file.flush()
        target = None
        if n:
            num_bytes = n * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            # Memory that stands for a file without room on the disk ends the process.
            os.posix_fallocate(file.fileno(), 0, len(head) + num_bytes)
            target = np.memmap(file, dtype.newbyteorder("<"), "r+", len(head), (n, *shape))
        for piece in pieces:
            at = places.at[first : first + len(piece)]
            if len(at) != len(piece):
                raise ValueError(f"{path} was to have {n:,} rows, and more came.")
            if target is not None:
                target[at] = piece
            first += len(piece)
        if first != n:
            raise ValueError(f"{path} was to have {n:,} rows, and {first:,} came.")
        if target is not None:
            target.flush()

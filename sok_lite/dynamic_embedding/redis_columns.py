"""The layout of a value in a Redis: a row and the columns that follow it, such as its states.

A value ends where the worker that wrote it knew of no more columns: what it lacks is what they
begin with.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Column(NamedTuple):
    """A column behind the rows.

    Attributes:
      name: of the column; one with other bytes is another column.
      num_bytes: length.
      initial: what it begins with, as often as it fits in.
    """

    name: str
    num_bytes: int
    initial: bytes

    def text(self) -> str:
        """Returns the column as a Redis has it."""
        return f"{self.num_bytes}:{self.initial.hex()}:{self.name}"

    @classmethod
    def of(cls, text: str) -> "Column":
        """Returns the column of a text."""
        num_bytes, initial, name = text.split(":", 2)
        return cls(name, int(num_bytes), bytes.fromhex(initial))


class Layout:
    """The layout of a value: a row, then its columns.

    Args:
      row_bytes: length of a row.
      columns: that follow it.

    Attributes:
      places: of each column in a value.
      num_bytes: of a value with all columns.
    """

    def __init__(self, row_bytes: int, columns: Iterable[Column] = ()) -> None:
        self.row_bytes = row_bytes
        self.places: dict[Column, slice] = {}
        self._initial = bytes(row_bytes)
        for column in columns:
            start = len(self._initial)
            self.places[column] = slice(start, start + column.num_bytes)
            self._initial += column.initial * (column.num_bytes // len(column.initial))
        self.num_bytes = len(self._initial)

    def rows(self, values: np.ndarray) -> np.ndarray | None:
        """Returns values with all columns, (n, num_bytes) uint8; None: one has none of its lengths.

        Args:
          values: (n,) of objects, bytes or None, which is a row of 0.
        """
        lengths = np.array([0 if value is None else len(value) for value in values], np.int64)
        rows = np.tile(np.frombuffer(self._initial, np.uint8), (len(values), 1))
        ends = {0, self.row_bytes, *(place.stop for place in self.places.values())}
        for length in set(lengths.tolist()):
            if length not in ends:
                return None
            at = np.flatnonzero(lengths == length)
            if length:
                data = b"".join(values[at])
                rows[at, :length] = np.frombuffer(data, np.uint8).reshape(-1, length)
        return rows


def fields_of(keys: np.ndarray) -> np.ndarray:
    """Returns keys as Redis has them, (n,) of objects."""
    return objects_of(keys.astype("<i8", copy=False)[:, None])


def objects_of(array: np.ndarray) -> np.ndarray:
    """Returns rows as bytes, (n,) of objects."""
    # Not NumPy's own bytes, which lose trailing zeros.
    width = array.shape[1] * array.itemsize
    return np.array(array.reshape(-1).view(f"V{width}").tolist(), object)

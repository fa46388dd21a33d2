"""Tables that another system keeps as keys and rows, its optimizer states as such tables beside.

The keys of a table are in memory while it is read, 16 bytes each, and of a state 16 more; rows are
as they came, which may be arrays that are mapped from a file.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.engine.dtypes import key_dtype, row_dtype
from sok_lite.engine.files.manifest import StateFacts
from sok_lite.engine.files.shard import CHUNK_BYTES
from sok_lite.engine.files.source import Source
from sok_lite.engine.table.content_parts import one_of_each


class StoredRows(NamedTuple):
    """Keys and rows that are stored together.

    Attributes:
      keys: (k,) of the table's key type.
      rows: (k, dim) in the storage of the table's dtype.
    """

    keys: np.ndarray
    rows: np.ndarray


class Keyed(NamedTuple):
    """Keys and rows of one name. Of a key that repeats the last counts.

    Attributes:
      name: of the table.
      key_type, dtype, dim: of the table.
      parts: all of it.
    """

    name: str
    key_type: str
    dtype: str
    dim: int
    parts: Sequence[StoredRows]

    def all_keys(self) -> np.ndarray:
        """Returns the keys of all parts, one behind the other."""
        none = np.empty(0, key_dtype(self.key_type).dtype)
        return np.concatenate([none, *(part.keys for part in self.parts)])


class KeyedSource(Source):
    """A table as a `Source`.

    Args:
      keyed: keys and rows.
      states: the states' rows, by what is said of each; a key that one lacks has its initial value.
    """

    def __init__(self, keyed: Keyed, states: Sequence[tuple[StateFacts, Keyed]]) -> None:
        self.name, self.key_type, self.dtype, self.dim, self._parts = keyed
        keys = keyed.all_keys()
        kept = one_of_each(keys, "last", f"table {self.name!r}")
        self._is_kept = np.zeros(keys.size, bool)
        self._is_kept[kept] = True
        self.num_keys = kept.size
        self._states = {facts.tensor: (facts, _Found(rows)) for facts, rows in states}
        self.states = tuple(facts for facts, _ in self._states.values())
        widths = [row_dtype(self.dtype).storage.itemsize * self.dim, 8]
        widths += [4 * facts.dim for facts in self.states]
        self._piece_rows = max(1, CHUNK_BYTES // max(widths))

    def read(self, column: str) -> Iterator[np.ndarray]:
        begin = 0
        for part in self._parts:
            for first in range(0, part.keys.size, self._piece_rows):
                some = slice(first, first + self._piece_rows)
                keys = part.keys[some]
                is_kept = self._is_kept[begin + first :][: keys.size]
                if column == "values":
                    yield part.rows[some][is_kept]
                elif column == "keys":
                    yield keys[is_kept]
                else:
                    facts, found = self._states[column]
                    yield found.rows(keys[is_kept], facts.initial)
            begin += part.keys.size


class _Found:
    """Rows of a state, found by their keys and returned as float32."""

    def __init__(self, keyed: Keyed) -> None:
        self._keyed = keyed
        keys = keyed.all_keys()
        self._places = one_of_each(keys, "last", f"the states in {keyed.name!r}")
        self._keys = keys[self._places]
        self._ends = np.cumsum([part.keys.size for part in keyed.parts])

    def rows(self, keys: np.ndarray, initial: float) -> np.ndarray:
        """Returns the row of each key, (k, dim); all `initial` where it has none."""
        rows = np.full((keys.size, self._keyed.dim), initial, np.float32)
        at = np.searchsorted(self._keys, keys)
        is_there = at < self._keys.size
        is_there[is_there] = self._keys[at[is_there]] == keys[is_there]
        places, where = self._places[at[is_there]], np.flatnonzero(is_there)
        of_part = np.searchsorted(self._ends, places, "right")
        for number, part in enumerate(self._keyed.parts):
            its = of_part == number
            begin = self._ends[number] - part.keys.size
            stored = part.rows[places[its] - begin]
            rows[where[its]] = row_dtype(self._keyed.dtype).to_float32(np, stored)
        return rows

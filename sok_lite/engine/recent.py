"""The keys of a table's last gradient with their row numbers, for the update that follows it.

In training the keys of an update are those of the gradient before it. They are known to be distinct
and their rows are known, so the update deduplicates nothing and probes nothing. Keys are compared
in full: an update of other keys finds nothing here.
"""

import weakref
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.rows.store import ABSENT
from sok_lite.engine.table import EmbeddingTable


class _Gradient(NamedTuple):
    keys: Array
    rows: Array
    generation: int


_last: "weakref.WeakKeyDictionary[EmbeddingTable, _Gradient]" = weakref.WeakKeyDictionary()


def remember(table: EmbeddingTable, keys: Array, rows: Array, generation: int) -> None:
    """Keeps the keys of a gradient, and their rows.

    Args:
      table: the table.
      keys: (u,) int64, distinct; not to be written afterwards.
      rows: (u,) uint32; where some are absent, nothing will be recalled.
      generation: of the table when it gave the row numbers.
    """
    _last[table] = _Gradient(keys, rows, generation)


def recall(table: EmbeddingTable, keys: Array) -> Array | None:
    """Returns the rows of keys (n,) int64 if they are those remembered, and so distinct; else None.

    On a GPU it waits for the comparison.
    """
    last = _last.get(table)
    if last is None or last.generation != table.generation or last.keys.size != keys.size:
        return None
    # One that had no row may have got one since.
    is_same = (last.keys == keys).all() & (last.rows != np.uint32(ABSENT)).all()
    return last.rows if bool(is_same) else None

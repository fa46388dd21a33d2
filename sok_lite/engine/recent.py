"""The keys of a table's last whole lookup with their row numbers, for the update that follows it.

In training the keys of an update are those of the lookup before it. They are known to be distinct
and their rows are known, so the update makes nothing distinct and probes nothing. Keys are compared
in full: an update of other keys finds nothing here.
"""

import weakref
from typing import NamedTuple

from sok_lite.backend import Array
from sok_lite.engine.table import EmbeddingTable


class _Lookup(NamedTuple):
    keys: Array
    rows: Array
    generation: int


_last: "weakref.WeakKeyDictionary[EmbeddingTable, _Lookup]" = weakref.WeakKeyDictionary()


def remember(table: EmbeddingTable, keys: Array, rows: Array) -> None:
    """Keeps the keys of a lookup, and their rows.

    Args:
      table: the table.
      keys: (u,) int64, distinct; not to be written afterwards.
      rows: (u,) uint32, all of them held.
    """
    _last[table] = _Lookup(keys, rows, table.generation)


def recall(table: EmbeddingTable, keys: Array) -> Array | None:
    """Returns the rows of keys (n,) int64 if they are those remembered, and so distinct; else None.

    On a GPU it waits for the comparison.
    """
    last = _last.get(table)
    if last is None or last.generation != table.generation or last.keys.size != keys.size:
        return None
    return last.rows if bool((last.keys == keys).all()) else None

"""Tables of rows by key, of two kinds: "hbm" and "hybrid"."""

from typing import Any

from sok_lite.backend import Backend
from sok_lite.engine.table.det import DetTable
from sok_lite.engine.table.hkv import HkvTable, RefusedError
from sok_lite.engine.table.results import Entries, Lookup, Statistics
from sok_lite.engine.table.table import EmbeddingTable

__all__ = [
    "DetTable",
    "EmbeddingTable",
    "Entries",
    "HkvTable",
    "Lookup",
    "RefusedError",
    "Statistics",
    "make_table",
]

_TABLES: dict[str, type[EmbeddingTable]] = {"hbm": DetTable, "hybrid": HkvTable}


def make_table(var_type: str, backend: Backend, dim: int, **options: Any) -> EmbeddingTable:
    """Makes an empty table.

    Args:
      var_type: "hbm": all in the backend's memory, growing without bound; "hybrid": up to a number
        of keys, with eviction, in two tiers of memory.
      options: of `DetTable` or `HkvTable`.

    Raises:
      ValueError: an unknown `var_type`, or an option out of range.
      TypeError: an unknown option.
    """
    if var_type not in _TABLES:
        raise ValueError(f"var_type must be 'hbm' or 'hybrid'. Received: {var_type!r}.")
    return _TABLES[var_type](backend, dim, **options)

"""What a table is, and how one is made."""

from typing import Any

from sok_lite.backend import Backend
from sok_lite.engine.table.det import DetTable

__all__ = ["DetTable", "make_table"]


def make_table(var_type: str, backend: Backend, dim: int, **options: Any) -> DetTable:
    """Makes an empty table.

    Args:
      var_type: "hbm": all in the backend's memory, growing without bound.
      backend: where it lives.
      dim: elements of a row.
      options: of the table's constructor.

    Raises:
      ValueError: no such kind of table.
      NotImplementedError: "hybrid", which is not built yet.
    """
    if var_type == "hbm":
        return DetTable(backend, dim, **options)
    if var_type == "hybrid":
        raise NotImplementedError(
            "var_type='hybrid' (GPU and host memory with eviction) is not available in this "
            "version. Use var_type='hbm', which grows as long as there is memory."
        )
    raise ValueError(f"var_type must be 'hbm' or 'hybrid'. Received: {var_type!r}.")

"""The rows of several tables that have changed since a time, of all ranks together."""

from collections.abc import Sequence

import numpy as np

from sok_lite.comm.protocol import Communicator
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.failure import together
from sok_lite.engine.table import EmbeddingTable


def changes_since(
    tables: Sequence[EmbeddingTable], times: Sequence[float], comm: Communicator
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns keys and rows that have changed, those of all ranks on every rank.

    Every rank must call it.

    Args:
      tables: the same on all ranks.
      times: of each table, in seconds since 1970; they need not be the same on all ranks.

    Returns:
      Of each table (keys (n,) of the key type, rows (n, dim) storage), on the host: the result of
      `export_since` on rank 0, then that on rank 1 and so on.

    Raises:
      ValueError: the ranks have different tables; on all ranks.
      MemoryError: a rank has none for its rows; on all ranks.
    """
    names = {
        f"table {i}": [table.name, table.dim, table.row_dtype.name, table.key_dtype.name]
        for i, table in enumerate(tables)
    }
    check_equal_on_all_ranks(comm, names, "An incremental dump")

    def exported() -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (table.backend.to_host(keys), table.backend.to_host(rows))
            for table, at in zip(tables, times, strict=True)
            for keys, rows in [table.export_since(at)]
        ]

    def of_all(array: np.ndarray) -> np.ndarray:
        return comm.allgatherv(array, call="changes_since").rows

    return [(of_all(keys), of_all(rows)) for keys, rows in together(comm, exported)]

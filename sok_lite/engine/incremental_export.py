"""Keys and rows of several tables that have changed since a time, of all ranks together."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from sok_lite.backend import Array
from sok_lite.comm.protocol import Communicator
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.failure import together
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.locking import with_lock


def changes_since(
    tables: Sequence[EmbeddingTable],
    times: Sequence[float],
    comm: Communicator,
    removed: bool = False,
) -> list[tuple[np.ndarray, ...]]:
    """Returns keys and rows that have changed on any rank. All ranks must call it.

    Args:
      tables: the same on all ranks.
      times: of each table, in seconds since 1970; ranks may differ.
      removed: whether to return removed keys too. The tables then forget older removals.

    Returns:
      Of each table (keys (n,) of the key type, rows (n, dim) storage), on the host: the result of
      `export_since` on rank 0, then that on rank 1 and so on. With `removed`, also the keys (m,)
      that have lost their rows.

    Raises:
      ValueError: the ranks have different tables, or one has no log of removals since the time; on
        all ranks.
      MemoryError: a rank has no memory for its rows; on all ranks.
    """
    names = {
        f"table {i}": [table.name, table.dim, table.row_dtype.name, table.key_dtype.name]
        for i, table in enumerate(tables)
    }
    check_equal_on_all_ranks(comm, {**names, "removed": removed}, "An incremental dump")

    def export() -> list[tuple[np.ndarray, ...]]:
        return [
            tuple(
                map(table.backend.to_host, with_lock(table, partial(_changes, table, at, removed)))
            )
            for table, at in zip(tables, times, strict=True)
        ]

    changes = together(comm, export)
    if removed:
        for table, at in zip(tables, times, strict=True):
            table.forget_removals(before=table.first_removal_since(at))
    return [
        tuple(comm.allgatherv(array, call="changes_since").rows for array in arrays)
        for arrays in changes
    ]


def _changes(table: EmbeddingTable, at: float, removed: bool) -> tuple[Array, ...]:
    if not removed:
        return table.export_since(at)
    gone = table.removed_since(table.first_removal_since(at))
    return (*table.export_since(at), gone)

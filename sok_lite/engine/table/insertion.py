"""Inserting keys into one table: their rows, what these begin with, what was evicted for them."""

from typing import Any

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.publish import Action
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.table.counters import new_counters
from sok_lite.engine.table.parts import TableParts
from sok_lite.engine.table.results import Evicted
from sok_lite.engine.table.stages import NewKeys, WithRows, run


def insert(
    table: TableParts,
    new: NewKeys,
    before: list[Action],
    after: WithRows,
    evicted: list[Any] | None = None,
) -> None:
    """Does what `insertion_stages` does, for this table alone."""
    counters = new_counters(table.backend, 1)
    run(
        table.backend,
        counters,
        {0: table.insertion_stages(new, before, after, counters[0], evicted)},
    )


def claim_rows(table: TableParts, count: int) -> Claim:
    """Chooses rows for keys.

    Raises:
      MemoryError: it names the table.
    """
    try:
        return table.store.claim(count)
    except MemoryError as error:
        raise MemoryError(
            f"No memory for {count:,} more rows of table {table.name!r}, "
            f"{table.store.row_bytes:,} bytes each. It is as it was, with {table.size:,} keys. "
            f"Use more ranks, fewer keys or shorter rows. ({error})"
        ) from error


def plan_content(table: TableParts, new: NewKeys, rows: Array) -> Action:
    """Prepares to write what the rows (n,) uint32 of new keys begin with."""
    if new.values is not None:
        return table.store.plan_write(rows, new.values, source=new.source)
    where = (table.backend, table.store, rows, new.keys, table.table_seed)
    return table.initializer.plan_fill(*where, new.refused_values)


def gather_evicted(table: TableParts, parts: list[Evicted]) -> Evicted:
    """Returns together what was evicted, whose keys are int64 as yet."""
    xp = table.backend.xp
    keys = xp.concatenate([xp.empty(0, np.int64), *(part.keys for part in parts)])
    empty = xp.empty((0, table.dim), table.row_dtype.storage)
    values = xp.concatenate([empty, *(part.values for part in parts)])
    scores = xp.concatenate([xp.empty(0, np.uint64), *(part.scores for part in parts)])
    return Evicted(table.key_dtype.from_int64(xp, keys), values, scores)

"""A lookup in several tables at once: all keys are looked for by one launch for all tables.

Only where keys are missing more is done; see engine/table/new_keys.py.
"""

from collections.abc import Sequence
from typing import Any

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, publish
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.segments import cut
from sok_lite.engine.table.index import NUM_COUNTS
from sok_lite.engine.table.new_keys import Asked, Incomplete, complete, pooling


class WrongSplitsError(ValueError):
    """Row splits do not rise from 0 to the number of keys."""


def look_up(backend: Backend, keys: Array, rows: Array, asked: Sequence[Asked]) -> list[int]:
    """Finds keys, inserts those that are missing, and writes row numbers and rows.

    Args:
      keys: (n,) int64, which may repeat; those of each table follow those of the table before.
      rows: (n,) uint32, gets the row numbers.
      asked: of tables that are all different, each in a call that may change it.

    Returns:
      How many keys have no row afterwards, for each table.

    Raises:
      MemoryError: no memory for new keys. Each table is as it was or as it is to be.
      WrongSplitsError: row splits of an output do not fit its keys. Nothing was inserted.
    """
    for each in asked:
        if each.insert:
            each.table._before_lookup()
    sizes = [each.size for each in asked]
    its_keys, its_rows = cut(keys, sizes), cut(rows, sizes)
    counts = backend.xp.zeros((len(asked), NUM_COUNTS), int)
    publish(*map(_finding, asked, its_keys, its_rows, counts))
    found = backend.to_host(counts).tolist()
    if any(num_wrong for _, _, num_wrong in found):
        raise WrongSplitsError("Row splits do not rise from 0 to the number of keys.")
    finished: list[list[Action]] = []
    num_missing = []
    for each, (missing, num_seen, _) in zip(asked, found, strict=True):
        each.table._count_found(each.size, missing)
        num_missing.append(missing)
        if not missing and each.insert:
            finished.append(each.table._touching(num_seen, None))
    publish(*finished)
    if not any(num_missing):
        return num_missing
    num_seen = [seen for _, seen, _ in found]
    return complete(
        backend, keys, rows, asked, Incomplete(split_offsets(sizes), num_missing, num_seen)
    )


def _finding(asked: Asked, keys: Array, rows: Array, counts: Array) -> list[Action]:
    """Prepares to find the keys of a table, and to give the rows of those that are found."""
    table = asked.table
    backend, store = table.backend, table.store
    actions, stamp, warming = [], 0, None
    if asked.insert:
        actions = table._beginning_lookup()
        stamp, warming = table.clock.now + 1, table._warming()
    is_pooled = any(output.row_splits is not None for output in asked.outputs)
    if is_pooled and backend.name == "cpu":
        place, note = table.index.place(), table.index.noting(stamp, warming)
        rows_place = store.place()
        for output in asked.outputs:
            first, end = output.first, output.end
            batch, arguments = _pooled(output, rows, counts)
            find = (*place, *note, keys[first:end], *rows_place, *arguments)
            actions.append(backend.prepared("find_and_pool", batch, *find))
        return actions
    copying = None
    if asked.outputs and not is_pooled:
        copying = store.copying(asked.outputs[0].out)
    into = (rows, counts)
    actions += table.index.searching(keys, stamp, asked.given, warming, copying, into).actions
    if is_pooled:
        *where, _ = store.place()
        kernel = f"pool_{table.row_dtype.suffix}"
        for output in asked.outputs:
            batch, arguments = _pooled(output, rows, counts)
            actions.append(backend.prepared(kernel, batch, *where, *arguments))
    return actions


def _pooled(output: Any, rows: Array, counts: Array) -> tuple[int, tuple[Any, ...]]:
    """Returns the rows of a pooled output, and what a kernel takes that pools them."""
    batch, how = pooling(output)
    num_items = output.end - output.first
    rows = rows[output.first : output.end]
    return batch, (rows, *how, output.out, counts, num_items, batch)

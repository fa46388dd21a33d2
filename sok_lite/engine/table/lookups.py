"""A lookup in several tables at once: all keys are looked for by one launch for all tables.

Only where keys are missing more is done; see engine/table/new_keys.py.
"""

from collections.abc import Sequence
from typing import Any

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import Part, joined_launches
from sok_lite.backend.publish import Action, publish
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.segments import cut
from sok_lite.engine.table.counters import Count, new_counters
from sok_lite.engine.table.new_keys import Asked, Incomplete, Output, complete, pooling


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
    counters = new_counters(backend, len(asked))
    beginning: list[Action] = []
    parts: list[tuple[Backend, str, Part]] = []
    for each, some_keys, some_rows, counts in zip(asked, its_keys, its_rows, counters, strict=True):
        stamp = 0
        if each.insert:
            beginning += each.table._beginning_lookup()
            stamp = each.table.clock.now + 1
        parts += _finding(each, some_keys, some_rows, stamp, counts)
    publish([*beginning, *joined_launches(parts)])
    found = backend.to_host(counters).tolist()
    if any(counts[Count.WRONG_SPLITS] for counts in found):
        raise WrongSplitsError("Row splits do not rise from 0 to the number of keys.")
    finished: list[list[Action]] = []
    is_complete = True
    for each, counts in zip(asked, found, strict=True):
        num_missing = counts[Count.MISSING]
        each.table._count_found(each.size, num_missing)
        if num_missing:
            is_complete = False
        elif each.insert:
            touching = each.table._touching(counts[Count.SEEN], None)
            if touching:
                finished.append(touching)
    publish(*finished)
    if is_complete:
        return [0] * len(asked)
    search = Incomplete(counters, found, split_offsets(sizes))
    return complete(backend, keys, rows, asked, search)


def _finding(
    asked: Asked, keys: Array, rows: Array, stamp: int, counts: Array
) -> list[tuple[Backend, str, Part]]:
    """Prepares to find the keys of a table, and to give the rows of those that are found.

    Args:
      stamp: number of this lookup; 0: it inserts nothing, and notes nothing.
    """
    table, outputs = asked.table, asked.outputs
    backend, index = table.backend, table.index
    warming = table._warming() if stamp else None
    is_pooled = bool(outputs) and outputs[0].row_splits is not None
    if is_pooled and backend.name == "cpu":
        place, note, rows_place = index.place(), index.noting(stamp, warming), table.store.place()
        parts = []
        for output in outputs:
            batch, arguments = _pooled(output, rows, counts)
            some_keys = keys[output.first : output.end]
            find = (*place, *note, some_keys, *rows_place, *arguments)
            parts.append((backend, "find_and_pool", Part(batch, find)))
        return parts
    copying = None if is_pooled or not outputs else table.store.copying(outputs[0].out)
    find = index.searching(keys, stamp, asked.given, warming, copying, (rows, counts)).launch
    parts = [(backend, find.kernel, find.part)]
    if is_pooled:
        *where, _ = table.store.place()
        kernel = f"pool_{table.row_dtype.suffix}"
        for output in outputs:
            batch, arguments = _pooled(output, rows, counts)
            parts.append((backend, kernel, Part(batch, (*where, *arguments))))
    return parts


def _pooled(output: Output, rows: Array, counts: Array) -> tuple[int, tuple[Any, ...]]:
    """Returns the rows of a pooled output, and what a kernel takes that pools them."""
    batch, how = pooling(output)
    num_items = output.end - output.first
    rows = rows[output.first : output.end]
    return batch, (rows, *how, output.out, counts, num_items, batch)

"""Finding keys in a table, and counting the lookups that do.

`find`, `contains`, `scores`, `read_state` and `mark_seen_search` are methods of `EmbeddingTable`.
"""

from typing import Any

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.arguments import checked_keys
from sok_lite.engine.table.dumped import forget
from sok_lite.engine.table.exclusive import exclusive
from sok_lite.engine.table.index import Found, Search
from sok_lite.engine.table.parts import TableParts
from sok_lite.engine.table.tiering import access_counts


@exclusive
def find(table: TableParts, keys: Any) -> Array:
    """Returns the row number of every key, (n,) uint32; NO_ROW where it has none.

    It changes nothing but the counters: no key is inserted and none counts as seen.
    """
    keys = checked_keys(table, keys)
    found = table.index.find(keys)
    count_found(table, int(keys.size), found.num_missing)
    return found.rows


@exclusive
def contains(table: TableParts, keys: Any) -> Array:
    """Returns whether each key has a row, (n,) bool. It changes nothing."""
    return table.index.find(checked_keys(table, keys)).rows != np.uint32(NO_ROW)


@exclusive
def scores(table: TableParts, keys: Any) -> Array:
    """Returns the score of every key, (n,) uint64; 0 where it has no row.

    An "hbm" table keeps that of kLru: the number of the lookup that last saw the key.
    """
    return table.scores_of(checked_keys(table, keys))


@exclusive
def read_state(table: TableParts, name: str, keys: Any) -> Array:
    """Returns an optimizer state of keys, (n, dim) float32. It changes nothing.

    A key without a row gives what the state begins with.

    Raises:
      KeyError: there is no such state.
    """
    rows = table.index.find(checked_keys(table, keys)).rows
    column = table.store.column(name)
    state = table.store.read(rows, name)
    if column.initial != 0:
        state[rows == np.uint32(NO_ROW)] = column.initial
    return state


def count_found(table: TableParts, num_items: int, num_missing: int) -> None:
    """Counts the keys of a lookup, and how many of them have no row."""
    table.counters.found += num_items - num_missing
    table.counters.missed += num_missing


def age(table: TableParts) -> None:
    """Halves the number of every lookup, so that counting can go on."""
    with uninterrupted():
        table.clock.halve()  # the one that needs memory
        table.index.age()
        if table.removals is not None:
            table.removals.age()
        if table.pending is not None:
            table.pending.age()
        forget(table)


def find_and_mark_seen(table: TableParts, keys: Array) -> Found:
    """Begins a lookup that may insert, and finds keys, which count as seen by it."""
    if table.clock.is_full:
        age(table)
    search = table.index.search(keys, table.clock.now + 1, accesses=access_counts(table))
    with uninterrupted():
        table.clock.tick()
        search.launch()
    return search.found


def mark_seen_search(table: TableParts, keys: Array) -> Search:
    """Returns a search for keys whose rows are to change: they count as seen by the last lookup."""
    into = (table.backend.xp.empty(int(keys.size), np.uint32), None)
    return table.index.search(keys, table.clock.now, into=into, refreshes=False)

"""Moves rows between the two tiers of a table's memory, as part of a lookup.

`engine/rows/tiers.py` counts how often rows are accessed, and says which change places.
"""

from sok_lite.backend import Array
from sok_lite.backend.launches import Launch
from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.table.index import AccessCounts
from sok_lite.engine.table.parts import TableParts


def rebalance_if_due(table: TableParts) -> None:
    """Moves hot rows near, every so often: before any row number of a lookup is known."""
    if table.tiers is not None and table.tiers.is_due:
        rebalance(table)


def rebalance(table: TableParts) -> None:
    """Moves hot rows near. Row numbers handed out before are stale then."""
    assert table.tiers is not None
    with uninterrupted():
        moved = table.tiers.rebalance()
        if moved is not None:
            table.index.update(moved.keys, rows=moved.rows)
            table.renew()


def access_counts(table: TableParts) -> AccessCounts | None:
    """Returns how often rows were accessed, to which a lookup that may insert adds; None: not
    counted."""
    tiers = table.tiers
    counts = None if tiers is None else tiers.access_counts()
    return None if tiers is None or counts is None else AccessCounts(counts, tiers.is_counting)


def count_launches(table: TableParts, new_rows: Array) -> list[Launch]:
    """Returns the launches that count accesses of new rows (n,) uint32; `count_lookup` follows."""
    if table.tiers is None:
        return []
    table.tiers.reserve(table.store.num_rows)
    return table.tiers.count_launches(new_rows)


def count_lookup(table: TableParts, num_rows: int) -> None:
    """Notes how many rows a lookup saw, new ones with them."""
    if table.tiers is not None:
        table.tiers.count_lookup(num_rows)

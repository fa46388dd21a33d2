"""Moves rows between the two tiers of a table's memory, as part of a lookup.

`engine/rows/tiers.py` counts how often rows are accessed, and says which change places.
"""

from sok_lite.backend import Array
from sok_lite.backend.publish import Action
from sok_lite.engine.table.index import AccessCounts
from sok_lite.engine.table.parts import TableParts


def rebalance_if_due(table: TableParts) -> None:
    """Moves hot rows near, every so often: before any row number of a lookup is known."""
    if table.tiers is not None and table.tiers.is_due:
        rebalance(table)


def rebalance(table: TableParts) -> None:
    """Moves hot rows near. Row numbers handed out before are stale then."""
    assert table.tiers is not None
    table.tiers.rebalance(
        lambda moved: [*table.index.plan_update(moved.keys, rows=moved.rows), *table.plan_renew()]
    )


def access_counts(table: TableParts) -> AccessCounts | None:
    """Returns how often rows were accessed, to which a lookup that may insert adds; None: not
    counted."""
    tiers = table.tiers
    counts = None if tiers is None else tiers.access_counts()
    return None if tiers is None or counts is None else AccessCounts(counts, tiers.is_counting)


def plan_score_update(table: TableParts, num_seen: int, new_rows: Array | None) -> list[Action]:
    """Prepares to note how many rows a lookup saw, beside new ones (n,) uint32."""
    return [] if table.tiers is None else table.tiers.plan_score_update(num_seen, new_rows)

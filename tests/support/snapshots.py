"""What a table holds, as it is given to a table: on the backend, so that tests can change it."""

from sok_lite.engine.table import content
from sok_lite.engine.table.snapshot import Snapshot


def take(table):
    """Returns a Snapshot of all that a table holds."""
    device, taken = table.backend.from_host, content.take(table)
    states = [state._replace(rows=device(state.rows)) for state in taken.states]
    held = content.as_snapshot(table, taken).held
    return Snapshot(held, device(taken.values), states)

"""The optimizer states of a table under unique names, to list, rename and drop them.

`EmbeddingTable.read_state`, `assign_state` and `export` read and write their values.
"""

from typing import NamedTuple

from sok_lite.backend.publish import publish
from sok_lite.engine.rows.column import Column
from sok_lite.engine.rows.states import drop_states, plan_rename
from sok_lite.engine.rows.store import RowStore
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.content import numbered_states
from sok_lite.engine.table.exclusive import alone, changing_alone


class NamedState(NamedTuple):
    """An optimizer state of a table on this rank.

    Attributes:
      name: unique among the states of the table.
      kind: its name in its optimizer; states of several optimizers may have the same.
      group: a number that the states of one optimizer have in common, and no others; None: it is
        not known which states belong together, as in old checkpoints.
      dim: elements of a row.
      initial: the value of every element in a new row.
      num_bytes: memory of the rows that were handed out so far.
      is_used: whether a living optimizer owns it; otherwise it is free, for the next optimizer that
        needs the same states.
    """

    name: str
    kind: str
    group: int | None
    dim: int
    initial: float
    num_bytes: int
    is_used: bool


def named_states(table: EmbeddingTable) -> list[NamedState]:
    """Returns the states of a table, without those whose optimizer is gone."""
    return alone(table, lambda: [_facts_of(table.store, *each) for each in _alive(table.store)])


def rename_state(table: EmbeddingTable, name: str, kind: str) -> str:
    """Renames a free state, so that an optimizer with a state of the new name may take it over.

    Args:
      name: of the state, unique in the table (`NamedState.name`).
      kind: the new name.

    Returns:
      The new unique name: `kind`, unless another state has it.

    Raises:
      ValueError: there is no such state, an optimizer uses it, another state of its group has the
        new name, or the new name is not valid. Nothing has changed.
    """
    return changing_alone(table, lambda: _rename(table, name, kind))


def drop_state(table: EmbeddingTable, name: str) -> None:
    """Drops a state and frees its memory. An optimizer that uses it makes a new one next.

    Raises:
      ValueError: there is no such state.
    """
    changing_alone(table, lambda: drop_states(table.store, [state_column(table, name)]))


def _alive(store: RowStore) -> list[tuple[int | None, str, Column]]:
    return [
        each
        for each in numbered_states(store)
        if each[2].owner is None or not each[2].owner.is_gone
    ]


def _facts_of(store: RowStore, group: int | None, kind: str, column: Column) -> NamedState:
    num_bytes = (store.num_rows - store.numbers.num_returned) * column.row_bytes
    facts = (column.name, kind, group, column.dim, float(column.initial), num_bytes)
    return NamedState(*facts, _is_used(column))


def _is_used(column: Column) -> bool:
    return column.owner is not None and column.owner.optimizer is not None


def state_column(table: EmbeddingTable, name: str) -> Column:
    """Returns the column of a state. Hold the table.

    Raises:
      ValueError: there is no such state.
    """
    found = _alive(table.store)
    for *_, column in found:
        if column.name == name:
            return column
    has = ", ".join(repr(column.name) for *_, column in found) or "none"
    raise ValueError(f"Table {table.name!r} has no optimizer state {name!r}. It has: {has}.")


def _rename(table: EmbeddingTable, name: str, kind: str) -> str:
    column = state_column(table, name)
    if _is_used(column):
        raise ValueError(
            f"State {name!r} of table {table.name!r} cannot be renamed: an optimizer uses it, by "
            f"its name {column.state!r}. Rename it when the optimizer is gone, or after a load."
        )
    if not kind or kind == column.state:
        raise ValueError(f"A state is renamed to another name. Received: {kind!r}.")
    if kind in table.store.state_groups[column.owner]:
        raise ValueError(
            f"State {name!r} of table {table.name!r} belongs together with one that is called "
            f"{kind!r} already. Rename or drop that one first."
        )
    publish(plan_rename(table.store, column, kind))
    return column.name

"""Makes, hands over, copies, renames and drops the optimizer states of a row store."""

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sok_lite.engine.rows.column import Column
from sok_lite.engine.rows.state_owner import Kinds, StateOwner, States

if TYPE_CHECKING:
    from sok_lite.engine.rows.store import RowStore

_PIECE = 1 << 16  # rows that are copied at once


def unused_name(store: "RowStore", state: str) -> str:
    """Returns a name for the column of a state that no column has."""
    names = itertools.chain([state], (f"{state} ({i})" for i in itertools.count(2)))
    return next(name for name in names if name not in store.columns)


def add_states(store: "RowStore", kinds: Kinds, owner: StateOwner | None) -> list[Column]:
    """Makes float32 columns for states, all of them or none, whatever others there are.

    Args:
      kinds: by name, elements of a row and their initial value.
      owner: of all of them; None: they are free.

    Raises:
      MemoryError: no memory for them; the store is as it was.
    """
    columns = [
        store.new_column(unused_name(store, name), dim, np.dtype(np.float32), initial, name, owner)
        for name, (dim, initial) in kinds.items()
    ]
    store.add_columns(columns)
    return columns


def give_states(store: "RowStore", columns: Iterable[Column], owner: StateOwner) -> None:
    """Makes an owner the owner of free states."""
    for column in columns:
        column.owner = owner
    store.set_columns(store.columns)


def copy_states(store: "RowStore", states: States, columns: Iterable[Column]) -> None:
    """Writes the rows of states into columns that are called as they are, piece by piece."""
    xp = store.backend.xp
    for start in range(0, store.num_rows, _PIECE):
        rows = xp.arange(start, min(start + _PIECE, store.num_rows), dtype=np.uint32)
        for column in columns:
            store.write(rows, store.read(rows, states[column.state].name), column.name)


def rename_column(store: "RowStore", column: Column, state: str) -> None:
    """Renames a state."""
    name = unused_name(store, state)
    columns = {name if each is column else key: each for key, each in store.columns.items()}
    column.name, column.state = name, state
    store.set_columns(columns)


def drop_states(store: "RowStore", columns: Sequence[Column]) -> None:
    """Drops states that are not used any more, and frees their memory."""
    gone = {column.name for column in columns}
    left = {name: column for name, column in store.columns.items() if name not in gone}
    if store.num_far_rows:
        store.backend.synchronize()  # kernels that still use pinned memory
    store.set_columns(left)
    for column in columns:
        column.discard()

"""The optimizer states of a table: their owners, how optimizers acquire them, and their names.

The first step of an optimizer on a table makes states for it, or takes over free ones that fit,
such as those of a checkpoint. Several optimizers each have their own, also under equal names. The
states of an optimizer that is gone are dropped with the next step of any optimizer, or with the
next checkpoint. If a restore gave states to an optimizer that has taken no step since, another one
gets a copy: it may be the optimizer of the checkpoint, made again, while the program still refers
to the old one.

The owner of a state is in its column (engine/rows/column.py). Programs list, rename and drop states
by the names of their columns; `EmbeddingTable.read_state`, `assign_state` and `export` take these
names too.
"""

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.callers import warn
from sok_lite.engine.rows.column import Column, Kinds, StateOwner, States, kinds_of
from sok_lite.engine.rows.store import RowStore
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.dump_mark import forget
from sok_lite.engine.table.locking import locked, mutate

_PIECE = 1 << 16  # rows that are copied at once


class State(NamedTuple):
    """An optimizer state of a table, in memory or saved.

    Attributes:
      name: the optimizer's name for it.
      dim: elements of a row.
      initial: their value in a new row.
      rows: its Column; or (n, dim) float32, those of n keys; or what a caller defines.
      group: a number that the states of one optimizer share; None: unknown, as in old checkpoints.
    """

    name: str
    dim: int
    initial: float
    rows: Any
    group: int | None = None


# ---- the states that a step works on -------------------------------------------------------------


def acquire_states(
    tables: Sequence[EmbeddingTable], kinds: Sequence[Kinds], optimizers: Sequence[Any]
) -> list[States]:
    """Returns the states that steps work on, and makes those that are missing.

    Args:
      kinds: of each table, the states that the step needs.
      optimizers: of each table, the owner of the states; None: they stay free.

    Raises:
      MemoryError: no memory for the states of a table. Other tables may have theirs already.
    """
    usual = usual_states(tables, kinds, optimizers)
    return _acquire(tables, kinds, optimizers) if usual is None else usual


def usual_states(
    tables: Sequence[EmbeddingTable], kinds: Sequence[Kinds], optimizers: Sequence[Any]
) -> list[States] | None:
    """Returns the states that steps work on if each table has those of its optimizer alone.

    That is so in most steps. No function is called per table: a step may have a thousand.
    """
    usual = [
        sole.states
        for table, its_kinds, optimizer in zip(tables, kinds, optimizers, strict=True)
        for sole in (table.store.sole_states,)
        if table.store.known_groups is not None and sole is not None and sole.kinds == its_kinds
        if sole.owner is None
        or (
            not sole.owner.is_restored
            and optimizer is not None
            and sole.owner.reference is not None
            and sole.owner.reference() is optimizer
        )
    ]
    return usual if len(usual) == len(tables) else None


def _acquire(
    tables: Sequence[EmbeddingTable], kinds: Sequence[Kinds], optimizers: Sequence[Any]
) -> list[States]:
    requests, taken = list(zip(tables, kinds, optimizers, strict=True)), list[States | None]()
    for table, its_kinds, optimizer in requests:
        states = states_owned_by(table.store, optimizer)
        if states is not None:
            _confirm_owner(table.store, states)
        if states is None or not its_kinds.keys() <= states.keys():
            states = _take_over(table, its_kinds, optimizer)
        taken.append(states)
    missing = [table for table, states in zip(tables, taken, strict=True) if states is None]
    if any(_num_optimizers(table.store) for table in missing):
        _collect()
    for table in tables:
        _drop_orphans(table.store)
    return [
        _make(*request) if states is None else states
        for request, states in zip(requests, taken, strict=True)
    ]


def states_of(store: RowStore, kinds: Kinds, optimizer: Any) -> States | None:
    """Returns the states that the next step of an optimizer will work on; changes nothing.

    Args:
      kinds: the states that it needs.
      optimizer: None: free states.

    Returns:
      None where that step would make some.
    """
    own = states_owned_by(store, optimizer)
    if own is None:
        return find_matching_states(store, kinds) if kinds else {}
    return own if kinds.keys() <= own.keys() else None


def states_owned_by(store: RowStore, optimizer: Any) -> States | None:
    """Returns the states that an optimizer owns; None: it owns none."""
    if optimizer is not None:
        for owner, states in store.state_groups.items():
            if owner is not None and owner.optimizer is optimizer:
                return states
    return None


def find_matching_states(store: RowStore, kinds: Kinds) -> States | None:
    """Returns the first free states that an optimizer can take over; None: there are none."""
    return next(_all_fitting(store, kinds), None)


def _all_fitting(store: RowStore, kinds: Kinds) -> Iterator[States]:
    """Yields free states that an optimizer can take over.

    An owner's states must be all the states of the optimizer: Ftrl has an `accumulator` as Adagrad
    does, with another meaning. Free states without an owner, as from old checkpoints, may be more.
    """
    for owner, states in store.state_groups.items():
        if owner is not None and not owner.is_free:
            continue
        found = kinds_of(states)
        if owner is None:
            found = {name: kind for name, kind in found.items() if name in kinds}
        if found == kinds:
            yield {name: states[name] for name in kinds}


def warn_if_several_fit(table_name: str, store: RowStore, kinds: Kinds) -> None:
    """Warns if free states of several optimizers fit, and names those that are taken over."""
    found = list(_all_fitting(store, kinds))
    if len(found) > 1:
        names = "; ".join(
            ", ".join(repr(column.name) for column in states.values()) for states in found
        )
        warn(
            f"The checkpoint of table {table_name!r} has the states of {len(found)} optimizers "
            f"that fit the one which trains it now: {names}. It takes the first, those of the "
            "optimizer that trained the table first. If it should have others, drop or rename "
            "these first: see optimizer_states().",
            RuntimeWarning,
        )


def restored(store: RowStore, kinds: Kinds) -> list[States]:
    """Returns matching states that a restore gave to an optimizer which has not used them yet."""
    return [
        states
        for owner, states in store.state_groups.items()
        if owner is not None and owner.is_restored and kinds_of(states) == kinds
    ]


def _take_over(table: EmbeddingTable, kinds: Kinds, optimizer: Any) -> States | None:
    store = table.store
    states = states_of(store, kinds, optimizer)
    if states and optimizer is not None:
        warn_if_several_fit(table.name, store, kinds)
        give_states(store, states.values(), StateOwner.of(optimizer))
    return states


def _make(table: EmbeddingTable, kinds: Kinds, optimizer: Any) -> States:
    store = table.store
    # An optimizer may come to need one more: RMSprop does where its momentum is no longer 0.
    own = states_owned_by(store, optimizer) or {}
    others = [] if own or optimizer is None else restored(store, kinds)
    if others:
        return _copy(table, kinds, optimizer, others[0])
    owner = next((column.owner for column in own.values()), None) or StateOwner.of(optimizer)
    new = store.add_states({name: kinds[name] for name in kinds if name not in own}, owner)
    return {**own, **{column.state: column for column in new}}


class _Nobody:
    """An optimizer that is gone."""


def _copy(table: EmbeddingTable, kinds: Kinds, optimizer: Any, others: States) -> States:
    store = table.store
    # Orphaned until the copy is complete: nothing stays of one that fails.
    columns = store.add_states(kinds, StateOwner(weakref.ref(_Nobody())))
    copy_states(store, others, columns)
    with uninterrupted():
        give_states(store, columns, StateOwner.of(optimizer))
        forget(table)  # an increment would lack the copied rows: the next dump is a whole one
        _confirm_owner(store, others)  # the next new optimizer gets the next states, or new ones
    return {column.state: column for column in columns}


def copy_states(store: RowStore, states: States, columns: Iterable[Column]) -> None:
    """Copies the rows of states into columns of the same state names, piece by piece."""
    xp = store.backend.xp
    for start in range(0, store.num_rows, _PIECE):
        rows = xp.arange(start, min(start + _PIECE, store.num_rows), dtype=np.uint32)
        for column in columns:
            store.write(rows, store.read(rows, states[column.state].name), column.name)


def give_states(store: RowStore, columns: Iterable[Column], owner: StateOwner) -> None:
    """Sets the owner of states."""
    with uninterrupted():
        for column in columns:
            column.owner = owner
        store.set_columns(store.columns)


def _confirm_owner(store: RowStore, states: States) -> None:
    """Ends the time in which another optimizer may get a copy of restored states."""
    owner = next(iter(states.values())).owner
    if owner is not None and owner.is_restored:
        give_states(store, states.values(), StateOwner(owner.reference))


# ---- dropping states -----------------------------------------------------------------------------


def drop_orphaned_states(table: EmbeddingTable) -> None:
    """Frees the memory of states whose optimizer is gone. Hold `table.lock`."""
    if table.is_changing:
        return  # a signal handler saves the table in the midst of a change
    if _num_optimizers(table.store) > 1:
        _collect()
    _drop_orphans(table.store)


def settle_states(table: EmbeddingTable) -> None:
    """Ends the search for owners of restored states: drops free ones; new optimizers begin anew."""
    mutate(table, lambda: _settle(table.store))


def _settle(store: RowStore) -> None:
    free = [each.rows for each in numbered_states(store) if not each.rows.is_used]
    for states in store.state_groups.values():
        if next(iter(states.values())).is_used:
            _confirm_owner(store, states)
    if free:
        drop_states(store, free)


def _num_optimizers(store: RowStore) -> int:
    """Returns how many optimizers have states, including some that nobody uses any more."""
    owners = store.state_groups
    return sum(owner is not None and owner.optimizer is not None for owner in owners)


def _collect() -> None:
    # A dropped optimizer may be in a reference cycle, as with the graph of a tf.function. Called
    # rarely: it visits all objects of Python.
    gc.collect()


def _drop_orphans(store: RowStore) -> None:
    gone = [each.rows for each in numbered_states(store) if each.rows.is_gone]
    if gone:
        drop_states(store, gone)


def drop_states(store: RowStore, columns: Sequence[Column]) -> None:
    """Drops states, and frees their memory."""
    gone = {column.name for column in columns}
    left = {name: column for name, column in store.columns.items() if name not in gone}
    if store.num_far_rows:
        store.backend.synchronize()  # kernels that still use pinned memory
    with uninterrupted():
        store.set_columns(left)
        for column in columns:
            column.discard()


# ---- states by name ------------------------------------------------------------------------------


def numbered_states(store: RowStore) -> list[State]:
    """Returns every state with its column, group by group; those of no group come first."""
    groups = store.state_groups
    grouped = [groups.get(None, {}), *(groups[owner] for owner in groups if owner)]
    return [
        State(name, column.dim, float(column.initial), column, number or None)
        for number, group in enumerate(grouped)
        for name, column in group.items()
    ]


@locked
def named_states(table: EmbeddingTable) -> list[State]:
    """Returns the states of a table with their columns, without those whose optimizer is gone.

    The name of the column is unique in the table; `State.name` is unique in its optimizer.
    """
    return [each for each in numbered_states(table.store) if not each.rows.is_gone]


@locked
def state_column(table: EmbeddingTable, name: str) -> Column:
    """Returns the column of a state by its name.

    Raises:
      ValueError: there is no such state.
    """
    columns = {each.rows.name: each.rows for each in named_states(table)}
    if name not in columns:
        has = ", ".join(map(repr, columns)) or "none"
        raise ValueError(f"Table {table.name!r} has no optimizer state {name!r}. It has: {has}.")
    return columns[name]


@locked
def num_bytes_of(table: EmbeddingTable, name: str) -> int:
    """Returns the memory of a state in the rows that were handed out so far; see `state_column`."""
    num_rows = table.store.num_rows - table.store.allocator.num_returned
    return num_rows * state_column(table, name).row_bytes


@locked
def is_used(table: EmbeddingTable, name: str) -> bool:
    """Returns whether a state is that of a living optimizer; see `state_column`."""
    return state_column(table, name).is_used


def rename_state(table: EmbeddingTable, name: str, new_name: str) -> str:
    """Renames a free state, so that an optimizer with a state of the new name may take it over.

    Args:
      name: of its column.
      new_name: in its optimizer.

    Returns:
      The new name of its column: `new_name`, unless another state has it.

    Raises:
      ValueError: there is no such state, an optimizer uses it, another state of its group has the
        new name, or the new name is not valid. Nothing has changed.
    """
    return mutate(table, lambda: _rename(table, name, new_name))


def _rename(table: EmbeddingTable, name: str, new_name: str) -> str:
    store, column = table.store, state_column(table, name)
    if column.is_used:
        raise ValueError(
            f"State {name!r} of table {table.name!r} cannot be renamed: an optimizer uses it, by "
            f"its name {column.state!r}. Rename it when the optimizer is gone, or after a load."
        )
    if not new_name or new_name == column.state:
        raise ValueError(f"A state is renamed to another name. Received: {new_name!r}.")
    if new_name in store.state_groups[column.owner]:
        raise ValueError(
            f"State {name!r} of table {table.name!r} belongs together with one that is called "
            f"{new_name!r} already. Rename or drop that one first."
        )
    unused = store.unused_name(new_name)
    columns = {unused if each is column else key: each for key, each in store.columns.items()}
    with uninterrupted():
        column.name, column.state = unused, new_name
        store.set_columns(columns)
    return column.name


def drop_state(table: EmbeddingTable, name: str) -> None:
    """Drops a state; see `state_column`. An optimizer that uses it makes a new one next."""
    mutate(table, lambda: drop_states(table.store, [state_column(table, name)]))

"""Acquires the states of a table that the step of an optimizer works on: its own states.

The first step of an optimizer on a table makes states for it, or takes over free ones that fit,
such as those of a checkpoint. Several optimizers each have their own, also under equal names. The
states of an optimizer that is gone are dropped with the next step of any, with the next checkpoint
at the latest. If a restore gave states to an optimizer that has taken no step since, another one
gets a copy: it may be the optimizer of the checkpoint, made again, while the program still refers
to the old one.
"""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.rows.state_owner import (
    Kinds,
    StateOwner,
    States,
    fitting,
    orphaned,
    owned,
    restored,
    warn_if_several_fit,
)
from sok_lite.engine.rows.states import copy_states, drop_states, give_states
from sok_lite.engine.rows.store import RowStore
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.dumped import forget
from sok_lite.engine.table.exclusive import changing_alone


def acquire_states(
    tables: Sequence[EmbeddingTable], kinds: Sequence[Kinds], optimizers: Sequence[Any]
) -> list[States]:
    """Returns the states that steps work on, and makes those that are missing.

    Args:
      tables: that are trained.
      kinds: of each table, the states that the step needs.
      optimizers: of each table, the owner of the states; None: they stay free.

    Raises:
      MemoryError: there is none for the states of a table. Other tables may have theirs already.
    """
    usual = usual_states(tables, kinds, optimizers)
    return _acquire(tables, kinds, optimizers) if usual is None else usual


def usual_states(
    tables: Sequence[EmbeddingTable], kinds: Sequence[Kinds], optimizers: Sequence[Any]
) -> list[States] | None:
    """Returns the states that steps work on, where each table has those of its optimizer alone.

    So it is in most steps. Nothing is called for each table: a step may have a thousand.
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
        states = owned(table.store.state_groups, optimizer)
        if states is not None:
            _keep(table.store, states)
        if states is None or not its_kinds.keys() <= states.keys():
            states = _taken_over(table, its_kinds, optimizer)
        taken.append(states)
    missing = [table for table, states in zip(tables, taken, strict=True) if states is None]
    if any(_num_optimizers(table.store) for table in missing):
        _collect()
    for table in tables:
        _drop_orphaned_states(table.store)
    return [
        _make(*request) if states is None else states
        for request, states in zip(requests, taken, strict=True)
    ]


def drop_orphaned_states(table: EmbeddingTable) -> None:
    """Frees the memory of states whose optimizer is gone. Hold `table.lock`."""
    if table.is_changing:
        return  # a signal handler saves the table in the midst of a change
    if _num_optimizers(table.store) > 1:
        _collect()
    _drop_orphaned_states(table.store)


def settle_states(table: EmbeddingTable) -> None:
    """Has states that a restore brought go to no other optimizer than those which have them by now.

    What no living optimizer has is dropped. An optimizer that is new begins anew.
    """
    changing_alone(table, lambda: _settle(table.store))


def _settle(store: RowStore) -> None:
    free = [
        column
        for owner, states in store.state_groups.items()
        if owner is None or owner.optimizer is None
        for column in states.values()
    ]
    for owner, states in store.state_groups.items():
        if owner is not None and owner.optimizer is not None:
            _keep(store, states)
    if free:
        drop_states(store, free)


def states_of(store: RowStore, kinds: Kinds, optimizer: Any) -> States | None:
    """Returns the states that the next step of an optimizer will work on; changes nothing.

    Args:
      kinds: the states that it needs.
      optimizer: None: free ones.

    Returns:
      None where that step would make some.
    """
    own = owned(store.state_groups, optimizer)
    if own is None:
        return fitting(store.state_groups, kinds) if kinds else {}
    return own if kinds.keys() <= own.keys() else None


def _taken_over(table: EmbeddingTable, kinds: Kinds, optimizer: Any) -> States | None:
    store = table.store
    states = states_of(store, kinds, optimizer)
    if states and optimizer is not None:
        warn_if_several_fit(table.name, store.state_groups, kinds)
        with uninterrupted():
            give_states(store, states.values(), StateOwner.of(optimizer))
    return states


def _make(table: EmbeddingTable, kinds: Kinds, optimizer: Any) -> States:
    store = table.store
    # An optimizer may come to need one more: RMSprop does where its momentum is no longer 0.
    own = owned(store.state_groups, optimizer) or {}
    others = [] if own or optimizer is None else restored(store.state_groups, kinds)
    if others:
        return _copy(table, kinds, optimizer, others[0])
    owner = next((column.owner for column in own.values()), None) or StateOwner.of(optimizer)
    new = store.add_states({name: kinds[name] for name in kinds if name not in own}, owner)
    return {**own, **{column.state: column for column in new}}


class _Nobody:
    """An optimizer that is gone."""


def _copy(table: EmbeddingTable, kinds: Kinds, optimizer: Any, others: States) -> States:
    store = table.store
    # Nobody's until it is whole: of what fails nothing stays.
    columns = store.add_states(kinds, StateOwner(weakref.ref(_Nobody())))
    copy_states(store, others, columns)
    # An increment would have the rows that change from now on alone: the next dump is a whole one.
    with uninterrupted():
        give_states(store, columns, StateOwner.of(optimizer))
        forget(table)
        _keep(store, others)  # the next one that is new has the next, or begins anew
    return {column.state: column for column in columns}


def _keep(store: RowStore, states: States) -> None:
    """Notes that states which a restore may have brought are no optimizer's but their own."""
    owner = next(iter(states.values())).owner
    if owner.is_restored:
        give_states(store, states.values(), StateOwner(owner.reference))


def _num_optimizers(store: RowStore) -> int:
    """How many have states, as far as it is known that they are in use."""
    owners = store.state_groups
    return sum(owner is not None and owner.optimizer is not None for owner in owners)


def _collect() -> None:
    # What holds a dropped optimizer may still wait for the garbage collector: the graph of a
    # tf.function does. It takes long, for it looks at all of Python's objects.
    gc.collect()


def _drop_orphaned_states(store: RowStore) -> None:
    gone = orphaned(store.state_groups)
    if gone:
        drop_states(store, gone)

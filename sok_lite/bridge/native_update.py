"""Native updates: the plan of an update whose keys all have rows."""

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import fields
from typing import Any, NamedTuple

from sok_lite.bridge.native_lookup import are_native
from sok_lite.engine.initializer import as_i64
from sok_lite.engine.optimizer_states import usual_states
from sok_lite.engine.optimizers import UpdateRule
from sok_lite.engine.rows.column import States
from sok_lite.engine.table.locking import with_locks
from sok_lite.engine.work_counters import UPDATES
from sok_lite.native.plans import UpdatePart, UpdatePlan


class UpdateByRule(NamedTuple):
    """An update that Python has done.

    Attributes:
      key_types: TensorFlow's dtype number of each table's keys.
      decayed, undecayed: the rule of tables with weight decay, and of others.
      of_gradients: for each table, whether its keys always come from one of our gradients.
      optimizer: the owner of the optimizer states; None: they have none.
      names, settings: the optimizer's numbers except the learning rate; their values as float64.
      num_nonfinite: address of the counter of gradient rows with a NaN or an infinity.
      taken: address that receives the number of a step; 0: none.
      gradient: number of the lookup's call whose gradient the update takes itself; 0: none.
    """

    tables: Sequence[Any]
    key_types: Sequence[int]
    decayed: UpdateRule
    undecayed: UpdateRule
    decays: Sequence[bool]
    of_gradients: Sequence[bool]
    is_stochastic: bool
    optimizer: Any
    names: Sequence[str]
    settings: bytes
    num_nonfinite: int
    taken: int
    gradient: int


def plan_of(update: UpdateByRule) -> UpdatePlan | None:
    """Returns the plan of the next update with the same settings.

    None if a table repeats, has states of several optimizers, or does more than the rule.
    """
    if not may_have_plan(update.tables):
        return None
    return with_locks(update.tables, lambda: _plan_of(update))


def may_have_plan(tables: Sequence[Any]) -> bool:
    """Returns whether updates of tables may have a plan, by what never changes."""
    if len(set(tables)) < len(tables) or not are_native(tables):
        return False
    return not any(table.step_type is not None or table.sees_updates for table in tables)


def _plan_of(update: UpdateByRule) -> UpdatePlan | None:
    tables = update.tables
    for table in tables:
        table.store.number_states()
    kinds = [update.decayed.kinds(table.dim) for table in tables]
    states = usual_states(tables, kinds, [update.optimizer] * len(tables))
    if states is None:
        return None
    rule = update.decayed.native
    return UpdatePlan(
        tables[0].backend,
        UPDATES,
        update.num_nonfinite,
        update.taken,
        update.gradient,
        rule.number,
        update.settings,
        _counter_indices(update),
        update.undecayed.native.values,
        rule.values,
        tuple(_part_of(update, i, its) for i, its in enumerate(states)),
    )


def _counter_indices(update: UpdateByRule) -> tuple[int, int]:
    """Returns the position of the step counter among the settings, and among the rule's fields."""
    counter = update.decayed.counter
    if counter is None:
        return -1, -1
    names = [field.name for field in fields(update.decayed)]
    return update.names.index(counter), names.index(counter)


def _part_of(update: UpdateByRule, number: int, states: States) -> UpdatePart:
    table, rule = update.tables[number], update.decayed
    row_dtype, record, of_rule = table.row_dtype, table.record, rule.states
    is_stochastic = update.is_stochastic and row_dtype.is_half
    form = "_stochastic" if is_stochastic else "_summing" if update.gradient else ""
    kernel, num_arguments = table.backend.kernel(f"{rule.kernel}{form}_{row_dtype.suffix}")
    columns = [states[name].record if name in of_rule else None for name in rule.columns]
    return UpdatePart(
        addressof(record),
        record.generation,
        table.store.record.states,
        update.key_types[number],
        table.dim,
        update.of_gradients[number],
        update.decays[number],
        is_stochastic,
        as_i64(table.table_seed),
        kernel,
        num_arguments,
        tuple(0 if column is None else addressof(column) for column in columns),
    )

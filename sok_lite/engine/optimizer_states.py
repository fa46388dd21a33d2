"""Which optimizer the states of a table belong to: the one that made them, as long as it lives.

States that nobody made here, such as restored ones, are adopted by the first optimizer that they
fit. Those of an optimizer that is gone begin anew for the next one, unless that has the same rule
and the rule counts no steps: then it goes on, as in a program that makes its optimizer in every
step. Two living optimizers never share a state: the second is refused, as its steps would mix with
those of the first.
"""

import gc
import weakref
from typing import Any, NamedTuple

import numpy as np

from sok_lite.engine.optimizers import UpdateRule
from sok_lite.engine.optimizers.rule import RuleStep
from sok_lite.engine.rows.column import Column
from sok_lite.engine.rows.store import RowStore
from sok_lite.engine.table import EmbeddingTable

_ROWS_AT_A_TIME = 1 << 20


class StateOwner(NamedTuple):
    """Whose a state is, or was.

    Attributes:
      optimizer: a weak reference to it.
      rule: its update rule.
    """

    optimizer: "weakref.ref[Any]"
    rule: type[UpdateRule]


def check_states(table: EmbeddingTable, step: RuleStep, optimizer: Any) -> None:
    """Raises ValueError if a state that a rule needs belongs to another optimizer.

    Args:
      step: of the rule.
      optimizer: whose rule it is; None: nobody's in particular.
    """
    store = table.store
    for name, initial in step.states.items():
        column = store.state(name)
        if column is None:
            continue
        if _is_anothers(column, optimizer):
            # What holds a dropped optimizer may still wait for the garbage collector: the graph of
            # a tf.function does.
            gc.collect()
            if _is_anothers(column, optimizer):
                raise ValueError(
                    f"State {name!r} of table {table.name!r} belongs to another optimizer, "
                    f"{_described(_owner(column))}. Received: {_described(optimizer)}. Use one "
                    "optimizer per table: go on with the first one, or drop it and every "
                    "tf.function that uses it, and the states begin anew."
                )
        store.check_state(name, initial, store.dim)


def claim_states(table: EmbeddingTable, step: RuleStep, optimizer: Any) -> None:
    """Makes the states that a rule needs and gives them to an optimizer, after `check_states`.

    Raises:
      MemoryError: there is none for a state. Those before it are the optimizer's.
    """
    rule, store = step.rule, table.store
    for name, initial in step.states.items():
        column = store.state(name) or store.ensure_state(name, initial)
        owner = column.owner
        if owner is not None:
            its_optimizer = owner.optimizer()
            if its_optimizer is not None and owner.rule is type(rule):
                continue  # it is this optimizer's by now
            if its_optimizer is None and (rule.counts_steps or owner.rule is not type(rule)):
                _begin_anew(store, name)
        column.owner = None if optimizer is None else StateOwner(weakref.ref(optimizer), type(rule))


def _owner(column: Column) -> Any:
    return None if column.owner is None else column.owner.optimizer()


def _is_anothers(column: Column, optimizer: Any) -> bool:
    owner = _owner(column)
    return owner is not None and owner is not optimizer


def _begin_anew(store: RowStore, name: str) -> None:
    for first in range(0, store.num_rows, _ROWS_AT_A_TIME):
        end = min(first + _ROWS_AT_A_TIME, store.num_rows)
        store.fill(name, store.backend.xp.arange(first, end, dtype=np.uint32))


def _described(optimizer: Any) -> str:
    if optimizer is None:
        return "an update without an optimizer"
    name = getattr(optimizer, "name", None)
    return type(optimizer).__name__ + (f" {name!r}" if isinstance(name, str) else "")

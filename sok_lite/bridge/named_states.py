"""The optimizer states of a variable's rows, to look at, set, rename and drop."""

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.slot import StateView
from sok_lite.bridge.type_spec import alive
from sok_lite.bridge.variable import TableVariable, variable_of_layer
from sok_lite.engine import named_states
from sok_lite.engine.named_states import NamedState
from sok_lite.engine.rows.column import Column
from sok_lite.engine.table import EmbeddingTable


def optimizer_states(variable: Any) -> "dict[str, OptimizerState]":
    """Returns the optimizer states of a variable's rows on this rank, by name.

    There are those of optimizers that have trained the variable, and those that a load or a
    checkpoint brought and that no optimizer has taken over yet. What is done with one is done on
    this rank alone: do it on every rank. Nothing is communicated.

    Args:
      variable: whose rows are in this process, or a sok_lite.keras.Table.

    Returns:
      Each state under a name that no other has: what its optimizer calls it, and a number behind
      where several call theirs so.

    Raises:
      TypeError: not such a variable. RuntimeError: not in eager mode.
    """
    variable = variable_of_layer(variable)
    if not isinstance(variable, TableVariable) or not variable.table.lists_states:
        raise TypeError(
            "optimizer_states() takes a variable whose rows are in this process, or a "
            f"sok_lite.keras.Table. Received: {type(variable).__name__}."
        )
    found = _call_eagerly(variable, named_states.named_states)
    return {state.name: OptimizerState(variable, state) for state in found}


@unconverted
class OptimizerState(StateView):
    """An optimizer state of a variable's rows: a float32 row for each key.

    `sparse_read(keys)`, `tf.nn.embedding_lookup(state, keys)` and `export()` read it, `assign(keys,
    values)` sets it. It is good as long as the variable is there and has the state.

    Args:
      variable: has the rows. This does not keep it alive.
      state: which one it is.

    Attributes:
      name: no other state of the variable has it.
      kind: what its optimizer calls it.
      group: a number that states of one optimizer have in common; None: nothing says what belongs
        together.
      dimension: elements of a row.
      initial_value: what they are in a new row.
    """

    def __init__(self, variable: TableVariable, state: NamedState) -> None:
        super().__init__(variable, state.name)
        self.kind, self.group, self.initial_value = state.kind, state.group, state.initial

    @property
    def num_bytes(self) -> int:
        """Memory of the state on this rank, without what is set aside for further rows."""
        return self._now().num_bytes

    @property
    def is_used(self) -> bool:
        """Whether an optimizer has it; else the next one that has the same takes it over."""
        return self._now().is_used

    def rename(self, name: str) -> None:
        """Has a state that no optimizer uses called otherwise.

        An optimizer takes over free states that have all of its names, dimensions and initial
        values. So those of another optimizer, or of another library, can go on.

        Raises:
          ValueError: an optimizer uses it, there is no such state any more, or another one of its
            group is called so. Nothing has changed.
          RuntimeError: not in eager mode.
        """
        variable = alive(self._variable)
        rename = partial(named_states.rename_state, name=self.name, kind=str(name))
        self.name = _call_eagerly(variable, rename)
        self.kind = str(name)

    def drop(self) -> None:
        """Gives its memory back. An optimizer that uses it begins it anew with its next step.

        Raises:
          ValueError: there is no such state any more. RuntimeError: not in eager mode.
        """
        _call_eagerly(alive(self._variable), partial(named_states.drop_state, name=self.name))

    def _now(self) -> NamedState:
        states = _call_eagerly(alive(self._variable), named_states.named_states)
        found = [state for state in states if state.name == self.name]
        if not found:
            has = ", ".join(repr(state.name) for state in states) or "none"
            raise ValueError(
                f"There is no optimizer state {self.name!r} any more. There are: {has}."
            )
        return found[0]

    def _column(self, table: EmbeddingTable) -> Column:
        return named_states.state_column(table, self.name)

    def __repr__(self) -> str:
        return (
            f"<OptimizerState {self.name!r} of {alive(self._variable).name!r}: dimension "
            f"{self.dimension}, {self.initial_value} in new rows>"
        )


def _call_eagerly(variable: TableVariable, function: Callable[[EmbeddingTable], Any]) -> Any:
    if not tf.executing_eagerly():
        raise RuntimeError(
            "Optimizer states are listed, renamed and dropped in eager mode only. Do it outside of "
            "tf.function and of graphs of TF1."
        )
    return on_device(variable.table.backend, function, variable.table)

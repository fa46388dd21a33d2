"""The optimizer states of a variable's rows, as views that are read and written by key.

An `OptimizerState` is one of all that a table has, to look at, set, rename and drop; a `SlotView`
is that of one optimizer.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge import table_ops
from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.checks import check_cutoff, checked_keys, checked_rows
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.table_call import array_call
from sok_lite.bridge.tf_private import OpDispatcher
from sok_lite.bridge.type_spec import alive
from sok_lite.bridge.variable import TableVariable, variable_of_layer
from sok_lite.engine.optimizer_states import (
    State,
    drop_state,
    is_used,
    named_states,
    num_bytes_of,
    rename_state,
    state_column,
    states_of,
    states_owned_by,
)
from sok_lite.engine.rows.column import Column, Kinds, kinds_of
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.locking import with_lock


@unconverted
class StateView(ABC):
    """Base of views of optimizer states: reads and writes by key. Keeps no variable alive.

    Attributes:
      dimension: elements of a row.
      dtype: of the states, independent of the variable's.
    """

    dtype = tf.float32

    def __init__(self, variable: TableVariable, name: str) -> None:
        self.name = name
        self._variable = weakref.ref(variable)
        self._key_type = variable.key_type
        table = variable.table
        # Another thread may be creating states.
        self.dimension = with_lock(table, lambda: self._column(table).dim)

    @abstractmethod
    def _column(self, table: EmbeddingTable) -> Column:
        """Returns the column of the state. The caller holds the table's lock."""

    @property
    def shape(self) -> tf.TensorShape:
        """[None, dimension]."""
        return tf.TensorShape([None, self.dimension])

    @property
    def size(self) -> tf.Tensor:
        """int32 tensor [rows on this rank, dimension]."""
        return table_ops.size(alive(self._variable))

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Returns the states of keys. It changes nothing, and has no gradient.

        Args:
          indices: integer keys of any shape; one without a row returns the state's initial value.

        Returns:
          indices.shape + [dimension], float32.

        Raises:
          TypeError: keys are not integers.
        """
        variable = alive(self._variable)
        keys = checked_keys(variable, indices)

        def read(table: EmbeddingTable, keys: Array) -> Array:
            return table.read_state(self._column(table).name, keys.reshape(-1))

        def run(table: EmbeddingTable, keys: Array) -> Array:
            found = with_lock(table, partial(read, table, keys))
            return found.reshape(*keys.shape, found.shape[-1])

        shape = keys.shape.concatenate([self.dimension])
        (states,) = array_call(variable, self._what("A lookup"), run, [keys], [tf.float32], [shape])
        return states

    def assign(self, indices: Any, values: Any) -> Any:
        """Sets the states of keys, which must have rows. No communication.

        Args:
          indices: (n,) integers; for a repeated key the last state is kept.
          values: (n, dimension).

        Returns:
          The view in eager mode, the operation in a graph.

        Raises:
          TypeError: keys are not integers or states not floats.
          ValueError: shapes do not fit, or a key has no row. Nothing has changed then.
        """
        variable = alive(self._variable)
        keys = checked_keys(variable, indices)
        states = tf.cast(checked_rows(self, keys, values, "assign"), tf.float32)

        def run(table: EmbeddingTable, keys: Array, states: Array) -> None:
            column = with_lock(table, partial(self._column, table))
            table.assign_state(column.name, keys, states)

        done = array_call(variable, self._what("assign"), run, [keys, states])
        return self if tf.executing_eagerly() else done

    def _what(self, call: str) -> str:
        return f"{call} in state {self.name!r} of {alive(self._variable).name!r}"

    def export(self, cutoff: float | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns this rank's keys, ascending, and their states: (n,), (n, dimension) float32.

        Args:
          cutoff: leaves out the same keys as in the variable's `export`.
        """
        check_cutoff(cutoff)

        def run(table: EmbeddingTable) -> tuple[Array, Array]:
            return with_lock(table, lambda: table.export(self._column(table).name, cutoff=cutoff))

        keys, values = array_call(
            alive(self._variable),
            f"The export of {self.name!r}",
            run,
            dtypes=[self._key_type, tf.float32],
            shapes=[[None], [None, self.dimension]],
        )
        return keys, values


@unconverted
class SlotView(StateView):
    """A view of one optimizer state of a variable's rows, such as "m".

    `tf.nn.embedding_lookup` accepts it in place of a variable. It keeps neither variable nor
    optimizer alive. `kinds` maps the table to the optimizer's states; before its first step, the
    view shows those that this step would adopt. Raises ValueError for an unknown state.
    """

    def __init__(
        self,
        variable: TableVariable,
        name: str,
        optimizer: Any,
        kinds: Callable[[EmbeddingTable], Kinds],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        table = variable.table
        own = with_lock(table, lambda: states_owned_by(table.store, optimizer))
        self._kinds = kinds_of(own) if own else kinds(table)
        super().__init__(variable, name)

    def _column(self, table: EmbeddingTable) -> Column:
        optimizer = self._optimizer()
        if optimizer is None:
            raise ValueError(
                f"The optimizer whose state {self.name!r} of table {table.name!r} this is was "
                "deleted, and its states with it. Keep the optimizer as long as its states."
            )
        states = states_of(table.store, self._kinds, optimizer)
        if states is None or self.name not in states:
            has = ", ".join(map(repr, states or ())) or "none yet: they come with its first update"
            raise ValueError(
                f"The optimizer has no state {self.name!r} in table {table.name!r}. It has {has}."
            )
        return states[self.name]


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
    found = _call_eagerly(variable, named_states)
    return {state.rows.name: OptimizerState(variable, state) for state in found}


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

    def __init__(self, variable: TableVariable, state: State) -> None:
        super().__init__(variable, state.rows.name)
        self.kind, self.group, self.initial_value = state.name, state.group, state.initial

    @property
    def num_bytes(self) -> int:
        """Memory of the state on this rank, without what is set aside for further rows."""
        return self._call(num_bytes_of)

    @property
    def is_used(self) -> bool:
        """Whether an optimizer has it; else the next one that has the same takes it over."""
        return self._call(is_used)

    def rename(self, name: str) -> None:
        """Has a state that no optimizer uses called otherwise.

        An optimizer takes over free states that have all of its names, dimensions and initial
        values. So those of another optimizer, or of another library, can go on.

        Raises:
          ValueError: an optimizer uses it, there is no such state any more, or another one of its
            group is called so. Nothing has changed.
          RuntimeError: not in eager mode.
        """
        self.name = self._call(partial(rename_state, new_name=str(name)))
        self.kind = str(name)

    def drop(self) -> None:
        """Gives its memory back. An optimizer that uses it begins it anew with its next step.

        Raises:
          ValueError: there is no such state any more. RuntimeError: not in eager mode.
        """
        self._call(drop_state)

    def _call(self, function: Callable[..., Any]) -> Any:
        return _call_eagerly(alive(self._variable), partial(function, name=self.name))

    def _column(self, table: EmbeddingTable) -> Column:
        return state_column(table, self.name)

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


class _Lookups(OpDispatcher):
    """Handles `tf.nn.embedding_lookup` of a view: TensorFlow dispatches types it does not know."""

    def handle(self, args: Any, kwargs: Any) -> Any:
        names = ("params", "ids", "max_norm", "name")
        arguments = dict(zip(names, args, strict=False)) | kwargs
        slot, ids = arguments.pop("params", None), arguments.pop("ids", None)
        if isinstance(slot, StateView) and not set(arguments) - {"name"}:
            return slot.sparse_read(ids)
        return self.NOT_SUPPORTED


_Lookups().register(tf.nn.embedding_lookup)

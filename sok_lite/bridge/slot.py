"""Optimizer states as views ("slots"), which are read and written by key like a variable."""

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
from sok_lite.bridge.table_call import array_call
from sok_lite.bridge.tf_private import OpDispatcher
from sok_lite.bridge.type_spec import alive
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.optimizer_states import states_of
from sok_lite.engine.rows.column import Column
from sok_lite.engine.rows.state_owner import Kinds, kinds_of, owned
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import alone


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
        self.dimension = alone(table, lambda: self._column(table).dim)

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
            found = alone(table, partial(read, table, keys))
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
            column = alone(table, partial(self._column, table))
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
            return alone(table, lambda: table.export(self._column(table).name, cutoff=cutoff))

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
        own = alone(table, lambda: owned(table.store.state_groups, optimizer))
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

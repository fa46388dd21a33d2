"""`StaticVariable`: a variable of TensorFlow with this rank's rows of a static table.

It is a variable as any other: its dense value is this rank's rows, and every optimizer, assignment
and checkpoint of TensorFlow works on those. Only the lookups of all ranks know of the others' rows.
"""

import weakref
from typing import Any, NoReturn

import tensorflow as tf

from sok_lite.bridge.refusals import RefusesCopies
from sok_lite.bridge.serving.mode import is_exporting
from sok_lite.bridge.tf_private import ResourceVariable
from sok_lite.bridge.type_spec import OfTable
from sok_lite.engine.static_table import StaticTable


class StaticVariable(RefusesCopies, OfTable, ResourceVariable):
    """This rank's rows of a static table. Those of all APIs are made of it.

    Args:
      table: what lookups know of it.
      rows: (local rows, dim), or a function that gives them.
      name, trainable, options: of TensorFlow's variable.
    """

    kind = "static table"
    instead_of_custom_step = "Give its gradient to an optimizer in a train_step of your own."
    instead_of_save = (
        "Save the rest of the model alone, and its rows with numpy(); for serving, use "
        "sok_lite.export_serving."
    )
    instead_of_copy = "Make a new variable of its rows."
    # Keras 3 knows its own variables only; tf_keras trains and saves any of TensorFlow.
    left_out_by = frozenset({"keras"})

    # TensorFlow would take the arguments by place for those of tf.Variable.
    _variable_call: Any = None

    def __init__(
        self, table: StaticTable, rows: Any, *, name: str, trainable: bool, **options: Any
    ) -> None:
        self._table = table
        self._is_freed_with_it = False
        with tf.init_scope():  # it may be while a tf.function is traced
            super().__init__(rows, trainable, name=name, dtype=table.row_dtype.name, **options)

    def is_trained_by(self, optimizer: Any) -> bool:
        """Whether an optimizer would update its rows where `left_out_by` leaves it out: no."""
        return False

    @property
    def table(self) -> StaticTable:
        """The engine's table, for lookups."""
        return self._table

    @property
    def key_type(self) -> tf.DType:
        """Type of the row numbers that lookups take: int64, and whatever fits."""
        return tf.int64

    def free_with_its_variable(self) -> None:
        """Has the memory of the rows freed when this object goes: a graph is about to hold them.

        TensorFlow never drops the graph of a function that a gradient was defined in, and such a
        graph would keep the rows with the handle.
        """
        if not self._is_freed_with_it and not self._in_graph_mode:
            self._is_freed_with_it = True
            weakref.finalize(self, _free_rows, self.handle, self._table.dim, self.dtype)

    def _refuse_copy(self, method: str) -> NoReturn:
        raise NotImplementedError(
            f"{method}() is not supported: {self.name!r} is a {self.kind}, and the copy would know "
            f"this rank's rows alone. {self.instead_of_copy}"
        )

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_freed_with_it and not is_exporting():
            raise NotImplementedError(
                f"tf.saved_model.save() is not supported: a function looks rows of {self.name!r} "
                f"up, a {self.kind}, and a saved function reaches no rank. {self.instead_of_save}"
            )
        return super()._export_to_saved_model_graph(*args, **kwargs)


def _free_rows(handle: tf.Tensor, dim: int, dtype: tf.DType) -> None:
    with tf.init_scope():
        nothing = tf.zeros([0, dim], dtype)
        tf.raw_ops.AssignVariableOp(resource=handle, value=nothing)

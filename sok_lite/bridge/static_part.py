"""A static variable as a part of a checkpoint: its rows, and an optimizer's slots for it."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend.publish import Action
from sok_lite.bridge.static_variable import StaticVariable
from sok_lite.bridge.tf_private import context, execute
from sok_lite.engine.files.static_part import ReadRows, StaticPart


class VariableRows(StaticPart):
    """This rank's rows of a static variable.

    Args:
      variable: has them.
      slots: by name, variables of the same shape that an optimizer has for it; None: of none.
    """

    def __init__(self, variable: StaticVariable, slots: Mapping[str, Any] | None = None) -> None:
        super().__init__(variable.table, None if slots is None else tuple(slots))
        # A variable of Keras 3 has TensorFlow's as its value.
        of_tf = {
            name: slot if isinstance(slot, tf.Variable) else slot.value
            for name, slot in (slots or {}).items()
        }
        self._variables = {"value": variable, **of_tf}

    def reading(self) -> ReadRows:
        # TensorFlow copies what somebody still reads before it writes it.
        tensors = {name: variable.read_value() for name, variable in self._variables.items()}

        def read(column: str, first: int, last: int) -> np.ndarray:
            rows = tensors[column][first:last]
            if column != "value":
                return tf.cast(rows, tf.float32).numpy()
            return rows.numpy().view(self.table.row_dtype.storage)

        return read

    def plan_assign(self, columns: Mapping[str, np.ndarray]) -> list[Action]:
        actions: list[Action] = []
        for name, rows in columns.items():
            variable = self._variables[name]
            with tf.device(variable.device):
                if name == "value":
                    tensor = tf.constant(rows.view(variable.dtype.as_numpy_dtype))
                else:
                    tensor = tf.cast(tf.constant(rows), variable.dtype)
                tensor = tf.identity(tensor)
            # Not `assign`, which is Python: an interrupt would come between two variables.
            arguments = (context(), "AssignVariableOp", None, variable.handle, tensor)
            actions.append(partial(execute, *arguments))
        return actions

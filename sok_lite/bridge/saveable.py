"""What `tf.compat.v1.train.Saver` saves of a table in a graph of TF1."""

import weakref
from typing import Any

import tensorflow as tf

from sok_lite.bridge.tf_private import SaveableObject, SaveSpec
from sok_lite.bridge.type_spec import alive
from sok_lite.bridge.variable import TableVariable


class TableSaveable(SaveableObject):
    """Saves and restores a table as `tf.train.Checkpoint` does. It keeps no variable alive.

    Args:
      variable: the table, of a graph.
      name: the tensors are `<name>-keys`, `<name>-values` and so on; see bridge/checkpoint.py.
    """

    def __init__(self, variable: TableVariable, name: str) -> None:
        with tf.name_scope(f"{name}/saved"):
            tensors = variable._serialize_to_tensors()
        self._variable = weakref.ref(variable)
        self._parts = list(tensors)
        specs = [_spec(tensor, f"{name}-{part}") for part, tensor in tensors.items()]
        super().__init__(variable.handle, specs, name)

    def restore(self, restored_tensors: list[tf.Tensor], restored_shapes: Any) -> Any:
        """Returns the operation that makes the table what was saved."""
        by_part = dict(zip(self._parts, restored_tensors, strict=True))
        return alive(self._variable)._restore_from_tensors(by_part)


def _spec(tensor: Any, name: str) -> Any:
    """Returns what is saved of a tensor, or of a SaveSpec of one that is made when it is saved."""
    if not isinstance(tensor, SaveSpec):
        return SaveSpec(tensor, "", name, tensor.dtype)
    tensor.name = name
    return tensor


def save_with_graph(variable: TableVariable, name: str) -> None:
    """Has the savers of a TF1 graph save a table, unless they are told what to save."""
    saveable = TableSaveable(variable, name)
    tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS, saveable)

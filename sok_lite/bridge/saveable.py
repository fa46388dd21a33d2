"""How `tf.compat.v1.train.Saver` saves a table in a graph of TF1, and what a saver is doing."""

import re
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from sok_lite.bridge.tf_private import (
    SAVER,
    SAVER_BUILDS,
    SAVER_FILENAME,
    SAVER_NAMES,
    SAVER_RESTORES,
    SAVER_SAVES,
    SaveableObject,
    SaveSpec,
    callers,
)
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


class SaverCall(NamedTuple):
    """A saver that is building its operations, or in eager mode saves or restores.

    Attributes:
      filename: scalar text, what the checkpoint's files start with.
      restores: whether the tensors are for a restore.
      names: what it saves, variables and lists of them, by the names in its argument.
    """

    filename: tf.Tensor
    restores: bool
    names: Mapping[str, Any]


def saver_call() -> SaverCall | None:
    """Returns what the saver does that is among the callers; None: there is none.

    It asks for the same attribute when it saves and when it restores, and tells nobody of its file.
    """
    filename, restores = None, False
    for frame in callers():
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") == SAVER:
            if name in (SAVER_SAVES, SAVER_RESTORES):
                filename, restores = frame.f_locals[SAVER_FILENAME], name == SAVER_RESTORES
            elif name == SAVER_BUILDS and filename is not None:
                return SaverCall(filename, restores, frame.f_locals[SAVER_NAMES])
    return None if filename is None else SaverCall(filename, restores, {})


def prefix_in_the_end(filename: str) -> str:
    """Returns what a checkpoint's files start with, of what a saver writes: a sharded one moves it.

    Args:
      filename: as the saver has it.
    """
    return re.sub(r"(_temp/part|\.part)-\d+-of-\d+$", "", filename)

"""Saves tables with `tf.compat.v1.train.Saver` in TF1 graphs, and inspects saver calls."""

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
)
from sok_lite.bridge.type_spec import alive
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.callers import callers


class TableSaveable(SaveableObject):
    """Saves and restores a table as `tf.train.Checkpoint` does. Keeps no variable alive.

    The tensors are `<name>-keys` and so on; see bridge/checkpoint.py.
    """

    def __init__(self, variable: TableVariable, name: str) -> None:
        with tf.name_scope(f"{name}/saved"):
            tensors = variable._serialize_to_tensors()
        self._variable = weakref.ref(variable)
        self._parts = list(tensors)
        specs = [_spec(tensor, f"{name}-{part}") for part, tensor in tensors.items()]
        super().__init__(variable.handle, specs, name)

    def restore(self, restored_tensors: list[tf.Tensor], restored_shapes: Any) -> Any:
        """Returns the operation that restores the table."""
        by_part = dict(zip(self._parts, restored_tensors, strict=True))
        return alive(self._variable)._restore_from_tensors(by_part)


def _spec(tensor: Any, name: str) -> Any:
    """Returns the SaveSpec of a tensor, or renames one of a tensor that is made on saving."""
    if not isinstance(tensor, SaveSpec):
        return SaveSpec(tensor, "", name, tensor.dtype)
    tensor.name = name
    return tensor


def save_with_graph(variable: TableVariable, name: str) -> None:
    """Adds a table to what savers of its TF1 graph save by default."""
    saveable = TableSaveable(variable, name)
    tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS, saveable)


class SaverCall(NamedTuple):
    """A saver that builds its operations or, in eager mode, saves or restores.

    Attributes:
      filename: scalar text, prefix of the checkpoint's files.
      names: what it saves: variables and lists of them, by name.
    """

    filename: tf.Tensor
    restores: bool
    names: Mapping[str, Any]


def saver_call() -> SaverCall | None:
    """Returns the call of the saver among the callers; None if there is none.

    A saver reads the same attribute for save and restore, and passes its file name to nobody.
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
    """Returns the prefix of a checkpoint's final files; a sharded saver moves them there."""
    return re.sub(r"(_temp/part|\.part)-\d+-of-\d+$", "", filename)

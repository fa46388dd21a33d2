"""What a saver of TF1 is doing when it asks a variable for its tensors."""

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
    callers,
)


class SaverCall(NamedTuple):
    """A saver that is building its operations, or in eager mode saves or restores.

    Attributes:
      filename: scalar text, what the checkpoint's files start with.
      restores: whether the tensors are for a restore.
      names: what it saves, variables and lists of them, by the names that it was given.
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

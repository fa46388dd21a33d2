"""What a saver of TF1 is doing when it asks a variable for its tensors."""

import sys
from typing import Any, NamedTuple

import tensorflow as tf

from sok_lite.bridge.tf_private import SAVER, SAVER_FILENAME, SAVER_RESTORES, SAVER_SAVES


class SaverCall(NamedTuple):
    """A saver that is building its operations, or in eager mode saves or restores.

    Attributes:
      filename: scalar text, what the checkpoint's files start with.
      restores: whether the tensors are for a restore.
    """

    filename: tf.Tensor
    restores: bool


def saver_call() -> SaverCall | None:
    """Returns what the saver does that is among the callers; None: there is none.

    It asks for the same attribute when it saves and when it restores, and tells nobody of its file.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in (SAVER_SAVES, SAVER_RESTORES) and frame.f_globals.get("__name__") == SAVER:
            return SaverCall(frame.f_locals[SAVER_FILENAME], name == SAVER_RESTORES)
        frame = frame.f_back
    return None

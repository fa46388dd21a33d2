"""`patch_tf`: puts TFPlus' names into TensorFlow, for programs that ask for it."""

import functools
import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from sok_lite.bridge.tf_private import STATE_OPS
from sok_lite.kv_variable.kv_variable_ops import OPERATIONS, KvVariable
from sok_lite.kv_variable.variable_scope import get_kv_variable

__all__ = ["patch_tf", "unpatch_tf"]

# Names that TFPlus' document takes from `tf` and TensorFlow 2 has only in `tf.compat.v1`.
_OF_TF1 = ("AUTO_REUSE", "Session", "global_variables_initializer", "variable_scope")
_OF_TRAIN = ("FtrlOptimizer", "Saver")

_OF_TF1_NAME = re.compile(r"tensorflow(\._api\.v2)?\.compat\.v1")

# (module, name, original; `_NOTHING` without one), in the order of patching.
_NOTHING = object()
_patched: list[tuple[Any, str, Any]] = []


def patch_tf(*, disable_eager: bool = True) -> None:
    """Puts TFPlus' names into TensorFlow for programs written for TFPlus.

    `tf` and `tf.compat.v1` get `get_kv_variable`. `tf` gets the names of TFPlus' document that it
    lacks: AUTO_REUSE, Session, global_variables_initializer, variable_scope, train.FtrlOptimizer,
    train.Saver. For more of TensorFlow 1 use `import tensorflow.compat.v1 as tf`. `scatter_add` and
    similar functions of `tf.compat.v1` and `tensorflow.python.ops.state_ops` accept KvVariables.

    Call it once, before making anything. A second call has no effect.

    Args:
      disable_eager: whether to disable eager execution for the whole process, for programs with
        sessions. TensorFlow cannot enable it again, not even `unpatch_tf`.
    """
    if disable_eager:
        tf.compat.v1.disable_eager_execution()
    if _patched:
        return
    of_tf1 = _modules_of_tf1()
    for module in (tf, *of_tf1):
        _put(module, "get_kv_variable", get_kv_variable)
    for module, source, names in (
        (tf, tf.compat.v1, _OF_TF1),
        (tf.train, tf.compat.v1.train, _OF_TRAIN),
    ):
        for name in names:
            if not hasattr(module, name):
                _put(module, name, getattr(source, name))
    for module in (*of_tf1, importlib.import_module(STATE_OPS)):
        for operation in OPERATIONS:
            name = f"scatter_{operation}"
            _put(module, name, _scatter(getattr(module, name), name))


def unpatch_tf() -> None:
    """Undoes `patch_tf`, except for eager execution."""
    while _patched:
        module, name, before = _patched.pop()
        if before is _NOTHING:
            delattr(module, name)
        else:
            setattr(module, name, before)


def _modules_of_tf1() -> list[Any]:
    """Returns `tf.compat.v1` and the other module of `import tensorflow.compat.v1`."""
    importlib.import_module("tensorflow.compat.v1")  # puts it in the place of the first
    named = [module for name, module in list(sys.modules.items()) if _OF_TF1_NAME.fullmatch(name)]
    return list({id(module): module for module in [tf.compat.v1, *named]}.values())


def _put(module: Any, name: str, value: Any) -> None:
    _patched.append((module, name, getattr(module, name, _NOTHING)))
    setattr(module, name, value)


def _scatter(original: Callable[..., Any], method: str) -> Callable[..., Any]:
    """Wraps a function of TensorFlow to call a method of KvVariables."""

    @functools.wraps(original)
    def scatter(ref: Any, indices: Any, updates: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(ref, KvVariable):
            return original(ref, indices, updates, *args, **kwargs)
        rows = tf.convert_to_tensor(updates, ref.dtype)
        delta = tf.IndexedSlices(rows, tf.convert_to_tensor(indices))
        return getattr(ref, method)(delta)

    return scatter

"""Guards Keras models: methods that would leave out tables raise.

Keras 3 knows only its own variables: silently, `fit` would not train a table and `save` would not
save it, without a call of the table. So the public methods check the model first. They are wrapped
when the program has imported Keras and uses a table; see training.py, weights.py and saving.py.
Models without tables behave as before.

Works with Keras 3, tf_keras, both or neither; imports none.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge.keras import called, hooks, training
from sok_lite.bridge.keras.held import PACKAGES, register_layers
from sok_lite.bridge.keras.hooks import is_cloning, register_functions
from sok_lite.bridge.keras.ids import watch_ids
from sok_lite.bridge.keras.saving import track_tables, wrap_files
from sok_lite.bridge.keras.weights import wrap_weights
from sok_lite.bridge.tf_private import CHECKPOINT

_guarded: set[str] = set()
_lock = threading.Lock()
_told: list[Callable[[str, Any], None]] = []


def tell(function: Callable[[str, Any], None], at_once: bool = True) -> None:
    """Calls a function once with name and module of each guarded Keras, now or later.

    A Keras is guarded when a program that has imported it creates a table or looks rows up; with
    `at_once`, now.
    """
    if function in _told:
        return
    if at_once:
        watch()
    _told.append(function)
    for name in _guarded:
        function(name, sys.modules[name])


def watch() -> bool:
    """Guards each Keras that the program has imported; returns whether one is new."""
    is_new = False
    for name in PACKAGES:
        if name in sys.modules and name not in _guarded:
            is_new |= _guard(name, sys.modules[name])
    return is_new


def refuse_custom_step(variables: Sequence[Any]) -> None:
    """Raises in a lookup within Keras' own training step if that would not train the tables."""
    training.refuse_custom_step(variables, watch())


def refuse_clone() -> None:
    """Raises if `clone_model` creates a table."""
    watch()
    if is_cloning():
        raise NotImplementedError(
            "clone_model() would make a model whose tables are new: no row is copied. Make the "
            "model by its class, export the rows of the old tables and assign them to the new ones."
        )


def _guard(name: str, package: Any) -> bool:
    with _lock:
        model = getattr(package, "Model", None)
        if name in _guarded or model is None:  # None: while Keras is being imported
            return False
        if not _guarded:  # tf.train.Checkpoint is shared by both Keras
            for method in CHECKPOINT:
                check = partial(track_tables, method)
                hooks.around(tf.train.Checkpoint, method, hooks.checking, check)
        _guarded.add(name)
        register_layers(package.layers.Layer)
        register_functions(package.models)
        training.watch_steps(model)
        if name == "keras":
            hooks.around(model, "__call__", called.record_call, inherits=True)
        watch_ids(model)
        wrap_files(name, model)
        wrap_weights(package.layers.Layer, model)
    for function in _told:
        function(name, package)
    return True

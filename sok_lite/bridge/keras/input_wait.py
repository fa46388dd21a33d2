"""How long steps of `fit` wait for their batch, where a program has its metrics read.

A batch comes within the function of a training step. That notes when it has come; from the call on
it has taken as long as the wait was.
"""

import functools
import time
from typing import Any

import tensorflow as tf

from sok_lite.bridge.keras import held, hooks
from sok_lite.engine.work_done import INPUT_WAITS

# An attribute of models: a variable, float64, when the last batch has come, seconds since 1970.
_ARRIVED = "_sok_lite_batch_arrived"
_IS_TIMED = "_sok_lite_is_timed"


def time_input(name: str, package: Any) -> None:
    """Has models of a Keras that have tables time the wait of their training steps for batches."""
    hooks.around(package.Model, "train_step", _noting)
    hooks.around(package.Model, "make_train_function", _timing)


def _noting(call: Any, self: Any, data: Any) -> Any:
    arrived = getattr(self, _ARRIVED, None)
    if arrived is not None:
        tensors = tf.nest.flatten(data, expand_composites=True)
        with tf.control_dependencies([each for each in tensors if each is not None]):
            with tf.device("CPU:0"):
                arrived.assign(tf.timestamp())
    return call(self, data)


def _timing(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    # Of several batches in one call it would be the time of all but the last.
    if not INPUT_WAITS.is_read or int(self.steps_per_execution) != 1 or not held.kept_tables(self):
        return call(self, *args, **kwargs)
    if getattr(self, _ARRIVED, None) is None:
        with tf.device("CPU:0"):
            arrived = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        object.__setattr__(self, _ARRIVED, arrived)  # it is no weight
    made = call(self, *args, **kwargs)
    if not hasattr(self.train_function, _IS_TIMED):
        self.train_function = _timed(self.train_function, getattr(self, _ARRIVED))
    return made if made is None else self.train_function


def _timed(function: Any, arrived: tf.Variable) -> Any:
    @functools.wraps(function)
    def timed(iterator: Any) -> Any:
        last, begun = float(arrived), time.time()
        done = function(iterator)
        now = float(arrived)
        if now != last:  # a step of a program's own does not note it
            INPUT_WAITS.add(max(0.0, now - begun))
        return done

    setattr(timed, _IS_TIMED, True)
    return timed

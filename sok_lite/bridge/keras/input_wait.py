"""Measures how long steps of `fit` wait for their batch, if metrics are read.

The batch arrives inside the training function, which records the time; the wait is the time from
the call until then.
"""

import functools
import time
from typing import Any

import tensorflow as tf

from sok_lite.bridge.keras import held, hooks
from sok_lite.engine.work_counters import INPUT_WAITS

# Attribute of models: a float64 variable, arrival of the last batch in seconds since 1970.
_ARRIVED = "_sok_lite_batch_arrived"
_IS_TIMED = "_sok_lite_is_timed"


def time_input(name: str, package: Any) -> None:
    """Makes models with tables measure how long their training steps wait for batches."""
    hooks.around(package.Model, "train_step", _record_arrival)
    hooks.around(package.Model, "make_train_function", _time_steps)


def _record_arrival(call: Any, self: Any, data: Any) -> Any:
    arrived = getattr(self, _ARRIVED, None)
    if arrived is not None:
        tensors = tf.nest.flatten(data, expand_composites=True)
        with tf.control_dependencies([each for each in tensors if each is not None]):
            with tf.device("CPU:0"):
                arrived.assign(tf.timestamp())
    return call(self, data)


def _time_steps(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    # With several batches in one call it would measure all but the last.
    if not INPUT_WAITS.is_read or int(self.steps_per_execution) != 1 or not held.kept_tables(self):
        return call(self, *args, **kwargs)
    if getattr(self, _ARRIVED, None) is None:
        with tf.device("CPU:0"):
            arrived = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        object.__setattr__(self, _ARRIVED, arrived)  # not a weight
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
        if now != last:  # a program's own step does not record it
            INPUT_WAITS.add(max(0.0, now - begun))
        return done

    setattr(timed, _IS_TIMED, True)
    return timed

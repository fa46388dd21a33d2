"""Weights of losses when ranks have batches of different sizes.

A rank's loss is the mean over its rows. The mean of the ranks' losses is that of all rows if each
is weighted by its number of rows. Gradients of dense variables are weighted as such; a table's
gradient is already a sum over ranks, so the gradient is weighted on its way back to the lookup.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from sok_lite.bridge.collectives import allreduce
from sok_lite.bridge.job import num_ranks, other_ranks
from sok_lite.bridge.serving.mode import is_exporting
from sok_lite.bridge.tf_private import record_operation, stop_recording

# Weight of the current step; 1 outside of one. A variable, so that functions traced before or for
# other batch sizes read the current value.
_weight: tf.Variable | None = None


def make_weight() -> None:
    """Creates the variable that `weight_loss` writes, unless the outermost graph is of TF1.

    Called when a table is created: during tracing, TensorFlow would trace the function twice.
    """
    global _weight
    with tf.init_scope():
        if tf.executing_eagerly() and _weight is None:
            with tf.device("CPU:0"):
                _weight = tf.Variable(1.0, trainable=False, name="sok_weight_of_loss")


# The call in which other ranks wait for a rank that has no more batches.
_CALL = "a training step of fit()"


@contextmanager
def weight_loss(rows: tf.Tensor) -> Iterator[None]:
    """A `with` block that weights the loss of its step by its rows, scalar int64.

    With 0 the loss does not count, whatever its gradients are. Every rank must call it.
    """
    own = tf.cast(rows * num_ranks(), tf.float32)
    weight = tf.math.divide_no_nan(own, tf.cast(allreduce(rows, "sum", _CALL), tf.float32))
    make_weight()
    assert _weight is not None
    _weight.assign(weight)
    try:
        yield
    finally:
        _weight.assign(1.0)


def apply_weight(gradient: tf.Tensor) -> tf.Tensor:
    """Returns a gradient times the weight of this rank's loss.

    Computed in at least 32 bits. Weight 0 gives 0 also for NaN, the mean of no rows.
    """
    if _weight is None or other_ranks() is None:
        return gradient
    dtype = tf.float32 if gradient.dtype.size < tf.float32.size else gradient.dtype
    weight = tf.cast(_weight.read_value(), dtype)
    return tf.cast(tf.math.multiply_no_nan(tf.cast(gradient, dtype), weight), gradient.dtype)


def weighed_on_the_way_back(output: tf.Tensor) -> tf.Tensor:
    """Returns an output whose gradient is multiplied by the weight of this rank's loss."""
    if _weight is None or other_ranks() is None or is_exporting():
        return output

    if tf.executing_eagerly():
        return _same(output)
    # TensorFlow keeps the function of a graph's custom gradient, and with it the graph, as long as
    # the process lives. So the gradient is registered by name, and a tape records it.
    values = tf.identity(output)  # may come from an outer graph
    graph: Any = tf.compat.v1.get_default_graph()
    with stop_recording(), graph.gradient_override_map({"Identity": _WEIGHED}):
        result = tf.raw_ops.Identity(input=values)
    record_operation(_WEIGHED, [result], [values], lambda gradient: [apply_weight(gradient)])
    return result


@tf.custom_gradient
def _same(values: tf.Tensor) -> Any:
    return tf.identity(values), apply_weight


_WEIGHED = "SokLiteWeighed"


@tf.RegisterGradient(_WEIGHED)
def _weighed(_: Any, gradient: tf.Tensor) -> tf.Tensor:
    return apply_weight(gradient)

"""How much the loss of this rank counts in a step of all ranks that have not as many rows.

The loss of a rank is the mean of its rows. The mean of the ranks' losses is that of all rows where
each is weighed by its rows. The gradient of a dense variable may be weighed when there is one; that
of a table is a sum over ranks by then, so that what a lookup gives is weighed on the way back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from sok_lite.bridge.collectives import allreduce
from sok_lite.bridge.job import num_ranks, other_ranks
from sok_lite.bridge.serving.mode import is_exporting
from sok_lite.bridge.tf_private import record_operation, stop_recording

# Of the step that is being taken, 1 outside of one. A variable: a function that a program has
# traced before a step, or in one of other rows, serves in all.
_weight: tf.Variable | None = None


def make_weight() -> None:
    """Makes what `counted` writes, unless a TF1 graph is outside.

    Called where a table is made: a variable that is made while a tf.function is traced has it
    traced twice.
    """
    global _weight
    with tf.init_scope():
        if tf.executing_eagerly() and _weight is None:
            with tf.device("CPU:0"):
                _weight = tf.Variable(1.0, trainable=False, name="sok_weight_of_loss")


# Where a rank has no more batches, the others are in this.
_CALL = "a training step of fit()"


@contextmanager
def counted(rows: tf.Tensor) -> Iterator[None]:
    """Has the loss of a step that is taken within count by its rows. Every rank must call it.

    Args:
      rows: scalar int64. 0: the loss counts nothing, whatever its gradients are.
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


def weighed(gradient: tf.Tensor) -> tf.Tensor:
    """Returns a gradient of this rank's loss times the weight of it.

    The product of 16-bit floats is one of 32 bits. Times 0 even NaN, a mean of none, is 0.
    """
    if _weight is None or other_ranks() is None:
        return gradient
    dtype = tf.float32 if gradient.dtype.size < tf.float32.size else gradient.dtype
    weight = tf.cast(_weight.read_value(), dtype)
    return tf.cast(tf.math.multiply_no_nan(tf.cast(gradient, dtype), weight), gradient.dtype)


def weighed_on_the_way_back(output: tf.Tensor) -> tf.Tensor:
    """Returns an output whose gradient counts by the weight of this rank's loss.

    A model for serving has no gradient, and no such weight.
    """
    if _weight is None or other_ranks() is None or is_exporting():
        return output

    if tf.executing_eagerly():
        return _same(output)
    # TensorFlow would keep the function of a custom gradient of a graph, and with it the graph, for
    # as long as the process lives. So an operation has a gradient by name, and a tape is told.
    values = tf.identity(output)  # which may be of a graph around this one
    graph: Any = tf.compat.v1.get_default_graph()
    with stop_recording(), graph.gradient_override_map({"Identity": _WEIGHED}):
        result = tf.raw_ops.Identity(input=values)
    record_operation(_WEIGHED, [result], [values], lambda gradient: [weighed(gradient)])
    return result


@tf.custom_gradient
def _same(values: tf.Tensor) -> Any:
    return tf.identity(values), weighed


_WEIGHED = "SokLiteWeighed"


@tf.RegisterGradient(_WEIGHED)
def _weighed(_: Any, gradient: tf.Tensor) -> tf.Tensor:
    return weighed(gradient)

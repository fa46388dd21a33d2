"""The gradient of a table, keys and rows, in the form that TensorFlow's control flow asks for."""

import functools
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from sok_lite.bridge.tf_private import GRADIENT_OF_A_LOOP, FuncGraph

OUT_OF_A_LOOP = (
    "Look all keys up before the loop, or put the gradient, such as a GradientTape, inside it."
)


# An attribute of tensors. What somebody makes of one, as by `tf.boolean_mask`, is without it.
_DISTINCT = "_sok_lite_distinct"


def are_distinct(keys: tf.Tensor) -> bool:
    """Whether keys are known to be distinct: those of a gradient, as it was returned."""
    return getattr(keys, _DISTINCT, False)


def row_gradient(
    name: str, keys: tf.Tensor, row_grads: tf.Tensor, dim: int, distinct: bool = False
) -> Any:
    """Returns the gradient of a variable.

    Args:
      name: of the variable.
      keys: (n,) of the key type.
      row_grads: (n, dim) float32.
      distinct: whether no key repeats, which `are_distinct` then tells.

    Returns:
      An IndexedSlices. Its shape is [-1, dim], for its indices are keys: TensorFlow makes no dense
      tensor of it, see `refuse_dense`. In a graph its static lengths are unknown and its shape is
      int32, as in the empty gradient that TensorFlow makes for a branch without a lookup: the two
      must match.
    """
    shape = gradient_shape(dim)
    if not tf.executing_eagerly():
        if _leaves_a_loop():
            keys = _refusing(name, keys)
            # TensorFlow makes it dense in any case, and asks for it only where it is wanted.
            shape = tf.compat.v1.placeholder_with_default(tf.constant([0, dim], tf.int32), [2])
        keys = tf.compat.v1.placeholder_with_default(keys, [None])
        row_grads = tf.compat.v1.placeholder_with_default(row_grads, [None, row_grads.shape[1]])
    # A tensor of a TF1 graph may be fed: nobody knows what it has then.
    if distinct and (tf.executing_eagerly() or isinstance(keys.graph, FuncGraph)):
        setattr(keys, _DISTINCT, True)
    return tf.IndexedSlices(row_grads, keys, shape)


def gradient_shape(dim: int) -> tf.Tensor:
    """Returns the shape of a gradient, whose indices are keys: [-1, dim] int32."""
    return _eager_shape(dim) if tf.executing_eagerly() else tf.constant([-1, dim], tf.int32)


@functools.cache
def _eager_shape(dim: int) -> tf.Tensor:
    with tf.device("CPU"):
        return tf.constant([-1, dim], tf.int32)


def refuse_dense(value: tf.IndexedSlices, *_: Any, **__: Any) -> Any:
    """Refuses to make a dense tensor of the gradient of a table, whose keys are no row numbers.

    TensorFlow asks it before it converts slices (`tf.register_tensor_conversion_function`). Where a
    graph does not say their shape, TensorFlow refuses the number of rows, -1, when it runs.
    """
    shape = None if value.dense_shape is None else tf.get_static_value(value.dense_shape)
    if shape is None or shape[0] >= 0:
        return NotImplemented
    raise NotImplementedError(
        "The gradient of a table has no dense form: its indices are keys, and not numbers of rows. "
        "tf.convert_to_tensor, tf.norm, tf.add_n, tape.jacobian and the like ask for one. Use its "
        "rows, g.values: row i is that of key g.indices[i]. To add two gradients, join their "
        "values and their indices by tf.concat: keys may repeat."
    )


# Before TensorFlow's own, which has 100.
tf.register_tensor_conversion_function(tf.IndexedSlices, refuse_dense, priority=90)


def _leaves_a_loop() -> bool:
    """Whether this is the way back through a loop that the tape is outside of."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        if type(graph).__name__ == GRADIENT_OF_A_LOOP[1]:
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def slices_only(name: str, gradient: Any) -> Any:
    """Returns the gradient of a variable, or in place of a dense one a tensor that raises.

    `tf.vectorized_map` rewrites a lookup without its gradient: zeros would arrive instead, in the
    shape of the empty tensor that stands for the rows.

    Args:
      name: of the variable.
      gradient: what has arrived in a graph.
    """
    return gradient if isinstance(gradient, tf.IndexedSlices) else _refusing(name, gradient)


def _refusing(name: str, tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor that raises where something asks for it.

    TensorFlow makes the gradients of everything that a loop uses, and runs those that are wanted:
    a gradient of dense variables alone must go on.
    """

    def refuse(_: np.ndarray) -> NoReturn:
        raise NotImplementedError(
            f"The gradient of a lookup in {name!r} cannot leave the loop that the lookup is in "
            "(tf.while_loop, tf.map_fn, tf.vectorized_map, `for` over a tensor): TensorFlow adds "
            f"dense gradients there, and a table has none. {OUT_OF_A_LOOP}"
        )

    refused = tf.numpy_function(refuse, [tensor], tensor.dtype, stateful=False)
    refused.set_shape(tensor.shape)
    return refused

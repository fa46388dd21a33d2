"""Gradients of tables, keys and rows, for control flow; and what they reject."""

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from sok_lite.bridge.refusals import FORWARD_REFUSAL
from sok_lite.bridge.tf_private import (
    CONVERSION,
    GRADIENT_OF_A_FUNCTION,
    GRADIENT_OF_A_LOOP,
    FuncGraph,
    graphs_around,
)
from sok_lite.engine.callers import callers

OUT_OF_A_LOOP = (
    "Look all keys up before the loop, or put the gradient, such as a GradientTape, inside it."
)


# Attribute of tensors. Tensors derived from one, as by `tf.boolean_mask`, lack it.
_DISTINCT = "_sok_lite_distinct"


def are_distinct(keys: tf.Tensor) -> bool:
    """Whether keys are known to be distinct: keys of a gradient, as returned."""
    return getattr(keys, _DISTINCT, False)


def row_gradient(
    name: str, keys: tf.Tensor, row_grads: tf.Tensor, dim: int, distinct: bool = False
) -> Any:
    """Returns the gradient of a variable, for keys (n,) and row_grads (n, dim) float32.

    `distinct`: no key repeats; `are_distinct` then returns True.

    Returns an IndexedSlices of shape [-1, dim], because its indices are keys: it has no dense form
    (`refuse_dense`). In a graph its static lengths are unknown and its shape is int32, to match the
    empty gradient that TensorFlow makes for a branch without a lookup.
    """
    shape = gradient_shape(dim)
    if not tf.executing_eagerly():
        if is_out_of_a_loop():
            keys = _raising_tensor(name, keys)
            # TensorFlow makes it dense in any case, but runs that only if needed.
            shape = tf.compat.v1.placeholder_with_default(tf.constant([0, dim], tf.int32), [2])
        keys = tf.compat.v1.placeholder_with_default(keys, [None])
        row_grads = tf.compat.v1.placeholder_with_default(row_grads, [None, row_grads.shape[1]])
    # Tensors of a TF1 graph may be fed with any values.
    if distinct and (tf.executing_eagerly() or isinstance(keys.graph, FuncGraph)):
        setattr(keys, _DISTINCT, True)
    return tf.IndexedSlices(row_grads, keys, shape)


def is_out_of_a_loop() -> bool:
    """Whether the default graph is the gradient of a loop, with the tape outside."""
    return any(type(graph).__name__ == GRADIENT_OF_A_LOOP[1] for graph in graphs_around())


def gradient_shape(dim: int) -> tf.Tensor:
    """Returns the shape of a gradient, whose indices are keys: [-1, dim] int32."""
    return _eager_shape(dim) if tf.executing_eagerly() else tf.constant([-1, dim], tf.int32)


@functools.cache
def _eager_shape(dim: int) -> tf.Tensor:
    with tf.device("CPU"):
        return tf.constant([-1, dim], tf.int32)


def refuse_dense(value: tf.IndexedSlices, *_: Any, **__: Any) -> Any:
    """Rejects conversion of a table's gradient to a dense tensor: its keys are not row numbers.

    TensorFlow calls it before it converts slices (`tf.register_tensor_conversion_function`). If a
    graph does not know their shape, TensorFlow rejects the number of rows, -1, at run time.
    """
    shape = None if value.dense_shape is None else tf.get_static_value(value.dense_shape)
    if shape is None or shape[0] >= 0:
        return NotImplemented
    modules = (frame.f_globals.get("__name__") for frame in callers())
    if next(name for name in modules if name not in CONVERSION) == GRADIENT_OF_A_FUNCTION:
        raise NotImplementedError(FORWARD_REFUSAL)
    raise NotImplementedError(
        "The gradient of a table has no dense form: its indices are keys, and not numbers of rows. "
        "tf.convert_to_tensor, tf.norm, tf.add_n, tape.jacobian and the like ask for one. Use its "
        "rows, g.values: row i is that of key g.indices[i]. To add two gradients, join their "
        "values and their indices by tf.concat: keys may repeat."
    )


# Before TensorFlow's own conversion, of priority 100.
tf.register_tensor_conversion_function(tf.IndexedSlices, refuse_dense, priority=90)


def _raising_tensor(name: str, tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor that raises when it is used.

    TensorFlow builds gradients of everything that a loop uses and runs those that are needed:
    gradients of dense variables must still work.
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


def no_second_derivative(what: str) -> str:
    """Returns why the gradients of a lookup have no derivative."""
    return (
        f"{what} has no second derivative: its gradient is computed outside of TensorFlow. A "
        "penalty may be on the gradient by the rows that the lookup returns, which is TensorFlow's "
        "own. Or take the rows by tf.nn.embedding_lookup, which has second derivatives, and "
        "combine them."
    )


def zero_or_refused(text: str, arrived: Sequence[Any]) -> tf.Tensor:
    """Returns 0, or a tensor that raises unless all derivatives are zero."""

    def check(*arrays: np.ndarray) -> np.ndarray:
        if any(array.any() for array in arrays):  # also for NaN
            raise NotImplementedError(text)
        return np.float32(0)

    tensors = [each.values if isinstance(each, tf.IndexedSlices) else each for each in arrived]
    tensors = [each for each in tensors if each is not None]
    zero = tf.numpy_function(check, tensors, tf.float32)  # stateful, else it is optimized away
    zero.set_shape([])
    return zero

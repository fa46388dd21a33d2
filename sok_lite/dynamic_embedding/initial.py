"""Converts the argument `initializer` to an initializer of the engine."""

import numbers
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.dynamic_embedding.arguments import DtypeError
from sok_lite.engine.initializer_spec import make_initializer, warn_of_fans

# The warning describes what TFRA would draw for this many keys.
_SOME_KEYS = 1024
_IN_TFRA = f"TFRA counts the keys of each lookup as fan_in: with {_SOME_KEYS}"


def initial_value(
    initializer: Any,
    dim: int,
    dtype: tf.DType,
    row_shape: tuple[int, int] | None = None,
    name: str = "",
) -> Any:
    """Returns an initializer of the engine.

    The value depends only on the key, not on the batch or the position in it.

    Args:
      initializer: None (zeros); a number, or an array or tensor of one number or `dim` numbers,
        truncated for integer rows; an initializer of Keras 3, tf_keras or TensorFlow; or a function
        that returns one of these, called with `shape=[dim]` or without arguments.
      row_shape: (fan_in, fan_out) for Glorot and the like. None: as Keras does for a vector, fan_in
        = fan_out = dim, with a warning on what TFRA would draw.

    Raises:
      DtypeError: a string, or another type.
      ValueError: an array of another length, an initializer that needs a matrix, or an invalid
        `row_shape`.
    """
    for _ in range(4):
        if initializer is None:
            return make_initializer(0.0, dim)
        if isinstance(initializer, (str, bytes)):
            raise DtypeError(
                "`initializer` must be a number, an array or an initializer of Keras or "
                f"TensorFlow. Received: {initializer!r}. Use tf.keras.initializers.get(...)."
            )
        if isinstance(initializer, (numbers.Number, np.ndarray, list, tuple)):
            break
        if tf.is_tensor(initializer):
            initializer = array_of(initializer)
            break
        if isinstance(initializer, type) or hasattr(initializer, "get_config"):
            initializer = initializer() if isinstance(initializer, type) else initializer
            made = make_initializer(initializer, dim, row_shape)
            if row_shape is None:
                warn_of_fans(initializer, dim, name, _SOME_KEYS, _IN_TFRA)
            return made
        if not callable(initializer):
            break
        initializer = _call(initializer, dim)
    values = np.asarray(initializer)
    if values.dtype == tf.bfloat16.as_numpy_dtype:
        values = values.astype(np.float32)
    if values.dtype.kind not in "iufb":
        raise DtypeError(
            "`initializer` must be a number, an array or an initializer of Keras or TensorFlow. "
            f"Received: {initializer!r} of type {type(initializer).__name__}."
        )
    if values.size not in (1, dim):
        raise ValueError(
            f"An array for `initializer` must have one number, or {dim}, the dimension. "
            f"Received: {values.size} numbers."
        )
    values = values.reshape(-1)
    if dtype.is_integer and not np.isfinite(values).all():
        raise ValueError(f"Values of {dtype.name} begin with numbers. Received: {initializer!r}.")
    values = values.astype(np.float64 if dtype.is_floating else np.int64)
    return make_initializer(values[0] if values.size == 1 else values, dim)


def array_of(tensor: Any) -> np.ndarray:
    """Converts numbers to an array. ValueError: a tensor without a static value."""
    if not tf.is_tensor(tensor):
        return np.asarray(tensor)
    with tf.init_scope():
        if not (tf.executing_eagerly() and hasattr(tensor, "numpy")):
            constant = tf.get_static_value(tensor)
            if constant is None:
                raise ValueError(
                    "A tensor for `initializer` must be known when the variable is made. "
                    f"Received: {tensor!r}. Use a NumPy array."
                )
            return np.asarray(constant)
        return np.asarray(tensor.numpy())


def _call(function: Any, dim: int) -> Any:
    with tf.init_scope():
        try:
            return function(shape=[dim])
        except TypeError:
            return function()

"""The gradient of a table, keys and rows, in the form that TensorFlow's control flow asks for."""

from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.engine.table import DetTable


def size_tensor(table: DetTable) -> tf.Tensor:
    """Returns an eager int32 tensor, [rows on this rank, dimension]; the largest int32 for more."""
    return tf.constant([min(table.size, np.iinfo(np.int32).max), table.dim], tf.int32)


def row_gradient(name: str, keys: tf.Tensor, row_grads: tf.Tensor, size: tf.Tensor) -> Any:
    """Returns the gradient of a variable.

    Args:
      name: of the variable.
      keys: (n,) of the key type.
      row_grads: (n, dim) float32.
      size: what `size_tensor` gave.

    Returns:
      An IndexedSlices. In a graph its static lengths are unknown and its shape is int32, as in the
      empty gradient that TensorFlow makes for a branch without a lookup: the two must match.
    """
    if tf.executing_eagerly():
        return tf.IndexedSlices(row_grads, keys, size)
    keys = tf.compat.v1.placeholder_with_default(keys, [None])
    row_grads = tf.compat.v1.placeholder_with_default(row_grads, [None, row_grads.shape[1]])
    return tf.IndexedSlices(row_grads, keys, size)

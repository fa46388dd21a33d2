"""Strings in tensors as keys, by an operation of TensorFlow."""

from typing import Any

import tensorflow as tf


def hash_tensor(strings: Any) -> Any:
    """Returns the keys of strings; see `sok_lite.hash_strings`.

    Args:
      strings: a Tensor, RaggedTensor or SparseTensor of strings.

    Returns:
      The same of int64.

    Raises:
      TypeError: they are no strings.
    """
    if strings.dtype != tf.string:
        raise TypeError(
            f"hash_strings takes strings. Received: a tensor of {strings.dtype.name}. Integers are "
            "keys as they are; tf.strings.as_string makes strings of numbers."
        )
    if isinstance(strings, tf.SparseTensor):
        return strings.with_values(hash_tensor(strings.values))
    if isinstance(strings, tf.RaggedTensor):
        return strings.with_flat_values(hash_tensor(strings.flat_values))
    # One to a row: those of a longer row would be hashed together.
    prints = tf.fingerprint(tf.reshape(strings, [-1]))
    keys = tf.reshape(tf.bitcast(prints, tf.int64), tf.shape(strings))
    return tf.ensure_shape(keys, strings.shape)

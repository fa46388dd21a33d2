"""Strings in tensors as keys, by an operation of TensorFlow."""

from typing import Any

import numpy as np
import tensorflow as tf


def is_keras_tensor(value: Any) -> bool:
    """Whether a value is the placeholder of a Keras 3 or tf_keras functional model."""
    return any(base.__name__ == "KerasTensor" for base in type(value).__mro__)


def is_tensor(strings: Any) -> bool:
    """Whether strings are a tensor of TensorFlow or Keras."""
    kinds = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
    return isinstance(strings, kinds) or is_keras_tensor(strings)


def tensor_of_texts(texts: Any) -> tf.Tensor | None:
    """Returns texts, also none, as a tensor: a text, lists, an array or a column; else None."""
    # As objects: NumPy's text dtypes drop trailing zeros.
    array = np.asarray(texts, None if isinstance(texts, np.ndarray) else object)
    flat = array.astype(object).reshape(-1).tolist()
    if not all(isinstance(each, (str, bytes)) for each in flat):
        return None
    return tf.constant(array.astype(object), tf.string)


def hash_tensor(strings: Any) -> Any:
    """Returns Fingerprint64 of each string, the hash of `sok_lite.hash_strings`.

    For strings that `is_tensor` accepts; else TypeError. The same kind and shape, int64.
    """
    if is_keras_tensor(strings):
        raise TypeError(
            "hash_strings takes strings. Received: a KerasTensor, which has none yet. A table of "
            "sok_lite.keras with key_type=str takes it as it is. Else call hash_strings in a "
            "keras.layers.Lambda or in the `call` of a model."
        )
    if strings.dtype != tf.string:
        raise TypeError(
            f"hash_strings takes strings. Received: a tensor of {strings.dtype.name}. Integers are "
            "keys as they are; tf.strings.as_string makes strings of numbers."
        )
    if isinstance(strings, tf.SparseTensor):
        return strings.with_values(hash_tensor(strings.values))
    if isinstance(strings, tf.RaggedTensor):
        return strings.with_flat_values(hash_tensor(strings.flat_values))
    # One per row: tf.fingerprint hashes a row as a whole.
    prints = tf.fingerprint(tf.reshape(strings, [-1]))
    keys = tf.reshape(tf.bitcast(prints, tf.int64), tf.shape(strings))
    return tf.ensure_shape(keys, strings.shape)

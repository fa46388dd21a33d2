"""The arguments of `get_kv_variable`, checked before anything is made."""

from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.checks import checked_dtype
from sok_lite.engine.dtypes import check_integer, is_integer
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.row_initializer import MatrixInitializer

KEY_DTYPES = (tf.int64, tf.int32)
VALUE_DTYPES = (tf.float32, tf.float16, tf.bfloat16)
# What initializers that count with the shape of the whole weight take for the number of rows, as in
# TFPlus.
NUM_ROWS = 10000


def check_types(
    name: Any, trainable: Any, collections: Any, partitioner: Any, regularizer: Any
) -> None:
    """Raises TypeError where one of them is of a wrong type, ValueError for an empty name."""
    if not isinstance(name, str):
        raise TypeError(f"`name` must be a text. Received: name={name!r}.")
    if not name:
        raise ValueError("`name` must not be empty. Received: name=''.")
    if trainable is not None and not isinstance(trainable, (bool, np.bool_)):
        raise TypeError(
            f"`trainable` must be True, False or None. Received: trainable={trainable!r}."
        )
    if collections is not None and not (
        isinstance(collections, (list, tuple))
        and all(isinstance(each, str) for each in collections)
    ):
        raise TypeError(
            "`collections` must be a list or tuple of the names of collections, or None. "
            f"Received: collections={collections!r}."
        )
    for what, function in (("partitioner", partitioner), ("regularizer", regularizer)):
        if function is not None and not callable(function):
            raise TypeError(f"`{what}` must be callable or None. Received: {what}={function!r}.")


def checked_key_dtype(dtype: Any) -> tf.DType:
    """Returns the type of the keys. Python's int is int64."""
    key_dtype = tf.int64 if dtype is int else checked_dtype("key_dtype", dtype)
    if key_dtype not in KEY_DTYPES:
        raise ValueError(
            f"`key_dtype` must be tf.int64 or tf.int32. Received: {key_dtype.name}. Hash texts to "
            "numbers first, as by tf.strings.to_hash_bucket_fast."
        )
    return key_dtype


def checked_value_dtype(dtype: Any) -> tf.DType:
    """Returns the type of the rows."""
    value_dtype = checked_dtype("value_dtype", dtype)
    if value_dtype not in VALUE_DTYPES:
        known = ", ".join(f"tf.{each.name}" for each in VALUE_DTYPES)
        raise ValueError(f"`value_dtype` must be one of {known}. Received: {value_dtype.name}.")
    return value_dtype


def checked_dim(embedding_dim: Any) -> int:
    """Returns the length of a row; it may come as a list or TensorShape of one number."""
    if isinstance(embedding_dim, tf.TensorShape):
        embedding_dim = embedding_dim.as_list()
    if isinstance(embedding_dim, (list, tuple)) and len(embedding_dim) == 1:
        (embedding_dim,) = embedding_dim
    if isinstance(embedding_dim, tf.compat.v1.Dimension):
        embedding_dim = embedding_dim.value
    if not is_integer(embedding_dim):
        raise TypeError(
            "`embedding_dim` must be an integer, the length of a row. "
            f"Received: embedding_dim={embedding_dim!r}."
        )
    check_integer("embedding_dim", embedding_dim, 1)
    return int(embedding_dim)


def checked_threshold(enter_threshold: Any) -> int:
    """Returns how often a key must have been seen to get a row."""
    if not is_integer(enter_threshold):
        raise TypeError(
            "`enter_threshold` must be an integer, how often a key must be seen to get a row. "
            f"Received: enter_threshold={enter_threshold!r}."
        )
    if enter_threshold < 0:
        raise ValueError(
            f"`enter_threshold` must not be negative. Received: enter_threshold={enter_threshold}."
        )
    return int(enter_threshold)


def initial_value(initializer: Any, dim: int) -> Any:
    """Returns an initializer of the engine.

    Args:
      initializer: of Keras, tf_keras or TensorFlow, its class, or a function that gives a tensor or
        an initializer; None: Glorot's uniform; a tensor or array of one number, of `dim`, or of
        rows (n, dim), of which a key takes one.
      dim: elements of a row.

    Raises:
      ValueError: a tensor without a static shape, or of another shape.
    """
    if initializer is None:
        initializer = tf.compat.v1.glorot_uniform_initializer()
    if isinstance(initializer, type):
        initializer = initializer()
    if isinstance(initializer, str):
        initializer = tf.keras.initializers.get(initializer)
    if callable(initializer) and not hasattr(initializer, "get_config"):
        initializer = _call(initializer, dim)
    if hasattr(initializer, "get_config"):
        return make_initializer(initializer, dim, row_shape=(NUM_ROWS, dim))
    if tf.is_tensor(initializer):
        if not initializer.shape.is_fully_defined():
            raise ValueError(
                "A tensor for `initializer` must have a static shape. "
                f"Received: shape {initializer.shape}."
            )
        initializer = _array_of(initializer)
    rows = np.asarray(initializer, np.float64)
    if rows.ndim == 2 and rows.shape[0] and rows.shape[1] == dim:
        if (rows != rows[0]).any():
            return MatrixInitializer(rows)
        rows = rows[0]
    if rows.size != 1 and rows.shape != (dim,):
        raise ValueError(
            f"A tensor for `initializer` must have one number, shape ({dim},), or rows "
            f"(n, {dim}). Received: shape {rows.shape}."
        )
    return make_initializer(float(rows.reshape(-1)[0]) if rows.size == 1 else rows, dim)


def _call(function: Any, dim: int) -> Any:
    try:
        return function([1, dim], tf.float32)
    except TypeError:
        return function()


def _array_of(tensor: tf.Tensor) -> np.ndarray:
    if hasattr(tensor, "numpy"):
        return np.asarray(tensor.numpy())
    constant = tf.get_static_value(tensor)
    if constant is not None:
        return np.asarray(constant)
    try:
        with tf.compat.v1.Session(graph=tensor.graph) as session:
            return np.asarray(session.run(tensor))
    except (tf.errors.OpError, AttributeError) as error:
        raise ValueError(
            "A tensor for `initializer` must be known when the variable is made. "
            f"Received: {tensor!r}. ({error})"
        ) from error

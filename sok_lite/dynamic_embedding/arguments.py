"""Checks a program's keys and values and makes them tensors.

Errors have both types that programs catch: the documented one and the one that TFRA raises.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.checks import checked_dtype
from sok_lite.bridge.string_keys import tensor_of_texts
from sok_lite.engine.dtypes import array_of_keys, copy_error, key_dtype

KEY_DTYPES = (tf.int64, tf.int32, tf.string)
VALUE_DTYPES = (*(tf.float32, tf.float16, tf.bfloat16, tf.float64), *(tf.int32, tf.int64, tf.int8))


class DtypeError(TypeError, ValueError):
    """A wrong dtype: TFRA documents TypeError and raises ValueError."""


class ShapeError(tf.errors.InvalidArgumentError, ValueError):
    """A wrong shape: TFRA raises TensorFlow's InvalidArgumentError."""

    def __init__(self, message: str) -> None:
        super().__init__(None, None, message)


class PartitionError(tf.errors.InvalidArgumentError, ValueError):
    """A partitioner returned something other than a shard number."""

    def __init__(self, message: str) -> None:
        super().__init__(None, None, message)


def checked_dtypes(key_dtype: Any, value_dtype: Any) -> tuple[tf.DType, tf.DType]:
    """Returns the dtypes of keys and values. DtypeError: unsupported. TypeError: not a dtype."""
    key_dtype = checked_dtype("key_dtype", key_dtype)
    value_dtype = checked_dtype("value_dtype", value_dtype)
    if key_dtype in KEY_DTYPES and value_dtype in VALUE_DTYPES:
        return key_dtype, value_dtype
    keys, values = (
        ", ".join(dtype.name for dtype in dtypes) for dtypes in (KEY_DTYPES, VALUE_DTYPES)
    )
    raise DtypeError(
        f"Keys must be of {keys}, values of {values}. Received: key_dtype={key_dtype.name}, "
        f"value_dtype={value_dtype.name}."
    )


def checked_keys(keys: Any, dtype: tf.DType, name: str) -> tf.Tensor:
    """Returns keys of any shape as a tensor of the dtype, or raises DtypeError."""
    if isinstance(keys, tf.Variable):
        keys = keys.read_value()
    if not tf.is_tensor(keys):
        keys = _convert_texts(keys) if dtype == tf.string else _convert_integers(keys, dtype, name)
    if getattr(keys, "dtype", None) != dtype or not isinstance(keys, tf.Tensor):
        received = getattr(getattr(keys, "dtype", None), "name", type(keys).__name__)
        if isinstance(keys, np.ndarray) and keys.dtype.kind in "SU":
            received = "texts"
        advice = _advice(getattr(keys, "dtype", None), dtype)
        if not isinstance(keys, (tf.Tensor, np.ndarray)):
            received = f"{received} in a {type(keys).__name__}"
        if isinstance(keys, (tf.RaggedTensor, tf.SparseTensor)):
            flat = "flat_values" if isinstance(keys, tf.RaggedTensor) else "values"
            advice = f"Give its `{flat}`, or use de.embedding_lookup_sparse for pooled rows."
        raise DtypeError(f"Keys of {name!r} must be {dtype.name}. Received: {received}. {advice}")
    return keys


def wrong_ids(received: tf.DType, params: Any) -> DtypeError:
    """Returns the error for ids whose dtype differs from a variable's keys."""
    return DtypeError(
        f"`ids` must be {params.key_dtype.name}, as the keys of {params.name!r}. "
        f"Received: {received.name}. {_advice(received, params.key_dtype)}"
    )


def _advice(received: Any, dtype: tf.DType) -> str:
    """Returns the fix for keys of another dtype than the table's."""
    if received == tf.string:  # NumPy's string and object dtypes equal it
        return "Make the table with key_dtype=tf.string, or use sok_lite.hash_strings."
    if dtype == tf.string:
        return "Turn numbers into texts with tf.strings.as_string."
    return "Cast them first if they really are keys."


def _convert_texts(keys: Any) -> Any:
    """Converts strings to a tensor; returns an array of anything else."""
    texts = tensor_of_texts(keys)
    return np.asarray(keys) if texts is None else texts


def _convert_integers(keys: Any, dtype: tf.DType, name: str) -> Any:
    """Converts integers to a tensor of the dtype; returns an array of anything else."""
    what = f"Keys of {name!r}"
    try:
        array = array_of_keys(keys, dtype.as_numpy_dtype, what)
        if array.size and array.dtype.kind not in "iu":
            return array
        if array.size:
            key_dtype(dtype.name).check(np, array, what)
        return tf.convert_to_tensor(array.astype(dtype.as_numpy_dtype))
    except ValueError as error:
        raise DtypeError(str(error)) from None
    except MemoryError as error:
        raise copy_error(what, dtype.name, error) from error


def checked_values(values: Any, keys: tf.Tensor, dim: int, dtype: tf.DType, name: str) -> tf.Tensor:
    """Returns values (keys.shape + [dim]) as a tensor (n, dim), one row for each of n keys.

    DtypeError: a tensor of another dtype, or not convertible. ShapeError: another shape.
    """
    if isinstance(values, tf.Variable):
        values = values.read_value()
    try:
        values = tf.convert_to_tensor(values, dtype)
    except MemoryError as error:
        raise copy_error(f"Values of {name!r}", dtype.name, error) from error
    except (TypeError, ValueError) as error:
        received = getattr(values, "dtype", None)
        raise DtypeError(
            f"Values of {name!r} must be {dtype.name}. Received: "
            f"{getattr(received, 'name', type(values).__name__)}. Cast them first. ({error})"
        ) from None
    expected = keys.shape.concatenate([dim])
    if not values.shape.is_compatible_with(expected):
        raise ShapeError(
            f"Expected shape {expected} for value of {name!r}, got {values.shape}: one row of "
            f"{dim} for each key."
        )
    return tf.reshape(values, [-1, dim])

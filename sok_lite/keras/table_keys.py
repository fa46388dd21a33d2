"""Keys that a program looks up or writes: integers, or strings, whose key is their hash."""

from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.checks import integer_keys, without_keras
from sok_lite.bridge.string_keys import tensor_of_texts
from sok_lite.bridge.texts import keys_of_kept
from sok_lite.engine.dtypes import unwrap_scalar
from sok_lite.engine.fingerprint import fingerprints

_PLAIN = (str, bytes, int, float, np.generic)


def tensor_of_ids(table: Any, ids: Any) -> Any:
    """Converts Python ids (a number, a string, or nested lists) to a tensor; returns others as is.

    Keras accepts neither these nor NumPy's own string arrays. TypeError: numbers that are not all
    integers. ValueError: lists of different lengths, or a number that does not fit the key type.
    """
    first = ids
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    if isinstance(ids, np.ndarray):
        return tf.constant(ids) if ids.dtype.kind in "US" else ids
    if not isinstance(first, (*_PLAIN, list, tuple)):
        return ids
    lists = [each for each in ids if isinstance(each, (list, tuple))] if ids is not first else []
    if len({len(each) for each in lists}) > 1:
        raise ValueError(
            f"Lists of ids of table {table.name!r} must have one length. Received: lists of "
            f"{', '.join(str(len(each)) for each in lists[:9])}. Use tf.ragged.constant(ids)."
        )
    if isinstance(first, (list, tuple)):  # empty
        dtype = tf.as_dtype(table.key_dtype_name)
        return tf.constant(np.asarray(ids).astype(dtype.as_numpy_dtype), dtype)
    if table.has_texts or isinstance(first, (str, bytes)):
        return tf.constant(ids)
    name = table.key_dtype_name
    return integer_keys(ids, f"The ids of table {table.name!r}", name, tf.as_dtype(name))


def check_mask_value(table: Any, mask_value: Any) -> None:
    """Raises TypeError or ValueError for a `mask_value` that is not an id of the table.

    TensorFlow would truncate an integer that does not fit, and so mask another id.
    """
    if mask_value is None:
        return
    kinds = (str, bytes) if table.has_texts else (int, np.integer)
    expected = "a text" if table.has_texts else f"an integer, as ids of {table.key_dtype_name} are"
    if not isinstance(mask_value, kinds) or isinstance(mask_value, bool):
        raise TypeError(
            f"`mask_value` for table {table.name!r} must be {expected}. Received: "
            f"mask_value={mask_value!r}."
        )
    if not table.has_texts:
        limits = tf.as_dtype(table.key_dtype_name)
        if not limits.min <= mask_value <= limits.max:
            raise ValueError(
                f"`mask_value` for table {table.name!r} must fit {limits.name} ({limits.min} to "
                f"{limits.max}). Received: mask_value={mask_value!r}. No id is that number: leave "
                "it out."
            )


def keys_of_ids(table: Any, flat: tf.Tensor, inserts: bool) -> tf.Tensor:
    """Returns the keys of flat ids; strings are hashed. TypeError: they are not the table's kind.

    Args:
      inserts: whether new keys get a row, if the table is trained.
    """
    if not table.has_texts:
        if flat.dtype == tf.string:
            raise TypeError(
                f"The ids of table {table.name!r} must be {table.key_dtype_name}. Received: texts. "
                "Make the table with key_type=str."
            )
        if flat.dtype.is_floating:
            raise TypeError(
                f"The ids of table {table.name!r} must be {table.key_dtype_name}. Received: "
                f"{flat.dtype.name}. Keras casts the inputs of a model without keras.Input to "
                "floats: if your ids are integers, begin a Sequential with keras.Input(shape, "
                f"dtype={table.key_dtype_name!r})."
            )
        return flat
    if flat.dtype != tf.string:
        raise TypeError(
            f"The ids of table {table.name!r} must be texts: it was made with key_type=str. "
            f"Received: {flat.dtype.name}. Pass texts, or make the table with another key_type."
        )
    return keys_of_texts(table.variable, flat, inserts and table.trainable)


def keys_of_texts(variable: Any, texts: tf.Tensor, remember: bool) -> tf.Tensor:
    """Returns the keys (n,) int64 of strings (n,).

    Args:
      remember: whether the keys may get rows: then a table that keeps strings remembers them.
    """
    store = variable.table.texts
    if store is None or not remember:
        return tf.bitcast(tf.fingerprint(texts), tf.int64)
    return keys_of_kept(store, texts, variable.table.name)


def key_of(table: Any, key: Any) -> Any:
    """Returns the key of a string or hash (else TypeError); in an integer table the argument."""
    if not table.has_texts:
        return key
    if tf.is_tensor(key) and key.shape.rank == 0 and hasattr(key, "numpy"):
        key = key.numpy()
    key = unwrap_scalar(key)
    if isinstance(key, (str, bytes)):
        return fingerprints([key.encode() if isinstance(key, str) else key])[0]
    if isinstance(key, np.int64):
        return key
    raise _no_texts(table, repr(key))


def keys_of(table: Any, keys: Any, remember: bool = False) -> Any:
    """Returns keys of any shape as integers, hashing strings as lookups do.

    Args:
      keys: integers; in a string table strings, or their hashes as an int64 tensor or array.
        Anything else there raises TypeError.
      remember: whether they get rows: then a table that keeps strings remembers them.
    """
    if not table.has_texts:
        return keys
    if any(tf.is_tensor(each) for each in tf.nest.flatten(keys)):
        given = tf.convert_to_tensor(without_keras(keys))
    else:
        given = tensor_of_texts(keys)
        if given is None:
            _check_missing(table, keys)
            given = np.asarray(keys)
            hashed = hasattr(keys, "dtype") or all(
                isinstance(each, np.int64) for each in np.asarray(keys, object).reshape(-1).tolist()
            )
            if not hashed:
                raise _no_texts(table, f"{given.dtype.name} in a {type(keys).__name__}")
    if given.dtype == tf.string:
        flat = keys_of_texts(table.variable, tf.reshape(given, [-1]), remember)
        return tf.ensure_shape(tf.reshape(flat, tf.shape(given)), given.shape)
    if given.dtype != tf.int64:
        raise _no_texts(table, given.dtype.name)
    return given


def _check_missing(table: Any, keys: Any) -> None:
    """Raises TypeError if a value among keys is missing: None, NaN or pandas' NA."""
    if isinstance(keys, np.ndarray) and keys.dtype.kind in "iu":
        return  # hashes, maybe millions
    for key in np.asarray(keys, object).reshape(-1).tolist():
        is_nan = isinstance(key, float) and key != key
        if key is None or is_nan or type(key).__name__ == "NAType":
            raise TypeError(
                f"Keys of table {table.name!r} must be texts. Received: {key!r} among them. Give "
                'missing values a text of their own, such as "".'
            )


def _no_texts(table: Any, received: str) -> TypeError:
    return TypeError(
        f"Keys of table {table.name!r} must be texts: it was made with key_type=str. Received: "
        f"{received}. Their hashes are taken as an int64 tensor or array, as `export` and "
        "sok_lite.hash_strings give them. For integer keys make the table with another key_type."
    )

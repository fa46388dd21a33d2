"""Checks arguments of table methods and converts them to tensors before anything changes."""

import functools
import inspect
import itertools
import numbers
from collections.abc import Callable
from typing import Any, ParamSpec

import numpy as np
import tensorflow as tf

from sok_lite.bridge.string_keys import is_keras_tensor
from sok_lite.bridge.tf_private import LOOKUP_IN_A_LIST
from sok_lite.engine.callers import callers
from sok_lite.engine.dtypes import array_of_keys, as_float, copy_error, is_integer

_P = ParamSpec("_P")


def refusing_names(**instead: str) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """Returns a decorator: an `__init__` that rejects arguments of other classes, with advice."""

    def decorated(init: Callable[_P, None]) -> Callable[_P, None]:
        @functools.wraps(init)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
            for name in kwargs:
                if name in instead:
                    raise TypeError(
                        f"{type(args[0]).__name__} has no argument `{name}`. Received: "
                        f"{name}={kwargs[name]!r:.100}. {instead[name]}"
                    )
            init(*args, **kwargs)

        checked.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]  # for Keras
        return checked

    return decorated


def without_keras(value: Any) -> Any:
    """Returns a Keras variable, whose dtype is a text, as a tensor; any other value unchanged."""
    if tf.is_tensor(value) and isinstance(value.dtype, str):
        return tf.convert_to_tensor(value)
    return value


def checked_dtype(argument: str, dtype: Any) -> tf.DType:
    """Converts an argument to a dtype, or raises TypeError.

    Integers are rejected: for TensorFlow 16, meant as a dimension, is quint16.
    """
    if is_integer(dtype):
        raise TypeError(
            f"`{argument}` must be a dtype such as tf.int64. Received: {argument}={dtype!r}. A "
            "table has a dimension and no number of rows: of Embedding(rows, dim) give dim alone."
        )
    try:
        return tf.as_dtype(tf.string if dtype is str else dtype)
    except TypeError:
        raise TypeError(
            f"`{argument}` must be a dtype such as tf.int64. Received: {argument}={dtype!r}."
        ) from None


def checked_keys(variable: Any, keys: Any) -> tf.Tensor:
    """Returns keys as an integer tensor, or raises TypeError."""
    key_type = variable.key_type
    return integer_keys(keys, f"Keys of {variable.name!r}", key_type.name, key_type)


def integer_keys(keys: Any, whose: str, expected: str, key_type: tf.DType = tf.int64) -> tf.Tensor:
    """Returns keys of any shape as an integer tensor; `whose` and `expected` are for errors.

    Raises TypeError for other keys, ValueError if a Python integer does not fit `key_type`.
    """
    # The common case first: the checks below take as long as an eager lookup.
    if isinstance(keys, tf.Tensor) and keys.dtype in (tf.int64, tf.int32):
        return keys
    keys = without_keras(keys)
    if is_keras_tensor(keys):
        raise TypeError(
            f"{whose} cannot be a KerasTensor: in a functional model, use tables as layers, "
            "sok_lite.keras.Table and sok_lite.keras.Embeddings. In a subclassed model, look up in "
            "its `call`."
        )
    if isinstance(keys, (list, tuple)) and not tf.executing_eagerly():
        keys = _stack_tensors(keys, whose)
    if not tf.is_tensor(keys):
        try:
            array = array_of_keys(keys, key_type.as_numpy_dtype, whose)
            keys = tf.convert_to_tensor(array) if array.dtype.kind in "iuf" else array
        except MemoryError as error:
            raise copy_error(whose, key_type.name, error) from error
    dtype = getattr(keys, "dtype", None)
    if not isinstance(dtype, tf.DType) or not dtype.is_integer:
        name = dtype.name if isinstance(dtype, (tf.DType, np.dtype)) else type(keys).__name__
        advice = "Cast them first if they really are keys."
        if dtype == tf.string:  # which NumPy's texts and objects are equal to
            advice = "Turn strings into keys with sok_lite.hash_strings."
            name = name if name in ("object", "string") else "texts"
        raise TypeError(f"{whose} must be integers ({expected}). Received: {name}. {advice}")
    return keys


def _stack_tensors(keys: Any, whose: str) -> Any:
    """Stacks a list that contains a tensor, possibly symbolic; returns other values unchanged.

    Raises ValueError for a number that TensorFlow would truncate to the tensor's dtype.
    """
    leaves = tf.nest.flatten(keys)
    dtype = next((leaf.dtype for leaf in leaves if tf.is_tensor(leaf)), None)
    if dtype is None:
        return keys
    dtype = tf.as_dtype(dtype)
    if dtype.is_integer:
        for array in [np.asarray(leaf) for leaf in leaves if not tf.is_tensor(leaf)]:
            bad = array[(array < dtype.min) | (array > dtype.max)]
            if bad.size:
                raise ValueError(
                    f"{whose} in a list must fit {dtype.name}, the dtype of the tensor in it. "
                    f"Received: {bad[0]}. Cast the tensor to a wider dtype first."
                )
    return tf.convert_to_tensor(keys)


def checked_rows(variable: Any, keys: tf.Tensor, values: Any, what: str) -> tf.Tensor:
    """Returns rows for keys (n,) as a tensor, of any width of float or integer as the variable.

    Raises TypeError or ValueError. The table checks whether integers fit its dtype.
    """
    values = without_keras(values)
    if not tf.is_tensor(values):
        # Python numbers have no dtype of their own.
        is_plain = isinstance(values, (list, tuple)) and np.asarray(values).dtype.kind in "if"
        try:
            values = tf.convert_to_tensor(values, variable.dtype if is_plain else None)
        except MemoryError as error:
            whose = f"{what}: `values` of {variable.name!r}"
            raise copy_error(whose, variable.dtype.name, error) from error
    is_fit = values.dtype.is_integer if variable.dtype.is_integer else values.dtype.is_floating
    if not is_fit:
        raise TypeError(
            f"{what}: `values` must be {variable.dtype.name}. Received: dtype {values.dtype.name}. "
            "Cast them first if they really are rows."
        )
    expected = f"(n, {variable.dimension}), one row for each of the n keys"
    if keys.shape.rank is not None and keys.shape.rank != 1:
        raise ValueError(
            f"{what}: `indices` must have shape (n,). Received: shape {keys.shape}. Use "
            "tf.reshape(indices, [-1])."
        )
    if not values.shape.is_compatible_with([keys.shape[0] if keys.shape.rank else None, None]):
        raise ValueError(
            f"{what}: `values` must have shape {expected}. Received: indices of shape "
            f"{keys.shape} and values of shape {values.shape}."
        )
    if not values.shape.is_compatible_with([None, variable.dimension]):
        raise ValueError(
            f"{what}: `values` must have shape {expected}: {variable.name!r} has dimension "
            f"{variable.dimension}. Received: values of shape {values.shape}."
        )
    return values


def checked_scores(name: str, scores: Any) -> tf.Tensor:
    """Returns scores as a tensor of integers, or raises TypeError."""
    scores = tf.convert_to_tensor(scores)
    if not scores.dtype.is_integer:
        raise TypeError(
            f"Scores of {name!r} must be integers. Received: dtype {scores.dtype.name}. Cast them."
        )
    return scores


def refuse_partitions(variable: Any) -> None:
    """Raises if tf.nn.embedding_lookup was called with a list of variables.

    TensorFlow treats the list as partitions of one table, changes the keys, and reads each variable
    in turn. Only the caller's frame shows that.
    """
    for frame in itertools.islice(callers(), 16):
        if frame.f_code.co_name == LOOKUP_IN_A_LIST[1]:
            params = frame.f_locals.get("params")
            if isinstance(params, list) and len(params) > 1:
                raise ValueError(
                    f"tf.nn.embedding_lookup takes one {variable.kind}. Received: a list of "
                    f"{len(params)}, among them {variable.name!r}. TensorFlow would spread the "
                    f"keys over them. {variable.instead_of_partitions}"
                )
            return


def check_cutoff(cutoff: float | None) -> None:
    """Raises TypeError or ValueError unless the cutoff of an export is None or above 0."""
    if cutoff is None:
        return
    if isinstance(cutoff, bool) or not isinstance(cutoff, numbers.Real):
        raise TypeError(f"`cutoff` must be a number or None. Received: cutoff={cutoff!r}.")
    if not cutoff > 0:
        raise ValueError(
            f"`cutoff` must be above 0. Received: cutoff={cutoff}. Leave it out to export all rows."
        )


def checked_strength(optimizer: Any, name: str, value: Any) -> float:
    """Returns a finite hyperparameter >= 0 as a float; raises TypeError or ValueError."""
    what = f"`{name}` of {type(optimizer).__name__}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be a number. Received: {value!r}.")
    if not 0 <= as_float(value) < float("inf"):
        raise ValueError(f"{what} must be finite and >= 0. Received: {value!r}.")
    return float(value)

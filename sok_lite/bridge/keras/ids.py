"""Rejects invalid ids of models: floats that are not ids, texts instead of integers.

An integer `Input` casts all its data. NaN, infinities and fractions become some id, which later
code cannot detect. Besides, `fit`, `evaluate` and `predict` convert float arrays to float32, in
which large ids coincide. pandas converts integers to float64 if one is missing.

A float is a valid id if it is whole and below the limit up to which its dtype holds each integer:
2**53 for float64, 2**24 for float32. Arrays are checked before anything else, tensors when a model
is called, in graphs by an operation for floats only. An `Input` would also cast texts, by an
operation that does not exist.
"""

import functools
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.keras import hooks
from sok_lite.bridge.keras.called import is_built_by_shapes
from sok_lite.bridge.keras.held import tables_in

# Public methods that take arrays of ids.
TAKING_ARRAYS = ("fit", "evaluate", "predict")


def watch_ids(model: Any) -> None:
    """Makes models of a Keras with tables reject invalid ids."""
    for method in TAKING_ARRAYS:
        hooks.around(model, method, hooks.checking, refuse_arrays)
    hooks.around(model, "__call__", _call_with_ids, inherits=True)


def refuse_arrays(model: Any, x: Any = None, *_: Any, **__: Any) -> None:
    """Raises if an array has invalid ids, for models with tables and Inputs of ids.

    ValueError names the input and its first invalid float, TypeError an input of integers that got
    texts, or vice versa.
    """

    def looked_at(taken: Any, value: Any) -> Any:
        _check_kind(model, taken, value)
        if tf.as_dtype(taken.dtype) == tf.string:
            return value
        dtype = getattr(value, "dtype", None)
        if dtype is None and hasattr(value, "dtypes"):
            dtype = np.result_type(*value.dtypes)  # a table of pandas
        if isinstance(dtype, np.dtype) and dtype.kind == "f" and _has_tables(model):
            array, below = np.asarray(value), min(_whole_below(dtype), _whole_below(np.float32))
            with np.errstate(invalid="ignore"):
                is_id = (np.trunc(array) == array) & (np.abs(array) < below)
            if not is_id.all():
                first = array[~is_id].reshape(-1)[0]
                raise ValueError(f"{_refusal(taken, dtype.name, below)} Received: {first:.17g}.")
        return value

    _of_inputs_of_ids(_inputs_of(model), x, looked_at)


def _call_with_ids(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a model with float ids converted to integers; rejects invalid ids."""
    taken = _inputs_of(self)
    if taken is None or is_built_by_shapes():
        return call(self, *args, **kwargs)
    changed = []

    def as_ids(taken: Any, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            value = tf.convert_to_tensor(value)
        _check_kind(self, taken, value)
        if not (tf.is_tensor(value) and value.dtype.is_floating and _has_tables(self)):
            return value
        changed.append(taken)
        return _ids_of(taken, value)

    inputs = args[0] if args else kwargs.get("inputs")
    ids = _of_inputs_of_ids(taken, inputs, as_ids)
    if changed and args:
        args = (ids, *args[1:])
    elif changed:
        kwargs["inputs"] = ids
    return call(self, *args, **kwargs)


def _check_kind(model: Any, taken: Any, value: Any) -> None:
    """Raises TypeError for texts in place of integers, or numbers in place of texts."""
    is_text, dtype = _is_text(value), tf.as_dtype(taken.dtype)
    if is_text in (None, dtype == tf.string) or not _has_tables(model):
        return
    if is_text:
        raise TypeError(
            f"Ids of input {taken.name!r} must be {dtype.name}. Received: texts. For texts make "
            "the table with key_type=str, and its keras.Input with dtype='string'."
        )
    raise TypeError(
        f"Ids of input {taken.name!r} must be texts. Received: numbers. For integers make the "
        "table with key_type='int64', and its keras.Input with dtype='int64'."
    )


def _is_text(value: Any) -> bool | None:
    """Whether a tensor or array has texts, not numbers; None if neither."""
    dtype = getattr(value, "dtype", None)
    if tf.is_tensor(value):
        return tf.as_dtype(dtype) == tf.string
    if not isinstance(dtype, np.dtype) or dtype.kind not in "USOiufb":
        return None
    if dtype.kind != "O":
        return dtype.kind in "US"
    first = next(iter(np.asarray(value).reshape(-1)[:1].tolist()), None)
    is_text = isinstance(first, (str, bytes))
    return is_text if is_text or isinstance(first, numbers.Real) else None


def _ids_of(taken: Any, value: Any) -> Any:
    """Converts float ids to integers, also of ragged and sparse tensors."""
    if isinstance(value, tf.RaggedTensor):
        return value.with_flat_values(_ids_of(taken, value.flat_values))
    if isinstance(value, tf.SparseTensor):
        return value.with_values(_ids_of(taken, value.values))
    below = _whole_below(value.dtype.as_numpy_dtype)
    ids = tf.cast(value, taken.dtype)
    is_id = (tf.cast(ids, value.dtype) == value) & (tf.abs(value) < below)
    wrong = tf.reshape(value, [-1])[~tf.reshape(is_id, [-1])]
    text = _refusal(taken, value.dtype.name, below)
    if not tf.executing_eagerly():
        check = tf.debugging.Assert(tf.reduce_all(is_id), [f"{text} Received:", wrong[:1]])
        with tf.control_dependencies([check]):
            return tf.identity(ids)
    if tf.size(wrong):
        raise ValueError(f"{text} Received: {wrong[0].numpy():.17g}.")
    return ids


def _refusal(taken: Any, dtype: str, below: int) -> str:
    name = tf.as_dtype(taken.dtype).name
    return (
        f"Ids of input {taken.name!r} must be {name}, or {dtype} that are whole and below {below:,}"
        ", from which on floats do not hold each integer: Keras would make some id of any other. "
        f"Give {name}, with an id of its own for what is missing."
    )


@functools.cache
def _whole_below(dtype: Any) -> int:
    """Returns the limit up to which a float dtype holds each integer."""
    powers = (1 << bits for bits in range(1, 54))
    return next(power for power in powers if float(np.array(power + 1).astype(dtype)) != power + 1)


def _has_tables(model: Any) -> bool:
    return next(tables_in(model), None) is not None


def _inputs_of(model: Any) -> Any:
    """Returns the inputs of a model, in their structure; a subclassed model has none."""
    inputs = getattr(model, "inputs", None)
    structure = getattr(model, "input", None) if inputs else None
    # A Sequential within another model returns the tensors of that call.
    is_own = {id(each) for each in tf.nest.flatten(structure)} == {
        id(each) for each in inputs or ()
    }
    return structure if is_own else inputs


def _of_inputs_of_ids(inputs: Any, x: Any, act: Callable[[Any, Any], Any]) -> Any:
    """Maps `act` over (input, data) of each input of ids, integers or texts.

    Data of another structure than the inputs are returned unchanged, for Keras to reject.
    """
    if hasattr(inputs, "dtype"):
        if isinstance(x, Mapping):
            return {name: _of_inputs_of_ids(inputs, each, act) for name, each in x.items()}
        if isinstance(x, (list, tuple)):
            return [_of_inputs_of_ids(inputs, each, act) for each in x] if len(x) == 1 else x
        dtype = tf.as_dtype(inputs.dtype)
        return act(inputs, x) if dtype.is_integer or dtype == tf.string else x
    if isinstance(inputs, (list, tuple)):
        if isinstance(x, (list, tuple)) and len(x) == len(inputs):
            return [_of_inputs_of_ids(*each, act) for each in zip(inputs, x, strict=True)]
        if len(inputs) == 1 and not isinstance(x, Mapping):
            return _of_inputs_of_ids(inputs[0], x, act)
        inputs = {getattr(each, "name", None): each for each in inputs}
    if isinstance(inputs, Mapping) and isinstance(x, Mapping):
        return {
            name: _of_inputs_of_ids(inputs[name], each, act) if name in inputs else each
            for name, each in x.items()
        }
    return x

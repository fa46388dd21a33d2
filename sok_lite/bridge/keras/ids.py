"""Ids of another kind than a model takes: floats that are none, texts for integers, are refused.

An `Input` of integers casts whatever it is given. A missing id (NaN), an infinity and a fraction
become some id that way, and nobody behind it can tell. Beside that `fit`, `evaluate` and `predict`
make float32 of the arrays of floats that they are given, in which large ids are equal. pandas makes
float64 of integers where one is missing.

So a float is an id where it is whole, and below the number from which on its dtype does not hold
each integer: 2**53 of float64, 2**24 of float32. Arrays are looked at before anything is done with
them, tensors where a model is called, in graphs by an operation that only floats have. An `Input`
casts texts as well, by an operation that there is not.
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

# Public: what a program calls with arrays of ids.
TAKING_ARRAYS = ("fit", "evaluate", "predict")


def watch_ids(model: Any) -> None:
    """Has models with tables take as ids what is one.

    Args:
      model: the class of models of a Keras.
    """
    for method in TAKING_ARRAYS:
        hooks.around(model, method, hooks.checking, refuse_arrays)
    hooks.around(model, "__call__", _calling, inherits=True)


def refuse_arrays(model: Any, x: Any = None, *_: Any, **__: Any) -> None:
    """Raises if an array has what is no id.

    Args:
      model: a model of Keras; it is looked at if it has tables and an Input of integers or texts.
      x: its inputs, as `fit` takes them.

    Raises:
      ValueError: it names the input and the first float that is none. TypeError: it names the input
        that takes integers, and texts are given, or the other way round.
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


def _calling(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a model, which gets integers for floats that are ids; others are refused."""
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
    """Raises TypeError where texts are given for integers, or numbers for texts."""
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
    """Whether a tensor or array has texts, and no numbers; None: it has neither, or is none."""
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
    """Returns the integers that a tensor of floats, ragged or sparse too, stands for."""
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
    """Returns the number below which a dtype of floats holds each integer."""
    powers = (1 << bits for bits in range(1, 54))
    return next(power for power in powers if float(np.array(power + 1).astype(dtype)) != power + 1)


def _has_tables(model: Any) -> bool:
    return next(tables_in(model), None) is not None


def _inputs_of(model: Any) -> Any:
    """Returns the inputs of a model, in their structure; one of a class of one's own has none."""
    inputs = getattr(model, "inputs", None)
    structure = getattr(model, "input", None) if inputs else None
    # A Sequential that is called in another model says what it was called with there.
    is_own = {id(each) for each in tf.nest.flatten(structure)} == {
        id(each) for each in inputs or ()
    }
    return structure if is_own else inputs


def _of_inputs_of_ids(inputs: Any, x: Any, act: Callable[[Any, Any], Any]) -> Any:
    """Returns the data of a model, with what `act` gives for that of each input of ids.

    Ids are integers or texts.

    Args:
      inputs: a structure of inputs.
      x: the data; where it is not of that structure it is for Keras to take.
      act: takes an input and its data.
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

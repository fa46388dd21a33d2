"""Ids that Keras would change on their way to a table: refused by name.

Keras makes float32 numbers of any array of floats that `fit`, `evaluate` and `predict` are given,
and of these the integers that an `Input` asks for. Ids above 2**24 become equal on the way, and
nobody behind it can tell. An array of float64 is what pandas makes of integers where one is
missing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.keras.held import tables_in

# Public: what a program calls with arrays of ids.
TAKING_ARRAYS = ("fit", "evaluate", "predict")


def refuse_changed_ids(model: Any, x: Any = None, *_: Any, **__: Any) -> None:
    """Raises if an array of floats has ids that Keras would change.

    Args:
      model: a model of Keras; it is looked at if it has tables and an Input of integers.
      x: its inputs, as `fit` takes them.

    Raises:
      ValueError: it names the input and the first such number.
    """
    for taken, value in _of_integer_inputs(model, x):
        dtype = getattr(value, "dtype", None)
        if dtype is None and hasattr(value, "dtypes"):
            dtype = np.result_type(*value.dtypes)  # a table of pandas
        if dtype is None or dtype != np.float64:
            continue
        array = np.asarray(value)
        with np.errstate(over="ignore"):
            changed = array[array.astype(np.float32) != array]  # a NaN is not itself either
        if changed.size and next(tables_in(model), None) is not None:
            name, dtype = taken.name, tf.as_dtype(taken.dtype).name
            raise ValueError(
                f"Input {name!r} takes {dtype}, and its array is float64 with "
                f"{changed.reshape(-1)[0]:.17g}. Keras would make float32 of it first: ids above "
                "16,777,216 become equal, and a missing one becomes some id. Give integers, such "
                f"as x.astype({dtype!r}), with an id of its own for what is missing."
            )


def _of_integer_inputs(model: Any, x: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the inputs that a model takes integers for, each with its data."""
    inputs = getattr(model, "inputs", None)  # a model of a class of the program's own has none
    if not inputs:
        return
    if isinstance(x, Mapping):
        pairs = [(each, x[each.name]) for each in inputs if each.name in x]
    elif isinstance(x, Sequence) and len(x) == len(inputs):
        pairs = list(zip(inputs, x, strict=True))
    else:
        pairs = [(inputs[0], x)] if len(inputs) == 1 else []
    for each, value in pairs:
        if tf.as_dtype(each.dtype).is_integer and hasattr(value, "__array__"):
            yield each, value

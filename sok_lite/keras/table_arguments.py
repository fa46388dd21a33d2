"""The arguments of a `Table`, checked."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.engine.dtypes import check_integer, is_integer
from sok_lite.engine.table.hkv_options import HkvOptions

TEXTS = "str"
_KEY_TYPES = ("int64", "int32", "uint64", TEXTS)
_ROW_DTYPES = ("float32", "float16", "bfloat16")
_OF_LOOKUP_SPARSE = "filter_ratio"


def checked_arguments(
    name: Any,
    dim: Any,
    seed: Any,
    key_type: Any,
    row_dtype: Any,
    var_type: Any,
    options: Mapping[str, Any],
    keep_texts: Any = False,
) -> tuple[str, str]:
    """Returns the names of the key type and of the rows' dtype; checks all arguments.

    Raises:
      TypeError, ValueError: an argument is not as `Table` says.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"`name` must be a string. Received: name={name!r}. A table has a name and a "
            'dimension, and no size: Table("item", 16).'
        )
    check_integer("dim", dim, 1)
    check_integer("seed", seed)
    key_type = TEXTS if key_type in (str, TEXTS, tf.string) else _name_of(key_type)
    row_dtype = _name_of(row_dtype)
    _check_among("key_type", key_type, _KEY_TYPES)
    _check_among("row_dtype", row_dtype, _ROW_DTYPES)
    _check_among("var_type", var_type, ("hbm", "hybrid"))
    if not isinstance(keep_texts, bool):
        raise TypeError(f"`keep_texts` must be a bool. Received: keep_texts={keep_texts!r}.")
    if keep_texts and key_type != TEXTS:
        raise ValueError(
            f"Only a table of key_type=str has texts to keep. Received: key_type={key_type!r} with "
            "keep_texts=True."
        )
    of_hybrid = [name for name in HkvOptions.names() if name != _OF_LOOKUP_SPARSE]
    known = of_hybrid if var_type == "hybrid" else ["init_capacity"]
    if _OF_LOOKUP_SPARSE in options:
        raise TypeError(
            f"`{_OF_LOOKUP_SPARSE}` is for sok.lookup_sparse with use_low_frequency_filter=True, "
            "and a Table is looked up by layers. Give `enter_threshold` with "
            'var_type="hybrid": a key gets a row when so many batches have had it.'
        )
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(
            f"A table of var_type={var_type!r} has no option {unknown[0]!r}. It has: "
            f"{', '.join(known)}."
        )
    return key_type, row_dtype


def _name_of(dtype: Any) -> str:
    """Returns the name of a dtype; of what is none, its text."""
    try:
        return (
            str(dtype)
            if is_integer(dtype)
            else tf.as_dtype(np.int64 if dtype is int else dtype).name
        )
    except TypeError:
        return str(dtype)


def check_names_differ(name: str, ids: Any) -> None:
    """Raises ValueError where a keras.Input that a table is called with has the table's name."""
    history = getattr(ids, "_keras_history", None)  # Keras 3 has operations, tf_keras layers
    origin = getattr(history, "operation", getattr(history, "layer", None))
    if origin is not None and origin.name == name:
        raise ValueError(
            f"The table and its keras.Input have the same name, {name!r}, but names in a model "
            f'must differ. Rename one, for example the table: sk.Table("{name}_table", ...).'
        )


def _check_among(argument: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(
            f"`{argument}` must be one of {', '.join(allowed)}. Received: {argument}={value!r}."
        )

"""The arguments of `DynamicVariable`, checked before anything is made."""

from typing import Any

import numpy as np
import tensorflow as tf

# SOK's options for its "hybrid" table. SOK ignores them for "hbm", where they have no meaning; so
# programs pass them to either. `init_capacity` is honoured, with no effect on results.
_SOK_OPTIONS = frozenset(
    {
        *("init_capacity", "max_capacity", "max_hbm_for_vectors", "max_load_factor"),
        *("max_bucket_size", "block_size", "device_id", "io_by_cpu", "evict_strategy"),
        "filter_ratio",
    }
)
_OPTIONS = _SOK_OPTIONS | {"row_shape", "seed"}


def checked_dimension(dimension: Any) -> int:
    if isinstance(dimension, (bool, np.bool_)) or not isinstance(dimension, (int, np.integer)):
        raise TypeError(
            "`dimension` must be an integer, the length of a row. "
            f"Received: dimension={dimension!r}."
        )
    if dimension < 1:
        raise ValueError(f"`dimension` must be at least 1. Received: dimension={dimension}.")
    return int(dimension)


def check_options(options: dict[str, Any]) -> None:
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise TypeError(
            f"DynamicVariable got an unexpected keyword argument {unknown[0]!r}. "
            f"Known options: {', '.join(sorted(_OPTIONS))}."
        )
    for name, least in (("seed", None), ("init_capacity", 0)):
        value = options.get(name, 0)
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r}.")
        if least is not None and value < least:
            raise ValueError(f"`{name}` must be at least {least}. Received: {name}={value}.")


def checked_mode(mode: Any) -> int:
    """Returns the rank of "localized:<rank>", or -1 for a table spread over all ranks."""
    if mode is None or mode == "distributed":
        return -1
    if isinstance(mode, str) and mode.startswith("localized:") and mode[10:].isdigit():
        return int(mode[10:])
    raise ValueError(
        "`mode` must be None, 'distributed' or 'localized:<rank>' such as 'localized:0'. "
        f"Received: mode={mode!r}."
    )


def dtype_name(dtype: Any, default: str, argument: str) -> str:
    try:
        return tf.as_dtype(default if dtype is None else dtype).name
    except TypeError as error:
        raise TypeError(
            f"`{argument}` must be a dtype such as tf.{default}. Received: {argument}={dtype!r}."
        ) from error

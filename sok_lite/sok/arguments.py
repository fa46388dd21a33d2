"""Checks the arguments of `DynamicVariable` before anything is made."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.checks import checked_dtype
from sok_lite.engine.callers import warn
from sok_lite.engine.dtypes import RowDtype, check_integer, is_integer, row_dtype
from sok_lite.engine.owner import HASH, MOD, FunctionOfKeys, OneRank, OwnerRule
from sok_lite.engine.table.hkv_options import HkvOptions, refuse_hybrid_option, round_up_capacities

# SOK's options for its "hybrid" table. SOK ignores them for "hbm", so programs pass them to both:
# for "hbm" they only warn. `init_capacity` is used, without an effect on results.
_SOK_OPTIONS = frozenset(
    {
        *("init_capacity", "max_capacity", "max_hbm_for_vectors", "max_load_factor"),
        *("max_bucket_size", "block_size", "device_id", "io_by_cpu", "evict_strategy"),
        "filter_ratio",
    }
)
_OPTIONS_OF_HYBRID = frozenset(HkvOptions.names())
_OPTIONS_OF_ALL = frozenset({"gradient_dtype", "partitioner", "row_shape", "seed"})
_OPTIONS = _SOK_OPTIONS | _OPTIONS_OF_HYBRID | _OPTIONS_OF_ALL
_ROW_DTYPES = ("float32", "float16", "bfloat16")
_warned_of: set[str] = set()


def checked_dimension(dimension: Any) -> int:
    if not is_integer(dimension):
        raise TypeError(
            "`dimension` must be an integer, the length of a row. "
            f"Received: dimension={dimension!r}."
        )
    check_integer("dimension", dimension, 1)
    return int(dimension)


def checked_options(var_type: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the table options among keyword arguments.

    TypeError: an unknown option or type. ValueError: out of range, or an option that "hbm" does not
    have in SOK either.
    """
    if var_type not in ("hbm", "hybrid"):
        raise ValueError(f"`var_type` must be 'hbm' or 'hybrid'. Received: var_type={var_type!r}.")
    if "hot_keys" in options:
        raise TypeError(
            "`hot_keys` is gone: copies of hot rows saved no bytes in training, where each step "
            "changes those rows, and made lookups that only read slower. Received: "
            f"hot_keys={options['hot_keys']!r}. Leave it out: results are the same."
        )
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise TypeError(
            f"DynamicVariable got an unexpected keyword argument {unknown[0]!r}. "
            f"Known options: {', '.join(sorted(_OPTIONS))}."
        )
    check_integer("seed", options.get("seed", 0))
    if var_type == "hybrid":
        of_hybrid = {name: options[name] for name in options if name not in _OPTIONS_OF_ALL}
        return round_up_capacities(of_hybrid)
    for name in sorted(_OPTIONS_OF_HYBRID - _SOK_OPTIONS):
        if options.get(name) is not None:
            refuse_hybrid_option(name, options[name], var_type)
    _warn_of_ignored(
        name for name in sorted(_SOK_OPTIONS - {"init_capacity"}) if options.get(name) is not None
    )
    init_capacity = options.get("init_capacity", 0)
    check_integer("init_capacity", init_capacity, 0)
    return {"init_capacity": int(init_capacity)}


def _warn_of_ignored(names: Iterable[str]) -> None:
    """Warns once per program of each option without an effect."""
    new = [name for name in names if name not in _warned_of]
    if new:
        _warned_of.update(new)
        warn(
            f"{', '.join(new)}: ignored for a table of var_type 'hbm', which keeps every key in "
            "one memory and grows without bound. Use var_type='hybrid', or leave it out. (Said "
            "once for each option.)",
        )


def plain_initializer(initializer: Any) -> Any:
    """Converts a tensor or variable of one repeated number to it; ValueError if it is not known."""
    if initializer is None:
        return ""
    if not tf.is_tensor(initializer):
        return initializer
    with tf.init_scope():
        is_known = tf.executing_eagerly() and hasattr(initializer, "numpy")
        numbers = np.asarray(initializer).reshape(-1) if is_known else np.empty(0)
    if numbers.size == 0 or (numbers != numbers[0]).any():
        raise ValueError(
            "A tensor or variable for `initializer` must hold one number, which is known when the "
            f"table is made: each element of a row begins with it. Received: {initializer!r}. Use "
            "sok.assign for rows of your own."
        )
    return numbers[0]


def checked_mode(mode: Any) -> int:
    """Returns the rank of "localized:<rank>", or -1 for a distributed table."""
    if mode is None or mode == "distributed":
        return -1
    if isinstance(mode, str) and mode.startswith("localized:") and mode[10:].isdigit():
        return int(mode[10:])
    raise ValueError(
        "`mode` must be None, 'distributed' or 'localized:<rank>' such as 'localized:0'. "
        f"Received: mode={mode!r}."
    )


def checked_owner(mode: Any, partitioner: Any) -> OwnerRule:
    """Returns the rule for owner ranks. ValueError: invalid, or given for a localized table."""
    rank = checked_mode(mode)
    if rank >= 0 and partitioner is not None:
        raise ValueError(
            f"A table on one rank has no partitioner. Received: mode={mode!r}, "
            f"partitioner={partitioner!r}. Leave one of them out."
        )
    if rank >= 0:
        return OneRank(rank)
    if callable(partitioner):
        module = getattr(partitioner, "__module__", "")
        name = getattr(partitioner, "__qualname__", type(partitioner).__qualname__)
        return FunctionOfKeys(f"{module}.{name}", partitioner)
    rules = {None: MOD, "mod": MOD, "hash": HASH}
    if not isinstance(partitioner, (str, type(None))) or partitioner not in rules:
        raise ValueError(
            "`partitioner` must be 'mod', 'hash' or a function (keys, ranks) -> ranks. "
            f"Received: partitioner={partitioner!r}."
        )
    return rules[partitioner]


def dtype_name(dtype: Any, default: str, argument: str) -> str:
    return checked_dtype(argument, default if dtype is None else dtype).name


def checked_gradient_dtype(dtype: Any) -> bool:
    """Returns whether gradients are sent as bfloat16, not float32; else raises."""
    name = dtype_name(dtype, "float32", "gradient_dtype")
    if name not in ("float32", "bfloat16"):
        raise ValueError(
            "`gradient_dtype`, in which gradients travel between ranks, must be float32 or "
            f"bfloat16. Received: {name!r}."
        )
    return name == "bfloat16"


def checked_row_dtype(dtype: Any) -> RowDtype:
    """Returns the format of rows, one of SOK's three. TypeError, ValueError: another one."""
    name = dtype_name(dtype, "float32", "dtype")
    if name not in _ROW_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_ROW_DTYPES)}. Received: {name!r}.")
    return row_dtype(name)

"""Makes initializers from words, numbers, and initializers of Keras or TensorFlow.

Those are recognized by class name and config, so that this file imports neither.
"""

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any, ParamSpec

import numpy as np

from sok_lite.engine.callers import warn
from sok_lite.engine.dtypes import as_float, is_integer
from sok_lite.engine.initializer import Initializer, RowInitializer

_P = ParamSpec("_P")
_CUT = 0.87962566103423978  # the standard deviation of N(0, 1) cut at 2
# In SOK, "random" and "" differ between the two kinds of table; other words do not.
_RANDOM = {"hbm": Initializer("uniform", -0.05, 0.05), "hybrid": Initializer("normal", 0.0, 1.0)}
_WORDS = {
    "normal": Initializer("normal", 0.0, 1.0),
    "uniform": Initializer("uniform", 0.0, 1.0),
    "ones": Initializer("constant", 1.0),
    "zeros": Initializer("constant", 0.0),
}

# Scale, mode and distribution of the initializers that depend on the shape of a dense weight.
_FAN_BASED = {
    "GlorotUniform": (1.0, "fan_avg", "uniform"),
    "GlorotNormal": (1.0, "fan_avg", "truncated_normal"),
    "HeUniform": (2.0, "fan_in", "uniform"),
    "HeNormal": (2.0, "fan_in", "truncated_normal"),
    "LecunUniform": (1.0, "fan_in", "uniform"),
    "LecunNormal": (1.0, "fan_in", "truncated_normal"),
}
# Default arguments of Keras' initializers, for those given by name.
_BY_NAME: dict[str, dict[str, float]] = {
    "RandomNormal": {"stddev": 0.05},
    "RandomUniform": {"minval": -0.05, "maxval": 0.05},
    "TruncatedNormal": {"stddev": 0.05},
    **{name: {} for name in ("Zeros", "Ones", "VarianceScaling", *_FAN_BASED)},
}


def refusing_sizes(init: Callable[_P, None]) -> Callable[_P, None]:
    """Makes an `__init__` refuse a positional `initializer` that is an integer other than 0.

    Keras' Embedding takes (rows, dim): here, the second number would become the initial value of
    every element. As a keyword argument any number is allowed.
    """
    signature = inspect.signature(init)
    place = list(signature.parameters).index("initializer")

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if len(args) > place and is_integer(args[place]) and args[place] != 0:
            made, *named, dim, number = args[: place + 1]
            called, right = (
                f"{type(made).__name__}({', '.join(map(repr, [*named, *given]))}"
                for given in ([dim, number], [number])
            )
            raise TypeError(
                f"A table has a dimension and no number of rows. Received: {called}), of which "
                f"the last number is an initial value. Write {right}) for rows of {number} "
                f"numbers, or initializer={number}.0 for rows of {dim} that begin with it."
            )
        init(*args, **kwargs)

    checked.__signature__ = signature  # type: ignore[attr-defined]  # what Keras asks for
    return checked


def make_initializer(
    spec: Any, dim: int, row_shape: tuple[int, int] | None = None, var_type: str = "hbm"
) -> Initializer | RowInitializer:
    """Makes an initializer from the argument of a user.

    Args:
      spec: one of
        * None, "" or "random": U(-0.05, 0.05) for an "hbm" table, N(0, 1) for a "hybrid" one, as
          in SOK;
        * "normal": N(0, 1); "uniform": U(0, 1); "ones"; "zeros";
        * Keras' name of one of the initializers below, such as "glorot_uniform" or
          "GlorotUniform": that initializer with its default arguments;
        * a number, or a string that is one, such as "13": every element has that value;
        * a NumPy array (dim,) of numbers: every row starts with it;
        * an initializer of Keras 3, tf_keras or TensorFlow: RandomNormal, RandomUniform,
          TruncatedNormal, Constant, Zeros, Ones, VarianceScaling, Glorot*, He*, Lecun*, with its
          seed, if any; or its class;
        * an `Initializer` or `RowInitializer`.
      dim: elements of a row.
      row_shape: (fan_in, fan_out) for VarianceScaling, Glorot*, He* and Lecun*, since a table has
        no number of rows; None: both are `dim`, as Keras counts for a vector.
      var_type: "hbm" or "hybrid".

    Raises:
      ValueError: an unknown string, initializer or parameter.
      TypeError: an object of another kind.
    """
    if row_shape is not None and not _are_fans(row_shape):
        raise ValueError(
            "`row_shape` must be (fan_in, fan_out), two numbers above 0. "
            f"Received: row_shape={row_shape!r}."
        )
    if isinstance(spec, (Initializer, RowInitializer)):
        return spec
    if spec is None:
        return _RANDOM[var_type]
    if isinstance(spec, str):
        return _from_string(spec, var_type, dim, row_shape)
    if isinstance(spec, type):
        spec = spec()
    if isinstance(spec, (numbers.Real, np.ndarray)) and not isinstance(spec, (bool, np.bool_)):
        return _constant(spec, dim)
    if hasattr(spec, "get_config"):
        return _from_config(type(spec).__name__, dict(spec.get_config()), dim, row_shape)
    raise TypeError(
        "`initializer` must be a string, a number or a Keras or TensorFlow initializer. "
        f"Received: {spec!r} of type {type(spec).__name__}."
    )


def _are_fans(row_shape: Any) -> bool:
    return (
        isinstance(row_shape, (tuple, list))
        and len(row_shape) == 2
        and all(isinstance(fan, numbers.Real) and float(fan) > 0 for fan in row_shape)
    )


def warn_of_fans(
    spec: Any,
    dim: int,
    name: str,
    rows: int = 100_000,
    elsewhere: str = "In a keras.layers.Embedding of 100,000 rows",
) -> None:
    """Warns of an initializer that depends on a shape: a row here, a whole matrix in a peer.

    Args:
      spec: as in `make_initializer`, without a `row_shape`.
      name: of the table.
      rows: of the peer's matrix.
      elsewhere: names the peer.
    """
    here, there = (make_initializer(spec, dim, shape) for shape in (None, (rows, dim)))
    if here == there or not isinstance(here, Initializer) or not isinstance(there, Initializer):
        return
    is_name = isinstance(spec, (str, type))
    what = getattr(spec, "__name__", spec) if is_name else type(spec).__name__
    warn(
        f"{what} of {name!r} depends on the shape of a whole weight. Here it is that of a row, "
        f"({dim}, {dim}): initial values have a standard deviation of {_deviation(here):.3g}. "
        f"{elsewhere} it is {_deviation(there):.3g}. Give row_shape=(fan_in, fan_out), such as "
        f"row_shape=({rows}, {dim}), or an initializer that no shape matters to, such as "
        "RandomNormal.",
        RuntimeWarning,
    )


def _deviation(made: Initializer) -> float:
    if made.kind == "uniform":
        return (made.b - made.a) / math.sqrt(12)
    return made.b * (_CUT if made.kind == "truncated_normal" else 1)


def _from_string(
    text: str, var_type: str, dim: int, row_shape: tuple[int, int] | None
) -> Initializer | RowInitializer:
    if text in ("", "random"):
        return _RANDOM[var_type]
    if text in _WORDS:
        return _WORDS[text]
    name = "".join(word[:1].upper() + word[1:] for word in text.split("_"))
    if name in _BY_NAME:
        return _from_config(name, dict(_BY_NAME[name]), dim, row_shape)
    try:
        value = float(text)
    except ValueError:
        known = ", ".join(repr(word) for word in ("random", *_WORDS))
        raise ValueError(
            f"`initializer` must be one of {known}, a number such as '0.1', or one of Keras' "
            f"names {', '.join(_BY_NAME)}, also written as 'random_normal'. "
            f"Received: initializer={text!r}."
        ) from None
    return _constant(value, dim)


def _constant(value: Any, dim: int) -> Initializer | RowInitializer:
    array = np.asarray(value)
    if array.dtype == object and isinstance(value, numbers.Real):  # a large integer
        array = np.asarray(as_float(value))
    is_row = array.shape == (dim,) and dim > 1
    if not (is_row or array.size == 1) or array.dtype.kind not in "iuf":
        raise ValueError(
            "A constant initializer must have one number for all elements of a row, or an array "
            f"of its {dim} elements. Received: {value!r}. Use `assign` for rows of your own."
        )
    if is_row:
        return RowInitializer(tuple(array.tolist()))
    number = array.reshape(()).item()
    if not math.isfinite(number):
        raise ValueError(f"A constant initializer must be finite. Received: {number}.")
    return Initializer("constant", number)


def _from_config(
    name: str, config: dict[str, Any], dim: int, row_shape: tuple[int, int] | None
) -> Initializer | RowInitializer:
    seed = _own_seed(config.get("seed"))
    if name == "Zeros":
        return Initializer("constant", 0.0)
    if name == "Ones":
        return Initializer("constant", 1.0)
    if name == "Constant":
        return _constant(_plain(config.get("value", 0.0)), dim)
    if name == "RandomUniform":
        # TF1 has maxval=None for 1.0.
        low, high = config.get("minval"), config.get("maxval")
        return Initializer("uniform", _number(low, 0.0), _number(high, 1.0), seed)
    if name in ("RandomNormal", "TruncatedNormal"):
        kind = "normal" if name == "RandomNormal" else "truncated_normal"
        mean, stddev = config.get("mean"), config.get("stddev")
        return Initializer(kind, _number(mean, 0.0), _number(stddev, 1.0), seed)
    if name in _FAN_BASED or name == "VarianceScaling":
        scale, mode, distribution = _FAN_BASED.get(name) or (
            _number(config.get("scale"), 1.0),
            config.get("mode", "fan_in"),
            config.get("distribution", "truncated_normal"),
        )
        return _variance_scaling(scale, mode, distribution, seed, dim, row_shape)
    known = ["RandomNormal", "RandomUniform", "TruncatedNormal", "Constant", "Zeros", "Ones"]
    raise ValueError(
        f"`initializer` must be one of {', '.join([*known, 'VarianceScaling', *_FAN_BASED])}. "
        f"Received: {name}. A table starts each row by itself, whatever the others: "
        "use one of these, or `assign` rows of your own."
    )


def _variance_scaling(
    scale: float,
    mode: str,
    distribution: str,
    seed: int | None,
    dim: int,
    row_shape: tuple[int, int] | None,
) -> Initializer:
    fan_in, fan_out = (float(fan) for fan in row_shape or (dim, dim))
    fans = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
    if mode not in fans:
        raise ValueError(f"`mode` must be one of {', '.join(fans)}. Received: mode={mode!r}.")
    variance = scale / max(1.0, fans[mode])
    if distribution == "uniform":
        limit = math.sqrt(3 * variance)
        return Initializer("uniform", -limit, limit, seed)
    if distribution == "untruncated_normal":
        return Initializer("normal", 0.0, math.sqrt(variance), seed)
    if distribution in ("truncated_normal", "normal"):  # "normal" is the old name of the same
        return Initializer("truncated_normal", 0.0, math.sqrt(variance) / _CUT, seed)
    raise ValueError(
        "`distribution` must be 'uniform', 'truncated_normal' or 'untruncated_normal'. "
        f"Received: distribution={distribution!r}."
    )


def _plain(value: Any) -> Any:
    # Keras 3 writes a tensor or array value as {"class_name": ..., "config": {"value": ...}}.
    while isinstance(value, dict) and "config" in value:
        config = value["config"]
        value = config.get("value") if isinstance(config, dict) else config
    return value


def _number(value: Any, missing: float) -> float:
    value = _plain(value)
    return missing if value is None else as_float(np.asarray(value).reshape(()).item())


def _own_seed(seed: Any) -> int | None:
    if isinstance(seed, dict):  # Keras 3: a serialized SeedGenerator
        seed = seed.get("config", {}).get("seed")
    return None if seed is None else int(seed)

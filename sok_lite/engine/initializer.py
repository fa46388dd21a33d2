"""First values of rows, as a pure function of (seed, table name, key, column).

The value does not depend on which rank holds the key, on the order in which keys arrive, on the
other columns, or on the processor: kernels/initializer.cu draws it from a counter-based generator
and rounds the same way everywhere.
"""

import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action

# Parameters (a, b) of each distribution; a constant has no b.
_PARAMETERS = {
    "constant": "value",
    "uniform": "low, high",
    "normal": "mean, stddev",
    "truncated_normal": "mean, stddev; cut at 2 stddev",
}


@dataclass(frozen=True)
class Initializer:
    """How the rows of new keys start.

    Attributes:
      kind: "constant" (value a), "uniform" (from a to b), "normal" or "truncated_normal" (mean a,
        standard deviation b; the latter cut at two standard deviations).
      a, b: the parameters.
      seed: the seed that the user's initializer came with, which a table then takes in place of the
        job's; None: the job's.
    """

    kind: str
    a: float = 0.0
    b: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in _PARAMETERS:
            raise ValueError(
                f"`kind` must be one of {', '.join(_PARAMETERS)}. Received: kind={self.kind!r}."
            )
        # Finite as float32 too: 1e39 would be an infinity in the rows.
        largest = float(np.finfo(np.float32).max)
        ordered = self.kind != "uniform" or self.a <= self.b
        spread = self.kind not in ("normal", "truncated_normal") or self.b >= 0
        bounded = (
            abs(self.a) <= largest and abs(self.b) <= largest and abs(self.b - self.a) <= largest
        )
        if not (ordered and spread and bounded):
            raise ValueError(
                f"A {self.kind} initializer takes finite float32 numbers "
                f"({_PARAMETERS[self.kind]}), low <= high, stddev >= 0. "
                f"Received: {self.a}, {self.b}."
            )
        # A kernel takes a float for f32 and an int for i64.
        object.__setattr__(self, "a", float(self.a))
        object.__setattr__(self, "b", float(self.b))

    def filling(
        self, backend: Backend, store: Any, rows: Array, keys: Array, table_seed: int
    ) -> Action:
        """Prepares to write the initial values of rows into the `value` column.

        Args:
          backend: where the arrays live.
          store: the row store.
          rows: (n,) uint32, distinct; absent ones are skipped. They are read when the action is
            taken.
          keys: (n,) int64, the key of each row.
          table_seed: 64 bits that stand for the seed and the table's name.
        """
        name = f"init_{self.kind}_{store.row_dtype.suffix}"
        column = store.column("value").pointers
        place = (column, store.chunk_shift, store.dim, rows)
        source = () if self.kind == "constant" else (keys, _as_i64(table_seed))
        return backend.prepared(name, len(rows), *place, *source, *self._scalars(), len(rows))

    def fill(self, backend: Backend, store: Any, rows: Array, keys: Array, table_seed: int) -> None:
        """Writes the initial values of rows into the `value` column; see `filling`."""
        self.filling(backend, store, rows, keys, table_seed)()

    def values(self, backend: Backend, keys: Array, dim: int, table_seed: int) -> Array:
        """Returns the first values of keys, (n, dim) float32, without a table.

        Args:
          backend: where the arrays live.
          keys: (n,) int64.
          dim: elements of a row.
          table_seed: 64 bits that stand for the seed and the table's name.
        """
        shape = (len(keys), dim)
        if self.kind == "constant":
            return backend.xp.full(shape, self.a, dtype=np.float32)
        out = backend.xp.empty(shape, dtype=np.float32)
        seed = _as_i64(table_seed)
        name = f"draw_{self.kind}"
        backend.launch(name, len(keys), out, dim, keys, seed, *self._scalars(), len(keys))
        return out

    def _scalars(self) -> tuple[float, ...]:
        if self.kind == "constant":
            return (self.a,)
        if self.kind == "uniform":
            return self.a, self.b - self.a, self.b
        return self.a, self.b


def _as_i64(seed: int) -> int:
    seed = int(seed) & 0xFFFFFFFFFFFFFFFF
    return seed - (1 << 64) if seed >> 63 else seed


# "random" and "" mean different things in SOK's two kinds of table; the other words mean one thing.
_RANDOM = {"hbm": Initializer("uniform", -0.05, 0.05), "hybrid": Initializer("normal", 0.0, 1.0)}
_WORDS = {
    "normal": Initializer("normal", 0.0, 1.0),
    "uniform": Initializer("uniform", 0.0, 1.0),
    "ones": Initializer("constant", 1.0),
    "zeros": Initializer("constant", 0.0),
}

# scale, mode, distribution of the initializers that depend on the shape of a dense weight.
_FAN_BASED = {
    "GlorotUniform": (1.0, "fan_avg", "uniform"),
    "GlorotNormal": (1.0, "fan_avg", "truncated_normal"),
    "HeUniform": (2.0, "fan_in", "uniform"),
    "HeNormal": (2.0, "fan_in", "truncated_normal"),
    "LecunUniform": (1.0, "fan_in", "uniform"),
    "LecunNormal": (1.0, "fan_in", "truncated_normal"),
}


def make_initializer(
    spec: Any, dim: int, row_shape: tuple[int, int] | None = None, var_type: str = "hbm"
) -> Initializer:
    """Makes an initializer of what a user may give.

    Args:
      spec: one of
        * None, "" or "random": U(-0.05, 0.05) for an "hbm" table, N(0, 1) for a "hybrid" one, as
          in SOK;
        * "normal": N(0, 1); "uniform": U(0, 1); "ones"; "zeros";
        * a number, or a string that is one, such as "13": every element has that value;
        * an initializer of Keras 3, tf_keras or TensorFlow: RandomNormal, RandomUniform,
          TruncatedNormal, Constant, Zeros, Ones, VarianceScaling, Glorot*, He*, Lecun*, or its
          class. Its seed is used where it has one;
        * an `Initializer`.
      dim: elements of a row.
      row_shape: (fan_in, fan_out) for VarianceScaling, Glorot*, He* and Lecun*: a table has no
        number of rows they could take.
      var_type: "hbm" or "hybrid".

    Raises:
      ValueError: an unknown string, initializer or parameter.
      TypeError: something else altogether.
    """
    if isinstance(spec, Initializer):
        return spec
    if spec is None:
        return _RANDOM[var_type]
    if isinstance(spec, str):
        return _from_string(spec, var_type)
    if isinstance(spec, type):
        spec = spec()
    if isinstance(spec, (numbers.Real, np.ndarray)) and not isinstance(spec, (bool, np.bool_)):
        return _constant(spec)
    if hasattr(spec, "get_config"):
        return _from_object(spec, dim, row_shape)
    raise TypeError(
        "`initializer` must be a string, a number or a Keras or TensorFlow initializer. "
        f"Received: {spec!r} of type {type(spec).__name__}."
    )


def _from_string(text: str, var_type: str) -> Initializer:
    if text in ("", "random"):
        return _RANDOM[var_type]
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = float(text)
    except ValueError:
        known = ", ".join(repr(word) for word in ("random", *_WORDS))
        raise ValueError(
            f"`initializer` must be one of {known}, or a number such as '0.1'. "
            f"Received: initializer={text!r}."
        ) from None
    return _constant(value)


def _constant(value: Any) -> Initializer:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "iuf":
        raise ValueError(
            "A constant initializer must have one number for all elements of a row. "
            f"Received: {value!r}. Use `assign` for rows of your own."
        )
    number = float(array.reshape(()))
    if not math.isfinite(number):
        raise ValueError(f"A constant initializer must be finite. Received: {number}.")
    return Initializer("constant", number)


def _from_object(spec: Any, dim: int, row_shape: tuple[int, int] | None) -> Initializer:
    name = type(spec).__name__
    config = dict(spec.get_config())
    seed = _own_seed(config.get("seed"))
    if name == "Zeros":
        return Initializer("constant", 0.0)
    if name == "Ones":
        return Initializer("constant", 1.0)
    if name == "Constant":
        return _constant(_plain(config.get("value", 0.0)))
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
        return _variance_scaling(name, scale, mode, distribution, seed, dim, row_shape)
    known = ["RandomNormal", "RandomUniform", "TruncatedNormal", "Constant", "Zeros", "Ones"]
    raise ValueError(
        f"`initializer` must be one of {', '.join([*known, 'VarianceScaling', *_FAN_BASED])}. "
        f"Received: {name}. A table starts each row by itself, whatever the others: "
        "use one of these, or `assign` rows of your own."
    )


def _variance_scaling(
    name: str,
    scale: float,
    mode: str,
    distribution: str,
    seed: int | None,
    dim: int,
    row_shape: tuple[int, int] | None,
) -> Initializer:
    if row_shape is None:
        raise ValueError(
            f"{name} depends on the shape of the whole weight, and a table has no fixed number of "
            "rows. Give the shape it should count with, row_shape=(fan_in, fan_out), such as "
            f"(1000000, {dim}), or use RandomNormal, RandomUniform or TruncatedNormal."
        )
    if not isinstance(row_shape, (tuple, list)) or len(row_shape) != 2 or min(row_shape) <= 0:
        raise ValueError(
            "`row_shape` must be (fan_in, fan_out), two numbers above 0. "
            f"Received: row_shape={row_shape!r}."
        )
    fan_in, fan_out = (float(fan) for fan in row_shape)
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
        # The standard deviation of N(0, 1) cut at 2, which the cut would take away.
        return Initializer("truncated_normal", 0.0, math.sqrt(variance) / 0.87962566103423978, seed)
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
    return missing if value is None else float(np.asarray(value).reshape(()))


def _own_seed(seed: Any) -> int | None:
    if isinstance(seed, dict):  # Keras 3: a serialized SeedGenerator
        seed = seed.get("config", {}).get("seed")
    return None if seed is None else int(seed)

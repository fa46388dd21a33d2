"""Update rules of optimizers: hyper-parameters here, arithmetic in kernels/update/.

A rule is a frozen dataclass. Its flags select the variants that TensorFlow has under one name, so
that the optimizer of a user can be mapped exactly:

| optimizer | rule |
|---|---|
| every `SGD(momentum)` | `Momentum(momentum, nesterov)`; `SGD()` where momentum is 0 |
| tf.compat.v1 `MomentumOptimizer` | `Momentum(momentum, nesterov, lr_in_state=False)` |
| Keras 3, tf_keras `Adagrad` | `Adagrad(epsilon, initial_accumulator)` |
| tf_keras legacy `Adagrad` | `Adagrad(..., epsilon_inside_root=False)` |
| tf.compat.v1 `AdagradOptimizer` | `Adagrad(epsilon=0.0, ...)` |
| every `Adam`, `AdamW` | `Adam`, `AdamW`; v1 has epsilon 1e-8, Keras 1e-7 |
| Keras 3, tf_keras `RMSprop` | `RMSprop(rho, momentum, epsilon, centered)` |
| tf_keras legacy `RMSprop` | the same, and `epsilon_inside_root=False` where momentum is 0 |
| tf.compat.v1 `RMSPropOptimizer` | `RMSprop(rho=decay, ..., initial_rms=1.0)` |
| every `Ftrl` | `Ftrl(...)` |

Only the touched rows change, states included ("lazy"): a row that has no gradient in a step keeps
its momentum as it is.

Rows of 16 bits lose steps smaller than half a unit of their last place where they are rounded to
nearest. `StochasticRounding` lets them move by the right amount on average.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, publish
from sok_lite.engine.dtypes import RowDtype

Scalars = tuple[float | int, ...]


def _require(holds: bool, rule: object, name: str, expected: str) -> None:
    if not holds:
        raise ValueError(
            f"`{name}` of {type(rule).__name__} must be {expected}. "
            f"Received: {name}={getattr(rule, name)!r}."
        )


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """What every rule has.

    Attributes:
      weight_decay: decoupled weight decay of the touched rows: first `w -= w * lr * weight_decay`,
        then the step, as in Keras 3.
    """

    weight_decay: float = 0.0

    kernel: ClassVar[str]
    # Columns in the kernel's order; one that `states` lacks is passed as a null pointer.
    columns: ClassVar[tuple[str, ...]] = ()
    # Whether a step depends on its number: the states are then worth nothing without the count.
    counts_steps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is bool or field.type == "bool":
                _require(isinstance(value, (bool, np.bool_)), self, field.name, "True or False")
                continue
            if isinstance(value, (bool, np.bool_)) or not isinstance(
                value, (int, float, np.integer, np.floating)
            ):
                raise TypeError(
                    f"`{field.name}` of {type(self).__name__} must be a number. "
                    f"Received: {field.name}={value!r} of type {type(value).__name__}."
                )
            _require(math.isfinite(value), self, field.name, "finite")
            object.__setattr__(self, field.name, float(value))
        _require(self.weight_decay >= 0, self, "weight_decay", ">= 0")

    @property
    def states(self) -> dict[str, float]:
        """Returns the state columns beside the values, and what a new row has in them."""
        return {}

    def scalars(self, learning_rate: float, step: int) -> Scalars:
        """Returns the numbers the kernel takes, in its order.

        Args:
          learning_rate: of this step, after any schedule.
          step: 1 for the first update (an optimizer's `iterations + 1`).
        """
        raise NotImplementedError

    def _decay(self, learning_rate: float) -> float:
        return learning_rate * self.weight_decay


@dataclass(frozen=True, kw_only=True)
class SGD(UpdateRule):
    """`w -= lr * g`."""

    kernel: ClassVar[str] = "update_sgd"

    def scalars(self, learning_rate: float, step: int) -> Scalars:
        return learning_rate, self._decay(learning_rate)


@dataclass(frozen=True, kw_only=True)
class Momentum(UpdateRule):
    """SGD with momentum.

    Attributes:
      momentum: in [0, 1].
      nesterov: Nesterov's momentum.
      lr_in_state: True as in Keras, `m = momentum * m - lr * g; w += m`; False as in TF1,
        `m = momentum * m + g; w -= lr * m`. They differ when the learning rate changes.
    """

    momentum: float = 0.9
    nesterov: bool = False
    lr_in_state: bool = True

    kernel: ClassVar[str] = "update_momentum"
    columns: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(0 <= self.momentum <= 1, self, "momentum", "in [0, 1]")

    @property
    def states(self) -> dict[str, float]:
        return {"momentum": 0.0}

    def scalars(self, learning_rate: float, step: int) -> Scalars:
        decay = self._decay(learning_rate)
        return learning_rate, decay, self.momentum, int(self.nesterov), int(self.lr_in_state)


@dataclass(frozen=True, kw_only=True)
class Adagrad(UpdateRule):
    """`accumulator += g^2; w -= lr * g / sqrt(accumulator + epsilon)`.

    Attributes:
      epsilon: keeps the root away from 0.
      epsilon_inside_root: False: `/ (sqrt(accumulator) + epsilon)`.
      initial_accumulator: the accumulator of a new row. Not 0 where epsilon is: 0 / 0 is a NaN.
    """

    epsilon: float = 1e-7
    epsilon_inside_root: bool = True
    initial_accumulator: float = 0.1

    kernel: ClassVar[str] = "update_adagrad"
    columns: ClassVar[tuple[str, ...]] = ("accumulator",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.epsilon >= 0, self, "epsilon", ">= 0")
        _require(self.initial_accumulator >= 0, self, "initial_accumulator", ">= 0")
        if self.epsilon == 0:
            _require(
                self.initial_accumulator > 0, self, "initial_accumulator", "> 0 where epsilon is 0"
            )

    @property
    def states(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator}

    def scalars(self, learning_rate: float, step: int) -> Scalars:
        decay = self._decay(learning_rate)
        return learning_rate, decay, self.epsilon, int(self.epsilon_inside_root)


@dataclass(frozen=True, kw_only=True)
class Adam(UpdateRule):
    """Adam (Kingma and Ba, 2014) as Keras and TF1 have it.

    `alpha = lr * sqrt(1 - beta_2^t) / (1 - beta_1^t); w -= alpha * m / (sqrt(v) + epsilon)`.

    Attributes:
      beta_1, beta_2: in [0, 1).
      epsilon: "epsilon hat" of the paper.
      amsgrad: divides by the largest `v` so far, in the state "vhat".
      adaptive_epsilon: multiplies epsilon by sqrt(1 - beta_2^t), an option of tf_keras' Adam.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    amsgrad: bool = False
    adaptive_epsilon: bool = False

    kernel: ClassVar[str] = "update_adam"
    columns: ClassVar[tuple[str, ...]] = ("m", "v", "vhat")
    counts_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(0 <= self.beta_1 < 1, self, "beta_1", "in [0, 1)")
        _require(0 <= self.beta_2 < 1, self, "beta_2", "in [0, 1)")
        _require(self.epsilon > 0, self, "epsilon", "> 0")

    @property
    def states(self) -> dict[str, float]:
        states = {"m": 0.0, "v": 0.0}
        if self.amsgrad:
            states["vhat"] = 0.0
        return states

    def scalars(self, learning_rate: float, step: int) -> Scalars:
        # In float32 steps as TensorFlow has them: 1 - 0.999 has 5 digits there, and those reach the
        # rows. Only the power is taken in float64, where 1 ulp of it does not show in 1 - power.
        one = np.float32(1)
        power_1 = np.float32(float(np.float32(self.beta_1)) ** step)
        power_2 = np.float32(float(np.float32(self.beta_2)) ** step)
        correction_2 = np.sqrt(one - power_2)
        alpha = np.float32(learning_rate) * correction_2 / (one - power_1)
        epsilon = self.epsilon * float(correction_2) if self.adaptive_epsilon else self.epsilon
        return (
            float(alpha),
            self._decay(learning_rate),
            1 - self.beta_1,
            1 - self.beta_2,
            epsilon,
        )


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2017)."""

    weight_decay: float = 0.004


@dataclass(frozen=True, kw_only=True)
class RMSprop(UpdateRule):
    """`rms = rho * rms + (1 - rho) * g^2; w -= lr * g / sqrt(rms + epsilon)`.

    Attributes:
      rho: in [0, 1].
      momentum: in [0, 1]; where it is not 0, `step = momentum * step + lr * g / sqrt(...)` and
        `w -= step`, with the step in the state "momentum".
      epsilon: keeps the root away from 0.
      centered: divides by the root of the variance, `rms - mean_grad^2`.
      epsilon_inside_root: False: `/ (sqrt(rms) + epsilon)`.
      initial_rms: the `rms` of a new row: 0 in Keras, 1 in TF1.
    """

    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False
    epsilon_inside_root: bool = True
    initial_rms: float = 0.0

    kernel: ClassVar[str] = "update_rmsprop"
    columns: ClassVar[tuple[str, ...]] = ("rms", "mean_grad", "momentum")

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(0 <= self.rho <= 1, self, "rho", "in [0, 1]")
        _require(0 <= self.momentum <= 1, self, "momentum", "in [0, 1]")
        _require(self.epsilon > 0, self, "epsilon", "> 0")
        _require(self.initial_rms >= 0, self, "initial_rms", ">= 0")

    @property
    def states(self) -> dict[str, float]:
        states = {"rms": self.initial_rms}
        if self.centered:
            states["mean_grad"] = 0.0
        if self.momentum:
            states["momentum"] = 0.0
        return states

    def scalars(self, learning_rate: float, step: int) -> Scalars:
        return (
            learning_rate,
            self._decay(learning_rate),
            self.rho,
            1 - self.rho,
            self.epsilon,
            self.momentum,
            int(self.epsilon_inside_root),
        )


@dataclass(frozen=True, kw_only=True)
class Ftrl(UpdateRule):
    """FTRL-proximal (McMahan et al., KDD 2013) as Keras and TF1 have it.

    Its learning rate must be > 0.

    Attributes:
      learning_rate_power: <= 0; -0.5 is the paper's and the fastest.
      initial_accumulator: the accumulator of a new row.
      l1, l2: regularization strengths.
      l2_shrinkage: a magnitude penalty, applied to the touched rows only.
      beta: of the paper.
    """

    learning_rate_power: float = -0.5
    initial_accumulator: float = 0.1
    l1: float = 0.0
    l2: float = 0.0
    l2_shrinkage: float = 0.0
    beta: float = 0.0

    kernel: ClassVar[str] = "update_ftrl"
    columns: ClassVar[tuple[str, ...]] = ("accumulator", "linear")

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.learning_rate_power <= 0, self, "learning_rate_power", "<= 0")
        for name in ("initial_accumulator", "l1", "l2", "l2_shrinkage", "beta"):
            _require(getattr(self, name) >= 0, self, name, ">= 0")

    @property
    def states(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator, "linear": 0.0}

    def scalars(self, learning_rate: float, step: int) -> Scalars:
        if learning_rate <= 0:
            raise ValueError(
                "Ftrl divides by its learning rate, which must be > 0. "
                f"Received: learning_rate={learning_rate}. Start a warm-up above 0."
            )
        return (
            learning_rate,
            self._decay(learning_rate),
            -self.learning_rate_power,
            self.l1,
            self.l2 + self.beta / (2 * learning_rate),
            self.l2_shrinkage,
        )


class StochasticRounding(NamedTuple):
    """Random bits by which float16 and bfloat16 rows are rounded, up or down, exact in the mean.

    They depend on seed, key, column and step alone: not on the row number or the order of the rows.

    Attributes:
      keys: (u,) int64, C-contiguous; the key of each row.
      seed: 64 bits that stand for the table.
    """

    keys: Array
    seed: int


def count_nonfinite(backend: Backend, grads: Array, rows: Array | None = None) -> Array:
    """Counts the gradient rows that have a NaN or an infinity.

    Args:
      backend: where the arrays live.
      grads: (u, dim) float32.
      rows: (u,) uint32; absent rows are not counted. None: every row counts.

    Returns:
      A 0-d integer array of the backend: `int()` of it waits for the GPU.
    """
    num_rows, dim = grads.shape
    flags = backend.xp.zeros(num_rows, dtype=np.int32)
    backend.launch("count_nonfinite", num_rows, rows, grads, dim, flags, num_rows)
    return flags.sum()


def apply_rule(
    table: Any,
    rule: UpdateRule,
    rows: Array,
    grads: Array,
    learning_rate: float,
    step: int,
    on_nonfinite: str = "allow",
    rounding: StochasticRounding | None = None,
) -> Array:
    """Applies one optimizer step to rows of a table, in place; see `updating`.

    Returns:
      The number of rows whose gradient had a NaN or an infinity, as a 0-d integer array of the
      backend: `int()` of it waits for the GPU.
    """
    count = table.backend.xp.zeros(1, np.int64)
    publish(updating(table, rule, rows, grads, learning_rate, step, count, on_nonfinite, rounding))
    return count[0]


def updating(
    table: Any,
    rule: UpdateRule,
    rows: Array,
    grads: Array,
    learning_rate: float,
    step: int,
    num_nonfinite: Array,
    on_nonfinite: str = "allow",
    rounding: StochasticRounding | None = None,
) -> list[Action]:
    """Prepares one optimizer step for rows of a table.

    State columns that the table lacks are made at once.

    Args:
      table: a table, or anything with `backend` and `store`.
      rule: the update rule.
      rows: (u,) uint32, distinct; absent ones are skipped.
      grads: (u, dim) float32, one per row, already summed over duplicates.
      learning_rate: of this step, after any schedule.
      step: 1 for the first update.
      num_nonfinite: (1,) int64, grows by the rows whose gradient has a NaN or an infinity.
      on_nonfinite: "allow": rows whose gradient has a NaN or an infinity are updated all the same,
        and counted. "error": they raise before anything has changed, at the cost of one more pass
        over the gradients.
      rounding: of float16 and bfloat16 rows; None: to nearest even. Float32 rows, and states, are
        never rounded further.

    Raises:
      TypeError: `rule`, or the dtype of rows, gradients or the rounding's keys.
      ValueError: shapes, learning rate, step, or `on_nonfinite`.
      FloatingPointError: a gradient is not finite and `on_nonfinite` is "error".
    """
    backend, store = table.backend, table.store
    rows, grads = _checked(backend, store.dim, rule, rows, grads)
    learning_rate = float(learning_rate)
    check_step(learning_rate, step)
    scalars = rule.scalars(learning_rate, int(step))
    kernel, noise = _variant(store.row_dtype, rule, rows, rounding)
    if on_nonfinite == "error":
        _raise_if_nonfinite(backend, grads, rows)
    elif on_nonfinite != "allow":
        raise ValueError(f"`on_nonfinite` must be 'allow' or 'error'. Received: {on_nonfinite!r}.")

    states = rule.states
    for name, initial in states.items():
        store.ensure_state(name, initial)
    num_rows = len(rows)
    flags = backend.xp.zeros(num_rows, dtype=np.int32)
    update = backend.prepared(
        kernel,
        num_rows,
        store.column("value").pointers,
        *(store.column(name).pointers if name in states else None for name in rule.columns),
        store.chunk_shift,
        store.dim,
        rows,
        grads,
        flags,
        *noise,
        int(step),
        *scalars,
        num_rows,
    )
    return [update, backend.prepared("count_flags", num_rows, flags, num_nonfinite, num_rows)]


def _checked(
    backend: Backend, dim: int, rule: UpdateRule, rows: Array, grads: Array
) -> tuple[Array, Array]:
    if not isinstance(rule, UpdateRule):
        raise TypeError(
            f"`rule` must be one of {', '.join(sorted(RULES))}. Received: {type(rule).__name__}."
        )
    if rows.dtype != np.uint32 or grads.dtype != np.float32:
        raise TypeError(
            "`rows` must be uint32 and `grads` float32. "
            f"Received: rows {rows.dtype}, grads {grads.dtype}."
        )
    if rows.ndim != 1 or grads.shape != (rows.shape[0], dim):
        raise ValueError(
            f"`rows` must have shape (u,) and `grads` (u, {dim}). "
            f"Received: rows {rows.shape}, grads {grads.shape}."
        )
    return backend.xp.ascontiguousarray(rows), backend.xp.ascontiguousarray(grads)


def _variant(
    dtype: RowDtype, rule: UpdateRule, rows: Array, rounding: StochasticRounding | None
) -> tuple[str, tuple[Array | None, int]]:
    """Returns the kernel for a row format and a rounding, and its keys and seed."""
    if rounding is None or dtype.name == "float32":
        return f"{rule.kernel}_{dtype.suffix}", (None, 0)
    keys = rounding.keys
    if keys.dtype != np.int64:
        raise TypeError(f"The keys of `rounding` must be int64. Received: {keys.dtype}.")
    if keys.shape != rows.shape:
        raise ValueError(
            f"`rounding` must have one key for each of {len(rows)} rows. Received: {keys.shape}."
        )
    return f"{rule.kernel}_stochastic_{dtype.suffix}", (keys, rounding.seed)


def check_step(learning_rate: float, step: int) -> None:
    """Raises ValueError for a learning rate that is not finite or a step below 1."""
    if not math.isfinite(learning_rate):
        raise ValueError(f"`learning_rate` must be finite. Received: {learning_rate!r}.")
    if step < 1:
        raise ValueError(f"`step` must be >= 1, 1 for the first update. Received: {step}.")


def _raise_if_nonfinite(backend: Backend, grads: Array, rows: Array) -> None:
    count = int(count_nonfinite(backend, grads, rows))
    if count:
        raise FloatingPointError(
            f"{count} of {len(rows)} gradient rows have a NaN or an infinity; no row was changed. "
            "Clip the gradients or lower the learning rate, or use on_nonfinite='allow'."
        )


RULES: dict[str, Callable[..., UpdateRule]] = {
    rule.__name__: rule for rule in (SGD, Momentum, Adagrad, Adam, AdamW, RMSprop, Ftrl)
}

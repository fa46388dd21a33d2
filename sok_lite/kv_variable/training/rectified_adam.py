"""Rectified Adam (RAdam) for dense variables; the engine has the rule for table rows."""

from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.checks import checked_strength

_SETTINGS = ("decay", "total_steps", "warmup_proportion", "min_lr")


class RectifiedAdamOptimizer(tf.compat.v1.train.AdamOptimizer):
    """Adam that ignores the second moment in the first steps, until its estimate is reliable.

    Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", ICLR 2020. A sparse
    gradient changes only its rows, of dense variables too.

    Args:
      learning_rate: a number, a tensor or a callable.
      beta1, beta2, epsilon: numbers, tensors or callables; beta1 in [0, 1), beta2 in (0.6, 1),
        epsilon above 0.
      use_locking, name: of `tf.compat.v1.train.AdamOptimizer`.
      decay: divides the learning rate by `1 + decay * t` in step t, 1 for the first.
      weight_decay: decoupled: a row or variable loses `learning rate * weight_decay` of itself.
      amsgrad: divides by the largest second moment so far.
      sma_threshold: minimum number of gradients averaged in the second moment; >= 4.
      total_steps: > 0: the learning rate rises from 0 in the first `warmup_proportion` of these
        steps, then falls to `min_lr`.
      warmup_proportion: in [0, 1].
      min_lr: the learning rate after `total_steps`.
      use_nesterov: steps by `beta1 * m + (1 - beta1) * g` instead of m.

    Raises:
      TypeError, ValueError: an argument is out of range.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        epsilon: Any = 1e-7,
        decay: float = 0.0,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        sma_threshold: float = 5.0,
        total_steps: int = 0,
        warmup_proportion: float = 0.1,
        min_lr: float = 0.0,
        use_locking: bool = False,
        use_nesterov: bool = False,
        name: str = "RectifiedAdam",
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, use_locking, name)
        self._check_numbers(beta1, beta2, epsilon)
        values = (decay, total_steps, warmup_proportion, min_lr)
        for argument, value in zip(_SETTINGS, values, strict=True):
            setattr(self, f"_{argument}", checked_strength(self, argument, value))
        self.weight_decay = checked_strength(self, "weight_decay", weight_decay)
        if self._warmup_proportion > 1:
            raise ValueError(
                "`warmup_proportion` of RectifiedAdamOptimizer must be in [0, 1]. "
                f"Received: {warmup_proportion!r}."
            )
        self.sma_threshold = checked_strength(self, "sma_threshold", sma_threshold)
        if self.sma_threshold < 4:
            raise ValueError(
                "`sma_threshold` of RectifiedAdamOptimizer must be >= 4: below, the rectification "
                f"is no number. Received: {sma_threshold!r}."
            )
        self.amsgrad, self._use_nesterov = bool(amsgrad), bool(use_nesterov)

    def _check_numbers(self, beta1: Any, beta2: Any, epsilon: Any) -> None:
        """Raises if a number is out of range. Row updates check tensors and callables."""
        limits = (("beta1", beta1, None, 1.0), ("beta2", beta2, 0.6, 1.0))
        for name, value, low, high in (*limits, ("epsilon", epsilon, 0.0, float("inf"))):
            if callable(value) or tf.is_tensor(value):
                continue
            number = checked_strength(self, name, value)
            what = f"`{name}` of RectifiedAdamOptimizer"
            if low is not None and number <= low:
                raise ValueError(f"{what} must be above {low:g}. Received: {value!r}.")
            if number >= high:
                raise ValueError(f"{what} must be below {high:g}. Received: {value!r}.")

    def learning_rate_after(self, iterations: Any) -> Any:
        """Returns the learning rate after some steps, a number or a tensor."""
        rate = self._lr() if callable(self._lr) else self._lr
        if not self._decay and not self._total_steps:
            return rate
        step = tf.cast(iterations, tf.float64) + 1
        rate = _float64(rate) / (1 + self._decay * step)
        if not self._total_steps:
            return rate
        warmup = self._total_steps * self._warmup_proportion
        falling = max(self._total_steps - warmup, 1.0)
        fallen = rate + (self._min_lr - rate) / falling * tf.minimum(step - warmup, falling)
        return tf.where(step <= warmup, rate * step / max(warmup, 1e-30), fallen)

    # ---------------------------------------------------------------- of tf.compat.v1.train

    def _create_slots(self, var_list: Any) -> None:
        super()._create_slots(var_list)
        first = min(var_list, key=lambda variable: variable.name)
        self._create_non_slot_variable(initial_value=np.int64(1), name="step", colocate_with=first)
        if self.amsgrad:
            for variable in var_list:
                self._zeros_slot(variable, "vhat", self._name)

    def _step_variable(self) -> Any:
        with tf.init_scope():
            here = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
            return self._get_non_slot_variable("step", graph=here)

    def _apply_dense(self, grad: Any, var: Any) -> Any:
        return self._update_op(grad, var, None)

    def _resource_apply_dense(self, grad: Any, var: Any) -> Any:
        return self._update_op(grad, var, None)

    def _apply_sparse(self, grad: Any, var: Any) -> Any:
        return self._update_op(grad.values, var, grad.indices)

    def _resource_apply_sparse(self, grad: Any, var: Any, indices: Any) -> Any:
        return self._update_op(grad, var, indices)

    def _update_op(self, grad: Any, var: Any, indices: Any) -> Any:
        """Returns the update of a variable, or of its distinct rows (k,)."""
        dtype = var.dtype.base_dtype

        def read(variable: Any) -> Any:
            return tf.identity(variable) if indices is None else tf.gather(variable, indices)

        def written(variable: Any, value: Any) -> Any:
            locking = {"use_locking": self._use_locking}
            if indices is None:
                return tf.compat.v1.assign(variable, value, **locking)
            return tf.compat.v1.scatter_update(variable, indices, value, **locking)

        factors = self._factors()
        rate, beta_1, rest_1, beta_2, rest_2, correction_1, correction_2, rectifier, epsilon = (
            tf.cast(each, dtype) for each in factors
        )
        slots = {name: self.get_slot(var, name) for name in ("m", "v")}
        old, m, v = read(var), read(slots["m"]), read(slots["v"])
        m = beta_1 * m + rest_1 * grad
        v = beta_2 * v + rest_2 * tf.square(grad)
        new, largest = {"m": m, "v": v}, v
        if self.amsgrad:
            slots["vhat"] = self.get_slot(var, "vhat")
            largest = new["vhat"] = tf.maximum(read(slots["vhat"]), v)
        mean = (beta_1 * m + rest_1 * grad if self._use_nesterov else m) / correction_1
        root = tf.sqrt(largest / correction_2) + epsilon
        change = tf.where(rectifier > 0, rectifier * mean / root, mean)
        change += tf.cast(self.weight_decay, dtype) * old
        # Read everything before writing.
        with tf.control_dependencies([change, *new.values()]):
            written_slots = [written(slots[name], value) for name, value in new.items()]
            return tf.group(written(var, old - rate * change), *written_slots)

    def _factors(self) -> tuple[Any, ...]:
        """Returns the factors of a step in float64: in float32, 1 - 0.999 has 5 digits."""
        step = tf.cast(tf.identity(self._step_variable()), tf.float64)
        beta_1, beta_2 = _float64(self._beta1), _float64(self._beta2)
        correction_1, correction_2 = 1 - beta_1**step, 1 - beta_2**step
        longest = 2 / (1 - beta_2) - 1
        length = longest - 2 * step * (1 - correction_2) / correction_2
        is_known = length >= self.sma_threshold
        # A valid number even if unused: the root of a negative one would be NaN.
        safe = tf.where(is_known, length, longest)
        known = (safe - 4) * (safe - 2) * longest / ((longest - 4) * (longest - 2) * safe)
        rectifier = tf.where(is_known, tf.sqrt(known), tf.zeros_like(known))  # 0: not used
        return (
            self.learning_rate_after(step - 1),
            beta_1,
            1 - beta_1,
            beta_2,
            1 - beta_2,
            correction_1,
            correction_2,
            rectifier,
            _float64(self._epsilon),
        )

    def _finish(self, update_ops: Any, name_scope: Any) -> Any:
        with tf.control_dependencies(update_ops):
            step = self._step_variable()
            counted = tf.compat.v1.assign(step, step + 1, use_locking=self._use_locking)
        return super()._finish([*update_ops, counted], name_scope)


def _float64(value: Any) -> tf.Tensor:
    value = value() if callable(value) else value
    return tf.cast(value, tf.float64) if tf.is_tensor(value) else tf.constant(value, tf.float64)

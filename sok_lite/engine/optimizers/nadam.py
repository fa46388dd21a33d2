"""Nadam.

* Keras 3, tf_keras `Nadam`: `Nadam(...)`
* tf_keras legacy `Nadam`: `Nadam(..., schedule_decay=0.004)`, its `decay`
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sok_lite.engine.optimizers.rule import BelowOne, NotNegative, Positive, Scalars, UpdateRule

# (beta_1, schedule_decay) -> (step, product of the momenta up to it): the next step goes on there.
_products: dict[tuple[float, float], tuple[int, float]] = {}


@dataclass(frozen=True, kw_only=True)
class Nadam(UpdateRule):
    """Adam with Nesterov's momentum (Dozat, 2016), whose momentum grows with the steps.

    With `u(t) = beta_1 * (1 - 0.5 * 0.96^(schedule_decay * t))` and U(t) their product up to t,
    `w -= lr * (u(t + 1) * m / (1 - U(t + 1)) + (1 - u(t)) * g / (1 - U(t))) / (sqrt(v / (1 -
    beta_2^t)) + epsilon)`.

    Attributes:
      beta_1, beta_2: in [0, 1).
      epsilon: keeps the root away from 0.
      schedule_decay: how fast the momentum grows.
    """

    beta_1: BelowOne = 0.9
    beta_2: BelowOne = 0.999
    epsilon: Positive = 1e-7
    schedule_decay: NotNegative = 1.0

    kernel: ClassVar[str] = "update_nadam"
    columns: ClassVar[tuple[str, ...]] = ("m", "v")
    counts_steps: ClassVar[bool] = True
    lazy: ClassVar[str] = "steps by `m`; fading of `m` and `v`"

    def scalars(self, learning_rate: float, step: int) -> Scalars:
        momentum, coming = self._momentum(step), self._momentum(step + 1)
        product = self._product(step)
        # In float32 as TensorFlow has it; see Adam. Nadam has 1 - beta_2 in float32 too, and the
        # errors of the two, each 1e-5 of it, cancel.
        beta_2 = float(np.float32(self.beta_2))
        power_2 = np.float32(beta_2**step)
        return (
            learning_rate,
            self.decay_at(learning_rate),
            1 - self.beta_1,
            1 - beta_2,
            self.epsilon,
            coming / (1 - product * coming),
            (1 - momentum) / (1 - product),
            float(np.float32(1) - power_2),
        )

    def _momentum(self, step: int) -> float:
        return self.beta_1 * (1 - 0.5 * 0.96 ** (self.schedule_decay * step))

    def _product(self, step: int) -> float:
        """Returns the product of the momenta of all steps up to this one."""
        known = self.beta_1, self.schedule_decay
        last, product = _products.get(known, (0, 1.0))
        if last > step:
            last, product = 0, 1.0
        for number in range(last + 1, step + 1):
            product *= self._momentum(number)
            if product < 1e-20:  # 1 - product is 1
                break
        if len(_products) >= 64:  # settings that change in each step
            _products.clear()
        _products[known] = step, product
        return product

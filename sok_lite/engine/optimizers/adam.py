"""Adam and AdamW.

* every `Adam`: `Adam(...)`; epsilon is 1e-7 in Keras and 1e-8 in TF1
* every `AdamW`: `AdamW(...)`, which is `Adam` with another default of `weight_decay`
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sok_lite.engine.optimizers.rule import BelowOne, NotNegative, Positive, Scalars, UpdateRule


def corrections(beta_1: float, beta_2: float, step: int) -> tuple[np.float32, np.float32]:
    """Returns 1 - beta_1^step and sqrt(1 - beta_2^step)."""
    # In float32 steps as TensorFlow has them: 1 - 0.999 has 5 digits there, and those reach the
    # rows. Only the power is taken in float64, where 1 ulp of it does not show in 1 - power.
    one = np.float32(1)
    power_1 = np.float32(float(np.float32(beta_1)) ** step)
    power_2 = np.float32(float(np.float32(beta_2)) ** step)
    return one - power_1, np.sqrt(one - power_2)


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

    beta_1: BelowOne = 0.9
    beta_2: BelowOne = 0.999
    epsilon: Positive = 1e-7
    amsgrad: bool = False
    adaptive_epsilon: bool = False

    kernel: ClassVar[str] = "update_adam"
    columns: ClassVar[tuple[str, ...]] = ("m", "v", "vhat")
    counts_steps: ClassVar[bool] = True
    lazy: ClassVar[str] = "steps by `m`; fading of `m` and `v`"

    @property
    def states(self) -> dict[str, float]:
        states = {"m": 0.0, "v": 0.0}
        if self.amsgrad:
            states["vhat"] = 0.0
        return states

    def scalars(self, learning_rate: float, step: int) -> Scalars:
        correction_1, correction_2 = corrections(self.beta_1, self.beta_2, step)
        alpha = np.float32(learning_rate) * correction_2 / correction_1
        epsilon = self.epsilon * float(correction_2) if self.adaptive_epsilon else self.epsilon
        return (
            float(alpha),
            self.decay_at(learning_rate),
            1 - self.beta_1,
            1 - self.beta_2,
            epsilon,
        )


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2017)."""

    weight_decay: NotNegative = 0.004

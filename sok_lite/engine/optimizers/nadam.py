"""Nadam.

* Keras 3, tf_keras `Nadam`: `Nadam(...)`
* tf_keras legacy `Nadam`: `Nadam(..., schedule_decay=0.004)`, its `decay`
"""

from dataclasses import dataclass

from sok_lite.engine.optimizers.rule import BelowOne, NotNegative, Positive, UpdateRule


@dataclass(frozen=True, kw_only=True)
class Nadam(UpdateRule):
    """Adam with Nesterov's momentum (Dozat, 2016), whose momentum grows with the steps.

    With `u(t) = beta_1 * (1 - 0.5 * 0.96^(schedule_decay * t))` and U(t) their product up to t,
    `w -= lr * (u(t + 1) * m / (1 - U(t + 1)) + (1 - u(t)) * g / (1 - U(t))) / (sqrt(v / (1 -
    beta_2^t)) + epsilon)`.

    Attributes:
      schedule_decay: how fast the momentum grows.
    """

    beta_1: BelowOne = 0.9
    beta_2: BelowOne = 0.999
    epsilon: Positive = 1e-7
    schedule_decay: NotNegative = 1.0

    kernel = "update_nadam"
    columns = ("m", "v")
    counts_steps = True
    lazy = "steps by `m`; fading of `m` and `v`"

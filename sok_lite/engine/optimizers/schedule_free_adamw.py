"""`ScheduleFreeAdamW` of Keras 3."""

from dataclasses import dataclass
from typing import Annotated

from sok_lite.engine.optimizers.rule import BelowOne, NotNegative, Positive, UpdateRule


@dataclass(frozen=True, kw_only=True)
class ScheduleFreeAdamW(UpdateRule):
    """AdamW with averages in place of a learning rate schedule (Defazio et al., 2024), as in Keras.

    A value w interpolates between z, which takes the steps, and x, the mean of all z so far:
    `w = (1 - beta_1) * z + beta_1 * x`. In step t `z -= lr * g / (sqrt(v / (1 - beta_2^t)) +
    epsilon); x = (w - (1 - beta_1) * z) / beta_1; x += (z - x) / t`, and w follows. The paper gets
    x from the z before the step. Keras 3.15 means to, but on TensorFlow it reads the variable after
    it has changed; rows do the same.

    z begins equal to w. The state "ahead" is `z - w`, which is 0 in a new row.

    Attributes:
      warmup_steps: over which the learning rate of z rises linearly.
    """

    beta_1: Annotated[float, "in (0, 1)", lambda beta: 0 < beta < 1] = 0.9
    beta_2: BelowOne = 0.999
    epsilon: Positive = 1e-8
    warmup_steps: NotNegative = 0.0

    kernel = "update_schedule_free_adamw"
    columns = ("ahead", "v")
    counts_steps = True
    lazy = "the way of the mean to `z`; fading of `v`"

"""Schedule-free AdamW.

* Keras 3 `ScheduleFreeAdamW`: `ScheduleFreeAdamW(...)`
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from sok_lite.engine.optimizers.rule import BelowOne, NotNegative, Positive, UpdateRule


@dataclass(frozen=True, kw_only=True)
class ScheduleFreeAdamW(UpdateRule):
    """AdamW whose averages stand in for a learning rate schedule (Defazio et al., 2024), as Keras.

    A value w lies between z, which takes the steps, and x, the mean of all z so far:
    `w = (1 - beta_1) * z + beta_1 * x`. In step t `z -= lr * g / (sqrt(v / (1 - beta_2^t)) +
    epsilon); x = (w - (1 - beta_1) * z) / beta_1; x += (z - x) / t`, and w follows. The paper finds
    x by the z before the step. Keras 3.15 means to, but on TensorFlow reads its variable after it
    has changed; rows go where its variables go.

    z begins where w does. So the state is how far it is ahead, `z - w`, which is 0 in any new row.

    Attributes:
      beta_1: in (0, 1).
      beta_2: in [0, 1).
      epsilon: keeps the root away from 0.
      warmup_steps: the learning rate of z rises to its full height in so many steps.
    """

    beta_1: Annotated[float, "in (0, 1)", lambda beta: 0 < beta < 1] = 0.9
    beta_2: BelowOne = 0.999
    epsilon: Positive = 1e-8
    warmup_steps: NotNegative = 0.0

    kernel: ClassVar[str] = "update_schedule_free_adamw"
    columns: ClassVar[tuple[str, ...]] = ("ahead", "v")
    counts_steps: ClassVar[bool] = True
    lazy: ClassVar[str] = "the way of the mean to `z`; fading of `v`"

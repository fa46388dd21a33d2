"""Adam that sets whole rows to 0.

* `sok_lite.optimizers.GroupAdam`: `GroupAdam(...)`
"""

from dataclasses import dataclass
from typing import ClassVar

from sok_lite.engine.optimizers.adam import corrections
from sok_lite.engine.optimizers.group import GroupRule
from sok_lite.engine.optimizers.rule import BelowOne, Positive, Scalars


@dataclass(frozen=True, kw_only=True)
class GroupAdam(GroupRule):
    """Adam with a sparse group lasso (TFPlus' GroupAdam, version 4); see group.py.

    `alpha = lr * sqrt(1 - beta_2^t) / (1 - beta_1^t); step = alpha * m;
    divisor = sqrt(v) + epsilon`. TFPlus adds epsilon in the first step of all only, which is Adam
    for the rows of that step alone; here it is in every divisor.

    Attributes:
      beta_1, beta_2: in [0, 1).
      epsilon: "epsilon hat", as of Adam.
    """

    beta_1: BelowOne = 0.9
    beta_2: BelowOne = 0.999
    epsilon: Positive = 1e-7

    kernel: ClassVar[str] = "update_group_adam"
    columns: ClassVar[tuple[str, ...]] = ("linear", "m", "v")
    lazy: ClassVar[str] = "steps by `m`; fading; penalties"
    counts_steps: ClassVar[bool] = True

    def scalars(self, learning_rate: float, step: int) -> Scalars:
        correction_1, correction_2 = corrections(self.beta_1, self.beta_2, step)
        return (
            learning_rate * float(correction_2) / float(correction_1),
            self.decay_at(learning_rate),
            1 - self.beta_1,
            1 - self.beta_2,
            self.epsilon,
            *self.penalties_at(learning_rate),
        )

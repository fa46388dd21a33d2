"""`AdagradDAOptimizer` of tf.compat.v1: Adagrad with dual averaging."""

from dataclasses import dataclass
from typing import Annotated

from sok_lite.engine.optimizers.rule import NotNegative, Positive, UpdateRule


@dataclass(frozen=True, kw_only=True)
class AdagradDA(UpdateRule):
    """Adagrad with dual averaging (Duchi, Hazan and Singer, 2011) as TF1 has it.

    With G the sum of the gradients, S that of their squares and of `initial_accumulator`, and T the
    number of the step, `w = -lr * sign(G) * max(|G| - T * l1, 0) / (T * l2 * lr + sqrt(S))`: the
    first step overwrites the initial row.

    Attributes:
      global_step: T, counted by the program.
    """

    l1: NotNegative = 0.0
    l2: NotNegative = 0.0
    initial_accumulator: Positive = 0.1
    global_step: Annotated[float, ">= 1", lambda t: t >= 1] = 1.0

    kernel = "update_adagrad_da"
    columns = ("gradient_accumulator", "gradient_squared_accumulator")
    counter = "global_step"
    lazy = "value to 0; l1, l2"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.weight_decay == 0, "weight_decay", "0: a step does not read the row")

    @property
    def states(self) -> dict[str, float]:
        return {
            "gradient_accumulator": 0.0,
            "gradient_squared_accumulator": self.initial_accumulator,
        }

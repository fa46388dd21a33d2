"""`Ftrl` of every framework: FTRL-proximal."""

from dataclasses import dataclass
from typing import Annotated

from sok_lite.engine.optimizers.rule import NotNegative, UpdateRule


@dataclass(frozen=True, kw_only=True)
class Ftrl(UpdateRule):
    """FTRL-proximal (McMahan et al., KDD 2013) as Keras and TF1 have it.

    Its learning rate must be > 0.

    Attributes:
      learning_rate_power: <= 0; -0.5 is the paper's and the fastest.
      l2_shrinkage: a magnitude penalty.
      beta: of the paper.
    """

    learning_rate_power: Annotated[float, "<= 0", lambda power: power <= 0] = -0.5
    initial_accumulator: NotNegative = 0.1
    l1: NotNegative = 0.0
    l2: NotNegative = 0.0
    l2_shrinkage: NotNegative = 0.0
    beta: NotNegative = 0.0

    kernel = "update_ftrl"
    columns = ("accumulator", "linear")
    lazy = "value to 0; l2 shrinkage"
    refused_rate = (
        "divides by its learning rate, which must be > 0. "
        "Received: learning_rate={}. Start a warm-up above 0."
    )

    @property
    def states(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator, "linear": 0.0}

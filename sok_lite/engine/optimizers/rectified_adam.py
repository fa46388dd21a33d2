"""`sok_lite.kv_variable.training.RectifiedAdamOptimizer`: Rectified Adam, RAdam."""

from dataclasses import dataclass
from typing import Annotated

from sok_lite.engine.optimizers.rule import BelowOne, Positive, UpdateRule


@dataclass(frozen=True, kw_only=True)
class RectifiedAdam(UpdateRule):
    """Adam that leaves `v` out of the first steps, where its variance is high (Liu et al., 2020).

    With `inf = 2 / (1 - beta_2) - 1` and `length = inf - 2 t beta_2^t / (1 - beta_2^t)`, the number
    of gradients that `v` averages: where `length >= sma_threshold`
    `w -= lr * r * m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + epsilon)`, with
    `r = sqrt((length - 4) (length - 2) inf / ((inf - 4) (inf - 2) length))`; else
    `w -= lr * m / (1 - beta_1^t)`.

    Attributes:
      beta_2: > 0.6, for inf > 4.
      sma_threshold: >= 4, below which r is not a number.
      amsgrad: divides by the largest `v` so far, in the state "vhat".
      nesterov: steps by `beta_1 m + (1 - beta_1) g` in place of m.
    """

    beta_1: BelowOne = 0.9
    beta_2: BelowOne = 0.999
    epsilon: Positive = 1e-7
    sma_threshold: Annotated[float, ">= 4", lambda length: length >= 4] = 5.0
    amsgrad: bool = False
    nesterov: bool = False

    kernel = "update_rectified_adam"
    columns = ("m", "v", "vhat")
    counts_steps = True
    lazy = "steps by `m`; fading of `m` and `v`"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.beta_2 > 0.6, "beta_2", "> 0.6")

    @property
    def states(self) -> dict[str, float]:
        return dict.fromkeys(self.columns if self.amsgrad else self.columns[:2], 0.0)

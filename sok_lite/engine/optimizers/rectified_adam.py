"""Rectified Adam, RAdam.

* `sok_lite.kv_variable.training.RectifiedAdamOptimizer`: `RectifiedAdam(...)`
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from sok_lite.engine.optimizers.rule import BelowOne, Positive, UpdateRule


@dataclass(frozen=True, kw_only=True)
class RectifiedAdam(UpdateRule):
    """Adam whose first steps leave `v` out, until enough is known of it (Liu et al., 2020).

    With `inf = 2 / (1 - beta_2) - 1` and `length = inf - 2 t beta_2^t / (1 - beta_2^t)`, how many
    gradients `v` is the mean of: where `length >= sma_threshold`
    `w -= lr * r * m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + epsilon)`, with
    `r = sqrt((length - 4) (length - 2) inf / ((inf - 4) (inf - 2) length))`; else
    `w -= lr * m / (1 - beta_1^t)`.

    Attributes:
      beta_1, beta_2: in [0, 1); beta_2 > 0.6, for inf > 4.
      epsilon: keeps the root away from 0.
      sma_threshold: >= 4, below which r is no number.
      amsgrad: divides by the largest `v` so far, in the state "vhat".
      nesterov: steps by `beta_1 m + (1 - beta_1) g` in place of m.
    """

    beta_1: BelowOne = 0.9
    beta_2: BelowOne = 0.999
    epsilon: Positive = 1e-7
    sma_threshold: Annotated[float, ">= 4", lambda length: length >= 4] = 5.0
    amsgrad: bool = False
    nesterov: bool = False

    kernel: ClassVar[str] = "update_rectified_adam"
    columns: ClassVar[tuple[str, ...]] = ("m", "v", "vhat")
    counts_steps: ClassVar[bool] = True
    lazy: ClassVar[str] = "steps by `m`; fading of `m` and `v`"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.beta_2 > 0.6, "beta_2", "> 0.6")

    @property
    def states(self) -> dict[str, float]:
        return dict.fromkeys(self.columns if self.amsgrad else self.columns[:2], 0.0)

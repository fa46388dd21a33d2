"""Adamax.

* every `Adamax`: `Adamax(...)`
"""

from dataclasses import dataclass
from typing import ClassVar

from sok_lite.engine.optimizers.rule import BelowOne, Positive, UpdateRule


@dataclass(frozen=True, kw_only=True)
class Adamax(UpdateRule):
    """Adam by the infinity norm (Kingma and Ba, 2014, section 7.1).

    `v = max(beta_2 * v, |g|); w -= lr / (1 - beta_1^t) * m / (v + epsilon)`.

    Attributes:
      beta_1, beta_2: in [0, 1).
      epsilon: keeps the norm away from 0.
    """

    beta_1: BelowOne = 0.9
    beta_2: BelowOne = 0.999
    epsilon: Positive = 1e-7

    kernel: ClassVar[str] = "update_adamax"
    columns: ClassVar[tuple[str, ...]] = ("m", "v")
    counts_steps: ClassVar[bool] = True
    lazy: ClassVar[str] = "steps by `m`; fading of `m` and `v`"

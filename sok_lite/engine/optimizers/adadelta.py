"""Adadelta.

* every `Adadelta`: `Adadelta(...)`; epsilon is 1e-7 in Keras and 1e-8 in TF1
"""

from dataclasses import dataclass
from typing import ClassVar

from sok_lite.engine.optimizers.rule import Positive, UpdateRule, UpToOne


@dataclass(frozen=True, kw_only=True)
class Adadelta(UpdateRule):
    """Adadelta (Zeiler, 2012) with a learning rate, as Keras and TF1 have it.

    `accumulator` is the fading mean of g^2, `delta_accumulator` that of the steps' squares, and
    `w -= lr * g * sqrt(delta_accumulator + epsilon) / sqrt(accumulator + epsilon)`.

    Attributes:
      rho: in [0, 1].
      epsilon: keeps the roots away from 0.
    """

    rho: UpToOne = 0.95
    epsilon: Positive = 1e-7

    kernel: ClassVar[str] = "update_adadelta"
    columns: ClassVar[tuple[str, ...]] = ("accumulator", "delta_accumulator")
    lazy: ClassVar[str] = "fading of both"

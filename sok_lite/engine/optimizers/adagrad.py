"""Adagrad.

* Keras 3, tf_keras `Adagrad`: `Adagrad(epsilon, initial_accumulator)`
* tf_keras legacy `Adagrad`: `Adagrad(..., epsilon_inside_root=False)`
* tf.compat.v1 `AdagradOptimizer`: `Adagrad(epsilon=0.0, ...)`
"""

from dataclasses import dataclass
from typing import ClassVar

from sok_lite.engine.optimizers.rule import NotNegative, UpdateRule


@dataclass(frozen=True, kw_only=True)
class Adagrad(UpdateRule):
    """`accumulator += g^2; w -= lr * g / sqrt(accumulator + epsilon)`.

    Attributes:
      epsilon: keeps the root away from 0.
      epsilon_inside_root: False: `/ (sqrt(accumulator) + epsilon)`.
      initial_accumulator: the accumulator of a new row. Not 0 where epsilon is: 0 / 0 is a NaN.
    """

    epsilon: NotNegative = 1e-7
    epsilon_inside_root: bool = True
    initial_accumulator: NotNegative = 0.1

    kernel: ClassVar[str] = "update_adagrad"
    columns: ClassVar[tuple[str, ...]] = ("accumulator",)
    lazy: ClassVar[str] = "nothing"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon == 0:
            self.require(
                self.initial_accumulator > 0, "initial_accumulator", "> 0 where epsilon is 0"
            )

    @property
    def states(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator}

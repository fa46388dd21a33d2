"""Adagrad.

* Keras 3, tf_keras `Adagrad`: `Adagrad(epsilon, initial_accumulator)`
* tf_keras legacy `Adagrad`: `Adagrad(..., epsilon_inside_root=False)`
* tf.compat.v1 `AdagradOptimizer`: `Adagrad(epsilon=0.0, ...)`
"""

from dataclasses import dataclass

from sok_lite.engine.optimizers.rule import NotNegative, UpdateRule


@dataclass(frozen=True, kw_only=True)
class Adagrad(UpdateRule):
    """`accumulator += g^2; w -= lr * g / sqrt(accumulator + epsilon)`.

    Attributes:
      epsilon_inside_root: False: `/ (sqrt(accumulator) + epsilon)`.
      initial_accumulator: of a new row. > 0 where epsilon is 0, as 0 / 0 is a NaN.
    """

    epsilon: NotNegative = 1e-7
    epsilon_inside_root: bool = True
    initial_accumulator: NotNegative = 0.1

    kernel = "update_adagrad"
    columns = ("accumulator",)
    lazy = "nothing"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon == 0:
            self.require(
                self.initial_accumulator > 0, "initial_accumulator", "> 0 where epsilon is 0"
            )

    @property
    def states(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator}

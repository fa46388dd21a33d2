"""FTRL-proximal that sets whole table rows to 0."""

from typing import Any

import tensorflow as tf

from sok_lite.bridge.checks import checked_strength


class SparseGroupFtrlOptimizer(tf.compat.v1.train.FtrlOptimizer):
    """FTRL with a sparse group lasso on table rows, also called Group Adagrad.

    With `l21_regularization_strength=0`, and for dense variables, it is
    `tf.compat.v1.train.FtrlOptimizer`.

    Args:
      learning_rate, learning_rate_power, initial_accumulator_value: of FtrlOptimizer.
      l1_regularization_strength, l2_regularization_strength, use_locking, name: of FtrlOptimizer.
      accum_name, linear_name, l2_shrinkage_regularization_strength: of FtrlOptimizer.
      l21_regularization_strength: of the row norm times the root of the dimension; sets whole rows
        to 0.

    Raises:
      TypeError, ValueError: an argument is out of range.
    """

    def __init__(
        self,
        learning_rate: Any,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l21_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "SparseGroupFtrl",
        accum_name: str | None = None,
        linear_name: str | None = None,
        l2_shrinkage_regularization_strength: float = 0.0,
    ) -> None:
        super().__init__(
            learning_rate,
            learning_rate_power,
            initial_accumulator_value,
            l1_regularization_strength,
            l2_regularization_strength,
            use_locking,
            name,
            accum_name,
            linear_name,
            l2_shrinkage_regularization_strength,
        )
        self.l21_regularization_strength = checked_strength(
            self, "l21_regularization_strength", l21_regularization_strength
        )

"""Adam, by TFPlus' signature."""

from typing import Any

import tensorflow as tf

from sok_lite.kv_variable.training.arguments import check_version


class AdamOptimizer(tf.compat.v1.train.AdamOptimizer):
    """Adam. Only the rows of tables that have a gradient change.

    Args:
      learning_rate, beta1, beta2, epsilon, use_locking, name: of
        `tf.compat.v1.train.AdamOptimizer`.
      version: 1 or 2: where TFPlus keeps the states, which makes no difference here.

    Raises:
      ValueError: another version.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        epsilon: Any = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
        version: int = 1,
    ) -> None:
        check_version(self, version, (1, 2))
        super().__init__(learning_rate, beta1, beta2, epsilon, use_locking, name)

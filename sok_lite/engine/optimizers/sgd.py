"""`SGD` without momentum of every framework; `GradientDescentOptimizer` of tf.compat.v1."""

from dataclasses import dataclass

from sok_lite.engine.optimizers.rule import UpdateRule


@dataclass(frozen=True, kw_only=True)
class SGD(UpdateRule):
    """`w -= lr * g`."""

    kernel = "update_sgd"
    lazy = "nothing"

"""SGD without momentum.

* every `SGD` whose momentum is 0: `SGD()`
* tf.compat.v1 `GradientDescentOptimizer`: `SGD()`
"""

from dataclasses import dataclass

from sok_lite.engine.optimizers.rule import UpdateRule


@dataclass(frozen=True, kw_only=True)
class SGD(UpdateRule):
    """`w -= lr * g`."""

    kernel = "update_sgd"
    lazy = "nothing"

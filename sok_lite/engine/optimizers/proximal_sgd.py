"""Proximal gradient descent.

* tf.compat.v1 `ProximalGradientDescentOptimizer`: `ProximalSGD(l1, l2)`
"""

from dataclasses import dataclass

from sok_lite.engine.optimizers.rule import NotNegative, UpdateRule


@dataclass(frozen=True, kw_only=True)
class ProximalSGD(UpdateRule):
    """`p = w - lr * g; w = sign(p) * max(|p| - lr * l1, 0) / (1 + lr * l2)` (Duchi and Singer,
    "Efficient Learning using Forward-Backward Splitting", 2009).

    Attributes:
      l1, l2: regularization strengths, of the touched rows.
    """

    l1: NotNegative = 0.0
    l2: NotNegative = 0.0

    kernel = "update_proximal_sgd"
    lazy = "l1 and l2"

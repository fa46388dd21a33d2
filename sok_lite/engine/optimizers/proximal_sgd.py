"""`ProximalGradientDescentOptimizer` of tf.compat.v1."""

from dataclasses import dataclass

from sok_lite.engine.optimizers.rule import NotNegative, UpdateRule


@dataclass(frozen=True, kw_only=True)
class ProximalSGD(UpdateRule):
    """Proximal gradient descent (Duchi and Singer, 2009).

    `p = w - lr * g; w = sign(p) * max(|p| - lr * l1, 0) / (1 + lr * l2)`.
    """

    l1: NotNegative = 0.0
    l2: NotNegative = 0.0

    kernel = "update_proximal_sgd"
    lazy = "l1 and l2"

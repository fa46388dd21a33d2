"""Proximal Adagrad.

* tf.compat.v1 `ProximalAdagradOptimizer`: `ProximalAdagrad(l1, l2, initial_accumulator)`
"""

from dataclasses import dataclass

from sok_lite.engine.optimizers.rule import NotNegative, Positive, UpdateRule


@dataclass(frozen=True, kw_only=True)
class ProximalAdagrad(UpdateRule):
    """`accumulator += g^2; r = lr / sqrt(accumulator); p = w - r * g`, and `w = sign(p) *
    max(|p| - r * l1, 0) / (1 + r * l2)` (Duchi, Hazan and Singer, 2011).

    Attributes:
      l1, l2: regularization strengths, of the touched rows.
      initial_accumulator: the accumulator of a new row, > 0.
    """

    l1: NotNegative = 0.0
    l2: NotNegative = 0.0
    initial_accumulator: Positive = 0.1

    kernel = "update_proximal_adagrad"
    columns = ("accumulator",)
    lazy = "l1 and l2"

    @property
    def states(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator}

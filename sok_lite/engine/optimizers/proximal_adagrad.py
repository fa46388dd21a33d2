"""`ProximalAdagradOptimizer` of tf.compat.v1."""

from dataclasses import dataclass

from sok_lite.engine.optimizers.rule import NotNegative, Positive, UpdateRule


@dataclass(frozen=True, kw_only=True)
class ProximalAdagrad(UpdateRule):
    """Proximal Adagrad (Duchi, Hazan and Singer, 2011).

    `accumulator += g^2; r = lr / sqrt(accumulator); p = w - r * g;
    w = sign(p) * max(|p| - r * l1, 0) / (1 + r * l2)`.
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

"""`Lion` of Keras 3 and tf_keras."""

from dataclasses import dataclass

from sok_lite.engine.optimizers.rule import UpdateRule, UpToOne


@dataclass(frozen=True, kw_only=True)
class Lion(UpdateRule):
    """Lion (Chen et al., 2023).

    `w -= lr * sign(beta_1 * m + (1 - beta_1) * g)`, then `m = beta_2 * m + (1 - beta_2) * g`.
    """

    beta_1: UpToOne = 0.9
    beta_2: UpToOne = 0.99

    kernel = "update_lion"
    columns = ("m",)
    lazy = "steps by `m`, which fades"

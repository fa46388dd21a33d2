"""`Adamax` of every framework."""

from dataclasses import dataclass

from sok_lite.engine.optimizers.rule import BelowOne, Positive, UpdateRule


@dataclass(frozen=True, kw_only=True)
class Adamax(UpdateRule):
    """Adam by the infinity norm (Kingma and Ba, 2014, section 7.1).

    `v = max(beta_2 * v, |g|); w -= lr / (1 - beta_1^t) * m / (v + epsilon)`.
    """

    beta_1: BelowOne = 0.9
    beta_2: BelowOne = 0.999
    epsilon: Positive = 1e-7

    kernel = "update_adamax"
    columns = ("m", "v")
    counts_steps = True
    lazy = "steps by `m`; fading of `m` and `v`"

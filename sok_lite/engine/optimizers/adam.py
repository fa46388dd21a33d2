"""Adam and AdamW.

* every `Adam`: `Adam(...)`; epsilon is 1e-7 in Keras and 1e-8 in TF1
* every `AdamW`: `AdamW(...)`, which is `Adam` with another default of `weight_decay`
"""

from dataclasses import dataclass

from sok_lite.engine.optimizers.rule import BelowOne, NotNegative, Positive, UpdateRule


@dataclass(frozen=True, kw_only=True)
class Adam(UpdateRule):
    """Adam (Kingma and Ba, 2014) as Keras and TF1 have it.

    `alpha = lr * sqrt(1 - beta_2^t) / (1 - beta_1^t); w -= alpha * m / (sqrt(v) + epsilon)`.

    Attributes:
      epsilon: "epsilon hat" of the paper.
      amsgrad: divides by the largest `v` so far, in the state "vhat".
      adaptive_epsilon: multiplies epsilon by sqrt(1 - beta_2^t), an option of tf_keras' Adam.
      has_products: keeps the powers of beta as float32 products, one factor in each step, as TF1
        does: after ten steps a row differs by 1e-5 of its change.
      has_m: False: rows have no `m`, which is the gradient where beta_1 is 0.
    """

    beta_1: BelowOne = 0.9
    beta_2: BelowOne = 0.999
    epsilon: Positive = 1e-7
    amsgrad: bool = False
    adaptive_epsilon: bool = False
    has_products: bool = False
    has_m: bool = True

    kernel = "update_adam"
    columns = ("m", "v", "vhat")
    counts_steps = True
    lazy = "steps by `m`; fading of `m` and `v`"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.has_m:
            self.require(self.beta_1 == 0, "beta_1", "0 where rows have no `m`")
            self.require(not self.amsgrad, "amsgrad", "False where rows have no `m`")

    @property
    def states(self) -> dict[str, float]:
        states = {"m": 0.0, "v": 0.0} if self.has_m else {"v": 0.0}
        if self.amsgrad:
            states["vhat"] = 0.0
        return states


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2017)."""

    weight_decay: NotNegative = 0.004

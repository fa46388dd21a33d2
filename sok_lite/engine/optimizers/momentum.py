"""SGD with momentum.

* every `SGD(momentum)`: `Momentum(momentum, nesterov)`
* tf.compat.v1 `MomentumOptimizer`: `Momentum(momentum, nesterov, lr_in_state=False)`
"""

from dataclasses import dataclass

from sok_lite.engine.optimizers.rule import UpdateRule, UpToOne


@dataclass(frozen=True, kw_only=True)
class Momentum(UpdateRule):
    """SGD with momentum.

    Attributes:
      lr_in_state: True as in Keras, `m = momentum * m - lr * g; w += m`; False as in TF1,
        `m = momentum * m + g; w -= lr * m`. They differ when the learning rate changes.
    """

    momentum: UpToOne = 0.9
    nesterov: bool = False
    lr_in_state: bool = True

    kernel = "update_momentum"
    columns = ("momentum",)
    lazy = "steps by momentum, which fades"

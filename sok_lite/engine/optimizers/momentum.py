"""SGD with momentum.

* every `SGD(momentum)`: `Momentum(momentum, nesterov)`
* tf.compat.v1 `MomentumOptimizer`: `Momentum(momentum, nesterov, lr_in_state=False)`
"""

from dataclasses import dataclass
from typing import ClassVar

from sok_lite.engine.optimizers.rule import UpdateRule, UpToOne


@dataclass(frozen=True, kw_only=True)
class Momentum(UpdateRule):
    """SGD with momentum.

    Attributes:
      momentum: in [0, 1].
      nesterov: Nesterov's momentum.
      lr_in_state: True as in Keras, `m = momentum * m - lr * g; w += m`; False as in TF1,
        `m = momentum * m + g; w -= lr * m`. They differ when the learning rate changes.
    """

    momentum: UpToOne = 0.9
    nesterov: bool = False
    lr_in_state: bool = True

    kernel: ClassVar[str] = "update_momentum"
    columns: ClassVar[tuple[str, ...]] = ("momentum",)
    lazy: ClassVar[str] = "steps by momentum, which fades"

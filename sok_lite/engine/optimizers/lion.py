"""Lion.

* Keras 3, tf_keras `Lion`: `Lion(...)`
"""

from dataclasses import dataclass
from typing import ClassVar

from sok_lite.engine.optimizers.rule import UpdateRule, UpToOne


@dataclass(frozen=True, kw_only=True)
class Lion(UpdateRule):
    """Lion (Chen et al., 2023): `w -= lr * sign(beta_1 * m + (1 - beta_1) * g)`, then
    `m = beta_2 * m + (1 - beta_2) * g`.

    Attributes:
      beta_1, beta_2: in [0, 1].
    """

    beta_1: UpToOne = 0.9
    beta_2: UpToOne = 0.99

    kernel: ClassVar[str] = "update_lion"
    columns: ClassVar[tuple[str, ...]] = ("m",)
    lazy: ClassVar[str] = "steps by `m`, which fades"

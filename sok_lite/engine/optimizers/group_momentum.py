"""SGD with momentum that sets whole rows to 0.

* `sok_lite.optimizers.GroupMomentum`: `GroupMomentum(momentum, nesterov)`
"""

from dataclasses import dataclass
from typing import ClassVar

from sok_lite.engine.optimizers.group import GroupRule
from sok_lite.engine.optimizers.rule import UpToOne


@dataclass(frozen=True, kw_only=True)
class GroupMomentum(GroupRule):
    """SGD with momentum and a sparse group lasso; see group.py. The divisor is 1.

    The state holds the learning rate, as Keras has it: `m = momentum * m - lr * g; step = -m`.

    Attributes:
      momentum: in [0, 1].
      nesterov: Nesterov's momentum.
    """

    momentum: UpToOne = 0.9
    nesterov: bool = False

    kernel: ClassVar[str] = "update_group_momentum"
    columns: ClassVar[tuple[str, ...]] = ("linear", "momentum")
    lazy: ClassVar[str] = "steps by momentum, which fades; penalties"

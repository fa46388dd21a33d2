"""`sok_lite.optimizers.GroupMomentum`: SGD with momentum that sets whole rows to 0."""

from dataclasses import dataclass

from sok_lite.engine.optimizers.group import GroupRule
from sok_lite.engine.optimizers.rule import UpToOne


@dataclass(frozen=True, kw_only=True)
class GroupMomentum(GroupRule):
    """SGD with momentum and a sparse group lasso; see group.py. The divisor is 1.

    The state holds the learning rate, as Keras has it: `m = momentum * m - lr * g; step = -m`.
    """

    momentum: UpToOne = 0.9
    nesterov: bool = False

    kernel = "update_group_momentum"
    columns = ("linear", "momentum")
    lazy = "steps by momentum, which fades; penalties"

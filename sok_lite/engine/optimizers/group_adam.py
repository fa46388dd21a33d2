"""`sok_lite.optimizers.GroupAdam`: Adam that sets whole rows to 0."""

from dataclasses import dataclass
from typing import ClassVar

from sok_lite.engine.optimizers.group import GroupRule
from sok_lite.engine.optimizers.rule import BelowOne, Positive


@dataclass(frozen=True, kw_only=True)
class GroupAdam(GroupRule):
    """Adam with a sparse group lasso (TFPlus' GroupAdam, version 4); see group.py.

    `alpha = lr * sqrt(1 - beta_2^t) / (1 - beta_1^t); step = alpha * m;
    divisor = sqrt(v) + epsilon`. TFPlus adds epsilon in the first step of all only, which is Adam
    for the rows of that step alone; here it is in every divisor.

    Attributes:
      epsilon: "epsilon hat", as of Adam.
    """

    beta_1: BelowOne = 0.9
    beta_2: BelowOne = 0.999
    epsilon: Positive = 1e-7

    kernel = "update_group_adam"
    columns: ClassVar[tuple[str, ...]] = ("linear", "m", "v")
    lazy = "steps by `m`; fading; penalties"
    counts_steps = True

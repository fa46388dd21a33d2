"""LAMB by rows, which sets whole rows to 0.

* `sok_lite.optimizers.GroupLamb`: `GroupLamb(...)`
"""

from dataclasses import dataclass
from typing import ClassVar

from sok_lite.engine.optimizers.group_adam import GroupAdam


@dataclass(frozen=True, kw_only=True)
class GroupLamb(GroupAdam):
    """LAMB (You et al., 2019) of each row by itself, with a sparse group lasso; see group.py.

    With the corrections of Adam in `c = sqrt(1 - beta_2^t) / (1 - beta_1^t)`:
    `r = c * m / (sqrt(v) + epsilon)`, `ratio = ||w|| / (||r|| + 1e-8)`, or 1 where a norm is 0;
    `step = lr * ratio * c * m; divisor = sqrt(v) + epsilon`.

    TFPlus corrects v first and adds epsilon then. Here it is "epsilon hat", as of Adam: a divisor
    without the number of the step is known of a row whenever that was updated last.
    """

    kernel: ClassVar[str] = "update_group_lamb"

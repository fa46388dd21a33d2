"""AMSGrad that sets whole rows to 0.

* `sok_lite.optimizers.GroupAMSGrad`: `GroupAMSGrad(...)`
"""

from dataclasses import dataclass
from typing import ClassVar

from sok_lite.engine.optimizers.group_adam import GroupAdam


@dataclass(frozen=True, kw_only=True)
class GroupAMSGrad(GroupAdam):
    """AMSGrad with a sparse group lasso: `GroupAdam` whose divisor is of the largest `v` so far."""

    kernel: ClassVar[str] = "update_group_amsgrad"
    columns: ClassVar[tuple[str, ...]] = ("linear", "m", "v", "vhat")

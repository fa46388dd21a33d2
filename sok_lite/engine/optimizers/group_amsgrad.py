"""`sok_lite.optimizers.GroupAMSGrad`: AMSGrad that sets whole rows to 0."""

from dataclasses import dataclass

from sok_lite.engine.optimizers.group_adam import GroupAdam


@dataclass(frozen=True, kw_only=True)
class GroupAMSGrad(GroupAdam):
    """AMSGrad with a sparse group lasso: `GroupAdam` whose divisor is of the largest `v` so far."""

    kernel = "update_group_amsgrad"
    columns = ("linear", "m", "v", "vhat")

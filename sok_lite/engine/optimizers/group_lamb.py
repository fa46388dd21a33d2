"""`sok_lite.optimizers.GroupLamb`: LAMB by rows, which sets whole rows to 0."""

from dataclasses import dataclass

from sok_lite.engine.optimizers.group_adam import GroupAdam


@dataclass(frozen=True, kw_only=True)
class GroupLamb(GroupAdam):
    """LAMB (You et al., 2019) of each row by itself, with a sparse group lasso; see group.py.

    With the corrections of Adam in `c = sqrt(1 - beta_2^t) / (1 - beta_1^t)`:
    `r = c * m / (sqrt(v) + epsilon)`, `ratio = ||w|| / (||r|| + 1e-8)`, or 1 where a norm is 0;
    `step = lr * ratio * c * m; divisor = sqrt(v) + epsilon`.

    TFPlus corrects v before it adds epsilon. Here it is "epsilon hat", as in Adam: the old divisor
    of a row must not depend on the step of its last update.
    """

    kernel = "update_group_lamb"

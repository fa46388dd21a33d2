"""The base of the rules that set whole rows to exactly 0, with kernels/update/group.cuh.

The sparse group lasso with a row as a group: Yue et al., "Adaptive Optimizers with Sparse Group
Lasso for Neural Networks in CTR Prediction", ECML PKDD 2021, arXiv 2107.14432. A row is a function
of its states, of `linear` (z) above all:

    s = clip(z, -l1, l1) - z
    w = s * max(1 - l21 * sqrt(dim) / ||s||, 0) / (divisor + 2 * l2)

In the step that lets a row lose `step / divisor` where there are no penalties, z grows by
`step - (divisor - old_divisor) * w`, so that it stays `-divisor * w`. A row's first update begins
with an old divisor of 0, for z is 0 and w is its initial value. That z is 0 is all that tells it:
later z is 0 only where w is, and then the term is 0 whatever the old divisor. So a row may come
first at any step, with a gradient of 0 too.

The learning rate is in z, and the penalties are multiplied by it, as in TFPlus' version 4: without
penalties it is the other optimizer under any schedule. With a constant rate this is the paper's
Algorithm 1 multiplied by it, where the rule has no corrections by the step; Adam's make the divisor
sqrt(v) in place of the corrected one, so that in the first steps, about 1 / (1 - beta_2) of them,
the penalties are stronger than in the paper. With a rate that falls the penalties fall, what z has
does not, and rows at 0 come back with their next update. Since z has what a row is made of, a row
that was written from outside after its first update goes back to about what it was with its next
one.

A row at 0 keeps its states and is updated like any other.
"""

from dataclasses import dataclass
from typing import ClassVar

from sok_lite.engine.optimizers.rule import NotNegative, UpdateRule


@dataclass(frozen=True, kw_only=True)
class GroupRule(UpdateRule):
    """A rule with the penalties of the sparse group lasso.

    Attributes:
      l1: of every element: sets single ones to 0.
      l2: of the square of every element.
      l21: of the norm of a row, times the root of its dimension: sets whole rows to 0.
    """

    l1: NotNegative = 0.0
    l2: NotNegative = 0.0
    l21: NotNegative = 0.0

    refused_rate: ClassVar[str] = (
        "multiplies its penalties by its learning rate, which must be >= 0. "
        "Received: learning_rate={}."
    )

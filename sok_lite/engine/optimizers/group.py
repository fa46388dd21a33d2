"""Base of the rules with a sparse group lasso, which sets whole rows to exactly 0.

Yue et al., "Adaptive Optimizers with Sparse Group Lasso for Neural Networks in CTR Prediction",
ECML PKDD 2021, arXiv 2107.14432; a row is a group. The kernels share kernels/update/group.cuh. A
row is computed from its states, above all from `linear` (z):

    s = clip(z, -l1, l1) - z
    w = s * max(1 - l21 * sqrt(dim) / ||s||, 0) / (divisor + 2 * l2)

Where a step without penalties subtracts `step / divisor` from a row, z grows by
`step - (divisor - old_divisor) * w`, so that it stays `-divisor * w`. A row's first update has an
old divisor of 0, because z is 0 and w is the initial value. z = 0 identifies a first update: later
z is 0 only where w is, and then the term is 0 whatever the old divisor. So a row may appear at any
step, with a gradient of 0 too.

The learning rate is in z, and the penalties are multiplied by it, as in TFPlus' version 4: without
penalties it is the other optimizer under any schedule. With a constant rate this is the paper's
Algorithm 1 multiplied by it, where the rule has no bias correction; with Adam's the divisor is
sqrt(v), not the corrected one, so that in about the first 1 / (1 - beta_2) steps the penalties are
stronger than in the paper. With a falling rate the penalties fall, z does not, and rows at 0 come
back with their next update. Since a row is computed from z, a row that was assigned after its first
update returns to about its old value with the next one.

A row at 0 keeps its states and is updated like any other.
"""

from dataclasses import dataclass

from sok_lite.engine.optimizers.rule import NotNegative, UpdateRule


@dataclass(frozen=True, kw_only=True)
class GroupRule(UpdateRule):
    """A rule with the penalties of the sparse group lasso.

    Attributes:
      l1: of the elements: sets single ones to 0.
      l2: of their squares.
      l21: of the norm of a row, times the root of its dimension: sets whole rows to 0.
    """

    l1: NotNegative = 0.0
    l2: NotNegative = 0.0
    l21: NotNegative = 0.0

    refused_rate = (
        "multiplies its penalties by its learning rate, which must be >= 0. "
        "Received: learning_rate={}."
    )

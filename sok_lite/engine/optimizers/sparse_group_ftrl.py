"""`sok_lite.optimizers.SparseGroupFtrl`: FTRL-proximal that sets whole rows to 0."""

from dataclasses import dataclass

from sok_lite.engine.optimizers.ftrl import Ftrl
from sok_lite.engine.optimizers.rule import NotNegative


@dataclass(frozen=True, kw_only=True)
class SparseGroupFtrl(Ftrl):
    """Ftrl with a sparse group lasso (that of TFPlus, "Group Adagrad"); see group.py.

    As in Ftrl, and unlike TFPlus, the accumulator gets the square of the gradient without its
    shrinkage. `divisor = accumulator^-learning_rate_power / lr`, and neither z nor the penalties
    are multiplied by the learning rate. As in Ftrl, the smaller `initial_accumulator` is, the more
    a row's initial value counts. With 0 it counts in full: an element keeps it until its first
    gradient that is not 0, also where its row is set to 0.

    Attributes:
      l21: of the norm of a row, times the root of its dimension: sets whole rows to 0.
    """

    l21: NotNegative = 0.0

    kernel = "update_sparse_group_ftrl"
    columns = ("linear", "accumulator")

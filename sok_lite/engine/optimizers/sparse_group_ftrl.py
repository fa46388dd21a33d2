"""FTRL-proximal that sets whole rows to 0.

* `sok_lite.optimizers.SparseGroupFtrl`: `SparseGroupFtrl(...)`
"""

from dataclasses import dataclass
from typing import ClassVar

from sok_lite.engine.optimizers.ftrl import Ftrl
from sok_lite.engine.optimizers.rule import NotNegative


@dataclass(frozen=True, kw_only=True)
class SparseGroupFtrl(Ftrl):
    """Ftrl with a sparse group lasso (that of TFPlus, "Group Adagrad"); see group.py.

    As Ftrl, and not as TFPlus, it adds the gradient's own square to the accumulator, not that of
    the gradient with its shrinkage. With `initial_accumulator=0` an element keeps its value until
    it has had a gradient, also where its row is dropped.

    `divisor = accumulator^-learning_rate_power / lr`, and neither z nor the penalties are
    multiplied by the learning rate. As of Ftrl, a row's initial value counts for the more the
    smaller `initial_accumulator` is; with 0 it counts in full, and stays until there is a gradient.

    Attributes:
      l21: of the norm of a row, times the root of its dimension: sets whole rows to 0.
    """

    l21: NotNegative = 0.0

    kernel: ClassVar[str] = "update_sparse_group_ftrl"
    columns: ClassVar[tuple[str, ...]] = ("linear", "accumulator")

"""Optimizers that Keras 3 does not have, for `compile` and for `sok_lite.OptimizerWrapper`.

`RowWiseAdagrad` keeps one number for a row; the others set rows to 0.
"""

from sok_lite.bridge.optimizers.group import (
    GroupAdam,
    GroupAMSGrad,
    GroupLamb,
    GroupMomentum,
    SparseGroupFtrl,
)
from sok_lite.bridge.optimizers.rowwise_adagrad import RowWiseAdagrad

__all__ = [
    "GroupAMSGrad",
    "GroupAdam",
    "GroupLamb",
    "GroupMomentum",
    "RowWiseAdagrad",
    "SparseGroupFtrl",
]

"""Keras 3 optimizers that set rows of tables to 0, for `sok_lite.OptimizerWrapper`."""

from sok_lite.bridge.optimizers.group import (
    GroupAdam,
    GroupAMSGrad,
    GroupLamb,
    GroupMomentum,
    SparseGroupFtrl,
)

__all__ = ["GroupAMSGrad", "GroupAdam", "GroupLamb", "GroupMomentum", "SparseGroupFtrl"]

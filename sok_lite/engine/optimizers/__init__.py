"""The update rules of optimizers, a file each; kernels/update/ has one of the same name."""

from sok_lite.engine.optimizers.adadelta import Adadelta
from sok_lite.engine.optimizers.adagrad import Adagrad
from sok_lite.engine.optimizers.adagrad_da import AdagradDA
from sok_lite.engine.optimizers.adam import Adam, AdamW
from sok_lite.engine.optimizers.adamax import Adamax
from sok_lite.engine.optimizers.ftrl import Ftrl
from sok_lite.engine.optimizers.group_adam import GroupAdam
from sok_lite.engine.optimizers.group_amsgrad import GroupAMSGrad
from sok_lite.engine.optimizers.group_lamb import GroupLamb
from sok_lite.engine.optimizers.group_momentum import GroupMomentum
from sok_lite.engine.optimizers.lion import Lion
from sok_lite.engine.optimizers.momentum import Momentum
from sok_lite.engine.optimizers.nadam import Nadam
from sok_lite.engine.optimizers.proximal_adagrad import ProximalAdagrad
from sok_lite.engine.optimizers.proximal_sgd import ProximalSGD
from sok_lite.engine.optimizers.rectified_adam import RectifiedAdam
from sok_lite.engine.optimizers.rmsprop import RMSprop
from sok_lite.engine.optimizers.rowwise_adagrad import RowWiseAdagrad
from sok_lite.engine.optimizers.rule import UpdateRule
from sok_lite.engine.optimizers.schedule_free_adamw import ScheduleFreeAdamW
from sok_lite.engine.optimizers.sgd import SGD
from sok_lite.engine.optimizers.sparse_group_ftrl import SparseGroupFtrl

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "AdagradDA",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "GroupAMSGrad",
    "GroupAdam",
    "GroupLamb",
    "GroupMomentum",
    "Lion",
    "Momentum",
    "Nadam",
    "ProximalAdagrad",
    "ProximalSGD",
    "RMSprop",
    "RectifiedAdam",
    "RowWiseAdagrad",
    "ScheduleFreeAdamW",
    "SparseGroupFtrl",
    "UpdateRule",
]

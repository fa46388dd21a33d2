"""The update rules of optimizers, a file each; kernels/update/ has one of the same name."""

from sok_lite.engine.optimizers.adagrad import Adagrad
from sok_lite.engine.optimizers.adam import Adam, AdamW
from sok_lite.engine.optimizers.ftrl import Ftrl
from sok_lite.engine.optimizers.momentum import Momentum
from sok_lite.engine.optimizers.rmsprop import RMSprop
from sok_lite.engine.optimizers.rule import UpdateRule
from sok_lite.engine.optimizers.sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Ftrl", "Momentum", "RMSprop", "UpdateRule"]

"""SOK's module of this name."""

from sok_lite.sok.optimizer import SGD, OptimizerWrapper

__all__ = ["SGD", "OptimizerWrapper"]

"""SOK's module of this name."""

from sok_lite.sok.static_variable import DistributedVariable, LocalizedVariable, Variable

__all__ = ["DistributedVariable", "LocalizedVariable", "Variable"]

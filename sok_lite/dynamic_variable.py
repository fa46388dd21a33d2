"""SOK's module of this name."""

from sok_lite.sok.dynamic_variable import DynamicVariable, assign, export

__all__ = ["DynamicVariable", "assign", "export"]

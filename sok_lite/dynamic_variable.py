"""SOK's module of this name."""

from sok_lite.sok.dynamic_variable import DynamicVariable
from sok_lite.sok.table_functions import assign, export

__all__ = ["DynamicVariable", "assign", "export"]

"""SOK's module of this name."""

from sok_lite.sok.dump_load import dump, incremental_model_dump, load

__all__ = ["dump", "incremental_model_dump", "load"]

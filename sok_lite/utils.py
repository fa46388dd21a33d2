"""SOK's module of this name."""

from sok_lite.sok.utils import SOK_IndexedSlices, get_nano_time

__all__ = ["SOK_IndexedSlices", "get_nano_time"]

"""SOK's module of this name."""

from sok_lite.sok import raw_ops as _raw_ops
from sok_lite.sok.raw_ops import *  # noqa: F403 - a long list, which stands there

__all__ = _raw_ops.__all__

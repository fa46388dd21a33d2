"""Host memory that TensorFlow can adopt without a copy."""

import math

import numpy as np

from sok_lite.backend.arguments import address_of

ALIGNMENT = 64  # bytes, which TensorFlow's CPU kernels expect of a tensor


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialized array aligned to `ALIGNMENT` bytes, or raises MemoryError."""
    # NumPy's large arrays have huge pages, unlike TensorFlow's: scattered writes to 4 KB pages cost
    # a third more.
    memory = np.empty(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8)
    return np.ndarray(shape, dtype, memory, -address_of(memory) % ALIGNMENT)

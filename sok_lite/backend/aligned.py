"""Host memory that TensorFlow can adopt without a copy."""

import math

import numpy as np

from sok_lite.backend.arguments import address_of

# Alignment that TensorFlow's CPU kernels assume of a tensor.
ALIGNMENT = 64


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialized array aligned to `ALIGNMENT` bytes, or raises MemoryError."""
    # NumPy uses huge pages for large arrays, TensorFlow does not: scattered writes to 4 KB pages
    # cost a third more.
    memory = np.empty(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8)
    return np.ndarray(shape, dtype, memory, -address_of(memory) % ALIGNMENT)

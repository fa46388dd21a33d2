"""Memory of the host that TensorFlow takes over without a copy."""

import math

import numpy as np

from sok_lite.backend.arguments import address_of

# What TensorFlow's CPU kernels take for granted of the memory of a tensor.
ALIGNMENT = 64


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array, not initialised, that begins at a multiple of `ALIGNMENT` bytes.

    Raises:
      MemoryError: there is no memory for it.
    """
    # NumPy's own large arrays lie on huge pages, which TensorFlow's do not: rows scattered over
    # 4 KB pages cost a third more to write.
    memory = np.empty(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8)
    return np.ndarray(shape, dtype, memory, -address_of(memory) % ALIGNMENT)

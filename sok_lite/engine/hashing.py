"""The 64-bit hash of a key on the host: the same numbers as kernels/hash.cuh."""

import numpy as np

from sok_lite.backend import Array


def hash_keys(keys: Array) -> Array:
    """Returns the hash of every key, (n,) uint64, by the finaliser of MurmurHash3.

    Args:
      keys: (n,) int64, of NumPy or CuPy.
    """
    h = keys.view(np.uint64).copy()
    # In-place array arithmetic wraps silently; NumPy warns for scalars only.
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> np.uint64(33)
    return h

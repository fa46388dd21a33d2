"""Keys that somebody has chosen against the hash: the inverse of kernels/hash.cuh."""

import numpy as np

_FIRST = pow(0xFF51AFD7ED558CCD, -1, 1 << 64)
_SECOND = pow(0xC4CEB9FE1A85EC53, -1, 1 << 64)
_TURN = pow(0x9E3779B1, -1, 1 << 32)


def keys_of(hashes: np.ndarray, seed: int = 0) -> np.ndarray:
    """Returns the keys (n,) int64 that have some hashes (n,) uint64 in an index with a seed."""
    h = hashes.astype(np.uint64)
    h ^= h >> np.uint64(33)  # its own inverse, as 2 * 33 > 64
    h *= np.uint64(_SECOND)
    h ^= h >> np.uint64(33)
    h *= np.uint64(_FIRST)
    h ^= h >> np.uint64(33)
    return (h ^ np.uint64(seed)).view(np.int64)


def of_one_line(count: int, seed: int = 0) -> np.ndarray:
    """Returns keys that begin in one line of an "hbm" index, and one bucket of a "hybrid"."""
    return keys_of((np.arange(count, dtype=np.uint64) << np.uint64(32)) | np.uint64(12345), seed)


def of_two_buckets(count: int, seed: int = 0) -> np.ndarray:
    """Returns up to 2**16 keys that have the same two buckets of a "hybrid" index."""
    assert count <= 1 << 16
    low = np.uint64(0x123456789ABC)
    return keys_of((np.arange(count, dtype=np.uint64) << np.uint64(48)) | low, seed)


def of_one_segment(count: int, seed: int = 0) -> np.ndarray:
    """Returns keys that lie well in a segment of an index, but all in the first of its segments."""
    turned = np.arange(count, dtype=np.uint64) % np.uint64(1 << 20)  # the first 12 bits are 0
    high = (turned * np.uint64(_TURN)) & np.uint64(0xFFFFFFFF)
    low = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B1) & np.uint64(0xFFFFFFFF)
    return keys_of((high << np.uint64(32)) | low, seed)

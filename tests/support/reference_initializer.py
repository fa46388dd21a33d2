"""First values of rows once more, in Python integers and NumPy: the oracle of the initializers.

Shares no code with sok_lite. The random words are Philox4x32-10 in 64-bit NumPy arithmetic; the
inverse of the normal distribution function is Python's own.
"""

import statistics

import numpy as np

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = np.uint64(0xFFFFFFFF)


def philox(counter, key):
    """Philox4x32-10 (Salmon et al., 2011): counter, four uint64 arrays of 32-bit words -> four."""
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(10):
        product0 = c0 * np.uint64(_MULTIPLIERS[0])
        product1 = c2 * np.uint64(_MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            product1 & _WORD,
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            product0 & _WORD,
        )
        k0 = (k0 + _WEYL[0]) & 0xFFFFFFFF
        k1 = (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def words(keys, dim, seed):
    """The 32 random bits of every (key, column): (n, dim) uint64."""
    keys = np.asarray(keys, np.int64).view(np.uint64)[:, None]
    quads = np.arange((dim + 3) // 4, dtype=np.uint64)[None, :]
    seed &= 0xFFFFFFFFFFFFFFFF
    four = philox(
        (keys & _WORD, keys >> np.uint64(32), quads, np.uint64(0)), (seed & 0xFFFFFFFF, seed >> 32)
    )
    return np.stack(four, axis=-1).reshape(len(keys), 4 * quads.size)[:, :dim]


def uniform(keys, dim, seed, low, high):
    fraction = (words(keys, dim, seed) >> np.uint64(8)).astype(np.float32) / np.float32(1 << 24)
    values = np.float32(low) + np.float32(high - low) * fraction
    return np.minimum(values, np.float32(high))


def _quantiles(probabilities):
    inverse = np.vectorize(statistics.NormalDist().inv_cdf, otypes=[np.float64])
    return inverse(probabilities) if probabilities.size else probabilities


def normal(keys, dim, seed, mean, stddev):
    probabilities = (words(keys, dim, seed).astype(np.float64) + 0.5) / 2.0**32
    quantiles = _quantiles(probabilities)
    mean, stddev = float(np.float32(mean)), float(np.float32(stddev))
    return (mean + stddev * quantiles).astype(np.float32)


def truncated_normal(keys, dim, seed, mean, stddev):
    fraction = (words(keys, dim, seed).astype(np.float64) + 0.5) / 2.0**32
    below = statistics.NormalDist().cdf(-2.0)
    quantiles = _quantiles(below + (1 - 2 * below) * fraction)
    mean, stddev = float(np.float32(mean)), float(np.float32(stddev))
    return (mean + stddev * quantiles).astype(np.float32)

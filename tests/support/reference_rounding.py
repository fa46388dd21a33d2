"""Stochastic rounding once more, by its definition: the oracle of the updates' rounding.

Shares no code with sok_lite. Neighbours come from the list of all values of a format, and chances
are float64 numbers, which hold them exactly.
"""

import numpy as np

from tests.support.reference_initializer import philox

_WORD = np.uint64(0xFFFFFFFF)


def words(keys, dim, seed, step):
    """The 32 random bits of every (key, column) in a step: (n, dim) uint64."""
    keys = np.asarray(keys, np.int64).view(np.uint64)
    seed &= 0xFFFFFFFFFFFFFFFF
    first, second, _, _ = philox(
        (keys & _WORD, keys >> np.uint64(32), np.uint64(0), np.uint64(step & 0xFFFFFFFF)),
        (seed & 0xFFFFFFFF, seed >> 32),
    )
    x = first[:, None] + np.arange(dim, dtype=np.uint64)[None, :] * np.uint64(0x9E3779B9)
    x &= _WORD
    x = (x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D) & _WORD
    x ^= second[:, None]
    x = (x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B) & _WORD
    return x ^ (x >> np.uint64(16))


def _values(dtype):
    """All finite values >= 0 of a format, ascending, as float64."""
    if dtype == "float16":
        return np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    return (np.arange(0x7F80, dtype=np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def rounded(x, random_words, dtype):
    """float32 values rounded to a format by random words: float32 of the same shape.

    With chance `(|x| - low) / (high - low)` away from zero, to `high`, else to `low`, the
    neighbours of |x| in the format. The random fraction has as many bits as the format drops, and
    31 for subnormal float16 numbers.
    """
    values = _values(dtype)
    x = np.asarray(x, np.float32)
    with np.errstate(invalid="ignore"):  # NaNs
        size = np.abs(x.astype(np.float64))
    finite = np.where(np.isfinite(size), size, 0.0)
    at = np.searchsorted(values, finite, side="right") - 1
    low, high = values[at], values[np.minimum(at + 1, values.size - 1)]
    chance = np.where(high > low, (finite - low) / np.where(high > low, high - low, 1.0), 0.0)
    bits = np.full(x.shape, 16 if dtype == "bfloat16" else 13)
    if dtype == "float16":
        bits = np.where(finite < 2.0**-14, 31, bits)
        chance = np.floor(chance * 2.0**bits) / 2.0**bits
    fraction = np.floor(random_words.astype(np.float64) / 2.0 ** (32 - bits)) / 2.0**bits
    result = np.where(fraction + chance >= 1.0, high, low)
    # From the largest value on to nearest; its mantissa is odd, so a tie goes to infinity.
    half = (values[-1] - values[-2]) / 2
    result = np.where(finite >= values[-1], values[-1], result)
    result = np.where(size >= values[-1] + half, np.inf, result)
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(x), np.nan, np.copysign(result, x)).astype(np.float32)

"""A read-only index of keys: two arrays, made by one sort.

Keys lie in buckets by the first bits of their hash, one or two in each. One array has the start of
each bucket, the other the positions of the keys, bucket by bucket. A lookup compares its key with
those of one bucket. Both arrays together take 6 to 8 bytes a key.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sok_lite.engine.hashing import hash_keys, new_seed

# Places are kept as uint32.
MAX_KEYS = 1 << 32
_PLACE_BITS = np.uint64(32)


class KeyIndex(NamedTuple):
    """An index from keys to their positions in an array.

    Attributes:
      starts: (buckets + 1,) the start of each bucket in `places`; buckets are a power of two.
      places: (n,) uint32, positions of the keys, bucket by bucket, ascending in each.
      seed: of the hash (engine/hashing.py), so that nobody can choose keys that collide.
    """

    starts: np.ndarray
    places: np.ndarray
    seed: int

    def find(
        self, keys: np.ndarray, key_at: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Finds keys.

        Args:
          keys: (m,) int64.
          key_at: positions (k,) -> the keys there, (k,) int64.

        Returns:
          (which of `keys` were found, (k,); their positions, (k,)). Of a key that occurs twice the
          first position.
        """
        buckets = _buckets(keys, self.starts.size - 1, self.seed)
        at, ends = self.starts[buckets].astype(np.int64), self.starts[buckets + 1].astype(np.int64)
        places = np.full(keys.size, -1)
        left = np.flatnonzero(at < ends)
        while left.size:
            candidates = self.places[at[left]]
            is_it = key_at(candidates) == keys[left]
            places[left[is_it]] = candidates[is_it]
            left = left[~is_it]
            at[left] += 1
            left = left[at[left] < ends[left]]
        found = np.flatnonzero(places >= 0)
        return found, places[found]


def make_index(keys: np.ndarray) -> KeyIndex:
    """Returns the index of keys (n,) int64, fewer than `MAX_KEYS`. It takes 24 bytes a key."""
    num_buckets, seed = 1 << max(1, keys.size.bit_length() - 1), new_seed()
    # One word of each: bucket and place. Sorting words is much faster than sorting places by them.
    words = _buckets(keys, num_buckets, seed).view(np.uint64)
    starts = np.zeros(num_buckets + 1, np.int64)
    np.cumsum(np.bincount(words.view(np.int64), minlength=num_buckets), out=starts[1:])
    starts = starts.astype(np.uint32 if keys.size < MAX_KEYS else np.int64)
    words <<= _PLACE_BITS
    words |= np.arange(keys.size, dtype=np.uint64)
    words.sort()
    return KeyIndex(starts, words.astype(np.uint32), seed)


def _buckets(keys: np.ndarray, num_buckets: int, seed: int) -> np.ndarray:
    """Returns the bucket of each key, (m,) int64."""
    hashes = hash_keys(keys, seed)
    hashes >>= np.uint64(65 - num_buckets.bit_length())
    return hashes.view(np.int64)

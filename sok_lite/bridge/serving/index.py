"""Keys to row numbers with arrays alone: what an exported model finds rows by.

Keys are multiplied by an odd number, which no two keys share a product of, and sorted by it. How
large a product is says which bucket it is in, and where in the sorted ones that begins; a search by
halves among the few of the bucket finds the place. These are gathers and comparisons, which every
processor and every format of models has; there is nothing to fill when a model is loaded, as a hash
table has to be.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

# The golden ratio as a fraction of 2**64, odd: neighbouring keys get products far apart.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_LARGEST = np.iinfo(np.int64).max
# Those that a float32 has: TensorFlow Lite neither shifts nor divides int64. Its rounding keeps the
# order of products, so that those of one bucket lie together.
_MOST_BITS = 24


class KeyIndex:
    """Finds the place of keys among n.

    Args:
      keys: (n,) int64, distinct.
      make_variable: takes a name and an array, and gives a variable of it.

    Attributes:
      order: (n,) int64: which of `keys` has which place.
      size: n.
      variables: all that it reads.
    """

    def __init__(self, keys: np.ndarray, make_variable: Callable[..., Any]) -> None:
        products = (keys.view(np.uint64) * _FACTOR).view(np.int64)
        self.order = np.argsort(products)
        self.size = len(keys)
        products = products[self.order]
        # About one key in a bucket.
        bits = min(_MOST_BITS, max(1, (self.size - 1).bit_length()))
        self._first, self._scale = 1 << (bits - 1), np.float32(2.0 ** (bits - 64))
        buckets = (products.astype(np.float32) * self._scale).astype(np.int32) + self._first
        counts = np.bincount(buckets, minlength=2 * self._first + 1)
        # Whoever rounds otherwise where the model is served is one bucket off: the search goes from
        # the bucket before to the one behind.
        starts = np.concatenate([[0, 0], np.cumsum(counts)[:-2]])
        most = np.convolve(counts, np.ones(3, np.int64)).max()
        self._num_halvings = int(most).bit_length()
        # A search may look past the last key: no product is above the largest number.
        beyond = np.full(1 << self._num_halvings, _LARGEST, np.int64)
        products = np.concatenate([products, beyond])
        is_small = len(products) <= np.iinfo(np.int32).max
        self._products = make_variable("keys", products)
        self._starts = make_variable("starts", starts.astype(np.int32 if is_small else np.int64))
        self.variables = [self._products, self._starts]

    def find(self, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the place of each key, and whether it has one; the place is any if not.

        Args:
          keys: int64 of any shape.

        Returns:
          (integers of the keys' shape, in [0, n]; bool of the keys' shape).
        """
        products = keys * tf.constant(_FACTOR.view(np.int64), tf.int64)
        buckets = tf.cast(tf.cast(products, tf.float32) * self._scale, tf.int32) + self._first
        places = tf.gather(self._starts, buckets)
        for power in reversed(range(self._num_halvings)):
            step = 1 << power
            is_before = tf.gather(self._products, places + (step - 1)) < products
            places = tf.where(is_before, places + step, places)
        is_found = tf.equal(tf.gather(self._products, places), products) & (places < self.size)
        return places, is_found

"""Keys that are texts: a table knows them by a number, their 64-bit FarmHash fingerprint.

The fingerprint is TensorFlow's `tf.fingerprint`, which never changes. Two texts with one number are
found where the second is to be remembered; of a billion texts that happens once in 37 tables. A
text that is only looked up is not remembered, and may be taken for another with that chance.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from sok_lite.backend import get_backend
from sok_lite.bridge.host_call import host_call


def fingerprints(texts: tf.Tensor) -> tf.Tensor:
    """Returns the numbers of texts of any shape, int64 of the same shape."""
    bits = tf.fingerprint(tf.reshape(texts, [-1]))
    return tf.reshape(tf.bitcast(bits, tf.int64), tf.shape(texts))


class Texts:
    """The texts of the keys of a table, which grow with what is remembered.

    Args:
      name: of the table, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._by_key: dict[int, bytes] = {}

    def keys(self, texts: tf.Tensor, remember: bool) -> tf.Tensor:
        """Returns the keys of texts, int64 of the same shape.

        Args:
          texts: of any shape.
          remember: whether they may become keys of the table: it can then give them back.

        Raises:
          ValueError: a text has the number of another one. Nothing has changed.
        """
        keys = tf.ensure_shape(fingerprints(texts), texts.shape)
        if not remember:
            return keys
        what = f"Remembering the keys of {self._name!r}"
        noted = host_call(self._remember, [keys, texts], [], get_backend("cpu"), what)
        with tf.control_dependencies([] if tf.executing_eagerly() else [noted]):
            return tf.identity(keys)

    def texts(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the texts of keys (n,) that are remembered, (n,).

        Raises:
          ValueError: one is not.
        """
        what = f"The texts of the keys of {self._name!r}"
        (texts,) = host_call(self._recall, [keys], [tf.string], get_backend("cpu"), what)
        texts.set_shape(keys.shape)
        return texts

    def _remember(self, keys: tf.Tensor, texts: tf.Tensor) -> Sequence[tf.Tensor]:
        known = self._by_key
        pairs = zip(keys.numpy().reshape(-1).tolist(), np.ravel(texts.numpy()), strict=True)
        new = {key: text for key, text in pairs if known.get(key) != text}
        for key, text in new.items():
            if known.get(key, text) != text:
                raise ValueError(
                    f"Two keys of {self._name!r} have one fingerprint: {known[key]!r} and "
                    f"{text!r}. Change one of them, or use integer keys."
                )
        known.update(new)
        return ()

    def _recall(self, keys: tf.Tensor) -> Sequence[tf.Tensor]:
        numbers = keys.numpy().tolist()
        unknown = [key for key in numbers if key not in self._by_key]
        if unknown:
            raise ValueError(
                f"{len(unknown)} keys of {self._name!r} have no text. Received: {unknown[0]}. They "
                "were written by their numbers: write them by their texts."
            )
        return (tf.constant([self._by_key[key] for key in numbers], tf.string, [len(numbers)]),)

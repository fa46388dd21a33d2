"""Keys that are texts: a table knows them by a number, their 64-bit FarmHash fingerprint.

The fingerprint is TensorFlow's `tf.fingerprint`, which never changes. Two texts with one number are
found where the second is to be remembered; of a billion texts that happens once in 37 tables. A
text that is only looked up is not remembered, and may be taken for another with that chance.
"""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from sok_lite.backend import get_backend
from sok_lite.bridge.host_call import host_call
from sok_lite.bridge.serving.mode import looked_up
from sok_lite.bridge.string_keys import hash_tensor

# New texts that are kept whether the table has their keys or not: they may be about to come.
_RECENT = 1 << 16


class Texts:
    """The texts of the keys of a table. Those of keys that it does not hold go after a while.

    Args:
      name: of the table, for errors.
      are_held: takes keys (n,) int64 and says of each whether the table has it, (n,) bool.
    """

    def __init__(self, name: str, are_held: Callable[[np.ndarray], np.ndarray]) -> None:
        self._name = name
        self._are_held = are_held
        self._recent: dict[int, bytes] = {}
        self._older: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Texts that are remembered."""
        return len(self._recent) + len(self._older)

    def keys(self, texts: tf.Tensor, remember: bool) -> tf.Tensor:
        """Returns the keys of texts, int64 of the same shape.

        Args:
          texts: of any shape.
          remember: whether they may become keys of the table: it can then give them back.

        Raises:
          ValueError: a text has the number of another one. Nothing has changed.
        """
        keys = hash_tensor(texts)
        if not remember:
            return keys
        what = f"Remembering the keys of {self._name!r}"

        def remembered(keys: tf.Tensor) -> list[tf.Tensor]:
            noted = host_call(self._remember, [keys, texts], [], get_backend("cpu"), what)
            with tf.control_dependencies([] if tf.executing_eagerly() else [noted]):
                return [tf.identity(keys)]

        # A model for serving has no use for them.
        (keys,) = looked_up(what, remembered, lambda _, keys: [keys], [keys])
        return keys

    def texts(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the texts of keys (n,) that are remembered, (n,).

        Raises:
          ValueError: one is not.
        """
        what = f"The texts of the keys of {self._name!r}"
        (texts,) = host_call(self._recall, [keys], [tf.string], get_backend("cpu"), what)
        texts.set_shape(keys.shape)
        return texts

    def _text(self, key: int) -> bytes | None:
        text = self._recent.get(key)
        return self._older.get(key) if text is None else text

    def _remember(self, keys: tf.Tensor, texts: tf.Tensor) -> Sequence[tf.Tensor]:
        # As objects: NumPy's own texts lose zeros at their end.
        given = np.array(texts.numpy(), object).reshape(-1).tolist()
        new: dict[int, bytes] = {}
        with self._lock:
            for key, text in zip(keys.numpy().reshape(-1).tolist(), given, strict=True):
                known = new.get(key, self._text(key))
                if known is None:
                    new[key] = text
                elif known != text:
                    raise ValueError(
                        f"Two keys of {self._name!r} have one fingerprint: {known!r} and "
                        f"{text!r}. Change one of them, or use integer keys."
                    )
            if len(self._recent) > max(_RECENT, len(self._older)):
                self._forget()
            self._recent.update(new)
        return ()

    def _forget(self) -> None:
        """Drops older texts whose keys the table does not hold; those of late are older then."""
        keys = np.fromiter(self._older, np.int64, len(self._older))
        held = keys[self._are_held(keys)].tolist()
        self._older = {key: self._older[key] for key in held} | self._recent
        self._recent = {}

    def _recall(self, keys: tf.Tensor) -> Sequence[tf.Tensor]:
        numbers = keys.numpy().tolist()
        texts = [self._text(key) for key in numbers]
        if None in texts:
            unknown = [key for key, text in zip(numbers, texts, strict=True) if text is None]
            raise ValueError(
                f"{len(unknown)} keys of {self._name!r} have no text. Received: {unknown[0]}. They "
                "were written by their numbers: write them by their texts."
            )
        return (tf.constant(texts, tf.string, [len(numbers)]),)

"""Text keys: a table uses their 64-bit FarmHash fingerprints as keys.

The fingerprint is TensorFlow's `tf.fingerprint`, which never changes. Of tables with a billion
texts, one in 37 has two texts with one fingerprint. `Texts`, for tables that return texts instead
of keys, raises when the second is to be remembered; a text that is only looked up is not
remembered, and may be mistaken for another. `keys_of_kept`, for tables that show texts to people,
keeps the first.
"""

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from sok_lite.backend import get_backend
from sok_lite.bridge.host_call import host_call, on_device
from sok_lite.bridge.job import communicator
from sok_lite.bridge.serving.mode import dispatch_lookup
from sok_lite.bridge.string_keys import hash_tensor
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.failure import together
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.content import owns
from sok_lite.engine.texts import TextStore, are_held, texts_of
from sok_lite.reports.text import counted


class Texts:
    """The texts of a table's keys. Texts of keys that the table lacks are dropped after a while.

    `are_held` maps keys (n,) int64 to whether the table has each, (n,) bool.
    """

    def __init__(self, name: str, are_held: Callable[[np.ndarray], np.ndarray]) -> None:
        self._name, self._store = name, TextStore(are_held)

    def __len__(self) -> int:
        """Number of remembered texts."""
        return len(self._store)

    def keys(self, texts: tf.Tensor, remember: bool) -> tf.Tensor:
        """Returns the keys of texts of any shape, int64.

        `remember`: they may become keys of the table, which can then return them. Raises ValueError
        if a text has the fingerprint of another one; nothing has changed then.
        """
        keys = hash_tensor(texts)
        if not remember:
            return keys
        return _noting(f"Remembering the keys of {self._name!r}", self._remember, keys, texts)

    def texts(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the texts of remembered keys (n,), (n,); raises ValueError for others."""
        what = f"The texts of the keys of {self._name!r}"
        (texts,) = host_call(self._recall, [keys], [tf.string], get_backend("cpu"), what)
        texts.set_shape(keys.shape)
        return texts

    def _remember(self, keys: tf.Tensor, texts: tf.Tensor) -> Sequence[tf.Tensor]:
        new: dict[int, bytes] = {}
        for key, text in zip(keys.numpy().reshape(-1).tolist(), _as_bytes(texts), strict=True):
            if new.setdefault(key, text) != text:
                self._refuse(new[key], text)
        self._store.add(new, self._refuse)
        return ()

    def _refuse(self, known: bytes, text: bytes) -> None:
        raise ValueError(
            f"Two keys of {self._name!r} have one fingerprint: {known!r} and {text!r}. Change one "
            "of them, or use integer keys."
        )

    def _recall(self, keys: tf.Tensor) -> Sequence[tf.Tensor]:
        numbers = keys.numpy().tolist()
        texts = [self._store.get(key) for key in numbers]
        if None in texts:
            unknown = [key for key, text in zip(numbers, texts, strict=True) if text is None]
            raise ValueError(
                f"{len(unknown)} keys of {self._name!r} have no text. Received: {unknown[0]}. They "
                "were written by their numbers: write them by their texts."
            )
        return (tf.constant(texts, tf.string, [len(numbers)]),)


def remember_texts(table: EmbeddingTable) -> None:
    """Makes a table remember the texts that this rank looks up.

    Texts of this rank's own keys are dropped after the keys. It learns about other ranks' keys when
    a checkpoint is written.
    """
    reference = weakref.ref(table)

    def may_be_held(keys: np.ndarray) -> np.ndarray:
        table = reference()
        if table is None:
            return np.zeros(keys.size, bool)
        comm = communicator()
        are_own = owns(table, comm.rank, comm.size)(keys)
        return np.asarray(on_device(table.backend, are_held, table, keys) | ~are_own)

    table.texts = TextStore(may_be_held)


def texts_of_keys(table: EmbeddingTable, keys: tf.Tensor, missing: str | bytes | None) -> tf.Tensor:
    """Returns the texts of keys; see `sok_lite.keras.Table.texts`. Every rank must call it."""
    comm, what = communicator(), f"The texts of table {table.name!r}"

    def checked() -> tuple[TextStore, np.ndarray]:
        if tf.inside_function():
            raise RuntimeError(f"{what} are of the moment. Ask outside of the tf.function.")
        if table.texts is None:
            raise ValueError(f"{what} are not kept. Make it with keep_texts=True.")
        given = keys if isinstance(keys, tf.Tensor) else np.asarray(keys)
        if given.dtype.name != "int64":
            raise TypeError(
                f"{what} are asked for by int64 keys, as `export` gives them. Received: "
                f"{given.dtype.name}. sok_lite.hash_strings makes keys of texts."
            )
        if not (missing is None or isinstance(missing, (str, bytes))):
            raise TypeError(f"`missing` must be a text or None. Received: missing={missing!r}.")
        return table.texts, np.asarray(given)

    store, numbers = together(comm, checked)
    check_equal_on_all_ranks(comm, {"table": table.name}, "The table whose texts are asked for")
    found = texts_of(store, numbers.reshape(-1), comm)

    def told() -> tf.Tensor:
        flat = numbers.reshape(-1).tolist()
        unknown = [key for key in flat if key not in found]
        if unknown and missing is None:
            raise ValueError(
                f"No rank knows the text of {counted(len(unknown), 'key')} of table "
                f"{table.name!r}. Received: {unknown[0]}. Such keys were written by their numbers, "
                "or looked up before texts were kept. Give `missing`, a text to stand for theirs."
            )
        texts = [found.get(key, missing) for key in flat]
        return tf.reshape(tf.constant(texts, tf.string, [len(flat)]), numbers.shape)

    return together(comm, told)


def keys_of_kept(store: TextStore, texts: tf.Tensor, name: str) -> tf.Tensor:
    """Returns the keys of texts of any shape, int64, and remembers the texts in a store.

    Texts of known keys are not compared, so two texts with one key are no error: they share a row,
    as without a store, and the first is remembered.
    """
    keys, what = hash_tensor(texts), f"Remembering the texts of {name!r}"

    def remember(keys: tf.Tensor, texts: tf.Tensor) -> Sequence[tf.Tensor]:
        flat = keys.numpy().reshape(-1)
        new = store.places_of_new(flat)
        if new.size:
            its_texts = _as_bytes(tf.gather(tf.reshape(texts, [-1]), new))
            store.add(dict(zip(flat[new].tolist(), its_texts, strict=True)))
        return ()

    return _noting(what, remember, keys, texts)


def _noting(
    what: str, note: Callable[..., Sequence[tf.Tensor]], keys: tf.Tensor, texts: tf.Tensor
) -> tf.Tensor:
    """Returns keys after a call of Python with them and their texts; see `host_call`."""

    def noted(keys: tf.Tensor) -> list[tf.Tensor]:
        done = host_call(note, [keys, texts], [], get_backend("cpu"), what)
        with tf.control_dependencies([] if tf.executing_eagerly() else [done]):
            return [tf.identity(keys)]

    # A model for serving does not need it.
    (result,) = dispatch_lookup(what, noted, lambda _, keys: [keys], [keys])
    return result


def _as_bytes(texts: tf.Tensor) -> list[bytes]:
    # As objects: NumPy's text dtypes drop trailing zeros.
    found: list[bytes] = np.array(texts.numpy(), object).reshape(-1).tolist()
    return found

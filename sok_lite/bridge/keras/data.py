"""Detects that all ranks of `fit` train the same rows by mistake.

Before an epoch the arrays passed to `fit` are compared; for other data the first batch of a
training. Ranks compare fingerprints of some rows.
"""

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.engine.callers import warn

# Fewer distinct rows may be equal on all ranks by chance, or on purpose.
_A_FEW = 4
# Sampled rows of a longer array: at least so many, and less than twice as many.
_SAMPLE = 1000
# Attribute of models: a variable, (2,) int64, the fingerprint of a training's first batch.
_FIRST = "_sok_lite_first_batch"
_NOTHING = (-1, 0)


def fingerprint(*arrays: Any) -> np.ndarray:
    """Returns a digest >= 0 of arrays, and the largest number of distinct rows, (2,) int64.

    It reads one or two thousand rows of each array, evenly spaced.
    """
    digest, most = hashlib.blake2b(digest_size=7), 0
    for array in arrays:
        if not len(array.shape):
            continue
        some = np.asarray(array[:: max(1, len(array) // _SAMPLE)])
        if some.dtype == object:
            rows = [repr(row).encode() for row in some.tolist()]
        else:
            rows = [row.tobytes() for row in some]
        digest.update(repr((some.dtype.str, tuple(array.shape))).encode() + b"".join(rows))
        most = max(most, len(set(rows)))
    return np.array([int.from_bytes(digest.digest(), "little"), most], np.int64)


def data_fingerprint(data: Any) -> np.ndarray:
    """Returns the fingerprint of `fit`'s data, or the empty one if they are not arrays."""
    leaves = [each for each in tf.nest.flatten(data) if each is not None]
    if not all(isinstance(each, (np.ndarray, tf.Tensor)) for each in leaves):
        return np.array(_NOTHING, np.int64)
    return fingerprint(*leaves)


def watch_first_batch(model: Any) -> None:
    """Makes the next training of a model record its first batch."""
    first = getattr(model, _FIRST, None)
    if first is None:
        with tf.device("CPU:0"):
            first = tf.Variable(_NOTHING, dtype=tf.int64, trainable=False)
        object.__setattr__(model, _FIRST, first)  # not a weight
    first.assign(_NOTHING)


def first_batch(model: Any) -> list[int]:
    """Returns the fingerprint of a training's first batch, or the empty one."""
    first = getattr(model, _FIRST, None)
    return list(_NOTHING) if first is None else first.numpy().tolist()


def note_batch(model: Any, batch: Any) -> None:
    """Records the fingerprint of a batch, in a training step, if it is the first."""
    first = getattr(model, _FIRST, None)
    if first is None:
        return
    tensors = [part for each in tf.nest.flatten(batch) for part in _parts(each)]

    def note() -> tf.Tensor:
        first.assign(tf.ensure_shape(tf.numpy_function(fingerprint, tensors, tf.int64), [2]))
        return tf.constant(True)

    tf.cond(first[0] < 0, note, lambda: tf.constant(False))


def _parts(tensor: Any) -> list[Any]:
    if tensor is None:
        return []
    if isinstance(tensor, tf.RaggedTensor):
        return [tensor.flat_values, *tensor.nested_row_lengths()]
    return tf.nest.flatten(tensor, expand_composites=True)


def warn_if_same(all_found: np.ndarray, what: str) -> bool:
    """Warns if the fingerprints of ranks, (num_ranks, 2), are equal; returns whether they are."""
    is_same = bool((all_found == all_found[0]).all()) and int(all_found[0, 1]) > _A_FEW
    if is_same:
        warn(
            f"All {len(all_found)} ranks of fit() have {what}: each trains on all rows, not on a "
            "part of them. Give fit() sok_lite.keras.shard(batches), with a tf.data.Dataset of "
            "batches; of arrays it is tf.data.Dataset.from_tensor_slices((x, y)).batch(rows).",
            RuntimeWarning,
        )
    return is_same

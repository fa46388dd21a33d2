"""What ranks train on: the same batches where each takes a part of them, and else not the same."""

import hashlib
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.collectives import allgather
from sok_lite.bridge.tf_private import (
    ANEW_OF_DATASET,
    ARRAYS_OF_DATASET,
    BATCH_SIZE_OF_DATASET,
    INPUTS_OF_DATASET,
    ORDER_OF_DATASET,
    SEEDS_OF_DATASET,
)
from sok_lite.comm.protocol import RanksDifferError

# ---- the same batches on all ranks ---------------------------------------------------------------


def check_batches(batches: Any, name: str) -> None:
    """Raises where data is no dataset of batches whose rows can be cut.

    Args:
      batches: what a program gives.
      name: of the function that it gives them, for errors.

    Raises:
      TypeError: it is no dataset, or its elements hold something that has no rows to cut.
      ValueError: its elements are no batches.
    """
    if not isinstance(batches, tf.data.Dataset):
        raise TypeError(
            f"{name}() takes a tf.data.Dataset of batches. Received: a {type(batches).__name__}. "
            "Make one of arrays: tf.data.Dataset.from_tensor_slices((x, y)).batch(rows)."
        )
    specs = tf.nest.flatten(batches.element_spec)
    for spec in specs:
        if not isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec)):
            raise TypeError(
                f"{name}() takes batches of tensors and RaggedTensors. Received: a "
                f"{type(spec).__name__.removesuffix('Spec')}. Make it one of these, as by "
                "tf.RaggedTensor.from_sparse."
            )
    lengths = {spec.shape[0] for spec in specs if spec.shape.rank}
    if any(spec.shape.rank == 0 for spec in specs) or len(lengths - {None}) > 1:
        raise ValueError(
            f"{name}() takes batches, whose tensors all have as many rows. Received: elements of "
            f"{batches.element_spec}. Call batch() before."
        )


def check_alike(batches: tf.data.Dataset) -> None:
    """Raises where ranks are seen to have other batches, or another order. All must call it.

    It looks at what a dataset was made of, and reads none of its elements. In a graph, where ranks
    cannot be asked, it does nothing.

    Raises:
      RanksDifferError: on all ranks.
    """
    if not tf.executing_eagerly():
        return
    made_of = list(_made_of(batches))
    sizes = [_number(size) for size in _attributes(made_of, BATCH_SIZE_OF_DATASET)]
    seeds = [
        tuple(_number(getattr(each, name)) for name in SEEDS_OF_DATASET)
        for each in made_of
        if all(hasattr(each, name) for name in SEEDS_OF_DATASET)
    ]
    has_order = batches.options().deterministic is not False
    has_order &= "false" not in _attributes(made_of, ORDER_OF_DATASET)
    tensors = tf.nest.flatten(_attributes(made_of, ARRAYS_OF_DATASET))
    # Of texts some are paths of files, which may differ; parts of ragged and sparse ones are none.
    arrays = [
        each for each in tensors if each.dtype.is_numpy_compatible and each.dtype != tf.string
    ]
    facts = (
        *(_crc(batches.element_spec), int(batches.cardinality()), _crc(sizes), _crc(seeds)),
        *(int((0, 0) in seeds), int(not has_order), int(fingerprint(*_samples(arrays))[0])),
    )
    specs, counts, all_sizes, all_seeds, unseeded, unordered, contents = (
        allgather(np.array([facts], np.int64)).numpy().T.tolist()
    )
    alike = "tf.random.set_seed or keras.utils.set_random_seed alike on all ranks"
    for is_wrong, came in (
        (len(set(specs)) > 1, f"other types or shapes; here {batches.element_spec}. Make them so"),
        (len(set(counts)) > 1, f"{counts} batches, by rank (-2: unknown). Give all ranks all data"),
        (len(set(all_sizes)) > 1, f"other sizes of batches; here {sizes}. Give batch() one size"),
        (
            any(unseeded),
            "a random dataset, such as shuffle(), without a seed. Give it one, the same on all "
            f"ranks, or before it is made call {alike}",
        ),
        (
            len(set(all_seeds)) > 1,
            "other seeds of shuffle(), which are made of its own and of the global one; here "
            f"{seeds}. Give it the same one, and before it is made call {alike}; what is to differ "
            "between ranks, such as dropout, comes after that",
        ),
        (
            any(unordered),
            "a dataset that leaves its order open. Leave deterministic=False out of map() and of "
            "its options",
        ),
        (
            len(set(contents)) > 1,
            "other arrays. Give all ranks all data; where each has data of its own, "
            "sok_lite.keras.equal_steps(batches) takes it",
        ),
    ):
        if is_wrong:
            raise RanksDifferError(
                "All ranks must give sok_lite.keras.shard() the same batches in the same order: "
                f"each trains on its part of them. Received: {came}."
            )


def shuffles_anew(dataset: Any) -> bool:
    """Whether a dataset has another order each time that it is begun."""
    return any(_attributes(list(_made_of(dataset)), ANEW_OF_DATASET))


def _made_of(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and those that it is made of."""
    yield dataset
    for each in getattr(dataset, INPUTS_OF_DATASET)():
        yield from _made_of(each)


def _attributes(datasets: list[Any], name: str) -> list[Any]:
    return [getattr(each, name) for each in datasets if hasattr(each, name)]


def _number(tensor: Any) -> int:
    return int(tf.get_static_value(tensor))


def _crc(fact: Any) -> int:
    return zlib.crc32(repr(fact).encode())


# ---- not the same rows on all ranks --------------------------------------------------------------

# Fewer different rows may be the same on all ranks by chance, or on purpose.
_A_FEW = 4
# Rows of an array that are looked at.
_SAMPLE = 1000
# An attribute of models: a variable, (2,) int64, the fingerprint of the first batch of a training.
_FIRST = "_sok_lite_first_batch"
_NOTHING = (-1, 0)


def fingerprint(*arrays: np.ndarray) -> np.ndarray:
    """Returns a digest of arrays, and how many different rows the most varied has, (2,) int64.

    Of the rows it compares the first thousand; the digest, which is not negative, is of all.
    """
    digest, most = hashlib.blake2b(digest_size=7), 0
    for array in arrays:
        digest.update(repr((array.dtype.str, array.shape)).encode())
        digest.update(repr(array.tolist()).encode() if array.dtype == object else array.tobytes())
        if array.ndim:
            some = array[:_SAMPLE]
            if array.dtype == object:
                rows = set(map(repr, some.tolist()))
            else:
                rows = {row.tobytes() for row in some}
            most = max(most, len(rows))
    return np.array([int.from_bytes(digest.digest(), "little"), most], np.int64)


def of_arrays(data: Any) -> np.ndarray:
    """Returns the fingerprint of what `fit` is given, or of nothing where it is no arrays."""
    leaves = [each for each in tf.nest.flatten(data) if each is not None]
    if not all(isinstance(each, (np.ndarray, tf.Tensor)) for each in leaves):
        return np.array(_NOTHING, np.int64)
    return fingerprint(*_samples(leaves))


def _samples(arrays: list[Any]) -> Iterator[np.ndarray]:
    """Yields some rows of each array."""
    for array in arrays:
        if len(array.shape):
            yield np.asarray(array[:: max(1, len(array) // _SAMPLE)])


def watch_first_batch(model: Any) -> None:
    """Has the next training of a model note its first batch."""
    first = getattr(model, _FIRST, None)
    if first is None:
        with tf.device("CPU:0"):
            first = tf.Variable(_NOTHING, dtype=tf.int64, trainable=False)
        object.__setattr__(model, _FIRST, first)  # it is no weight
    first.assign(_NOTHING)


def first_batch(model: Any) -> list[int]:
    """Returns the fingerprint of the first batch of a training, or that of nothing."""
    first = getattr(model, _FIRST, None)
    return list(_NOTHING) if first is None else first.numpy().tolist()


def note_batch(model: Any, batch: Any) -> None:
    """Keeps the fingerprint of a batch, in a training step, if it is the first."""
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
    """Warns where ranks train the same rows; returns whether.

    Args:
      all_found: (num_ranks, 2), the fingerprint of each rank.
      what: is the same.
    """
    is_same = bool((all_found == all_found[0]).all()) and int(all_found[0, 1]) > _A_FEW
    if is_same:
        warnings.warn(
            f"All {len(all_found)} ranks of fit() have {what}: each trains on all rows, not on a "
            "part of them. Give fit() sok_lite.keras.shard(batches), with a tf.data.Dataset of "
            "batches; of arrays it is tf.data.Dataset.from_tensor_slices((x, y)).batch(rows).",
            RuntimeWarning,
            stacklevel=2,
        )
    return is_same

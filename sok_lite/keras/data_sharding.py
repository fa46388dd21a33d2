"""Shards the data of a job over ranks: common batches, or batches of each rank's own.

For common batches it compares how each rank's dataset was made, which must agree.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.collectives import allgather
from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.keras.data import fingerprint
from sok_lite.bridge.keras.steps import rows_of
from sok_lite.bridge.tf_private import (
    ANEW_OF_DATASET,
    ARRAYS_OF_DATASET,
    BATCH_SIZE_OF_DATASET,
    INPUTS_OF_DATASET,
    ORDER_OF_DATASET,
    SEEDS_OF_DATASET,
)
from sok_lite.comm.protocol import RanksDifferError


def shard(batches: tf.data.Dataset, drop_remainder: bool = False) -> tf.data.Dataset:
    """Returns this rank's part of each batch; every rank gets the same number of parts.

    If the number of ranks does not divide a batch, the first ranks get one more row. A part may be
    empty and then counts nothing; see docs/keras.md. On one rank batches are unchanged.

    Every rank must call it, with the same batches in the same order. The ranks compare how the
    dataset was made: types, number and sizes of batches, seeds of `shuffle`, and numeric arrays.
    They cannot see files, or random numbers inside a function of `map` or `interleave`.

    Args:
      batches: of the whole job, of tensors and RaggedTensors.
      drop_remainder: whether to drop the surplus rows, so that all parts are equally long; for a
        custom `train_step` that weights all ranks equally.

    Raises:
      TypeError: not a dataset of tensors and RaggedTensors. ValueError: its elements are not
        batches. Both on one rank too.
      RanksDifferError: on all ranks, where the compared facts differ, or the order is random: a
        `shuffle` without a seed, or `deterministic=False`.
    """
    _check_batches(batches, "shard")
    comm = other_ranks()
    if comm is None:
        return batches
    _check_alike(batches)
    rank, size = comm.rank, comm.size

    def part(*batch: Any) -> Any:
        rows = rows_of(batch)
        each, rest = rows // size, 0 if drop_remainder else rows % size
        start, end = (each * i + tf.minimum(tf.cast(rest, tf.int64), i) for i in (rank, rank + 1))
        return _slice_rows(batches, batch, start, end)

    parts = batches.map(part)
    return parts.filter(lambda *part: rows_of(part) > 0) if drop_remainder else parts


def equal_steps(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Returns this rank's batches, then empty ones until every rank has the same number.

    An empty batch counts nothing; see docs/keras.md. Every rank must call it. On one rank batches
    are unchanged.

    Args:
      batches: of this rank, of tensors and RaggedTensors. If TensorFlow does not know their number,
        they are read once to count them.

    Raises:
      ValueError: its elements are not batches; or, on all ranks, a rank has none, or infinitely
        many.
    """
    _check_batches(batches, "equal_steps")
    if other_ranks() is None:
        return batches
    count = int(batches.cardinality())
    if count == tf.data.UNKNOWN_CARDINALITY:
        count = int(batches.reduce(np.int64(0), lambda number, *_: number + 1))
    counts = allgather(np.array([count], np.int64)).numpy().tolist()
    if min(counts) <= 0:
        raise ValueError(
            "Every rank must have a batch, and finitely many. Received: "
            f"{counts} batches, by rank ({tf.data.INFINITE_CARDINALITY}: endless). Give each rank "
            "some of the data; for endless batches give fit() steps_per_epoch."
        )

    first = batches.take(1).map(lambda *batch: _slice_rows(batches, batch, 0, 0))
    empties = first.cache().repeat(max(counts) - count)
    cardinality = tf.data.experimental.assert_cardinality(max(counts))
    return batches.concatenate(empties).apply(cardinality)


def _slice_rows(batches: tf.data.Dataset, batch: Any, start: Any, end: Any) -> Any:
    """Slices a batch into an element of the dataset."""
    rows = [each[start:end] for each in tf.nest.flatten(batch)]
    return tf.nest.pack_sequence_as(batches.element_spec, rows)


# ---- how a dataset was made --------------------------------------------------------------------


def _check_batches(batches: Any, name: str) -> None:
    """Raises TypeError or ValueError unless this is a dataset of batches with rows to slice."""
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


def _check_alike(batches: tf.data.Dataset) -> None:
    """Raises RanksDifferError on all ranks if their batches differ or have a random order.

    Every rank must call it. It inspects how the dataset was made and reads no element. In a graph,
    where ranks cannot communicate, it does nothing.
    """
    if not tf.executing_eagerly():
        return
    made_of = list(_datasets_in(batches))
    sizes = [_number(size) for size in _attributes(made_of, BATCH_SIZE_OF_DATASET)]
    seeds = [
        tuple(_number(getattr(each, name)) for name in SEEDS_OF_DATASET)
        for each in made_of
        if all(hasattr(each, name) for name in SEEDS_OF_DATASET)
    ]
    has_order = batches.options().deterministic is not False
    has_order &= "false" not in _attributes(made_of, ORDER_OF_DATASET)
    tensors = tf.nest.flatten(_attributes(made_of, ARRAYS_OF_DATASET))
    # Skip strings, which may be file paths that differ, and parts of ragged and sparse tensors.
    arrays = [
        each for each in tensors if each.dtype.is_numpy_compatible and each.dtype != tf.string
    ]
    facts = (
        *(_crc(batches.element_spec), int(batches.cardinality()), _crc(sizes), _crc(seeds)),
        *(int((0, 0) in seeds), int(not has_order), int(fingerprint(*arrays)[0])),
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


def reshuffles(dataset: Any) -> bool:
    """Whether each iteration of a dataset has another order."""
    return any(_attributes(list(_datasets_in(dataset)), ANEW_OF_DATASET))


def _datasets_in(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and its inputs, recursively."""
    yield dataset
    for each in getattr(dataset, INPUTS_OF_DATASET)():
        yield from _datasets_in(each)


def _attributes(datasets: list[Any], name: str) -> list[Any]:
    return [getattr(each, name) for each in datasets if hasattr(each, name)]


def _number(tensor: Any) -> int:
    return int(tf.get_static_value(tensor))


def _crc(fact: Any) -> int:
    return zlib.crc32(repr(fact).encode())

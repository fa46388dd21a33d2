"""Each rank's part of the data: of batches that all ranks have, or of batches of its own."""

from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.collectives import allgather
from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.keras.data import check_alike, check_batches
from sok_lite.bridge.keras.steps import rows_of


def shard(batches: tf.data.Dataset, drop_remainder: bool = False) -> tf.data.Dataset:
    """Returns this rank's part of each batch: every rank has as many parts.

    The rows of a batch that the number of ranks does not divide go to the first ranks, one each. So
    a rank may have a part without rows, which counts nothing; see docs/keras.md. On one rank the
    batches come as they are.

    Every rank must call it, with the same batches in the same order. The ranks compare what the
    dataset was made of: its types, its number and sizes of batches, the seeds of `shuffle` and
    arrays of numbers. What a function of `map` or `interleave` draws, and files, they do not see.

    Args:
      batches: of the whole job, of tensors and RaggedTensors.
      drop_remainder: whether those rows are left out instead, and all parts equally long; for a
        `train_step` of a program's own, whose ranks count alike.

    Raises:
      TypeError: it is no dataset of tensors and RaggedTensors. ValueError: its elements are no
        batches. Both on one rank too.
      RanksDifferError: on all ranks, where these differ in what they compare, or the order of a
        dataset is by chance: a `shuffle` without a seed, or `deterministic=False`.
    """
    check_batches(batches, "shard")
    comm = other_ranks()
    if comm is None:
        return batches
    check_alike(batches)
    rank, size = comm.rank, comm.size

    def part(*batch: Any) -> Any:
        rows = rows_of(batch)
        each, rest = rows // size, 0 if drop_remainder else rows % size
        start, end = (each * i + tf.minimum(tf.cast(rest, tf.int64), i) for i in (rank, rank + 1))
        return _of_rows(batches, batch, start, end)

    parts = batches.map(part)
    return parts.filter(lambda *part: rows_of(part) > 0) if drop_remainder else parts


def equal_steps(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Returns this rank's batches, and then empty ones for as long as another rank has some.

    An empty batch counts nothing; see docs/keras.md. Every rank must call it. On one rank the
    batches come as they are.

    Args:
      batches: of this rank, of tensors and RaggedTensors. Where TensorFlow does not know their
        number, they are read once to count them.

    Raises:
      TypeError: it is no dataset of tensors and RaggedTensors.
      ValueError: its elements are no batches; or, on all ranks, one has none, or endlessly many.
    """
    check_batches(batches, "equal_steps")
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

    first = batches.take(1).map(lambda *batch: _of_rows(batches, batch, 0, 0))
    empties = first.cache().repeat(max(counts) - count)
    cardinality = tf.data.experimental.assert_cardinality(max(counts))
    return batches.concatenate(empties).apply(cardinality)


def _of_rows(batches: tf.data.Dataset, batch: Any, start: Any, end: Any) -> Any:
    """Returns some rows of a batch, as an element of the dataset."""
    rows = [each[start:end] for each in tf.nest.flatten(batch)]
    return tf.nest.pack_sequence_as(batches.element_spec, rows)

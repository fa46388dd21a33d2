"""Pooled rows of a batch, with plain TensorFlow operations."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.inference import MissingKeyPolicy
from sok_lite.bridge.lookup_arguments import Argument, TableSpec
from sok_lite.bridge.sparse_matrix import combine_segments
from sok_lite.bridge.type_spec import alive


def tensors_of(arguments: Sequence[Argument]) -> list[tf.Tensor]:
    """Returns the tensors of a lookup's arguments, in the order of `look_up_served`."""
    every = [(a.keys, a.rows.places, a.rows.batch, a.weights) for a in arguments]
    return [tensor for some in every for tensor in some if tensor is not None]


def look_up_served(
    served: Any,
    tables: Sequence[TableSpec],
    batches: Sequence[int | None],
    policy: MissingKeyPolicy,
    of_all_ranks: bool,
    *tensors: tf.Tensor,
) -> list[tf.Tensor]:
    """Does `look_up` on `served`, the tables of an exported model, with `tensors_of`'s tensors."""
    stream = iter(tensors)
    outputs = []
    for spec, num_rows in zip(tables, batches, strict=True):
        keys = tf.reshape(next(stream), [-1])
        if spec.width is not None:
            batch = tf.size(keys, tf.int64)
            if spec.width > 1:  # TensorFlow Lite has no division of int64
                batch //= spec.width
            segments = tf.repeat(tf.range(batch), spec.width)
        elif spec.is_ragged:
            places = next(stream)
            batch = tf.shape(places, tf.int64)[0] - 1
            segments = tf.repeat(tf.range(batch), places[1:] - places[:-1])
        else:
            places, batch = next(stream), next(stream)[0]
            segments = places[:, 0]
        weights = next(stream) if spec.has_weights else None
        variable = alive(spec.variable)
        if spec.is_static:
            rows = served.read_static(variable, keys)
        else:
            rows, _ = served.read(variable, keys, policy, of_all_ranks)
        result = tf.cast(rows, tf.float32)
        if spec.width != 1 or weights is not None:  # else each id is a row by itself
            result = combine_segments(result, weights, segments, batch, spec.combiner)
        outputs.append(tf.ensure_shape(tf.cast(result, spec.dtype), [num_rows, spec.dim]))
    return outputs

"""Rows of keys combined row by row of a batch, with operations of TensorFlow alone."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.lookup_arguments import Argument, Facts
from sok_lite.bridge.lookup_host import Treatment
from sok_lite.bridge.type_spec import alive


def tensors_of(arguments: Sequence[Argument]) -> list[tf.Tensor]:
    """Returns the tensors of the arguments of a lookup, in the order of `combined`."""
    every = [(a.keys, a.rows.places, a.rows.batch, a.weights) for a in arguments]
    return [tensor for some in every for tensor in some if tensor is not None]


def combined(
    served: Any,
    tables: Sequence[Facts],
    treatment: Treatment,
    of_all_ranks: bool,
    *tensors: tf.Tensor,
) -> list[tf.Tensor]:
    """Returns what `look_up` gives, from what an exported model has.

    Args:
      served: the `ServedTables`.
      tables, treatment: of the lookup.
      of_all_ranks: whether it is one in the tables of several ranks.
      tensors: what `tensors_of` gave.
    """
    stream = iter(tensors)
    outputs = []
    for facts in tables:
        keys = next(stream)
        if facts.width is not None:
            batch = tf.size(keys, tf.int64) // facts.width
            segments = tf.repeat(tf.range(batch), facts.width)
        elif facts.is_ragged:
            places = next(stream)
            batch = tf.shape(places, tf.int64)[0] - 1
            segments = tf.repeat(tf.range(batch), places[1:] - places[:-1])
        else:
            places, batch = next(stream), next(stream)[0]
            segments = places[:, 0]
        weights = next(stream) if facts.has_weights else None
        variable = alive(facts.variable)
        if facts.is_static:
            rows = served.read_static(variable, keys)
        else:
            usually = "zeros" if treatment.has_filter else "initial"
            missing = treatment.missing or treatment.reading_only
            asked = treatment.training, missing, usually, of_all_ranks
            rows, _ = served.read(variable, keys, *asked)
        result = _segment(tf.cast(rows, tf.float32), weights, segments, batch, facts.combiner)
        outputs.append(tf.ensure_shape(tf.cast(result, facts.dtype), [facts.batch, facts.dim]))
    return outputs


def _segment(
    rows: tf.Tensor,
    weights: tf.Tensor | None,
    segments: tf.Tensor,
    batch: tf.Tensor,
    combiner: str,
) -> tf.Tensor:
    """Returns rows (n, dim) combined by the row of the batch that each is of, (batch, dim)."""
    if weights is not None:
        rows *= weights[:, tf.newaxis]
    total = tf.math.unsorted_segment_sum(rows, segments, batch)
    if combiner == "sum":
        return total
    weights = tf.ones_like(segments, tf.float32) if weights is None else weights
    by = weights if combiner == "mean" else weights * weights
    divisor = tf.math.unsorted_segment_sum(by, segments, batch)
    divisor = tf.sqrt(divisor) if combiner == "sqrtn" else divisor
    return tf.math.divide_no_nan(total, divisor[:, tf.newaxis])

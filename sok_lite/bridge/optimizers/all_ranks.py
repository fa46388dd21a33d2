"""Reductions of dense gradients over all ranks, before a step of all ranks."""

from typing import Any

import tensorflow as tf

from sok_lite.bridge.collectives import allreduce
from sok_lite.bridge.job import num_ranks
from sok_lite.bridge.loss_weight import apply_weight
from sok_lite.bridge.optimizers.gradients import map_values
from sok_lite.bridge.variable import TableVariable

Pairs = list[tuple[Any, Any]]


def sum_over_ranks(pairs: Pairs) -> Pairs:
    """Returns gradients, those of dense variables summed over all ranks, those of tables unchanged.

    Every rank must call it, with the same variables in the same order.
    """
    dense = iter(
        _sum_over_ranks([pair for pair in pairs if not isinstance(pair[1], TableVariable)])
    )
    return [pair if isinstance(pair[1], TableVariable) else next(dense) for pair in pairs]


def _sum_over_ranks(dense: Pairs) -> Pairs:
    """Sums dense gradients over all ranks, in one exchange per dtype."""
    gradients = [None if grad is None else tf.convert_to_tensor(grad) for grad, _ in dense]
    for dtype in {grad.dtype: None for grad in gradients if grad is not None}:
        places = [i for i, grad in enumerate(gradients) if grad is not None and grad.dtype == dtype]
        flat = tf.concat([tf.reshape(gradients[i], [-1]) for i in places], 0)
        sizes = [tf.size(gradients[i]) for i in places]
        parts = tf.split(allreduce(flat, "sum"), sizes, num=len(places))
        for i, part in zip(places, parts, strict=True):
            gradients[i] = tf.reshape(part, tf.shape(gradients[i]))
    return [(grad, var) for grad, (_, var) in zip(gradients, dense, strict=True)]


def average_over_ranks(pairs: Pairs) -> Pairs:
    """Returns weighted means over all ranks' losses (loss_weight.py) of dense gradients.

    Gradients of tables are already weighted and summed. Every rank must call it, with the same
    variables in the same order.
    """
    count = num_ranks()
    weighed_pairs = [
        (grad, var)
        if grad is None or isinstance(var, TableVariable)
        else (apply_weight(tf.convert_to_tensor(grad)), var)
        for grad, var in pairs
    ]
    every = sum_over_ranks(weighed_pairs)
    return map_values(lambda values: values / tf.cast(count, values.dtype), every)

"""Looks up the ids of features, dense, ragged or sparse, in their tables in one call."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sok_lite.bridge.inference import MissingKeyPolicy
from sok_lite.bridge.job import communicator
from sok_lite.bridge.keras.called import as_keys
from sok_lite.bridge.lookup import look_up
from sok_lite.bridge.lookup_arguments import checked_arguments
from sok_lite.bridge.loss_weight import weighed_on_the_way_back
from sok_lite.bridge.tf_private import could_possibly_record
from sok_lite.keras.table_keys import keys_of_ids

COMBINERS = ("sum", "mean", "sqrtn")


class Feature(NamedTuple):
    """How the ids of a feature become rows of a table.

    Attributes:
      table: a `Table`; features may share it.
      combiner: "sum", "mean" or "sqrtn" combines the rows along the last dimension of the ids.
        None: one row per id.
      mask_value: padding id, such as 0 or "": it is not looked up, returns zeros, and does not
        count in a combiner. None: no padding.
    """

    table: Any
    combiner: str | None = None
    mask_value: Any = None


class _LookupInput(NamedTuple):
    """The ids of one feature, prepared for a lookup."""

    ids: Any  # a ragged or sparse matrix, or flat: one row each
    weights: Any  # like ids, or None
    combiner: str
    unflatten: Callable[[tf.Tensor], Any]  # from combined rows (n, dim) to the layer's output


def is_training(training: Any) -> bool:
    """Returns whether a layer is called for training.

    In a model whose `call` has no argument `training`, layers get None even in `fit`. A gradient
    tape around the call tells: Keras' own step and custom training loops have one.
    """
    return could_possibly_record() if training is None else bool(training)


def rows_of(
    features: Sequence[Feature], ids: Sequence[Any], weights: Sequence[Any], training: Any
) -> list[Any]:
    """Looks up the ids of features, all trained ones in one call.

    Args:
      ids: per feature a tensor, RaggedTensor or SparseTensor; other arrays are converted.
      weights: per feature None, or weights of the same kind and shape as the ids.
      training: whether to insert new keys; None: whether a gradient tape is recording. Otherwise,
        and in a frozen table, nothing is inserted and keys without a row return zeros.

    Returns:
      Per feature the shape of its ids, without the last dimension if combined, + [dim]; ragged
      where the ids are and the shape still is.
    """
    inserts = is_training(training)
    taken = [_take_ids(*each, inserts) for each in zip(features, ids, weights, strict=True)]
    outputs: list[Any] = [None] * len(features)
    for is_trained in (True, False):
        chosen = [
            i
            for i, feature in enumerate(features)
            if (inserts and feature.table.trainable) is is_trained
        ]
        if not chosen:
            continue
        comm = communicator()
        arguments = checked_arguments(
            [features[i].table.variable for i in chosen],
            [taken[i].ids for i in chosen],
            [taken[i].weights for i in chosen],
            [taken[i].combiner for i in chosen],
            comm.size,
        )
        policy = MissingKeyPolicy(None if is_trained else False, None, False, "zeros")
        for i, rows in zip(chosen, look_up(comm, arguments, policy), strict=True):
            outputs[i] = taken[i].unflatten(weighed_on_the_way_back(rows))
    return outputs


def mask_of(feature: Feature, ids: Any, package: Any) -> Any:
    """Returns the mask of a dense tensor of ids for the next layers; None: no padding.

    Args:
      ids: a tensor, or a symbolic input of Keras 3.
    """
    if feature.mask_value is None or feature.combiner is not None:
        return None
    if package.__name__ == "keras" and isinstance(ids, package.KerasTensor):
        is_dense = not (ids.sparse or getattr(ids, "ragged", False))
        return package.ops.not_equal(ids, feature.mask_value) if is_dense else None
    is_dense = not isinstance(ids, (tf.RaggedTensor, tf.SparseTensor))
    if not is_dense:
        return None
    return _is_id(feature, as_keys(tf.convert_to_tensor(ids), feature.table.key_dtype_name))


def _take_ids(feature: Feature, ids: Any, weights: Any, inserts: bool) -> _LookupInput:
    if weights is not None and feature.combiner is None:
        raise ValueError(
            f"Weights of ids need a combiner. Received: weights for table {feature.table.name!r}, "
            "whose feature has none. Give it one of " + ", ".join(COMBINERS) + "."
        )
    if isinstance(ids, tf.SparseTensor):
        return _take_sparse(feature, ids, weights, inserts)
    if isinstance(ids, tf.RaggedTensor):
        return _take_ragged(feature, ids, weights, inserts)
    ids = as_keys(tf.convert_to_tensor(ids), feature.table.key_dtype_name)
    return _take_dense(feature, ids, weights, inserts)


def _take_sparse(
    feature: Feature, ids: tf.SparseTensor, weights: Any, inserts: bool
) -> _LookupInput:
    if feature.combiner is None:
        raise ValueError(
            f"Sparse ids need a combiner. Received: a SparseTensor for table "
            f"{feature.table.name!r}, whose feature has none. Give it one of "
            f"{', '.join(COMBINERS)}, or pass the ids as a dense tensor or RaggedTensor."
        )
    if feature.mask_value is not None:
        is_id = _is_id(feature, ids.values)
        weights = None if weights is None else tf.sparse.retain(weights, is_id)
        ids = tf.sparse.retain(ids, is_id)
    keys = ids.with_values(keys_of_ids(feature.table, ids.values, inserts))
    return _LookupInput(keys, weights, feature.combiner, lambda rows: rows)


def _take_ragged(
    feature: Feature, ids: tf.RaggedTensor, weights: Any, inserts: bool
) -> _LookupInput:
    if feature.combiner is None:
        whole = ids
        flat = _take_dense(feature, ids.flat_values, None, inserts)
        return flat._replace(unflatten=lambda rows: whole.with_flat_values(flat.unflatten(rows)))
    if ids.flat_values.shape.rank != 1:
        raise ValueError(
            "With a combiner, ragged ids must be ragged in their last dimension. Received: ids of "
            f"shape {ids.shape} for table {feature.table.name!r}. Use tf.RaggedTensor.from_tensor."
        )
    if feature.mask_value is not None:
        is_id = ids.with_flat_values(_is_id(feature, ids.flat_values))
        weights = None if weights is None else tf.ragged.boolean_mask(weights, is_id)
        ids = tf.ragged.boolean_mask(ids, is_id)
    outer = []
    inner, inner_weights = ids, weights
    while isinstance(inner.values, tf.RaggedTensor):
        outer.append(inner)
        inner = inner.values
        inner_weights = None if inner_weights is None else inner_weights.values

    def unflatten(rows: tf.Tensor) -> Any:
        for each in reversed(outer):
            rows = each.with_values(rows)
        return rows

    keys = inner.with_values(keys_of_ids(feature.table, inner.values, inserts))
    return _LookupInput(keys, inner_weights, feature.combiner, unflatten)


def _take_dense(feature: Feature, ids: tf.Tensor, weights: Any, inserts: bool) -> _LookupInput:
    rank = ids.shape.rank
    if rank is None:
        raise ValueError(
            f"The number of dimensions of ids must be known. Received: ids of unknown shape for "
            f"table {feature.table.name!r}. Use tf.ensure_shape."
        )
    is_pooled = feature.combiner is not None and rank > 1
    shape = tf.shape(ids, tf.int64)
    outer, static = (shape[:-1], ids.shape[:-1]) if is_pooled else (shape, ids.shape)
    flat, dim = tf.reshape(ids, [-1]), feature.table.dim

    def unflatten(rows: tf.Tensor) -> tf.Tensor:
        known = [-1 if size is None else size for size in static]
        if known.count(-1) < 2 and 0 not in known:
            # No computed shape: TensorFlow Lite has no operation to check it.
            return tf.reshape(rows, [*known, dim])
        shaped = tf.reshape(rows, tf.concat([outer, [dim]], 0))
        return tf.ensure_shape(shaped, static.concatenate([dim]))

    if feature.mask_value is None and not is_pooled:  # such a lookup needs no row splits
        weights = None if weights is None else tf.reshape(weights, [-1])
        keys = keys_of_ids(feature.table, flat, inserts)
        return _LookupInput(keys, weights, feature.combiner or "sum", unflatten)
    each = shape[-1] if is_pooled else tf.constant(1, tf.int64)
    splits = tf.range(tf.reduce_prod(outer) + 1, dtype=tf.int64) * each
    matrix = tf.RaggedTensor.from_row_splits(flat, splits, validate=False)
    if weights is not None:
        weights = matrix.with_values(tf.reshape(weights, [-1]))
    if feature.mask_value is not None:
        is_id = matrix.with_values(_is_id(feature, flat))
        weights = None if weights is None else tf.ragged.boolean_mask(weights, is_id)
        matrix = tf.ragged.boolean_mask(matrix, is_id)
    keys = matrix.with_values(keys_of_ids(feature.table, matrix.values, inserts))
    return _LookupInput(keys, weights, feature.combiner or "sum", unflatten)


def _is_id(feature: Feature, flat: tf.Tensor) -> tf.Tensor:
    mask_value = feature.mask_value
    if (flat.dtype == tf.string) != feature.table.has_texts:
        keys_of_ids(feature.table, flat, False)  # raises
    if flat.dtype.is_integer and not flat.dtype.min <= mask_value <= flat.dtype.max:
        return tf.ones_like(flat, tf.bool)  # the dtype cannot hold the mask value
    return tf.not_equal(flat, tf.constant(mask_value, flat.dtype))

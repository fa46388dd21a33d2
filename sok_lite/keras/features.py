"""The ids of features, dense, ragged or sparse, looked up in their tables by one call."""

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
      table: a `Table`; several features may have the same.
      combiner: "sum", "mean" or "sqrtn" combines the rows of the ids of the last dimension. None:
        each id gives its row.
      mask_value: an id that stands for no id, such as 0 or "" in padded ids: it is not looked up,
        gives zeros, and does not count in a combiner. None: there is none.
    """

    table: Any
    combiner: str | None = None
    mask_value: Any = None


class _Taken(NamedTuple):
    """The ids of one feature, as a lookup takes them.

    Attributes:
      ids, weights: matrices, ragged or sparse, or flat and dense: an id a row; no weights: None.
      combiner: of the rows of the matrices.
      unflatten: takes the combined rows (rows of the matrix, dim) and returns the layer's output.
    """

    ids: Any
    weights: Any
    combiner: str
    unflatten: Callable[[tf.Tensor], Any]


def is_training(training: Any) -> bool:
    """Returns whether a call of a layer is one of training.

    A model whose `call` has no argument `training` gives None to its layers, in `fit` as well. What
    Keras' own step, and a loop of a program, have around a call that trains is a gradient tape.
    """
    return could_possibly_record() if training is None else bool(training)


def rows_of(
    features: Sequence[Feature], ids: Sequence[Any], weights: Sequence[Any], training: Any
) -> list[Any]:
    """Looks the ids of features up, all that train in one call.

    Args:
      features: what to look up in.
      ids: of each a tensor, RaggedTensor or SparseTensor; what else is an array is made a tensor.
      weights: of each None, or the weights of its ids, of the same kind and shape.
      training: whether new keys are inserted; None: whether a gradient tape is recording. Else, and
        in a table that is frozen, nothing is inserted and a key without a row gives zeros.

    Returns:
      Of each feature its ids' shape, without the last dimension where it has a combiner, + [dim];
      ragged where the ids are and the shape still is.
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
    """Returns which ids of a dense tensor give a row, for the layers behind; None: all.

    Args:
      ids: a tensor, or what stands for one where a model of Keras 3 is made.
      package: keras or tf_keras.
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


def _take_ids(feature: Feature, ids: Any, weights: Any, inserts: bool) -> _Taken:
    if weights is not None and feature.combiner is None:
        raise ValueError(
            f"Weights of ids need a combiner. Received: weights for table {feature.table.name!r}, "
            "whose feature has none. Give it one of " + ", ".join(COMBINERS) + "."
        )
    if isinstance(ids, tf.SparseTensor):
        return _of_sparse(feature, ids, weights, inserts)
    if isinstance(ids, tf.RaggedTensor):
        return _of_ragged(feature, ids, weights, inserts)
    ids = as_keys(tf.convert_to_tensor(ids), feature.table.key_dtype_name)
    return _of_dense(feature, ids, weights, inserts)


def _of_sparse(feature: Feature, ids: tf.SparseTensor, weights: Any, inserts: bool) -> _Taken:
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
    return _Taken(keys, weights, feature.combiner, lambda rows: rows)


def _of_ragged(feature: Feature, ids: tf.RaggedTensor, weights: Any, inserts: bool) -> _Taken:
    if feature.combiner is None:
        whole = ids
        flat = _of_dense(feature, ids.flat_values, None, inserts)
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
    return _Taken(keys, inner_weights, feature.combiner, unflatten)


def _of_dense(feature: Feature, ids: tf.Tensor, weights: Any, inserts: bool) -> _Taken:
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
            # No shape to be computed: TensorFlow Lite has no operation that would check it.
            return tf.reshape(rows, [*known, dim])
        shaped = tf.reshape(rows, tf.concat([outer, [dim]], 0))
        return tf.ensure_shape(shaped, static.concatenate([dim]))

    if feature.mask_value is None and not is_pooled:  # a lookup of such ids needs no row splits
        weights = None if weights is None else tf.reshape(weights, [-1])
        keys = keys_of_ids(feature.table, flat, inserts)
        return _Taken(keys, weights, feature.combiner or "sum", unflatten)
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
    return _Taken(keys, weights, feature.combiner or "sum", unflatten)


def _is_id(feature: Feature, flat: tf.Tensor) -> tf.Tensor:
    mask_value = feature.mask_value
    if (flat.dtype == tf.string) != feature.table.has_texts:
        keys_of_ids(feature.table, flat, False)  # raises
    if flat.dtype.is_integer and not flat.dtype.min <= mask_value <= flat.dtype.max:
        return tf.ones_like(flat, tf.bool)  # ids of a dtype that cannot hold it
    return tf.not_equal(flat, tf.constant(mask_value, flat.dtype))

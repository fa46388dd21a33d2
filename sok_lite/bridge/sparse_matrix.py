"""Keys as a SparseTensor or RaggedTensor whose rows are combined: checks and arithmetic.

Shared by the lookups of several APIs.
"""

from typing import Any

import tensorflow as tf

_COMBINERS = ("mean", "sqrtn", "sum")


def checked_combiner(combiner: str | None) -> str:
    """Returns a combiner, "mean" for None, or raises ValueError."""
    combiner = "mean" if combiner is None else combiner
    if combiner not in _COMBINERS:
        raise ValueError(f"`combiner` must be one of {_COMBINERS}. Received: {combiner!r}.")
    return combiner


def check_sparse(ids: Any, weights: Any) -> None:
    """Raises TypeError unless ids, and weights if given, are matrices of one kind."""
    if not isinstance(ids, (tf.SparseTensor, tf.RaggedTensor)):
        raise TypeError(
            f"`sp_ids` must be a SparseTensor or RaggedTensor. Received: {type(ids).__name__}."
        )
    if weights is not None and type(weights) is not type(ids):
        raise TypeError(
            f"`sp_weights` must be None or a {type(ids).__name__}, as `sp_ids` is. "
            f"Received: {type(weights).__name__}."
        )


def values_of(matrix: Any) -> tf.Tensor:
    """Returns the values of a matrix, (n,)."""
    return matrix.flat_values if isinstance(matrix, tf.RaggedTensor) else matrix.values


def with_values(matrix: Any, values: tf.Tensor) -> Any:
    """Returns a matrix with other values (n,) in the same positions."""
    if isinstance(matrix, tf.RaggedTensor):
        return matrix.with_flat_values(values)
    return tf.SparseTensor(matrix.indices, values, matrix.dense_shape)


def as_rows(matrix: Any) -> Any:
    """Flattens rank 2 or more to a matrix (batch, None) by its first dimension."""
    if matrix.shape.rank is None or matrix.shape.rank <= 2:
        return matrix
    if isinstance(matrix, tf.RaggedTensor):
        return matrix.merge_dims(1, -1)
    shape = matrix.dense_shape
    return _reshape(matrix, tf.stack([shape[0], tf.reduce_prod(shape[1:])]))


def as_safe_matrix(ids: Any, weights: Any, combiner: str, default_id: Any) -> tuple[Any, Any, Any]:
    """Prepares the arguments of `safe_embedding_lookup_sparse`.

    Args:
      ids: a SparseTensor or RaggedTensor of rank 2 or more; ValueError for rank 1.
      weights: in the same form; except with "sum", ids with weights <= 0 are dropped.
      default_id: the key of an empty row, castable to the ids' dtype; None: none.

    Returns:
      (ids (batch, None), weights or None, the outer dimensions in the batch, None if there is one).
    """
    ids, weights, outer = _as_matrix(ids, weights)
    if weights is not None and combiner != "sum":
        keep = values_of(weights) > 0
        ids, weights = _retain(ids, keep), _retain(weights, keep)
    if default_id is not None:
        ids, weights = _fill_empty_rows(ids, weights, tf.cast(default_id, ids.dtype))
    return ids, weights, outer


def with_outer(rows: tf.Tensor, outer: Any, ids: Any) -> Any:
    """Returns rows (batch, dim) in the outer dimensions from `as_safe_matrix` of `ids`."""
    if outer is None:
        return rows
    if isinstance(ids, tf.RaggedTensor):
        return tf.RaggedTensor.from_nested_row_splits(rows, outer, validate=False)
    dim = rows.shape[-1]
    rows = tf.reshape(rows, tf.concat([outer, [dim]], 0))
    rows.set_shape(ids.shape[:-1].concatenate([dim]))
    return rows


def clipped(rows: tf.Tensor, max_norm: float | None) -> tf.Tensor:
    """Returns rows clipped to a norm; unchanged for None."""
    return rows if max_norm is None else tf.clip_by_norm(rows, max_norm, axes=[-1])


def combine_rows(rows: tf.Tensor, ids: Any, weights: Any, combiner: str) -> tf.Tensor:
    """Combines the rows of keys (n, dim) as `tf.nn.embedding_lookup_sparse` does.

    (batch, dim) of the rows' dtype, float32 for float16 and bfloat16; zeros for an empty row.
    """
    dtype = tf.float32 if rows.dtype in (tf.float16, tf.bfloat16) else rows.dtype
    # Integers in float64, except plain sums, which are exact in their own dtype.
    is_exact = rows.dtype.is_integer and combiner == "sum" and weights is None
    work = dtype if dtype.is_floating or is_exact else tf.float64
    rows = tf.cast(rows, work)
    if isinstance(ids, tf.RaggedTensor):
        segments, batch = ids.value_rowids(), ids.nrows()
    else:
        segments, batch = ids.indices[:, 0], ids.dense_shape[0]
    each_weight = None if weights is None else tf.cast(values_of(weights), rows.dtype)
    return tf.cast(combine_segments(rows, each_weight, segments, batch, combiner), dtype)


def combine_segments(
    rows: tf.Tensor, weights: tf.Tensor | None, segments: tf.Tensor, batch: tf.Tensor, combiner: str
) -> tf.Tensor:
    """Combines rows (n, dim) by segment (n,), to (batch, dim); weights (n,) of their dtype."""
    if weights is not None:
        rows *= weights[:, tf.newaxis]
    total = tf.math.unsorted_segment_sum(rows, segments, batch)
    if combiner == "sum":
        return total
    weights = tf.ones_like(segments, rows.dtype) if weights is None else weights
    by = weights if combiner == "mean" else weights * weights
    divisor = tf.math.unsorted_segment_sum(by, segments, batch)
    divisor = tf.sqrt(divisor) if combiner == "sqrtn" else divisor
    return tf.math.divide_no_nan(total, divisor[:, tf.newaxis])


def _as_matrix(ids: Any, weights: Any) -> tuple[Any, Any, Any]:
    """Returns ids and weights with rank 2, and the outer dimensions, None if they had rank 2."""
    if ids.shape.rank == 2:
        return ids, weights, None
    if isinstance(ids, tf.RaggedTensor):
        ragged = _all_ragged(ids)
        outer = ragged.nested_row_splits[:-1]
        inner = [None if each is None else _innermost(_all_ragged(each)) for each in (ids, weights)]
        return inner[0], inner[1], outer or None
    if ids.shape.rank is not None and ids.shape.rank < 2:
        raise ValueError(f"`sparse_ids` must have rank 2 or more. Received: shape {ids.shape}.")
    shape = ids.dense_shape
    flat = tf.stack([tf.reduce_prod(shape[:-1]), shape[-1]])
    flat_weights = None if weights is None else _reshape(weights, flat)
    return _reshape(ids, flat), flat_weights, shape[:-1]


def _reshape(sparse: tf.SparseTensor, shape: tf.Tensor) -> tf.SparseTensor:
    """Reshapes a SparseTensor to rank 2; shape (2,)."""
    sparse = tf.sparse.reshape(sparse, shape)
    return tf.SparseTensor(tf.ensure_shape(sparse.indices, [None, 2]), sparse.values, shape)


def _all_ragged(ragged: tf.RaggedTensor) -> tf.RaggedTensor:
    """Returns an equal RaggedTensor whose flat values have rank 1."""
    flat = ragged.flat_values
    if flat.shape.rank in (1, None):
        return ragged
    return ragged.with_flat_values(
        tf.RaggedTensor.from_tensor(flat, ragged_rank=flat.shape.rank - 1)
    )


def _innermost(ragged: tf.RaggedTensor) -> tf.RaggedTensor:
    """Returns the rows of the last dimension, (n, None)."""
    while ragged.ragged_rank > 1:
        ragged = ragged.values
    return ragged


def _retain(matrix: Any, keep: tf.Tensor) -> Any:
    if isinstance(matrix, tf.RaggedTensor):
        return tf.ragged.boolean_mask(matrix, matrix.with_values(keep))
    return tf.sparse.retain(matrix, keep)


def _fill_empty_rows(ids: Any, weights: Any, default_id: tf.Tensor) -> tuple[Any, Any]:
    """Returns ids and weights with a default key, of weight 1, in each empty row."""
    ragged = isinstance(ids, tf.RaggedTensor)
    filled, is_empty = tf.sparse.fill_empty_rows(ids.to_sparse() if ragged else ids, default_id)
    del is_empty
    if weights is None:
        return filled, None
    one = tf.ones([], values_of(weights).dtype)
    return filled, tf.sparse.fill_empty_rows(weights.to_sparse() if ragged else weights, one)[0]

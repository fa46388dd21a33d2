"""`embedding_lookup` and its kin: rows of keys, with gradients of the variable's trainable.

Lookups never insert. What they give has a gradient of the trainable that the name stands for: in
eager mode and tf.functions the variable's `ShadowVariable` of that name, which is made once; in a
graph of TF1 a new `TrainableWrapper`. A repeated key has the sum of its gradients.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted_function
from sok_lite.bridge.lookup import look_up
from sok_lite.bridge.lookup_arguments import checked_arguments
from sok_lite.bridge.lookup_host import Treatment
from sok_lite.comm.single import SingleCommunicator
from sok_lite.dynamic_embedding.errors import DtypeError
from sok_lite.dynamic_embedding.mode import ModelMode, get_model_mode
from sok_lite.dynamic_embedding.trainable import TrainableWrapper, clipped

# What TFRA adds to the name of a sparse lookup to have that of its trainable.
_LOOKUP = "embedding_lookup"
_COMBINERS = ("mean", "sqrtn", "sum")


@unconverted_function
def embedding_lookup(
    params: Any,
    ids: Any,
    partition_strategy: Any = None,
    name: str | None = None,
    validate_indices: Any = None,
    max_norm: float | None = None,
    return_trainable: bool = False,
) -> Any:
    """Returns the rows of keys.

    Args:
      params: a `Variable`, or a list of one.
      ids: keys of any shape, of the variable's key dtype.
      partition_strategy, validate_indices: not used.
      name: of the trainable; needed in eager mode.
      max_norm: rows are clipped to this norm where they are read; None: they are not.
      return_trainable: whether to return the trainable as well.

    Returns:
      ids.shape + [dim]; with `return_trainable` (rows, trainable).

    Raises:
      ValueError: several params, or no name in eager mode.
      TypeError: `params` is no Variable, or `ids` have another dtype.
      NotImplementedError: `return_trainable` in a tf.function: use `get_trainable_by_name`.
    """
    return _looked_up(params, ids, name, "embedding_lookup", max_norm, return_trainable)


@unconverted_function
def embedding_lookup_unique(
    params: Any,
    ids: Any,
    partition_strategy: Any = None,
    name: str | None = None,
    validate_indices: Any = None,
    max_norm: float | None = None,
    return_trainable: bool = False,
) -> Any:
    """Does what `embedding_lookup` does: repeated keys are deduplicated where that is cheapest.

    Args, returns, raises: as of `embedding_lookup`.
    """
    return _looked_up(params, ids, name, "embedding_lookup_unique", max_norm, return_trainable)


@unconverted_function
def embedding_lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any,
    partition_strategy: Any = None,
    name: str | None = "embedding_lookup_sparse",
    combiner: str | None = "mean",
    max_norm: float | None = None,
    return_trainable: bool = False,
) -> Any:
    """Returns the rows of keys, combined row by row of a sparse matrix.

    Args:
      params: a `Variable`, or a list of one.
      sp_ids: a SparseTensor or RaggedTensor (batch, None) of keys.
      sp_weights: weights in the same form and with rows of the same lengths; None: all are 1.
      partition_strategy: not used.
      name: of the trainable, which is known by `<name>/embedding_lookup` as well.
      combiner: "mean" (also None), "sqrtn" or "sum", as of `tf.nn.embedding_lookup_sparse`.
      max_norm: rows are clipped to this norm before they are combined.
      return_trainable: whether to return the trainable as well.

    Returns:
      (batch, dim) of the variable's value dtype, of float16 and bfloat16 values float32; zeros for
      a row without keys. With `return_trainable` (rows, trainable).

    Raises:
      ValueError: another combiner, or several params.
      TypeError: ids or weights of another kind or dtype.
    """
    combiner = _checked_combiner(combiner)
    _check_sparse(sp_ids, sp_weights)
    name = name or "embedding_lookup_sparse"
    trainable = _trainable(params, _values(sp_ids), [f"{name}/{_LOOKUP}", name], return_trainable)
    rows = _combined(trainable, sp_ids, sp_weights, combiner, max_norm)
    return (rows, trainable) if return_trainable else rows


@unconverted_function
def safe_embedding_lookup_sparse(
    embedding_weights: Any,
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: str | None = "mean",
    default_id: Any = None,
    name: str | None = "safe_embedding_lookup_sparse",
    partition_strategy: Any = None,
    max_norm: float | None = None,
    return_trainable: bool = False,
) -> Any:
    """Does what `embedding_lookup_sparse` does, for any rank, bad weights and empty rows.

    Keys whose weight is not above 0 are left out, but of "sum". Any key is good, negative ones too.

    Args:
      embedding_weights: a `Variable`, or a list of one.
      sparse_ids: a SparseTensor of rank 2 and above, or a RaggedTensor (batch, None); its last
        dimension is combined.
      sparse_weights: weights in the same form; None: all are 1.
      combiner: see `embedding_lookup_sparse`.
      default_id: the key that an empty row has; None: an empty row is zeros, and no key is looked
        up for it.
      name, partition_strategy, max_norm, return_trainable: see `embedding_lookup_sparse`.

    Returns:
      sparse_ids.shape[:-1] + [dim].

    Raises: as of `embedding_lookup_sparse`; ValueError for a SparseTensor of rank 1.
    """
    combiner = _checked_combiner(combiner)
    _check_sparse(sparse_ids, sparse_weights)
    name = name or "safe_embedding_lookup_sparse"
    params = _only(embedding_weights)
    ids, weights, outer = _as_matrix(sparse_ids, sparse_weights)
    if weights is not None and combiner != "sum":
        keep = _values(weights) > 0
        ids, weights = _retained(ids, keep), _retained(weights, keep)
    if default_id is not None:
        ids, weights = _filled(ids, weights, tf.cast(default_id, params.key_dtype))
    full_name = f"{name}/embedding_lookup_sparse/{_LOOKUP}"
    trainable = _trainable(params, _values(ids), [full_name, name], return_trainable)
    rows = _combined(trainable, ids, weights, combiner, max_norm)
    if outer is not None:
        rows = tf.reshape(rows, tf.concat([outer, [params.dim]], 0))
        rows.set_shape(sparse_ids.shape[:-1].concatenate([params.dim]))
    return (rows, trainable) if return_trainable else rows


def _looked_up(
    params: Any,
    ids: Any,
    name: str | None,
    default_name: str,
    max_norm: float | None,
    return_trainable: bool,
) -> Any:
    """Does what `embedding_lookup` does, under another name where none is given."""
    names = [name or default_name]
    trainable = _trainable(params, ids, names, return_trainable, name is not None)
    rows = clipped(trainable.lookup(ids), max_norm)
    return (rows, trainable) if return_trainable else rows


# ---- trainables ----------------------------------------------------------------------------------


def _only(params: Any) -> Any:
    """Returns the variable of `params`."""
    if isinstance(params, (list, tuple)):
        if len(params) != 1:
            raise ValueError(f"Only one params is allowed. Received: {len(params)}.")
        (params,) = params
    if not getattr(params, "is_dynamic_embedding", False):
        raise TypeError(f"`params` must be a de.Variable. Received: {type(params).__name__}.")
    return params


def _trainable(
    params: Any,
    ids: Any,
    names: Sequence[str],
    return_trainable: bool,
    is_named: bool = True,
) -> TrainableWrapper:
    """Returns what gradients are of.

    Args:
      names: of it; it is known by any of them.
      is_named: whether the program has given a name.
    """
    params = _only(params)
    dtype = getattr(ids, "dtype", params.key_dtype)
    if tf.as_dtype(dtype) != params.key_dtype:
        raise DtypeError(
            f"`ids` must be {params.key_dtype.name}, as the keys of {params.name!r}. "
            f"Received: {tf.as_dtype(dtype).name}. Cast them first."
        )
    if tf.inside_function() and return_trainable:
        raise NotImplementedError(
            "`return_trainable` does not work in a tf.function: a variable cannot leave it. Use "
            "params.get_trainable_by_name(name)."
        )
    with tf.init_scope():
        is_eager = tf.executing_eagerly()
    if not is_eager:
        return TrainableWrapper(params, ids, name=names[0])
    if not is_named and tf.executing_eagerly():
        raise ValueError(
            "`name` must be given in eager mode: params.get_trainable_by_name(name) is what is "
            "trained. Received: None."
        )
    return params.trainable_named(names)


# ---- sparse matrices -----------------------------------------------------------------------------


def _checked_combiner(combiner: str | None) -> str:
    combiner = "mean" if combiner is None else combiner
    if combiner not in _COMBINERS:
        raise ValueError(f"`combiner` must be one of {_COMBINERS}. Received: {combiner!r}.")
    return combiner


def _check_sparse(ids: Any, weights: Any) -> None:
    if not isinstance(ids, (tf.SparseTensor, tf.RaggedTensor)):
        raise TypeError(
            f"`sp_ids` must be a SparseTensor or RaggedTensor. Received: {type(ids).__name__}."
        )
    if weights is not None and type(weights) is not type(ids):
        raise TypeError(
            f"`sp_weights` must be None or a {type(ids).__name__}, as `sp_ids` is. "
            f"Received: {type(weights).__name__}."
        )


def _values(matrix: Any) -> tf.Tensor:
    return matrix.flat_values if isinstance(matrix, tf.RaggedTensor) else matrix.values


def _with_values(matrix: Any, values: tf.Tensor) -> Any:
    if isinstance(matrix, tf.RaggedTensor):
        return matrix.with_flat_values(values)
    return tf.SparseTensor(matrix.indices, values, matrix.dense_shape)


def _as_matrix(ids: Any, weights: Any) -> tuple[Any, Any, tf.Tensor | None]:
    """Returns ids and weights with two dimensions, and the outer ones; None: they have two."""
    if isinstance(ids, tf.RaggedTensor) or ids.shape.rank == 2:
        return ids, weights, None
    if ids.shape.rank is not None and ids.shape.rank < 2:
        raise ValueError(f"`sparse_ids` must have rank 2 or more. Received: shape {ids.shape}.")
    shape = ids.dense_shape
    flat = tf.stack([tf.reduce_prod(shape[:-1]), shape[-1]])

    def matrix(sparse: tf.SparseTensor) -> tf.SparseTensor:
        sparse = tf.sparse.reshape(sparse, flat)
        return tf.SparseTensor(tf.ensure_shape(sparse.indices, [None, 2]), sparse.values, flat)

    return matrix(ids), None if weights is None else matrix(weights), shape[:-1]


def _retained(matrix: Any, keep: tf.Tensor) -> Any:
    if isinstance(matrix, tf.RaggedTensor):
        return tf.ragged.boolean_mask(matrix, matrix.with_values(keep))
    return tf.sparse.retain(matrix, keep)


def _filled(ids: Any, weights: Any, default_id: tf.Tensor) -> tuple[Any, Any]:
    """Returns ids and weights with a default key, of weight 1, in each empty row."""
    ragged = isinstance(ids, tf.RaggedTensor)
    filled, is_empty = tf.sparse.fill_empty_rows(ids.to_sparse() if ragged else ids, default_id)
    del is_empty
    if weights is None:
        return filled, None
    one = tf.ones([], _values(weights).dtype)
    return filled, tf.sparse.fill_empty_rows(weights.to_sparse() if ragged else weights, one)[0]


def _combined(
    trainable: TrainableWrapper, ids: Any, weights: Any, combiner: str, max_norm: float | None
) -> tf.Tensor:
    """Returns the rows of keys combined, (batch, dim)."""
    params = trainable.params
    is_inference = not trainable.trainable or get_model_mode() == ModelMode.INFERENCE
    # Halves stay float32 when they are combined: a table would round them.
    is_pooled = params.is_pooled and params.value_dtype == tf.float32
    if is_inference or max_norm is not None or not is_pooled:
        return _combined_by_tensorflow(trainable, ids, weights, combiner, max_norm)
    keys = params.keys_of(_values(ids), remember=True)
    matrix = _with_values(ids, keys)
    arguments = checked_arguments([trainable], [matrix], weights, combiner, 1)
    return look_up(SingleCommunicator(), arguments, Treatment(False, None, False))[0]


def _combined_by_tensorflow(
    trainable: TrainableWrapper, ids: Any, weights: Any, combiner: str, max_norm: float | None
) -> tf.Tensor:
    rows = clipped(trainable.lookup(_values(ids)), max_norm)
    dtype = tf.float32 if rows.dtype in (tf.float16, tf.bfloat16) else rows.dtype
    # Integers as doubles: their sums alone are exact in their own type.
    is_exact = rows.dtype.is_integer and combiner == "sum" and weights is None
    work = dtype if dtype.is_floating or is_exact else tf.float64
    rows = tf.cast(rows, work)
    if isinstance(ids, tf.RaggedTensor):
        segments, batch = ids.value_rowids(), ids.nrows()
    else:
        segments, batch = ids.indices[:, 0], ids.dense_shape[0]
    number = tf.ones([tf.size(segments)], rows.dtype)
    weight = number if weights is None else tf.cast(_values(weights), rows.dtype)
    total = tf.math.unsorted_segment_sum(rows * weight[:, None], segments, batch)
    if combiner != "sum":
        by = weight if combiner == "mean" else weight * weight
        divisor = tf.math.unsorted_segment_sum(by, segments, batch)
        divisor = tf.sqrt(divisor) if combiner == "sqrtn" else divisor
        total = tf.math.divide_no_nan(total, divisor[:, None])
    return tf.cast(total, dtype)

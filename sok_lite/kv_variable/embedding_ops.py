"""The lookups of `tf.nn` for KvVariables, which TensorFlow's own functions dispatch to.

TensorFlow's own would drop negative keys, and divide the keys of a list of partitions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge import job
from sok_lite.bridge.autograph import unconverted_function
from sok_lite.bridge.checks import checked_keys
from sok_lite.bridge.lookup import look_up_combined
from sok_lite.bridge.sparse_matrix import (
    as_safe_matrix,
    check_sparse,
    checked_combiner,
    clipped,
    with_outer,
)
from sok_lite.bridge.tf_lookups import answer
from sok_lite.comm.single import SingleCommunicator
from sok_lite.kv_variable.kv_variable_ops import KvVariable

__all__ = [
    "embedding_lookup",
    "embedding_lookup_sparse",
    "embedding_lookup_unique",
    "insert_kv_embedding",
    "safe_embedding_lookup_sparse",
    "use_tf_embedding_ops",
    "use_tfplus_embedding_ops",
]


@unconverted_function
def embedding_lookup(
    params: Any,
    ids: Any,
    partition_strategy: str = "mod",
    name: str | None = None,
    validate_indices: bool = True,
    max_norm: float | None = None,
    *,
    training: bool | None = None,
) -> tf.Tensor:
    """Returns the rows of keys; `tf.nn.embedding_lookup` dispatches here for a KvVariable.

    Args:
      params: a KvVariable, the list of its partitions, or a list of one.
      ids: integer keys of any shape, or a RaggedTensor of them.
      partition_strategy, validate_indices: not used.
      name: of the result.
      max_norm: clip rows to this norm when read; None: do not clip.
      training: whether to insert new keys; None: the variable's `training`, else IS_TRAINING.

    Returns:
      ids.shape + [dim], ragged as ids are; its gradient is an IndexedSlices of the keys.

    Raises:
      TypeError: `params` is no KvVariable, or ids are not integers.
      ValueError: a list of anything but one variable's partitions.
    """
    variable = variable_of(params)
    if isinstance(ids, tf.RaggedTensor):
        options: dict[str, Any] = {"name": name, "max_norm": max_norm, "training": training}
        return ids.with_flat_values(embedding_lookup(variable, ids.flat_values, **options))
    rows = clipped(variable.sparse_read(ids, training=training), max_norm)
    return tf.identity(rows, name) if name is not None else rows


@unconverted_function
def embedding_lookup_unique(
    params: Any,
    ids: Any,
    partition_strategy: str = "mod",
    name: str | None = None,
    *,
    training: bool | None = None,
) -> tf.Tensor:
    """Does the same as `embedding_lookup`, which deduplicates keys where that is cheapest."""
    return embedding_lookup(params, ids, partition_strategy, name, training=training)


@unconverted_function
def embedding_lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any,
    partition_strategy: str = "mod",
    name: str | None = None,
    combiner: str | None = None,
    max_norm: float | None = None,
    *,
    training: bool | None = None,
) -> tf.Tensor:
    """Returns the rows of keys, combined per row of a sparse matrix.

    Other arguments as for `embedding_lookup`.

    Args:
      sp_ids: a SparseTensor or RaggedTensor (batch, None) of integers.
      sp_weights: weights in the same form and row lengths; None: all 1.
      combiner: "mean" (also None), "sqrtn" or "sum".
      max_norm: clip rows to this norm before combining.

    Returns:
      (batch, dim), float32 for float16 and bfloat16 rows; zeros for a row without keys.

    Raises:
      ValueError: another combiner, or several variables.
      TypeError: ids or weights of another type or dtype.
    """
    combiner = checked_combiner(combiner)
    check_sparse(sp_ids, sp_weights)
    rows = _combine(variable_of(params), sp_ids, sp_weights, combiner, max_norm, training)
    return tf.identity(rows, name) if name is not None else rows


@unconverted_function
def safe_embedding_lookup_sparse(
    embedding_weights: Any,
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: str | None = "mean",
    default_id: Any = None,
    name: str | None = None,
    partition_strategy: str = "div",
    max_norm: float | None = None,
    *,
    training: bool | None = None,
) -> tf.Tensor:
    """As `embedding_lookup_sparse`, for any rank, invalid weights and empty rows.

    Keys with weights <= 0 are left out, except for "sum". Negative keys are valid. Other arguments
    and errors as there.

    Args:
      sparse_ids: a SparseTensor of rank >= 2, or a RaggedTensor (batch, None); its last dimension
        is combined.
      default_id: the key of an empty row; None: an empty row returns zeros.

    Returns:
      sparse_ids.shape[:-1] + [dim].
    """
    combiner = checked_combiner(combiner)
    check_sparse(sparse_ids, sparse_weights)
    variable = variable_of(embedding_weights)
    ids, weights, outer = as_safe_matrix(sparse_ids, sparse_weights, combiner, default_id)
    rows = _combine(variable, ids, weights, combiner, max_norm, training)
    rows = with_outer(rows, outer, sparse_ids)
    return tf.identity(rows, name) if name is not None else rows


def insert_kv_embedding(params: Any, ids: Any, values: Any) -> Any:
    """Sets the rows of keys, inserting new ones; the last row of a repeated key wins.

    Args:
      params: a KvVariable, the list of its partitions, or a list of one.
      ids: integers of any shape.
      values: ids.shape + [dim].

    Returns:
      None in eager mode, the operation in a graph.

    Raises:
      TypeError: ids are not integers. ValueError: values have another shape.
    """
    variable = variable_of(params)
    keys = checked_keys(variable, ids)
    rows = tf.convert_to_tensor(values, variable.dtype)
    wanted = keys.shape.concatenate([variable.dimension])
    if not rows.shape.is_compatible_with(wanted):
        raise ValueError(
            f"`values` of insert_kv_embedding must have the shape of `ids` and rows of "
            f"{variable.dimension}, {wanted}. Received: shape {rows.shape}."
        )
    rows = tf.reshape(rows, [-1, variable.dimension])
    done = variable.insert(tf.reshape(keys, [-1]), rows)
    return None if tf.executing_eagerly() else done


def variable_of(params: Any) -> KvVariable:
    """Returns the variable of `params`: itself, or the owner of a list of partitions."""
    if isinstance(params, KvVariable):
        return params
    if not isinstance(params, (list, tuple)) or not all(
        isinstance(each, KvVariable) for each in params
    ):
        raise TypeError(
            f"`params` must be a KvVariable, or the list of its partitions. Received: {params!r}."
        )
    if len(params) == 1:
        return params[0]
    whole = params[0].whole if params else None
    if whole is None or list(whole) != list(params):
        raise ValueError(
            "A list of KvVariables must be all partitions of one, in their order. Received: "
            f"{[each.name for each in params]}. Look each up by itself."
        )
    return whole


def _combine(
    variable: KvVariable,
    ids: Any,
    weights: Any,
    combiner: str,
    max_norm: float | None,
    training: bool | None,
) -> tf.Tensor:
    """Returns combined rows, (batch, dim)."""
    comm = job.other_ranks() or SingleCommunicator()
    policy, read = variable.policy(training), partial(variable.sparse_read, training=training)
    return look_up_combined(comm, variable, ids, weights, combiner, policy, max_norm, read)


# ---- dispatch from TensorFlow's functions -------------------------------------------------------

_answers = True


def use_tfplus_embedding_ops() -> None:
    """Makes the lookups of `tf.nn` dispatch here for KvVariables and lists of them, the default."""
    global _answers
    _answers, KvVariable.safe_lookup = True, staticmethod(safe_embedding_lookup_sparse)


def use_tf_embedding_ops() -> None:
    """Makes the lookups of `tf.nn` use TensorFlow's own code for KvVariables too.

    They then reject lists of partitions, and leave out negative keys.
    """
    global _answers
    _answers, KvVariable.safe_lookup = False, None


def _while_answering(function: Callable[..., Any], variable: Any) -> Any:
    return function if _answers else None


for _function in (embedding_lookup, embedding_lookup_sparse):
    answer(_function.__name__, KvVariable, partial(_while_answering, _function))
use_tfplus_embedding_ops()

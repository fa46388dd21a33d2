"""`embedding_lookup` and its variants: rows of keys, with gradients of a trainable.

Lookups never insert. The gradient belongs to the trainable of the given name: in eager mode and
tf.functions the variable's `ShadowVariable` of that name, made once; in a TF1 graph a new
`TrainableWrapper`. Gradients of a repeated key are summed.

Instead of a variable each function takes a trainable, or an `HvdVariable`, which looks up on all
ranks: every rank must then call it.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted_function
from sok_lite.bridge.inference import MissingKeyPolicy
from sok_lite.bridge.lookup import look_up_combined, look_up_each
from sok_lite.bridge.sparse_matrix import (
    as_rows,
    as_safe_matrix,
    check_sparse,
    checked_combiner,
    values_of,
    with_outer,
    with_values,
)
from sok_lite.comm.single import SingleCommunicator
from sok_lite.dynamic_embedding.arguments import DtypeError, wrong_ids
from sok_lite.dynamic_embedding.mode import ModelMode, get_model_mode
from sok_lite.dynamic_embedding.ranks import communicator
from sok_lite.dynamic_embedding.trainable import ShadowVariable, TrainableWrapper, clipped

# Suffix of TFRA from a sparse lookup's name to its trainable's.
_LOOKUP = "embedding_lookup"


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
      params: a `Variable`, trainable or `HvdVariable`, or a list of one.
      ids: keys of any shape, of the variable's key dtype.
      partition_strategy, validate_indices: not used.
      name: of the trainable; required in eager mode for a `Variable`.
      max_norm: clip rows to this norm when read; None: do not clip.
      return_trainable: whether to also return the trainable.

    Returns:
      ids.shape + [dim]; with `return_trainable` (rows, trainable).

    Raises:
      ValueError: several params, or no name in eager mode.
      TypeError: `params` of another type, or `ids` of another dtype.
      NotImplementedError: `return_trainable` in a tf.function: use `get_trainable_by_name`.
    """
    return _look_up(params, ids, name, "embedding_lookup", max_norm, return_trainable)


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
    """Does the same as `embedding_lookup`, which deduplicates keys where that is cheapest."""
    return _look_up(params, ids, name, "embedding_lookup_unique", max_norm, return_trainable)


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
    """Returns the rows of keys, combined per row of a sparse matrix.

    Other arguments and errors as for `embedding_lookup`.

    Args:
      sp_ids: keys as a SparseTensor or RaggedTensor (batch, ...) of rank >= 2: all keys of one
        index in the first dimension are combined.
      sp_weights: weights in the same form and row lengths; None: all 1.
      name: of the trainable, also known as `<name>/embedding_lookup`.
      combiner: "mean" (also None), "sqrtn" or "sum".
      max_norm: clip rows to this norm before combining.

    Returns:
      (batch, dim) of the variable's value dtype, float32 for float16 and bfloat16 values; zeros for
      a row without keys. With `return_trainable` (rows, trainable).

    Raises:
      ValueError: another combiner. TypeError: ids or weights of another type or dtype.
    """
    combiner = checked_combiner(combiner)
    check_sparse(sp_ids, sp_weights)
    name = name or "embedding_lookup_sparse"
    ids, weights = as_rows(sp_ids), None if sp_weights is None else as_rows(sp_weights)
    table = _table_of(params, values_of(ids), [f"{name}/{_LOOKUP}", name], return_trainable)
    rows = _combine(table, ids, weights, combiner, max_norm)
    return (rows, _trainable_of(table)) if return_trainable else rows


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
    """As `embedding_lookup_sparse`, for any rank, invalid weights and empty rows.

    Keys with weights <= 0 are left out, except for "sum". Any key is valid, even negative. Other
    arguments and errors as there.

    Args:
      sparse_ids: a SparseTensor or RaggedTensor of rank >= 2; its last dimension is combined.
      default_id: the key of an empty row; None: an empty row returns zeros without a lookup.

    Returns:
      sparse_ids.shape[:-1] + [dim], ragged where the ids are.
    """
    combiner = checked_combiner(combiner)
    check_sparse(sparse_ids, sparse_weights)
    name = name or "safe_embedding_lookup_sparse"
    ids, weights, outer = as_safe_matrix(sparse_ids, sparse_weights, combiner, default_id)
    full_name = f"{name}/embedding_lookup_sparse/{_LOOKUP}"
    table = _table_of(embedding_weights, values_of(ids), [full_name, name], return_trainable)
    rows = _combine(table, ids, weights, combiner, max_norm)
    rows = with_outer(rows, outer, sparse_ids)
    return (rows, _trainable_of(table)) if return_trainable else rows


def _look_up(
    params: Any,
    ids: Any,
    name: str | None,
    default_name: str,
    max_norm: float | None,
    return_trainable: bool,
) -> Any:
    """As `embedding_lookup`, with its own default name."""
    table = _table_of(params, ids, [name or default_name], return_trainable, name is not None)
    rows = clipped(table.lookup(ids), max_norm)
    return (rows, _trainable_of(table)) if return_trainable else rows


# ---- on all ranks --------------------------------------------------------------------------------


class HvdVariable:
    """A variable sharded over ranks: each owns some keys, and any rank may look up all of them.

    The variable's partitioner assigns keys to ranks. A lookup is one exchange of keys and rows;
    gradients are summed over ranks and go to the owner rank. Every rank must make the object, and
    call each lookup and gradient. It inserts nothing.

    Args:
      name: of the variable.
      shadow: this rank's trainable.
      embedding_size: elements of a row.
      with_unique, with_secondary_unique: no effect: keys are always deduplicated before and after
        the exchange.
      mpi_size: expected number of ranks; None: not checked.

    Raises:
      ValueError: the ranks cannot be connected, or `mpi_size` differs.
      TypeError: string keys or non-float32 rows on several ranks.
    """

    def __init__(
        self,
        name: str,
        shadow: ShadowVariable,
        embedding_size: int,
        with_unique: bool = True,
        with_secondary_unique: bool = True,
        mpi_size: int | None = None,
    ) -> None:
        self.name, self.shadow, self.embedding_size = name, shadow, embedding_size
        self.with_unique, self.with_secondary_unique = with_unique, with_secondary_unique
        self._comm = communicator(f"A lookup of {name!r} on all ranks")
        self.mpi_size = self._comm.size
        if mpi_size not in (None, self.mpi_size):
            raise ValueError(
                f"`mpi_size` must be the number of ranks, {self.mpi_size}. Received: {mpi_size}. "
                "Leave it out."
            )
        params = shadow.params
        if self.mpi_size > 1 and (params.key_dtype == tf.string or not params.is_pooled):
            raise DtypeError(
                "Ranks look up integer keys, of rows of float32. Received: "
                f"key_dtype={params.key_dtype.name}, value_dtype={params.value_dtype.name}."
            )

    def lookup(self, ids: Any) -> Any:
        """Returns the rows of keys of any shape, dense or ragged, with a gradient of the shadow.
        Every rank must call it.

        Raises:
          NotImplementedError: a SparseTensor. ValueError, also a TypeError: keys of another dtype.
        """
        if isinstance(ids, tf.SparseTensor):
            raise NotImplementedError(
                "A lookup on all ranks takes dense or ragged keys. Received: a SparseTensor. Give "
                "tf.RaggedTensor.from_sparse(ids)."
            )
        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(self.lookup(ids.flat_values))
        ids = tf.convert_to_tensor(ids)
        params = self.shadow.params
        if ids.dtype != params.key_dtype:
            raise wrong_ids(ids.dtype, params)
        if self.mpi_size == 1:
            return self.shadow.lookup(ids)
        rows = look_up_each(self._comm, self.shadow, ids, MissingKeyPolicy(False))
        if get_model_mode() != ModelMode.TRAIN:
            rows = tf.stop_gradient(rows)
        return clipped(rows, self.shadow.max_norm)

    __lookup__ = lookup


# ---- trainables ----------------------------------------------------------------------------------


def _only(params: Any) -> tuple[Any, Any]:
    """Returns the element of `params`, and its variable."""
    if isinstance(params, (list, tuple)):
        if len(params) != 1:
            raise ValueError(f"Only one params is allowed. Received: {len(params)}.")
        (params,) = params
    if isinstance(params, (TrainableWrapper, HvdVariable)):
        return params, _trainable_of(params).params
    if not getattr(params, "is_dynamic_embedding", False):
        raise TypeError(
            "`params` must be a de.Variable, or a ShadowVariable or HvdVariable of one. "
            f"Received: {type(params).__name__}."
        )
    return params, params


def _trainable_of(table: TrainableWrapper | HvdVariable) -> TrainableWrapper:
    return table.shadow if isinstance(table, HvdVariable) else table


def _table_of(
    params: Any, ids: Any, names: Sequence[str], return_trainable: bool, is_named: bool = True
) -> TrainableWrapper | HvdVariable:
    """Returns the trainable or HvdVariable to look up in, which receives the gradients.

    Args:
      names: of the trainable; it is known by any of them.
      is_named: whether the program named it.
    """
    params, variable = _only(params)
    dtype = getattr(ids, "dtype", variable.key_dtype)
    if tf.as_dtype(dtype) != variable.key_dtype:
        raise wrong_ids(tf.as_dtype(dtype), variable)
    if tf.inside_function() and return_trainable:
        raise NotImplementedError(
            "`return_trainable` does not work in a tf.function: a variable cannot leave it. Use "
            "params.get_trainable_by_name(name)."
        )
    if params is not variable:
        return params
    with tf.init_scope():
        is_eager = tf.executing_eagerly()
    if not is_eager:
        # As TFRA names it.
        scope = tf.compat.v1.get_variable_scope().name
        with tf.name_scope(f"{scope}/{names[0]}/" if scope else f"{names[0]}/"):
            return TrainableWrapper(params, ids, name=names[0])
    if not is_named and tf.executing_eagerly():
        raise ValueError(
            "`name` must be given in eager mode: params.get_trainable_by_name(name) is what is "
            "trained. Received: None."
        )
    return params.find_trainable(names)


# ---- sparse matrices -----------------------------------------------------------------------------


def _combine(
    table: TrainableWrapper | HvdVariable,
    ids: Any,
    weights: Any,
    combiner: str,
    max_norm: float | None,
) -> tf.Tensor:
    """Returns combined rows (batch, dim)."""
    trainable = _trainable_of(table)
    params = trainable.params
    is_inference = not trainable.trainable or get_model_mode() == ModelMode.INFERENCE
    is_clipped = max_norm is not None or trainable.max_norm is not None
    can_pool = params.is_pooled and params.value_dtype == tf.float32 and table is trainable
    is_pooled = can_pool and not is_inference and not is_clipped
    if is_pooled:
        ids = with_values(ids, params.keys_of(values_of(ids), remember=True))
    variable = trainable if is_pooled else None
    policy, comm = MissingKeyPolicy(False), SingleCommunicator()
    return look_up_combined(comm, variable, ids, weights, combiner, policy, max_norm, table.lookup)

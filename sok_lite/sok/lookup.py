"""`sok.lookup_sparse`: keys of all ranks in all tables of a call; and SOK's helpers beside it."""

from collections.abc import Callable, Sequence
from typing import Any, overload

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted_function
from sok_lite.bridge.checks import integer_keys
from sok_lite.bridge.inference import AS_USUAL, MissingKeyPolicy, checked_missing, checked_training
from sok_lite.bridge.local_lookup import local_lookup_and_evict
from sok_lite.bridge.lookup import look_up
from sok_lite.bridge.lookup_arguments import Argument, checked_arguments
from sok_lite.bridge.tf_private import ResourceVariable
from sok_lite.bridge.type_spec import alive
from sok_lite.sok.communication import communicator
from sok_lite.sok.dynamic_variable import DynamicVariable
from sok_lite.sok.static_variable import FixedVariable

__all__ = [
    "all2all_dense_embedding",
    "allSupportedVariableCheckFunc",
    "group_lookup",
    "isDynamicVariable",
    "isEmbeddingVariable",
    "isResourceVariable",
    "isVariable",
    "lookup_sparse",
    "sparse_read_and_evict",
    "to_list",
]


@overload
def lookup_sparse(
    params: DynamicVariable | FixedVariable,
    sp_ids: Any,
    sp_weights: Any = None,
    combiners: str | Sequence[str] | None = None,
    use_low_frequency_filter: bool = False,
    *,
    training: bool | None = None,
    missing: str | None = None,
) -> tf.Tensor: ...
@overload
def lookup_sparse(
    params: Sequence[DynamicVariable | FixedVariable],
    sp_ids: Any,
    sp_weights: Any = None,
    combiners: str | Sequence[str] | None = None,
    use_low_frequency_filter: bool = False,
    *,
    training: bool | None = None,
    missing: str | None = None,
) -> list[tf.Tensor]: ...
@unconverted_function
def lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    combiners: Any = None,
    use_low_frequency_filter: bool = False,
    *,
    training: bool | None = None,
    missing: str | None = None,
) -> Any:
    """Looks keys up in the tables of all ranks, and combines their rows per batch row.

    Every rank must call it, with the same tables in the same order; batches may differ in size. New
    keys are inserted. In a graph the call is one operation forward and one backward; static
    variables have TensorFlow's, and on several ranks two and one of their own. In a TF1 graph
    nothing orders two such calls, so rank 0 decides the order: build the same graphs in the same
    order on all ranks and fetch the same, or make one call per step, which is faster. See
    docs/howto/tf1-graphs.md.

    Args:
      params: a DynamicVariable, a static `sok.Variable`, or a list of both, which may repeat. Keys
        of a static one are its row numbers, from 0.
      sp_ids: per variable a RaggedTensor or SparseTensor (in row-major order) of keys, (batch,
        None); or a dense tensor or array of keys, (batch, k), or (batch,) with one per row, of
        which every element counts.
      sp_weights: None, or per variable None or the weights of the keys, ragged, sparse or dense
        with the same row lengths.
      combiners: per variable, or one for all: "sum", "mean" or "sqrtn"; None: "mean". As in
        `tf.nn.embedding_lookup_sparse`: the weighted sum, divided by 1, by the sum of weights, or
        by the root of the sum of squared weights. An empty row, or a divisor of 0, returns zeros.
      use_low_frequency_filter: a key without a row gets one with probability `filter_ratio` of its
        table, drawn at each lookup; otherwise it returns zeros and still counts in a mean. For
        "hybrid" tables only.
      training: False: nothing is inserted and no score changes. True: both happen, even inside
        `sok.inference_mode`. None: that decides. The owner rank's value counts.
      missing: row of a missing key: "initial", the value it would start with, or "zeros". None:
        from `sok.inference_mode`, else "zeros" with the filter and "initial" without.

    Returns:
      (batch, dimension) of the variable's dtype; a list of them if `sp_ids` is a list or tuple. The
      gradient of a variable is an IndexedSlices of the distinct keys that this rank owns, with
      float32 rows summed over all ranks: not averaged, and not to be reduced by Horovod again. For
      a localized table it is empty except on its rank. For a static variable the indices are this
      rank's row numbers (`key_map` of the keys), and rows have the variable's dtype. Weights have
      gradients too.

    Raises:
      RuntimeError: `sok.init` has not connected the ranks, or a localized table names a rank out of
        range.
      TypeError, ValueError: arguments that do not match; a row number out of range.
      NotImplementedError: a tf.Variable or a layer, or the filter for a table that keeps every key.

    Examples:
      >>> items = sok.DynamicVariable(2, initializer=1.0, name="item")
      >>> ids = tf.ragged.constant([[7, 9], [], [9]], dtype=tf.int64)
      >>> sok.lookup_sparse(items, ids, combiners="sum").numpy().tolist()
      [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
    """
    policy = MissingKeyPolicy(
        checked_training(training), checked_missing(missing), bool(use_low_frequency_filter)
    )
    comm = communicator()
    arguments = checked_arguments(params, sp_ids, sp_weights, combiners, comm.size)
    if use_low_frequency_filter:
        _check_filter(arguments)
    outputs = look_up(comm, arguments, policy) if arguments else []
    is_list = isinstance(sp_ids, (list, tuple)) or isinstance(sp_weights, tuple)
    return outputs if is_list else outputs[0]


def _check_filter(arguments: list[Argument]) -> None:
    for argument in arguments:
        table = alive(argument.spec.variable).table
        if table.keeps_every_key:
            raise NotImplementedError(
                "`use_low_frequency_filter` needs tables of var_type 'hybrid'; "
                f"{table.name!r} is {table.var_type!r}, which keeps every key. Leave it out."
            )


@unconverted_function
def all2all_dense_embedding(param: Any, indices: Any) -> tf.Tensor:
    """Looks keys up in the table of all ranks, and returns a row for each.

    It equals `lookup_sparse` of one variable with one key per batch row, with its gradient and
    errors. Every rank must call it, with any number of keys. New keys are inserted.

    Args:
      param: the variable, distributed or localized.
      indices: (n,) integer keys.

    Returns:
      (n, dimension) of the variable's dtype.
    """
    comm = communicator()
    if isinstance(param, (list, tuple)):
        raise TypeError(
            "sok.all2all_dense_embedding takes one variable. Received: a list of "
            f"{len(param)}. For several use sok.lookup_sparse."
        )
    ids = _one_key_a_row(indices)
    arguments = checked_arguments([param], [ids], None, "sum", comm.size)
    return look_up(comm, arguments, AS_USUAL)[0]


def _one_key_a_row(indices: Any) -> tf.Tensor:
    """Returns keys as a tensor (n,), or raises TypeError or ValueError."""
    if isinstance(indices, (tf.RaggedTensor, tf.SparseTensor)):
        raise TypeError(
            "sok.all2all_dense_embedding takes a dense tensor of keys. "
            f"Received: {type(indices).__name__}. Use sok.lookup_sparse, or its values."
        )
    keys = integer_keys(indices, "The keys of sok.all2all_dense_embedding", "int64 or int32")
    if keys.shape.rank not in (1, None):
        raise ValueError(
            "sok.all2all_dense_embedding takes keys of shape (n,). "
            f"Received: shape {keys.shape}. Use tf.reshape(keys, [-1]), and reshape the rows."
        )
    return tf.ensure_shape(keys, [None]) if keys.shape.rank is None else keys


@unconverted_function
def sparse_read_and_evict(
    var: DynamicVariable, indices: Any, name: str | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """As `tf.nn.embedding_lookup`; also returns what was evicted for new keys.

    It looks up in this rank's table only. An "hbm" table, or a lookup inside `sok.inference_mode`,
    evicts nothing.

    Args:
      var: the variable.
      indices: integer keys of any shape.

    Returns:
      (embedding: indices.shape + [dimension] of the rows' dtype, the only one with a gradient;
      evicted_keys: (m,) of the key type, in no order; evicted_values: (m, dimension), their rows).

    Raises:
      TypeError: `var` is no DynamicVariable, or keys are not integers.
      ValueError: a key does not fit the key type.
    """
    if not isinstance(var, DynamicVariable):
        raise TypeError(
            "sok.sparse_read_and_evict takes a sok.DynamicVariable. "
            f"Received: {type(var).__name__}."
        )
    return local_lookup_and_evict(var, indices)


# ---- helpers of SOK's module of this name --------------------------------------------------------


def group_lookup(
    params: Any, indices: Any, dtype: Any = None, name: str | None = None
) -> list[tf.Tensor]:
    """Looks up each variable's own keys, on this rank only, as `tf.nn.embedding_lookup` does.

    Returns a list: per variable indices.shape + [dimension].

    Args:
      params: a variable or a list, dynamic and dense mixed.
      indices: keys of any shape, or as many of them as params; else ValueError.
      dtype: of the results; None: as each variable.
    """
    params, indices = to_list(params), to_list(indices)
    if len(params) != len(indices):
        raise ValueError(
            "group_lookup takes as many `indices` as `params`. "
            f"Received: {len(params)} params and {len(indices)} indices."
        )
    with tf.name_scope(name or "GroupLookup"):
        pairs = zip(params, indices, strict=True)
        rows = [tf.nn.embedding_lookup(param, ids) for param, ids in pairs]
        return rows if dtype is None else [tf.cast(some, dtype) for some in rows]


def to_list(any_obj: Any) -> Any:
    """Returns a list or tuple as it is, and anything else in a list."""
    return any_obj if isinstance(any_obj, (list, tuple)) else [any_obj]


def isDynamicVariable(variable: Any) -> bool:
    """Whether it is a `sok.DynamicVariable`."""
    return isinstance(variable, DynamicVariable)


def isEmbeddingVariable(variable: Any) -> bool:
    """Whether it is DeepRec's embedding variable: never."""
    return False


def isResourceVariable(variable: Any) -> bool:
    """Whether it is a dense resource variable of TensorFlow, as nearly all are."""
    is_resource = isinstance(variable, ResourceVariable)
    return is_resource and not isDynamicVariable(variable)


def isVariable(variable: Any) -> bool:
    """Whether it is another TensorFlow variable, such as TF1's reference variables."""
    kinds = (isResourceVariable, isDynamicVariable)
    return isinstance(variable, tf.Variable) and not any(is_kind(variable) for is_kind in kinds)


def allSupportedVariableCheckFunc() -> list[Callable[[Any], bool]]:
    """Returns the four functions above."""
    return [isDynamicVariable, isEmbeddingVariable, isResourceVariable, isVariable]

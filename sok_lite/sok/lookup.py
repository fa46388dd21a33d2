"""`sok.lookup_sparse`: every rank asks for keys of any rank, for all tables of a call together.

Beside it the helpers that SOK has in its module of this name.
"""

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
    """Looks keys up in the tables of all ranks, and combines them row by row.

    Every rank must call it, with the same tables in the same order; batches may differ in size.
    Keys that no rank has seen are inserted. In a graph the whole call is one operation forward and
    one backward; static variables have TensorFlow's, and on several ranks two and one of their own.
    In a TF1 graph nothing orders two such calls, so rank 0 says whose turn it is: build the same
    graphs in the same order on all ranks and fetch the same, or make one call per step, which is
    faster. docs/howto/tf1-graphs.md has more.

    Args:
      params: a DynamicVariable, a static `sok.Variable`, or a list of both; one may come several
        times. Keys of a static one are numbers of its rows, from 0 on.
      sp_ids: for each a RaggedTensor or SparseTensor (in row-major order) of keys, (batch, None);
        or a dense tensor or array of keys, (batch, k), or (batch,) with one to a row, each of which
        counts.
      sp_weights: None, or for each None or the weights of the keys, ragged, sparse or dense with
        rows of the same lengths.
      combiners: for each "sum", "mean" or "sqrtn" (or one for all); None: "mean". As in
        `tf.nn.embedding_lookup_sparse`: weighted sum, divided by 1, by the sum of the weights or by
        the root of the sum of their squares. An empty row, or a divisor of 0, gives zeros.
      use_low_frequency_filter: a key without a row gets one with the chance `filter_ratio` of its
        table, drawn anew at each lookup; else it gives zeros and still counts in a mean. For
        "hybrid" tables only.
      training: False: nothing is inserted and no score changes. True: it is, even within
        `sok.inference_mode`. None: as that says. It counts on the rank that owns a key.
      missing: what a key gives that has no row: "initial", the value it would start with, or
        "zeros". None: as `sok.inference_mode` says, else "zeros" with the filter and "initial"
        without.

    Returns:
      (batch, dimension) of the variable's dtype; a list of them where `sp_ids` is a list or tuple.
      The gradient of a variable is an IndexedSlices of distinct keys that this rank owns, with
      float32 rows summed over all ranks: neither averaged nor to be sent through Horovod again. Of
      a localized table it is empty on all ranks but its own. Of a static variable its indices are
      those of this rank's rows (`key_map` of the keys), and its rows have the variable's dtype.
      Weights have gradients too.

    Raises:
      RuntimeError: `sok.init` has not connected the ranks, or a localized table is to be on a rank
        that there is not.
      TypeError, ValueError: arguments that do not fit; a static variable has no such row.
      NotImplementedError: a tf.Variable or a layer, or the filter for a table that keeps every
        key.

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

    It is `lookup_sparse` with one key in each row of the batch. Every rank must call it; ranks may
    have different numbers of keys, and none. Keys that no rank has seen are inserted.

    Args:
      param: the variable, distributed or localized.
      indices: (n,) integer keys.

    Returns:
      (n, dimension) of the variable's dtype. Its gradient is an IndexedSlices of distinct keys that
      this rank owns, with rows summed over all ranks.

    Raises:
      RuntimeError: `sok.init` has not connected the ranks, or a localized table is to be on a rank
        that there is not.
      NotImplementedError: a tf.Variable.
      TypeError: several variables, or keys that are no integers.
      ValueError: keys of another shape, or one that does not fit the key type.
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
    """Returns keys (n,) as a tensor, or raises TypeError or ValueError."""
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
    """Does what `tf.nn.embedding_lookup` does and returns also what was evicted for new keys.

    It looks into the table of this rank only. An "hbm" table evicts nothing, and so does a lookup
    within `sok.inference_mode`.

    Args:
      var: the variable.
      indices: integer keys of any shape.

    Returns:
      (embedding: indices.shape + [dimension] of the rows' dtype, the only one with a gradient;
      evicted_keys: (m,) of the key type, in no order; evicted_values: (m, dimension), their rows).

    Raises:
      TypeError: `var` is no DynamicVariable, or keys are no integers.
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

    Args:
      params: a variable or a list, dynamic and dense mixed.
      indices: keys of any shape, or a list of as many.
      dtype: of the results; None: each as its variable.

    Returns:
      A list, for each variable indices.shape + [dimension].

    Raises:
      ValueError: not as many indices as variables.
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
    """Whether it is a variable that only DeepRec's TensorFlow has: never."""
    return False


def isResourceVariable(variable: Any) -> bool:
    """Whether it is a dense variable of TensorFlow, which nearly all are."""
    is_resource = isinstance(variable, ResourceVariable)
    return is_resource and not isDynamicVariable(variable)


def isVariable(variable: Any) -> bool:
    """Whether it is a variable of TensorFlow of another kind, such as TF1's reference variables."""
    kinds = (isResourceVariable, isDynamicVariable)
    return isinstance(variable, tf.Variable) and not any(is_kind(variable) for is_kind in kinds)


def allSupportedVariableCheckFunc() -> list[Callable[[Any], bool]]:
    """Returns the four functions above."""
    return [isDynamicVariable, isEmbeddingVariable, isResourceVariable, isVariable]

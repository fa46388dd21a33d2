"""Replaces lookups of `tf.nn` for tables where TensorFlow's own would change the ids.

TensorFlow's `safe_embedding_lookup_sparse` treats ids as row numbers. It drops negative ids, half
of all hashes, and looks up 0 for each empty row, a key that nobody passed.
"""

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from sok_lite.bridge import tf_private
from sok_lite.bridge.autograph import unconverted_function
from sok_lite.bridge.sparse_matrix import (
    as_safe_matrix,
    check_sparse,
    checked_combiner,
    with_outer,
)


def answer(name: str, kind: type, function_of: Callable[[Any], Any]) -> None:
    """Dispatches two functions of TensorFlow to another one for a class of variables.

    `name` is such as "embedding_lookup", in `tf.nn` and `tf.compat.v1.nn`. `function_of` maps the
    variable, or the first of a list, to a function, which is called with those of the arguments
    that it accepts; None: TensorFlow's own is called.
    """
    ragged = tf_private.private(tf_private.RAGGED_LOOKUPS, name)
    # TensorFlow allows one dispatch: so ragged ids of its own variables come here too.
    tf.experimental.unregister_dispatch_for(ragged)
    for public, if_ragged in (
        (getattr(tf.nn, name), None),
        (getattr(tf.compat.v1.nn, name), ragged),
    ):
        params, ids = list(inspect.signature(public).parameters)[:2]
        kinds: list[dict[str, Any]] = [{params: kind}, {params: list[kind]}]  # type: ignore[valid-type]
        if if_ragged is not None:
            kinds += [{ids: tf.RaggedTensor}, {ids: tf.compat.v1.ragged.RaggedTensorValue}]
        answering = _dispatch_target(public, kind, function_of, if_ragged)
        tf.experimental.dispatch_for_api(public, *kinds)(answering)


def _dispatch_target(
    public: Any, kind: type, function_of: Callable[[Any], Any], ragged: Any
) -> Any:
    """Returns the dispatch target of a public function; `ragged` is TensorFlow's for ragged ids."""
    signature = inspect.signature(public)

    def answering(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        params, ids = list(bound.values())[:2]
        first = params[0] if isinstance(params, (list, tuple)) and params else params
        function = function_of(first) if isinstance(first, kind) else None
        if function is not None:
            known = inspect.signature(function).parameters
            return function(**{name: value for name, value in bound.items() if name in known})
        is_ragged = isinstance(ids, (tf.RaggedTensor, tf.compat.v1.ragged.RaggedTensorValue))
        return ragged(*args, **kwargs) if ragged and is_ragged else NotImplemented

    answering.__signature__ = signature  # type: ignore[attr-defined]
    return answering


@unconverted_function
def safe_embedding_lookup_sparse(
    embedding_weights: Any,
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: str | None = "mean",
    default_id: Any = None,
    name: str | None = None,
    max_norm: float | None = None,
) -> Any:
    """Returns the rows of keys in this rank's table, combined over the last dimension.

    Args:
      embedding_weights: the variable of a table, or a list of one.
      sparse_ids: a SparseTensor or RaggedTensor of rank 2 or more.
      sparse_weights: weights in the same form; except with "sum", ids with weights <= 0 are
        dropped. None: all are 1.
      combiner: "mean" (also None), "sqrtn" or "sum".
      default_id: the key of an empty row; None: an empty row is zeros, without a lookup.
      name: of the result.
      max_norm: norm to which rows are clipped before they are combined.

    Returns:
      sparse_ids.shape[:-1] + [dimension], of the rows' dtype.
    """
    combiner = checked_combiner(combiner)
    check_sparse(sparse_ids, sparse_weights)
    ids, weights, outer = as_safe_matrix(sparse_ids, sparse_weights, combiner, default_id)
    rows = tf.nn.embedding_lookup_sparse(
        embedding_weights, ids, weights, combiner=combiner, max_norm=max_norm
    )
    # TensorFlow returns zeros for an empty row, but drops empty rows at the end.
    batch = (
        ids.nrows(tf.int32)
        if isinstance(ids, tf.RaggedTensor)
        else tf.cast(ids.dense_shape[0], tf.int32)
    )
    rows = tf.pad(rows, [[0, batch - tf.shape(rows)[0]], [0, 0]])
    rows = with_outer(tf.ensure_shape(rows, ids.shape[:1] + rows.shape[1:]), outer, sparse_ids)
    return tf.identity(rows, name) if name is not None else rows

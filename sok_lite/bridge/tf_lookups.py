"""What answers the lookups of `tf.nn` where TensorFlow's own would change the ids.

Its `safe_embedding_lookup_sparse` takes ids for numbers of rows. It leaves out those below 0, which
half of all hashes are, and looks number 0 up for each empty row: a key that nobody gave.
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
    """Has the two functions of TensorFlow of a name ask what answers a class of variables.

    Args:
      name: such as "embedding_lookup": `tf.nn` and `tf.compat.v1.nn` have one each.
      kind: the class.
      function_of: takes the variable, or the first of a list; gives a function, which is called
        with those of the arguments that it takes. None: TensorFlow answers.
    """
    ragged = tf_private.private(tf_private.RAGGED_LOOKUPS, name)
    # TensorFlow refuses two that answer: so ragged ids of its own variables come here as well.
    tf.experimental.unregister_dispatch_for(ragged)
    for public, if_ragged in (
        (getattr(tf.nn, name), None),
        (getattr(tf.compat.v1.nn, name), ragged),
    ):
        params, ids = list(inspect.signature(public).parameters)[:2]
        kinds: list[dict[str, Any]] = [{params: kind}, {params: list[kind]}]  # type: ignore[valid-type]
        if if_ragged is not None:
            kinds += [{ids: tf.RaggedTensor}, {ids: tf.compat.v1.ragged.RaggedTensorValue}]
        answering = _answering(public, kind, function_of, if_ragged)
        tf.experimental.dispatch_for_api(public, *kinds)(answering)


def _answering(public: Any, kind: type, function_of: Callable[[Any], Any], ragged: Any) -> Any:
    """Returns what TensorFlow calls for a public function.

    Args:
      ragged: what TensorFlow has for ragged ids; None: there is no such thing.
    """
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
      sparse_ids: a SparseTensor or RaggedTensor of rank 2 and above.
      sparse_weights: weights in the same form; those that are not above 0 go with their ids, but of
        "sum". None: all are 1.
      combiner: "mean" (also None), "sqrtn" or "sum".
      default_id: the key that an empty row has; None: an empty row is zeros, and no key is looked
        up for it.
      name: of the result.
      max_norm: rows are clipped to this norm before they are combined.

    Returns:
      sparse_ids.shape[:-1] + [dimension], of the rows' dtype.
    """
    combiner = checked_combiner(combiner)
    check_sparse(sparse_ids, sparse_weights)
    ids, weights, outer = as_safe_matrix(sparse_ids, sparse_weights, combiner, default_id)
    rows = tf.nn.embedding_lookup_sparse(
        embedding_weights, ids, weights, combiner=combiner, max_norm=max_norm
    )
    # TensorFlow gives zeros for an empty row, but none for those at the end.
    batch = (
        ids.nrows(tf.int32)
        if isinstance(ids, tf.RaggedTensor)
        else tf.cast(ids.dense_shape[0], tf.int32)
    )
    rows = tf.pad(rows, [[0, batch - tf.shape(rows)[0]], [0, 0]])
    rows = with_outer(tf.ensure_shape(rows, ids.shape[:1] + rows.shape[1:]), outer, sparse_ids)
    return tf.identity(rows, name) if name is not None else rows

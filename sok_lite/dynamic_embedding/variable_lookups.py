"""Methods of a `Variable` that look keys up to train their rows."""

from typing import Any

import tensorflow as tf

from sok_lite.dynamic_embedding import lookups
from sok_lite.dynamic_embedding.arguments import DtypeError
from sok_lite.dynamic_embedding.trainable import ShadowVariable


def get_trainable_by_name(variable: Any, name: str) -> ShadowVariable:
    """Returns the trainable that lookups of that name are through; makes it where it is new.

    Raises:
      TypeError: the name is no text.
      RuntimeError: in a graph of TF1.
    """
    if not isinstance(name, str):
        raise TypeError(f"name should be a string. Received: {name!r}.")
    with tf.init_scope():
        if not tf.executing_eagerly():
            raise RuntimeError(
                "get_trainable_by_name() is for eager mode. In a graph of TF1 use "
                "de.embedding_lookup(..., return_trainable=True)."
            )
    return variable.trainable_named([name])


def embedding_lookup(
    variable: Any,
    ids: Any,
    name: str | None = None,
    max_norm: float | None = None,
    return_trainable: bool = False,
) -> Any:
    """Returns the rows of keys, ids.shape + [dim]; with `return_trainable` (rows, trainable).

    What is trained is `<name>/embedding_lookup`. The arguments are those of `embedding_lookup`.
    """
    name = f"{name or variable.name}/embedding_lookup"
    return lookups.embedding_lookup(
        variable, ids, name=name, max_norm=max_norm, return_trainable=return_trainable
    )


def verify_embedding_weights(variable: Any, sparse_ids: Any, sparse_weights: Any = None) -> None:
    """Raises if keys, or their weights, are none that the variable can be looked up with.

    Raises:
      ValueError: no keys. TypeError: keys of another dtype, or weights that are no floats.
    """
    if sparse_ids is None:
        raise ValueError("`sparse_ids` must be given. Received: None.")
    if sparse_ids.dtype != variable.key_dtype:
        raise DtypeError(
            f"Keys of {variable.name!r} must be {variable.key_dtype.name}. "
            f"Received: {sparse_ids.dtype.name}."
        )
    if sparse_weights is not None and not sparse_weights.dtype.is_floating:
        raise DtypeError(
            f"Weights must be floating-point numbers. Received: {sparse_weights.dtype.name}."
        )

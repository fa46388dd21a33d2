"""The helpers of SOK's module `lookup`, under its names."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from sok_lite.bridge.tf_private import ResourceVariable
from sok_lite.sok.dynamic_variable import DynamicVariable

__all__ = [
    "allSupportedVariableCheckFunc",
    "group_lookup",
    "isDynamicVariable",
    "isEmbeddingVariable",
    "isResourceVariable",
    "isVariable",
    "to_list",
]


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

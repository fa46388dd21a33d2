"""Lookups through a `ShadowVariable`, for eager code and tf.functions."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted_function
from sok_lite.dynamic_embedding.arguments import wrong_ids
from sok_lite.dynamic_embedding.lookups import HvdVariable
from sok_lite.dynamic_embedding.trainable import DEResourceVariable, ShadowVariable

__all__ = [
    "DEResourceVariable",
    "HvdVariable",
    "ShadowVariable",
    "embedding_lookup",
    "embedding_lookup_unique",
    "embedding_lookup_unique_base",
]


@unconverted_function
def embedding_lookup(
    shadow: ShadowVariable,
    ids: Any,
    partition_strategy: Any = None,
    name: str | None = None,
    validate_indices: Any = None,
) -> tf.Tensor:
    """Returns the rows of keys, ids.shape + [dim], with a gradient of the shadow.

    `partition_strategy`, `name` and `validate_indices` have no effect.

    Args:
      shadow: a `ShadowVariable`.
      ids: keys of any shape, of the variable's key dtype; else a ValueError that is also a
        TypeError.
    """
    if ids.dtype != shadow.params.key_dtype:
        raise wrong_ids(ids.dtype, shadow.params)
    return shadow.lookup(ids)


@unconverted_function
def embedding_lookup_unique_base(
    ids: Any,
    embedding_size: int,
    lookup_function: Callable[[tf.Tensor], tf.Tensor],
    with_unique: bool = True,
    name: str | None = None,
) -> Any:
    """Looks up each distinct key once with a given function.

    Args:
      ids: a tensor of any shape, or a RaggedTensor.
      lookup_function: maps keys (n,) to rows (n, embedding_size).
      with_unique: whether to deduplicate keys first.

    Returns:
      ids.shape + [embedding_size], ragged as `ids` are.
    """
    if isinstance(ids, tf.RaggedTensor):
        rows = embedding_lookup_unique_base(
            ids.flat_values, embedding_size, lookup_function, with_unique
        )
        return ids.with_flat_values(rows)
    ids = tf.convert_to_tensor(ids)
    flat = tf.reshape(ids, [-1])
    if with_unique:
        distinct, places = tf.unique(flat)
        rows = tf.gather(lookup_function(distinct), places)
    else:
        rows = lookup_function(flat)
    result = tf.reshape(rows, tf.concat([tf.shape(ids), [embedding_size]], 0))
    result.set_shape(ids.shape.concatenate([embedding_size]))
    return result


@unconverted_function
def embedding_lookup_unique(
    shadow: ShadowVariable,
    ids: Any,
    embedding_size: int,
    with_unique: bool = True,
    name: str | None = None,
) -> Any:
    """As `embedding_lookup`, also for ragged keys: ids.shape + [embedding_size], ragged as `ids`
    are.

    Gradients of repeated keys are summed, whatever `with_unique` is: keys are deduplicated where
    rows are updated.
    """
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(embedding_lookup(shadow, ids.flat_values))
    return embedding_lookup(shadow, tf.convert_to_tensor(ids))

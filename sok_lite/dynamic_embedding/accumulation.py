"""Methods of a table that add to its rows."""

from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.table_call import method_call
from sok_lite.dynamic_embedding.arguments import ShapeError, checked_values
from sok_lite.engine.table import EmbeddingTable


def accum(
    table: Any, keys: Any, values_or_deltas: Any, exists: Any, name: str | None = None
) -> Any:
    """Adds to the rows of keys, or inserts them.

    A key that is in the table and exists by the caller's knowledge has a delta added, and one
    that neither is nor does is inserted. Any other is left alone: another worker has inserted
    or removed it. Deltas of a repeated key are summed; of one to be inserted the first counts.

    Args:
      keys: of any shape.
      values_or_deltas: keys.shape + [dim].
      exists: bool, one for each key.

    Returns:
      None in eager mode, the operation in a graph.
    """
    ints = table.keys_of(keys, remember=True)
    values = checked_values(values_or_deltas, ints, table.dimension, table.value_dtype, table.name)
    return table._accumulated(ints, exists, values)


def accum_difference(table: Any, keys: Any, old_values: Any, new_values: Any, exists: Any) -> Any:
    """Does what `accum` does with new - old of keys that exist, and with new of others.

    Args:
      keys: of any shape.
      exists: bool, one for each key: whether the caller found it.
      old_values, new_values: keys.shape + [dim].
    """
    ints = table.keys_of(keys, remember=True)
    old, new = (
        checked_values(values, ints, table.dimension, table.value_dtype, table.name)
        for values in (old_values, new_values)
    )
    return table._accumulated(ints, exists, new, old)


def accumulated(table: Any, keys: tf.Tensor, exists: Any, *values: tf.Tensor) -> Any:
    """Does what `accum` does; tables that count steps do more."""
    flags = tf.cast(tf.reshape(tf.cast(exists, tf.bool), [-1]), tf.uint8)
    inputs = [tf.reshape(keys, [-1]), flags, *values]
    return method_call(table, "accum", _accumulate, inputs)


def _accumulate(
    table: EmbeddingTable, keys: Array, flags: Array, new: Array, old: Array | None = None
) -> None:
    xp, exists = table.backend.xp, flags.view(np.bool_)
    if exists.shape != keys.shape:
        raise ShapeError(
            f"`exists` must have one bool for each of {keys.size} keys. Received: {exists.size}."
        )
    if old is not None and old.shape != new.shape:
        raise ShapeError(
            f"Old and new values must have one shape. Received: {old.shape} and {new.shape}."
        )
    if table.row_dtype.is_half:  # a difference of halves is no half
        new = table.row_dtype.to_float32(xp, new)
        old = None if old is None else table.row_dtype.to_float32(xp, old)
    if old is None:
        table.accum_or_assign(keys, new, exists)
        return
    values = new - old
    missing = xp.flatnonzero(~exists)
    if missing.size:
        values[missing] = new[missing]
    table.accum_or_assign(keys, values, exists)

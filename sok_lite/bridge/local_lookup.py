"""Rows of this rank's table, with gradient: the end of `tf.nn.embedding_lookup` and the like."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.checks import checked_keys, refuse_partitions
from sok_lite.bridge.graph_gradient import custom_gradient
from sok_lite.bridge.host_call import refuse_replicas
from sok_lite.bridge.inference import (
    AS_USUAL,
    MissingKeyPolicy,
    checked_missing,
    checked_training,
    pipeline_of_trace,
)
from sok_lite.bridge.row_gradient import row_gradient
from sok_lite.bridge.serving.mode import looked_up
from sok_lite.bridge.table_call import table_call
from sok_lite.bridge.tensor import empty, to_array, to_tensor
from sok_lite.bridge.type_spec import alive
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.work_done import LOOKUPS


def local_lookup(
    variable: Any, keys: Any, policy: MissingKeyPolicy = AS_USUAL, counts: Any = None
) -> tf.Tensor:
    """Returns the rows of keys in this rank's table. No communication.

    Args:
      variable: the table.
      keys: integers of any shape.
      policy: for keys without a row; it has no filter.
      counts: int64 of the keys' shape, how often each key counts as seen; None: once.

    Returns:
      keys.shape + [dimension], of the rows' dtype. The gradient is an IndexedSlices of these keys,
      flat, with float32 rows.

    Raises:
      TypeError: keys are no integers.
      ValueError: a key does not fit the key type, or the variable is one of a list.
    """
    refuse_partitions(variable)
    checked = checked_training(policy.training), checked_missing(policy.missing)
    policy = MissingKeyPolicy(*checked, *policy[2:])
    dim, dtype, backend = variable.dimension, variable.dtype, variable.table.backend
    pipeline = pipeline_of_trace()

    def look_up(table: Any, keys: Any, *counts: Any) -> Sequence[tf.Tensor]:
        insert, missing = policy.now([table], pipeline)
        rows = empty((*keys.shape, dim), dtype, backend)
        flat_rows = rows.reshape(-1, dim)
        counted = {"counts": counts[0].reshape(-1)} if counts and insert else {}
        table.lookup(keys.reshape(-1), out=flat_rows, insert=insert, missing=missing, **counted)
        return (to_tensor(rows, dtype, backend),)

    others = [] if counts is None else [tf.convert_to_tensor(counts, tf.int64)]

    def live(keys: tf.Tensor) -> Sequence[tf.Tensor]:
        return (_differentiable(variable, keys, look_up, [dtype], [], others),)

    reference = weakref.ref(variable)

    def plain(tables: Any, keys: tf.Tensor) -> Sequence[tf.Tensor]:
        return tables.read(alive(reference), keys, policy)[:1]

    keys = checked_keys(variable, keys)
    (rows,) = looked_up(f"A lookup in {variable.name!r}", live, plain, [keys])
    return rows


def local_lookup_and_evict(variable: Any, keys: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Does what `local_lookup` does and returns also what lost its place for it.

    Returns:
      (keys.shape + [dimension] rows, (m,) evicted keys, (m, dimension) their last rows).
    """
    dim, dtype, key_type = variable.dimension, variable.dtype, variable.key_type
    backend, pipeline = variable.table.backend, pipeline_of_trace()

    def look_up(table: Any, keys: Any) -> Sequence[tf.Tensor]:
        insert, missing = AS_USUAL.now([table], pipeline)
        rows = empty((*keys.shape, dim), dtype, backend)
        flat, flat_rows = keys.reshape(-1), rows.reshape(-1, dim)
        if insert:
            _, (evicted_keys, evicted_rows, _) = table.lookup_and_evict(flat, out=flat_rows)
        else:
            table.lookup(flat, out=flat_rows, insert=insert, missing=missing)
            evicted_keys = table.key_dtype.from_int64(backend.xp, backend.xp.empty(0, np.int64))
            evicted_rows = flat_rows[:0]
        return (
            to_tensor(rows, dtype, backend),
            to_tensor(evicted_keys, key_type, backend),
            to_tensor(evicted_rows, dtype, backend),
        )

    keys = checked_keys(variable, keys)
    dtypes = [dtype, key_type, dtype]
    rows, *evicted = _differentiable(variable, keys, look_up, dtypes, [[None], [None, dim]])
    return rows, *evicted


def _differentiable(
    variable: Any,
    keys: tf.Tensor,
    look_up: Callable[..., Sequence[tf.Tensor]],
    dtypes: list[tf.DType],
    other_shapes: list[list[int | None]],
    others: Sequence[tf.Tensor] = (),
) -> Any:
    """Returns what a lookup gives, a tuple if it is more than the rows; these have a gradient.

    Args:
      variable: the table.
      keys: a tensor of integers of any shape.
      look_up: takes the engine's table and arrays, the keys and `others`; gives keys.shape + [dim],
        and more.
      dtypes: of all that it gives.
      other_shapes: of what it gives beside the rows.
      others: what it is told beside the keys.
    """
    name, dim, key_type = variable.name, variable.dimension, variable.key_type

    def run(table: EmbeddingTable, *tensors: tf.Tensor) -> Sequence[tf.Tensor]:
        arrays = [to_array(tensor, table.backend) for tensor in tensors]
        return look_up(table, *arrays)

    @custom_gradient
    def read(source: tf.Tensor, keys: tf.Tensor) -> Any:
        shapes = [keys.shape.concatenate([dim]), *other_shapes]
        what, tensors = f"A lookup in {name!r}", [keys, *others]
        rows, *more = table_call(variable, what, run, tensors, dtypes, shapes, LOOKUPS)

        def grad(row_grads: tf.Tensor, *_: tf.Tensor) -> Any:
            refuse_replicas(f"The gradient of a lookup in {name!r}")
            flat_grads = tf.cast(tf.reshape(row_grads, [-1, dim]), tf.float32)
            # A session runs only what it needs, and a gradient may need no row: the lookup must
            # run all the same, or an update would not find the key.
            is_pruned = not tf.executing_eagerly() and not tf.inside_function()
            with tf.control_dependencies([rows] if is_pruned else []):
                flat_keys = tf.cast(tf.reshape(keys, [-1]), key_type)
            return row_gradient(name, flat_keys, flat_grads, dim), None

        # A tuple of one costs TensorFlow 12 of 184 microseconds.
        return ((rows, *more) if more else rows), grad

    return read(variable.gradient_source(), keys)

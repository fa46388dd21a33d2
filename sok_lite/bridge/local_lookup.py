"""Rows of this rank's table, with gradient: the end of `tf.nn.embedding_lookup` and the like."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.checks import checked_keys, refuse_partitions
from sok_lite.bridge.graph_gradient import FORWARD_REFUSAL
from sok_lite.bridge.host_call import refuse_replicas
from sok_lite.bridge.inference import (
    AS_USUAL,
    MissingKeyPolicy,
    checked_missing,
    checked_training,
    pipeline_of_trace,
)
from sok_lite.bridge.operation import NAME_OF_HANDLE, Facts, Outputs, operation
from sok_lite.bridge.refusals import is_called_from
from sok_lite.bridge.row_gradient import is_out_of_a_loop, row_gradient
from sok_lite.bridge.serving.mode import looked_up
from sok_lite.bridge.tf_private import FORWARDPROP
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
    dim, pipeline = variable.dimension, pipeline_of_trace()

    def look_up(table: EmbeddingTable, outputs: Outputs, keys: Array, *counts: Array) -> None:
        insert, missing = policy.now([table], pipeline)
        rows = outputs.empty(0, (*keys.shape, dim)).reshape(-1, dim)
        counted = {"counts": counts[0].reshape(-1)} if counts and insert else {}
        table.lookup(keys.reshape(-1), out=rows, insert=insert, missing=missing, **counted)

    others = [] if counts is None else [tf.convert_to_tensor(counts, tf.int64)]

    def live(keys: tf.Tensor) -> Sequence[tf.Tensor]:
        return _operation(variable, look_up, [keys, *others], [variable.dtype], [])

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
    pipeline = pipeline_of_trace()

    def look_up(table: EmbeddingTable, outputs: Outputs, keys: Array) -> None:
        insert, missing = AS_USUAL.now([table], pipeline)
        rows, flat = outputs.empty(0, (*keys.shape, dim)).reshape(-1, dim), keys.reshape(-1)
        if insert:
            _, (evicted_keys, evicted_rows, _) = table.lookup_and_evict(flat, out=rows)
            outputs.give(1, evicted_keys)
            outputs.give(2, evicted_rows)
        else:
            table.lookup(flat, out=rows, insert=insert, missing=missing)
            outputs.empty(1, (0,))
            outputs.empty(2, (0, dim))

    keys = checked_keys(variable, keys)
    dtypes, shapes = [dtype, key_type, dtype], [[None], [None, dim]]
    rows, evicted_keys, evicted_rows = _operation(variable, look_up, [keys], dtypes, shapes)
    return rows, evicted_keys, evicted_rows


def _operation(
    variable: Any,
    look_up: Callable[..., None],
    inputs: Sequence[tf.Tensor],
    dtypes: list[tf.DType],
    other_shapes: list[list[int | None]],
) -> list[tf.Tensor]:
    """Returns what a lookup gives: keys.shape + [dimension] rows, which have a gradient, and more.

    Args:
      variable: the table.
      look_up: takes the engine's table, the outputs, and the inputs as arrays.
      inputs: the keys, a tensor of integers of any shape, and what else it is told.
      dtypes: of all that it gives.
      other_shapes: of what it gives beside the rows.
    """
    reference, num_inputs = weakref.ref(variable), len(inputs)

    def run(outputs: Outputs, arrays: list[Array]) -> None:
        look_up(alive(reference).table, outputs, *arrays[:num_inputs])

    outputs: list[tf.Tensor] = operation(
        "sok_lookup",
        variable.access(),
        run,
        [*inputs, *variable.ready_inputs()],
        dtypes,
        variable.table.backend,
        f"A lookup in {variable.name!r}",
        Facts(variable.key_type, [variable.name], [variable.dimension], [variable.trainable]),
        LOOKUPS,
    )
    if not tf.executing_eagerly():
        shapes = [inputs[0].shape.concatenate([variable.dimension]), *other_shapes]
        for output, shape in zip(outputs, shapes, strict=True):
            output.set_shape(shape)
    return outputs


@tf.RegisterGradient("SokLookup")
def _gradient(op: Any, *gradients: Any) -> list[Any]:
    """Returns the gradient of the table: the keys as they were given, and the rows' gradients."""
    facts, count = Facts.of(op), op.get_attr("N")
    name = facts.names[0] if facts.names else getattr(op.inputs[0], NAME_OF_HANDLE, "")
    refuse_replicas(f"The gradient of a lookup in {name!r}")
    if is_called_from(FORWARDPROP):
        raise NotImplementedError(FORWARD_REFUSAL)  # it derives what this gives, which are keys
    if not facts.trainable[0] and is_out_of_a_loop():
        return [None] * len(op.inputs)  # it would be refused, and nobody has asked for it
    rows, keys, (dim,) = op.outputs[0], op.inputs[count + 1], facts.dims
    flat_grads = tf.cast(tf.reshape(gradients[0], [-1, dim]), tf.float32)
    # A session runs only what it needs, and a gradient may need no row: the lookup must run all the
    # same, or an update would not find the key.
    is_pruned = not tf.executing_eagerly() and not tf.inside_function()
    with tf.control_dependencies([rows] if is_pruned else []):
        flat_keys = tf.cast(tf.reshape(keys, [-1]), facts.key_type)
    by_handles = [(flat_keys, flat_grads)]
    if count > 1:  # the parts of one table, which TFPlus gives keys by their remainder
        owners = tf.cast(tf.math.floormod(flat_keys, count), tf.int32)
        its_keys = tf.dynamic_partition(flat_keys, owners, count)
        its_grads = tf.dynamic_partition(flat_grads, owners, count)
        by_handles = list(zip(its_keys, its_grads, strict=True))
    slices = [row_gradient(name, *each, dim) for each in by_handles]
    return [*slices, *[None] * (len(op.inputs) - count)]

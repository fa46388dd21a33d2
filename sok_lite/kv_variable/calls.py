"""Calls of the table of a KvVariable, in eager mode and in graphs."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.checks import checked_keys
from sok_lite.bridge.table_call import array_call
from sok_lite.engine.table import EmbeddingTable

if TYPE_CHECKING:
    from sok_lite.kv_variable.kv_variable_ops import KvVariable


def call(
    variable: "KvVariable",
    method: str,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    dtypes: Sequence[tf.DType] = (),
    shapes: Sequence[Any] = (),
) -> Any:
    """Calls a function of the table and of arrays, as `array_call`, once the variable is ready."""
    count = len(inputs)

    def run(table: EmbeddingTable, *arrays: Array) -> Any:
        return function(table, *arrays[:count])

    what = f"{method} of {variable.name!r}"
    return array_call(variable, what, run, [*inputs, *initialized(variable)], dtypes, shapes)


def of_keys(
    variable: "KvVariable",
    method: str,
    indices: Any,
    function: Callable[[EmbeddingTable, Array], Array],
) -> tf.Tensor:
    """Returns what a function of the table and of keys (n,) gives, int64 of the keys' shape."""
    keys = checked_keys(variable, indices)

    def run(table: EmbeddingTable, keys: Array) -> Array:
        return function(table, keys.reshape(-1)).reshape(keys.shape)

    (result,) = call(variable, method, run, [keys], [tf.int64], [keys.shape])
    return result


def initialized(variable: "KvVariable") -> list[tf.Tensor]:
    """Returns inputs for a call that fail in a session of a TF1 graph which has not initialized
    the variable; none elsewhere.

    A control dependency would not do: TensorFlow may leave out a read whose value nobody has.
    """
    if not variable._in_graph_mode:
        return []
    return [tensor for part in variable.parts for tensor in _initialized_part(part)]


def _initialized_part(variable: "KvVariable") -> list[tf.Tensor]:
    is_global = tf.compat.v1.GraphKeys.GLOBAL_VARIABLES in variable.collections
    with tf.control_dependencies([] if is_global else [variable._initializer_op]):
        return [tf.raw_ops.ReadVariableOp(resource=variable._true_handle, dtype=variable.dtype)]


def done(variable: "KvVariable", operation: Any) -> Any:
    """Returns what a write returns: the variable in eager mode, the operation in a graph."""
    return variable if tf.executing_eagerly() else operation

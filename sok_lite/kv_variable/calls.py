"""What the methods of a KvVariable need before a call of its table, and give after it."""

from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from sok_lite.kv_variable.kv_variable_ops import KvVariable


def ready_inputs(variable: "KvVariable") -> list[tf.Tensor]:
    """Returns inputs for a call that fail in a session of a TF1 graph which has not initialized
    the variable; none elsewhere.

    A control dependency would not do: TensorFlow may leave out a read whose value nobody has.
    """
    inputs = []
    for part in variable.parts if variable._in_graph_mode else ():
        is_global = tf.compat.v1.GraphKeys.GLOBAL_VARIABLES in part.collections
        with tf.control_dependencies([] if is_global else [part._initializer_op]):
            read = tf.raw_ops.ReadVariableOp(resource=part._true_handle, dtype=part.dtype)
        inputs.append(read)
    return inputs


def done(variable: "KvVariable", operation: Any) -> Any:
    """Returns what a write returns: the variable in eager mode, the operation in a graph."""
    return variable if tf.executing_eagerly() else operation

"""`custom_gradient`: that of TensorFlow, for calls in TF1 graphs too.

TensorFlow keeps what it is given there for as long as the process lives, and with it the graph, its
variables and their tables. Here the graph keeps it.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from sok_lite.bridge.tf_private import could_possibly_record

# What TensorFlow finds the gradients of all such calls by.
_NAME = "SokLiteCustomGradient"
# An attribute of graphs: gradients and numbers of outputs, by the name of an operation.
_GRADIENTS = "_sok_lite_gradients"


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose gradient is the one it says, as `tf.custom_gradient` does.

    Args:
      function: takes tensors; gives (a tensor or a tuple of them, the function of their gradients).
        It uses no variable that has a gradient and is not among what it takes.
    """

    def call(*args: Any) -> Any:
        if tf.executing_eagerly() and not could_possibly_record():
            return function(*args)[0]  # no tape would see it
        if tf.executing_eagerly() or tf.inside_function():
            return tf.custom_gradient(function)(*args)
        tensors = [tf.convert_to_tensor(arg) for arg in args]
        results, gradient = function(*tensors)
        is_many = isinstance(results, (list, tuple))
        outputs = list(results) if is_many else [results]
        graph: Any = tf.compat.v1.get_default_graph()
        with graph.gradient_override_map({"IdentityN": _NAME}):
            named = tf.raw_ops.IdentityN(input=[*outputs, *tensors])
        if not hasattr(graph, _GRADIENTS):
            setattr(graph, _GRADIENTS, {})
        getattr(graph, _GRADIENTS)[named[0].op.name] = gradient, len(outputs)
        return tuple(named[: len(outputs)]) if is_many else named[0]

    return call


@tf.RegisterGradient(_NAME)
def _gradient(operation: Any, *gradients: Any) -> list[Any]:
    try:
        gradient, count = getattr(operation.graph, _GRADIENTS)[operation.name]
    except (AttributeError, KeyError):
        raise LookupError(
            f"{operation.name!r} has no gradient: its graph was imported. Build the lookup anew."
        ) from None
    found = gradient(*gradients[:count])
    return [None] * count + (list(found) if isinstance(found, (list, tuple)) else [found])

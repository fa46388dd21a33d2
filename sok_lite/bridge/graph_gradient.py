"""`custom_gradient`: that of TensorFlow, which here goes with the graph that it is in.

TensorFlow keeps the function of a gradient, in a TF1 graph or a tf.function, for as long as the
process lives, and with it the graph: in a TF1 graph its variables and their tables, in a function
all operations of a trace. Here the graph keeps it.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.refusals import FORWARD_REFUSAL
from sok_lite.bridge.tf_private import (
    GRADIENT_OF_OPERATION,
    could_possibly_record,
    gradient_registry,
    kept_by,
    record_operation,
    stop_recording,
)

# What TensorFlow finds the gradients of all such calls by.
_NAME = "SokLiteCustomGradient"
# An attribute of graphs: gradients by their own names, and gradients with numbers of outputs by the
# names of operations.
_GRADIENTS = "_sok_lite_gradients"
_serial = itertools.count()


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose gradient is the one it says, as `tf.custom_gradient` does.

    Args:
      function: takes tensors; gives (a tensor or a tuple of them, the function of their gradients).
        It uses no variable that has a gradient and is not among what it takes.
    """

    def call(*args: Any) -> Any:
        if tf.executing_eagerly() and not could_possibly_record():
            return function(*args)[0]  # no tape would see it
        if tf.executing_eagerly():
            return _backward_only(function, args)
        if tf.inside_function():
            results = _backward_only(function, list(map(_bring_into_graph, args)))
            _keep_with_graph(results[0] if isinstance(results, (list, tuple)) else results)
            return results
        tensors = [tf.convert_to_tensor(arg) for arg in args]
        graph: Any = tf.compat.v1.get_default_graph()
        # A tape would take the operations within for all there is, and knows no gradient by a name
        # of an operation's own: so it is told.
        with stop_recording():
            results, gradient = function(*tensors)
            is_many = isinstance(results, (list, tuple))
            outputs = list(results) if is_many else [results]
            with graph.gradient_override_map({"IdentityN": _NAME}):
                named = tf.raw_ops.IdentityN(input=[*outputs, *tensors])
        _gradients_of(graph)[named[0].op.name] = gradient, len(outputs)
        results = named[: len(outputs)]
        record_operation(_NAME, results, tensors, lambda *arrived: _as_list(gradient(*arrived)))
        return tuple(results) if is_many else results[0]

    return call


def _backward_only(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Does what `tf.custom_gradient` does, but for a ForwardAccumulator.

    That asks for the gradient while the function is recorded, and derives it once more: what comes
    of the keys of a table is an error within TensorFlow.
    """
    recorded = False

    def with_gradient(*tensors: Any) -> Any:
        results, gradient = function(*tensors)

        def backward(*arrived: Any) -> Any:
            if not recorded:
                raise NotImplementedError(FORWARD_REFUSAL)
            return gradient(*arrived)

        return results, backward

    results = tf.custom_gradient(with_gradient)(*args)
    recorded = True
    return results


def _bring_into_graph(tensor: Any) -> Any:
    """Returns a tensor of the default graph for one of a graph around it.

    TensorFlow passes the function its own argument, and the gradient of a branch can take a tensor
    of that branch or of the graph around the gradient, but of no graph further out.
    """
    graph = getattr(tensor, "graph", None) if tf.is_tensor(tensor) else None
    is_outer = graph is not None and graph is not tf.compat.v1.get_default_graph()
    return tf.identity(tensor) if is_outer and tensor.dtype != tf.resource else tensor


def _keep_with_graph(output: tf.Tensor) -> None:
    """Has the graph of a function keep the gradient of an output of it, and not the process."""
    name = output.op.get_attr(GRADIENT_OF_OPERATION).decode()
    original = gradient_registry.lookup(name)
    del gradient_registry._registry[name]
    _register(output.graph, name, original)


def _register(graph: Any, name: str, gradient: Callable[..., Any]) -> None:
    """Registers the gradient of operations that name it, for as long as there is a graph."""
    _gradients_of(graph)[name] = gradient
    registered = gradient_registry._registry
    reference = weakref.ref(graph, lambda _: registered.pop(name, None))

    def of_graph(operation: Any, *gradients: Any) -> Any:
        return getattr(reference(), _GRADIENTS)[name](operation, *gradients)

    tf.RegisterGradient(name)(of_graph)


def _gradients_of(graph: Any) -> dict[str, Any]:
    gradients: dict[str, Any] = kept_by(graph, _GRADIENTS, dict)
    return gradients


@tf.RegisterGradient(_NAME)
def _gradient(operation: Any, *gradients: Any) -> list[Any]:
    try:
        gradient, count = getattr(operation.graph, _GRADIENTS)[operation.name]
    except (AttributeError, KeyError):
        raise LookupError(
            f"{operation.name!r} has no gradient: its graph was imported. Build the lookup anew."
        ) from None
    return [None] * count + _as_list(gradient(*gradients[:count]))


def _as_list(found: Any) -> list[Any]:
    return list(found) if isinstance(found, (list, tuple)) else [found]

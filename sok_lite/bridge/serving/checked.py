"""Whether a graph can do without this process: it has no call of Python."""

from collections.abc import Iterable
from typing import Any

# Operations whose function is in the process that built the graph.
_OF_PYTHON = {"EagerPyFunc", "PyFunc", "PyFuncStateless"}


def check_plain(graph_def: Any) -> None:
    """Raises NotImplementedError where a graph, or a function in it, calls Python."""
    for where, nodes in _parts_of(graph_def):
        for node in nodes:
            if node.op in _OF_PYTHON:
                raise NotImplementedError(
                    f"{node.name!r}{where} calls a function of Python, which no other process has: "
                    "tf.py_function, tf.numpy_function or a call of a table that is no lookup. "
                    "Leave it out of what is exported for serving. In a graph of TF1, lookups "
                    "within tf.function, tf.cond and tf.while_loop cannot be exported either."
                )


def _parts_of(graph_def: Any) -> Iterable[tuple[str, Any]]:
    yield "", graph_def.node
    for function in graph_def.library.function:
        yield f" in the function {function.signature.name!r}", function.node_def

"""Graphs of TF1 as lists of nodes: some tensors of one put in place of others, the rest cut off."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

# What an operation is put beside; it may be gone.
_BESIDE = "_class"
_INTO_A_LOOP = {"Enter", "RefEnter", "NextIteration", "RefNextIteration", "LoopCond"}
_OUT_OF_A_LOOP = {"Exit", "RefExit"}


class Nodes:
    """The nodes of one graph or several, by name.

    Args:
      graph_def: of the first graph.
    """

    def __init__(self, graph_def: Any) -> None:
        self._graph_def = graph_def
        self._nodes = {node.name: node for node in graph_def.node}
        self._of_first = frozenset(self._nodes)
        self._replaced: dict[str, str] = {}

    def unused_scope(self, name: str) -> str:
        """Returns a name, this one if it can be, that no node has and none is beneath.

        Of names that differ in case alone, TensorFlow changes one.
        """
        tops = {each.partition("/")[0].lower() for each in self._nodes}
        result, number = name, 0
        while result.lower() in tops:
            number += 1
            result = f"{name}_{number}"
        return result

    def add(self, graph_def: Any) -> None:
        """Takes the nodes of another graph, which may have grown since it was taken before.

        Raises:
          ValueError: a node of the first graph has the name of one of them.
        """
        added = {node.name: node for node in graph_def.node}
        both = sorted(self._of_first & added.keys())
        if both:
            raise ValueError(
                f"The graph must not have a node that the export makes. Received: {both}. Give "
                "these operations other names."
            )
        self._nodes |= added

    def replace(self, name: str, by: str) -> None:
        """Has whoever takes one tensor take another, both by the names that tensors have."""
        self._replaced[_edge(name)] = _edge(by)

    def resolved(self, name: str) -> str:
        """Returns the name of the tensor that stands where one did."""
        edge = self._replacement(_edge(name))
        return edge if ":" in edge else f"{edge}:0"

    def is_in_a_loop(self, name: str) -> bool:
        """Whether a tensor is computed within a loop of TF1's older kind."""
        seen: set[str] = set()
        waiting = [_node(name)]
        while waiting:
            name = waiting.pop()
            node = self._nodes[name]
            if node.op in _INTO_A_LOOP:
                return True
            if name in seen or node.op in _OUT_OF_A_LOOP:
                continue
            seen.add(name)
            waiting += [_node(each) for each in node.input]
        return False

    def needed(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns copies of the nodes that some tensors or operations depend on, by name."""
        result: dict[str, Any] = {}
        # What is left of an operation whose results are replaced, nothing waits for.
        gone = {_node(edge) for edge in self._replaced}
        waiting = [_node(self.resolved(name)) for name in names]
        while waiting:
            name = waiting.pop()
            if name in result:
                continue
            node = tf.compat.v1.NodeDef()
            node.CopyFrom(self._nodes[name])
            inputs = [
                each if each[0] == "^" else self._replacement(each)
                for each in node.input
                if each[0] != "^" or each[1:] not in gone
            ]
            del node.input[:]
            node.input.extend(inputs)
            if _BESIDE in node.attr:
                del node.attr[_BESIDE]
            result[name] = node
            waiting += [_node(each) for each in inputs]
        return result

    def used(self, names: Iterable[str]) -> set[str]:
        """Returns the tensors that are taken where some are computed, these included."""
        names = [self.resolved(name) for name in names]
        nodes = self.needed(names).values()
        return {*names, *(self.resolved(edge) for node in nodes for edge in node.input)}

    def graph_def(self, names: Iterable[str]) -> Any:
        """Returns the graph of what some tensors or operations depend on."""
        result = tf.compat.v1.GraphDef()
        result.versions.CopyFrom(self._graph_def.versions)
        result.node.extend(self.needed(names).values())
        functions = {each.signature.name: each for each in self._graph_def.library.function}
        called = _called_functions(result.node, functions)
        result.library.function.extend(functions[name] for name in sorted(called))
        return result

    def _replacement(self, edge: str) -> str:
        while edge in self._replaced:
            edge = self._replaced[edge]
        return edge


def _called_functions(nodes: Iterable[Any], functions: Mapping[str, Any]) -> set[str]:
    """Returns the functions that nodes call, and those that these do."""
    result: set[str] = set()
    waiting = [*_names_in(nodes)]
    while waiting:
        name = waiting.pop()
        if name in functions and name not in result:
            result.add(name)
            waiting += _names_in(functions[name].node_def)
    return result


def _names_in(nodes: Iterable[Any]) -> Iterator[str]:
    for node in nodes:
        yield node.op
        for attr in node.attr.values():
            yield attr.func.name
            yield from (each.name for each in attr.list.func)


def _edge(name: str) -> str:
    """Returns the name of a tensor as nodes have it: the first one is known by its node."""
    return name.removesuffix(":0")


def _node(edge: str) -> str:
    return edge.removeprefix("^").partition(":")[0]


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

"""`export_serving_graph`: a part of a TF1 graph as a SavedModel that runs without sok_lite."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge import job
from sok_lite.bridge.checks import check_cutoff
from sok_lite.bridge.serving.as_a_whole import as_a_whole, checked_folder
from sok_lite.bridge.serving.files import VariableFiles, beside
from sok_lite.bridge.serving.mode import Lookup, lookups_of
from sok_lite.bridge.serving.signature import plain_parts
from sok_lite.bridge.serving.tables import ServedTables, check_quantize
from sok_lite.bridge.serving.together import Ranks
from sok_lite.bridge.tf_private import eager_mode
from sok_lite.bridge.variable import TableVariable

_VARIABLES = ("VarHandleOp", "VariableV2", "Variable")
_SCOPE = "sok_serving"
# The operation with which one is colocated; it may be gone.
_BESIDE = "_class"
_INTO_A_LOOP = {"Enter", "RefEnter", "NextIteration", "RefNextIteration", "LoopCond"}
_OUT_OF_A_LOOP = {"Exit", "RefExit"}


def export_serving_graph(
    session: Any,
    path: Any,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    *,
    cutoff: float | None = None,
    quantize: str | None = None,
) -> None:
    """Writes the part of a TF1 graph that computes some tensors, without sok_lite.

    It takes what the outputs need and the inputs do not provide. Lookups in tables become plain
    operations (`export_serving` says what they return); variables have the session's values.
    `tf.compat.v1.saved_model.load`, `tf.saved_model.load` and TensorFlow Serving can open it. The
    session and its graph stay unchanged.

    Args:
      session: a tf.compat.v1.Session with initialized variables.
      path: the folder to write, which must be missing or empty, or an address that TensorFlow
        supports. It is replaced when complete, as by `export_serving`.
      inputs: signature name -> tensor: placeholders or any others. A sparse or ragged one has
        several names there, which end in "_values", "_row_splits" and similar.
      outputs: tensors by name, likewise.
      cutoff: leaves out keys whose row has only |elements| < cutoff; None: none.
      quantize: "float16" or "int8": reduces the size of float rows; None: no change.

    Raises:
      TypeError, ValueError: an argument that does not fit; an output needs a placeholder that is
        not among the inputs.
      FileExistsError: the folder is not empty.
      NotImplementedError: an output needs a call of Python other than a lookup, or a lookup in a
        loop or in a function.
      RuntimeError and similar: another rank has failed; the text has its number.
    """
    ranks = Ranks(job.other_ranks())
    with ranks.together():
        check_cutoff(cutoff)
        check_quantize(quantize)
        _check_tensors(session.graph, inputs, "inputs")
        _check_tensors(session.graph, outputs, "outputs")
        if ranks.is_first:
            _check_empty(path)
        copy = _Copy(session, _leaves(inputs), _leaves(outputs))
        with ExitStack() as stack:
            part = stack.enter_context(as_a_whole(path)) if ranks.is_first else None
            files = stack.enter_context(beside(part))
            copy.serve(cutoff, quantize, ranks, files)
            if files is not None:
                copy.write(part, files, inputs, outputs)
            ranks.meet()  # if one rank fails, none publishes


class _Copy:
    """The exported parts of the graph of a session with initialized variables."""

    def __init__(
        self, session: Any, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]
    ) -> None:
        self._session, self._graph = session, session.graph
        self._outputs = [tensor.name for tensor in outputs]
        self._nodes = Nodes(self._graph.as_graph_def())
        self._scratch = tf.Graph()  # replacements of lookups, and all variables
        # Scope of all that is made there: the graph may use any other name.
        self._scope = self._nodes.unused_scope(_SCOPE)
        self._values: dict[str, np.ndarray] = {}
        self._saved_names: dict[str, str] = {}
        with self._scratch.as_default(), tf.name_scope(f"{self._scope}/"):
            for tensor in inputs:
                if tensor.op.type != "Placeholder":
                    name = f"input/{tensor.op.name}"
                    stand_in = tf.compat.v1.placeholder(tensor.dtype, tensor.shape, name)
                    self._nodes.replace(tensor.name, stand_in.name)
        self._nodes.add(self._scratch.as_graph_def())
        self._inputs = {self._nodes.resolve(tensor.name) for tensor in inputs}
        self._initializers: list[str] = []

    def serve(
        self,
        cutoff: float | None,
        quantize: str | None,
        ranks: Ranks,
        files: VariableFiles | None,
    ) -> None:
        """Replaces lookups by plain operations, and the session's variables by ones with values."""
        read = self._session.run
        tables = ServedTables(self._variable, read, cutoff, quantize, ranks, files)
        waiting = lookups_of(self._graph)
        while True:
            used = self._nodes.used(self._outputs)
            lookup = next((each for each in waiting if used & _names(each.outputs)), None)
            if lookup is None:
                break
            waiting.remove(lookup)
            self._replace(lookup, tables)
        check_plain(self._nodes.graph_def(self._outputs))
        needed = self._nodes.needed(self._outputs)
        self._check_placeholders(needed)
        self._copy_variables(needed)
        self._nodes.add(self._scratch.as_graph_def())
        self._initializers = self._initializers_of(needed)

    def write(
        self,
        part: Any,
        files: VariableFiles,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
    ) -> None:
        """Writes the SavedModel."""
        # Its collections recreate the variables from the nodes of the same names.
        meta = tf.compat.v1.train.export_meta_graph(graph=self._scratch, clear_devices=True)
        with self._scratch.as_default():
            protos = [each.to_proto() for each in tf.compat.v1.global_variables()]
        kept = [*self._outputs, *self._inputs, *self._initializers]
        for proto in protos:
            kept += [proto.variable_name, proto.initializer_name, proto.snapshot_name]
            kept.append(proto.initial_value_name)
        graph_def = self._nodes.graph_def(kept)
        meta.graph_def.CopyFrom(graph_def)
        final = tf.Graph()
        with final.as_default(), tf.compat.v1.Session(graph=final) as session:
            tf.compat.v1.train.import_meta_graph(meta, clear_devices=True)
            variables = tf.compat.v1.global_variables()
            # In the files variables have the names of the session.
            names = self._saved_names
            saved = {names.get(each.op.name, each.op.name): each for each in variables}
            with eager_mode(), tf.device("CPU:0"):
                for name, value in self._values.items():
                    tensor = tf.constant(value)
                    files.add(names[name], tensor, 0, len(value) if tensor.shape.rank else 1)
            signature = tf.compat.v1.saved_model.build_signature_def(
                self._infos(final, inputs),
                self._infos(final, outputs),
                tf.saved_model.PREDICT_METHOD_NAME,
            )
            main_op = tf.group(*map(final.get_operation_by_name, self._initializers))
            builder = tf.compat.v1.saved_model.Builder(part)
            builder.add_meta_graph_and_variables(
                session,
                [tf.saved_model.SERVING],
                {tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY: signature},
                saver=_Saver(saved, files) if saved else None,
                main_op=main_op,
            )
            builder.save()

    def _replace(self, lookup: Lookup, tables: ServedTables) -> None:
        if any(self._nodes.is_in_a_loop(tensor.name) for tensor in lookup.inputs):
            raise NotImplementedError(
                f"{lookup.what} is within a loop, and cannot be exported for serving. Look all "
                "keys up before the loop."
            )
        with self._scratch.as_default(), tf.name_scope(f"{self._scope}/"):
            stand_ins = [
                tf.compat.v1.placeholder(tensor.dtype, tensor.shape) for tensor in lookup.inputs
            ]
            results = lookup.plain(tables, *stand_ins)
        for stand_in, tensor in zip(stand_ins, lookup.inputs, strict=True):
            self._nodes.replace(stand_in.name, tensor.name)
        for tensor, result in zip(lookup.outputs, results, strict=True):
            self._nodes.replace(tensor.name, result.name)
        self._nodes.add(self._scratch.as_graph_def())

    def _variable(self, name: str, shape: Sequence[int], dtype: tf.DType) -> tuple[Any, str]:
        made = self._make(name, shape, dtype, True, tf.TensorShape(shape))
        return made, made.op.name

    def _make(
        self,
        name: str,
        shape: Sequence[int],
        dtype: Any,
        is_resource: bool,
        declared: tf.TensorShape,
    ) -> Any:
        """Creates a variable of the scratch graph, without its value."""
        with self._scratch.as_default(), tf.name_scope(f"{self._scope}/"):
            return tf.compat.v1.Variable(
                tf.zeros(shape, dtype),
                trainable=False,
                name=name,
                use_resource=is_resource,
                validate_shape=declared.is_fully_defined(),
                shape=declared if is_resource else None,
            )

    def _copy_variables(self, needed: Mapping[str, Any]) -> None:
        collections = map(self._graph.get_collection, self._graph.get_all_collection_keys())
        known = {
            item.op.name: item
            for items in collections
            for item in items
            if isinstance(item, tf.Variable)
        }
        names = [name for name, node in needed.items() if node.op in _VARIABLES]
        names = [name for name in names if not name.startswith(f"{self._scope}/")]
        for name in names:
            if name not in known or isinstance(known[name], TableVariable):
                raise NotImplementedError(
                    f"An output needs {name!r}, which is no variable that can be saved by itself: "
                    "a table that is not looked up in, or one that no collection of the graph has."
                )
        values = self._session.run({name: known[name] for name in names})
        for name in names:
            is_resource, value = needed[name].op == "VarHandleOp", np.asarray(values[name])
            made = self._make(name, value.shape, value.dtype, is_resource, known[name].shape)
            self._values[made.op.name] = value
            self._saved_names[made.op.name] = name
            self._nodes.replace(name, made.op.name)

    def _initializers_of(self, needed: Mapping[str, Any]) -> list[str]:
        """Returns the operations that fill the lookup tables that an output needs."""
        collection = self._graph.get_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS)
        found = [op for op in collection if any(each.op.name in needed for each in op.inputs)]
        for op in found:
            if "TextFile" in op.type:
                raise NotImplementedError(
                    f"{op.name!r} reads a file, which would not be exported. Make the table with "
                    "tf.lookup.KeyValueTensorInitializer."
                )
        return [op.name for op in found]

    def _check_placeholders(self, needed: Mapping[str, Any]) -> None:
        names = [f"{name}:0" for name, node in needed.items() if node.op == "Placeholder"]
        missing = sorted(set(names) - self._inputs)
        if missing:
            raise ValueError(
                f"An output needs the placeholders {missing}, which are not among `inputs`. "
                f"Received: {sorted(self._inputs)}."
            )

    def _infos(self, final: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the signature's descriptions of tensors of the session's graph."""
        found = {
            part: final.get_tensor_by_name(self._nodes.resolve(tensor.name))
            for part, tensor in plain_parts(tensors.items()).items()
        }
        build = tf.compat.v1.saved_model.build_tensor_info
        return {name: build(tensor) for name, tensor in found.items()}


class _Saver(tf.compat.v1.train.Saver):
    """A saver that restores variables as TensorFlow's does; their values are already in files."""

    def __init__(self, variables: dict[str, Any], files: VariableFiles) -> None:
        super().__init__(variables)
        self._files = files

    def save(self, session: Any, save_path: str, *args: Any, **kwargs: Any) -> str:
        self._files.merge_into(save_path)
        return save_path


def _names(tensors: Sequence[tf.Tensor]) -> set[str]:
    return {tensor.name for tensor in tensors}


def _leaves(tensors: Mapping[str, Any]) -> list[tf.Tensor]:
    return tf.nest.flatten(list(tensors.values()), expand_composites=True)


def _check_empty(path: Any) -> None:
    path = checked_folder(path)
    if tf.io.gfile.isdir(path) and tf.io.gfile.listdir(path):
        raise FileExistsError(f"{path!r} is not empty. Give another path, or remove what is there.")


def _check_tensors(graph: Any, tensors: Any, argument: str) -> None:
    if not isinstance(tensors, Mapping) or not tensors:
        raise TypeError(
            f"`{argument}` must be a dict of tensors by name, at least one. Received: {tensors!r}."
        )
    for name, value in tensors.items():
        for leaf in tf.nest.flatten(value, expand_composites=True):
            if not tf.is_tensor(leaf) or getattr(leaf, "graph", None) is not graph:
                raise TypeError(
                    f"`{argument}` must be tensors of the session's graph. "
                    f"Received: {name}={leaf!r}."
                )
    plain_parts(tensors.items())  # raises for equal names


# ---- graphs as lists of nodes: some tensors replaced, unused nodes dropped ----------------------


class Nodes:
    """The nodes of one or more graphs, by name."""

    def __init__(self, graph_def: Any) -> None:
        self._graph_def = graph_def
        self._nodes = {node.name: node for node in graph_def.node}
        self._of_first = frozenset(self._nodes)
        self._replaced: dict[str, str] = {}

    def unused_scope(self, name: str) -> str:
        """Returns `name`, or one like it, that no node has and none is under.

        Case is ignored: TensorFlow renames one of two names that differ only in case.
        """
        tops = {each.partition("/")[0].lower() for each in self._nodes}
        result, number = name, 0
        while result.lower() in tops:
            number += 1
            result = f"{name}_{number}"
        return result

    def add(self, graph_def: Any) -> None:
        """Adds the nodes of another graph, also after it has grown; ValueError for clashes."""
        added = {node.name: node for node in graph_def.node}
        both = sorted(self._of_first & added.keys())
        if both:
            raise ValueError(
                f"The graph must not have a node that the export makes. Received: {both}. Give "
                "these operations other names."
            )
        self._nodes |= added

    def replace(self, name: str, by: str) -> None:
        """Replaces a tensor by another in all nodes, both by name."""
        self._replaced[_edge(name)] = _edge(by)

    def resolve(self, name: str) -> str:
        """Returns the name of a tensor's replacement, or its own."""
        edge = self._replacement(_edge(name))
        return edge if ":" in edge else f"{edge}:0"

    def is_in_a_loop(self, name: str) -> bool:
        """Whether a tensor is computed within a TF1 loop."""
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
        # Nothing waits for operations whose outputs are replaced.
        gone = {_node(edge) for edge in self._replaced}
        waiting = [_node(self.resolve(name)) for name in names]
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
        """Returns the given tensors and all tensors used to compute them."""
        names = [self.resolve(name) for name in names]
        nodes = self.needed(names).values()
        return {*names, *(self.resolve(edge) for node in nodes for edge in node.input)}

    def graph_def(self, names: Iterable[str]) -> Any:
        """Returns the graph that some tensors or operations depend on."""
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
    """Returns the functions that nodes call, directly or not."""
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
    """Returns a tensor's name as an input of nodes: that of output 0 is the node's."""
    return name.removesuffix(":0")


def _node(edge: str) -> str:
    return edge.removeprefix("^").partition(":")[0]


# Operations whose function exists only in the process that built the graph, besides ours.
_OF_PYTHON = {"EagerPyFunc", "PyFunc", "PyFuncStateless"}


def check_plain(graph_def: Any) -> None:
    """Raises NotImplementedError if a graph, or a function in it, calls Python."""
    for where, nodes in _parts_of(graph_def):
        for node in nodes:
            if node.op in _OF_PYTHON or node.op.startswith("Sok"):
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

"""What of a graph a real GPU would send to the host, where the simulated one cannot show it.

The simulated GPU is "CPU:0" for TensorFlow, which has a kernel for everything there. On a GPU an
operation without a kernel for its types runs on the host, and some kernels have arguments in the
host's memory: for them values are copied from the GPU, which waits for all work, and back. Keys,
row numbers, rows and what a gradient needs of a lookup must not go that way.

`gpu_kernels.json` has TensorFlow's kernels (tools/record_gpu_kernels.py). `Watch` looks at each
operation when it is added to a graph:

* those that sok_lite's own code adds (`joined.py`), whatever they are;
* those that TensorFlow adds to carry values into branches and loops and out of them, and to keep
  them for gradients ("TensorFlow"), where they carry inputs of operations on tables.

A program's other operations are its own affair. So are operations that are run eagerly.
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf
from tensorflow.core.framework import types_pb2

RECORD = Path(__file__).with_suffix(".json")
_ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = f"{_ROOT}/sok_lite/"
# Of it not ours: what goes into models that have tables as TensorFlow's own variables, what
# TensorFlow saves of others, Keras' steps, and the lookups of TensorFlow's that end in one of ours.
_NOT_OURS = (
    *(f"{_PACKAGE}bridge/serving/", f"{_PACKAGE}bridge/keras/model_folders.py"),
    f"{_PACKAGE}bridge/keras/input_wait.py",
    f"{_PACKAGE}bridge/tf_lookups.py",
)
# Where a program's own frames are: these end the search for who has added an operation.
_OTHERS = ("/keras/", "/tf_keras/")

# Arguments of ours that are in the host's memory (kernels/ops/ops.cpp); they have all types.
_HOST_OF_OURS = {"handles", "call", "numbers", "told"}
# TensorFlow keeps these on the host wherever a function, a branch or a loop takes or gives them.
_ON_HOST = (tf.int32, tf.string, tf.resource)
_FUNCTIONS = {"Placeholder", "PartitionedCall", "StatefulPartitionedCall", "Case", "StatelessCase"}
_FUNCTIONS |= {"If", "StatelessIf", "While", "StatelessWhile", "IdentityN", "_Arg"}
# What TensorFlow makes for branches, loops and their gradients.
_CARRIERS = {"Identity", "IdentityN", "Switch", "RefSwitch", "Merge", "Enter", "Exit"}
_CARRIERS |= {"NextIteration", "StackPushV2", "StackPopV2", "TensorListPushBack"}
_CARRIERS |= {"TensorListPopBack", "PlaceholderWithDefault", "ZerosLike"}


class Crossing(NamedTuple):
    """Values of a GPU that an operation needs on the host. `where` is the file of sok_lite that
    adds the operation, or "TensorFlow"."""

    where: str
    op: str
    dtype: str


# What is so today, and why. A new one fails the test in which it is found; one that is gone fails
# tests/bridge/test_gpu_kernels.py until it is taken out here.
_INT32 = "keys are int32 in a gradient, which TensorFlow has on the host in most operations"
KNOWN = {
    Crossing("row_gradient.py", "PlaceholderWithDefault", "int32"): _INT32,
    Crossing("lookup_gradient.py", "Reshape", "int32"): _INT32,
    Crossing("lookup_gradient.py", "FloorMod", "int32"): _INT32,
    Crossing("lookup_arguments.py", "StridedSlice", "int64"): "how many rows a sparse matrix has",
    Crossing("operation.py", "SokLookupGradient", "int64"): "numbers of the host that a loop keeps",
}
# What the oldest TensorFlow has beside, in some of its functions: the gradient of tf.gather casts a
# shape there.
_OF_THE_OLDEST = {Crossing("lookup_gradient.py", "StridedSlice", "int32")}
_ALLOWED = KNOWN.keys() | (_OF_THE_OLDEST if tf.__version__.startswith("2.16.") else set())


@cache
def record():
    return json.loads(RECORD.read_text())


def host_arguments(op_type, types):
    """Returns the arguments that a GPU's kernel has on the host; None where there is no kernel.

    `types` are lists by the names of the operation's attributes, {"T": [tf.int64]}; of other
    attributes the kernel may have any.
    """
    for kernel in record()["kernels"].get(op_type, []):
        allowed = {name: of.split() for name, of in kernel["types"].items()}
        if all(
            _name(each) in allowed[name] for name in allowed & types.keys() for each in types[name]
        ):
            return set(kernel["host"])
    return None


class Watch:
    """Notes the crossings of the operations that it is shown.

    Attributes:
      crossings: those that were found.
    """

    def __init__(self):
        self.crossings = set()

    def begin(self, monkeypatch):
        """Has itself shown every operation that is added to any graph."""
        add = tf.Graph._create_op_helper

        def added(graph, op, *args, **kwargs):
            add(graph, op, *args, **kwargs)
            self.show(op)

        monkeypatch.setattr(tf.Graph, "_create_op_helper", added)

    def show(self, op):
        """Looks at an operation that was added just now."""
        where = _adder()
        if where is not None:
            self._note(where, op)
        if _is_of_tables(op):
            self._note_carriers(op)

    def eager(self, where, op_type, types):
        """Looks at an operation that is not in a graph."""
        if host_arguments(op_type, types) is None:
            self.crossings.add(Crossing(where, op_type, _name(next(iter(types.values()))[0])))

    def check(self):
        """Raises where it has found crossings that are not known."""
        new = sorted(self.crossings - _ALLOWED)
        assert not new, f"On a GPU these would take values to the host: {new}. See {__file__}."

    def _note(self, where, op):
        if any(tensor.dtype.base_dtype == tf.string for tensor in (*op.inputs, *op.outputs)):
            return  # texts are the host's
        if op.type in ("PyFunc", "PyFuncStateless"):
            return  # it is there to raise (row_gradient.py)
        for tensor, is_on_host in zip(op.inputs, _on_host(op, "input"), strict=True):
            is_number = tensor.shape.rank == 0  # such as a learning rate, which Python reads
            if is_on_host and not is_number and _is_on_gpu(tensor):
                self.crossings.add(Crossing(where, op.type, _name(tensor.dtype)))

    def _note_carriers(self, op):
        """Looks at the carriers of what an operation on tables takes on the GPU."""
        inputs = zip(op.inputs, _on_host(op, "input"), strict=True)
        left = [tensor for tensor, is_on_host in inputs if not is_on_host]
        seen = set()
        while left:
            tensor = left.pop()
            if tensor.op in seen or _is_of_tables(tensor.op):
                continue
            seen.add(tensor.op)
            left.extend(tensor.op.inputs)
            if tensor.op.type in _CARRIERS and tensor.dtype.base_dtype not in _ON_HOST:
                self._note("TensorFlow", tensor.op)
                if not _is_on_gpu(tensor):
                    crossing = Crossing("TensorFlow", tensor.op.type, _name(tensor.dtype))
                    self.crossings.add(crossing)


def _is_of_tables(op):
    return op.type.startswith("Sok") or op.type == "EagerPyFunc"


def _adder():
    """Returns the file of sok_lite whose call of TensorFlow adds an operation now, or None."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE):
            return None if name.startswith(_NOT_OURS) else Path(name).name
        is_ours = name.startswith(f"{_ROOT}/") and "/site-packages/" not in name
        if name != __file__ and (is_ours or any(part in name for part in _OTHERS)):
            return None
        frame = frame.f_back
    return None


def _name(dtype):
    return types_pb2.DataType.Name(dtype.base_dtype.as_datatype_enum)[3:].lower()


def _host_arguments_of(op):
    """Returns what `host_arguments` does of an operation of a graph, where it would be placed."""
    if "CPU" in op.device and not _is_beside_a_variable(op):
        return None
    if op.type.startswith("Sok"):
        return _HOST_OF_OURS
    types = {}
    for attr in op.op_def.attr:
        if attr.type in ("type", "list(type)"):
            value = op.get_attr(attr.name)
            types[attr.name] = value if isinstance(value, list) else [value]
    return host_arguments(op.type, types)


def _is_beside_a_variable(op):
    """Whether it is where a table's handle or a variable is: the simulated GPU is "CPU:0" too."""
    names = [group.decode().removeprefix("loc:@") for group in op.colocation_groups()]
    beside = [op.graph.get_operation_by_name(name) for name in names]
    beside += [tensor.op for tensor in op.inputs if tensor.dtype == tf.resource]
    return any(each.type in ("VarHandleOp", "Placeholder") for each in beside)


def _on_host(op, kind):
    """Returns of each input or output ("input" or "output") whether it is in host memory."""
    host = _host_arguments_of(op)
    tensors = list(getattr(op, f"{kind}s"))
    if host is None:
        return [True] * len(tensors)
    if op.type in _FUNCTIONS:
        return [tensor.dtype.base_dtype in _ON_HOST for tensor in tensors]
    result = []
    for arg in getattr(op.op_def, f"{kind}_arg"):
        if arg.number_attr:
            count = op.get_attr(arg.number_attr)
        else:
            count = len(op.get_attr(arg.type_list_attr)) if arg.type_list_attr else 1
        result += [arg.name in host] * count
    return result


def _is_on_gpu(tensor):
    """Returns whether values are on the GPU. A constant of a graph is made where it is needed."""
    if tensor.op.type == "Const":
        return False
    return not _on_host(tensor.op, "output")[tensor.value_index]

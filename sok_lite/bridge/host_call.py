"""Calls of Python by TensorFlow: what touches a backend, and in which order.

Whatever touches a backend for TensorFlow goes through `on_device`: lookups, updates, exports, and
the making of a table. Most of it is an operation (operation.py); `host_call` is for texts.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from sok_lite.backend import Backend
from sok_lite.bridge.gpu import check_stream
from sok_lite.bridge.serving.mode import refuse_while_exporting
from sok_lite.bridge.tensor import may_leave, memory_of_call, wait_for_all
from sok_lite.bridge.tf_private import BRANCHES_AND_LOOPS, is_for_xla, kept_by
from sok_lite.engine.work_done import WorkDone
from sok_lite.native.callbacks import operations

Result = TypeVar("Result")
Waits = bool | Callable[[], bool]


def on_device(
    backend: Backend, function: Callable[..., Result], *args: Any, waits: Waits = True
) -> Result:
    """Calls Python that touches a backend, for TensorFlow.

    The thread uses the backend's device while the function runs, and the call returns when all work
    on it is done, after an error too: what kernels read and write is TensorFlow's memory.

    Args:
      backend: what `function` computes with.
      function: called with `args`.
      waits: False, or a function that says so once `function` has returned: kernels write nothing
        that TensorFlow reads, so the call may return before they have run. TensorFlow's memory that
        they read, that of `args` as well, is kept until a later call has waited. A few calls that
        nothing else waits for are waited for here.

    Raises:
      ValueError: the thread's stream is not CUDA's null stream.
    """
    if backend.name == "cpu":
        return function(*args)  # nothing is chosen, kept or waited for
    check_stream(backend)
    with memory_of_call(backend, left_behind=waits is not True) as memory:
        memory.arguments = args
        backend.activate()
        try:
            result = function(*args)
            memory.is_left = not (waits() if callable(waits) else waits) and may_leave(backend)
            return result
        finally:
            if not memory.is_left:
                wait_for_all(backend, memory)


def timed_on_device(
    work: WorkDone,
    backend: Backend,
    function: Callable[..., Result],
    *args: Any,
    waits: Waits = True,
) -> Result:
    """Does what `on_device` does, and adds the time to work of a kind."""
    begun = time.perf_counter()
    result = on_device(backend, function, *args, waits=waits)
    work.add(time.perf_counter() - begun)
    return result


@tf.autograph.experimental.do_not_convert  # else each call of a graph runs through AutoGraph
def host_call(
    function: Callable[..., Sequence[tf.Tensor]],
    inputs: Sequence[Any],
    output_dtypes: Sequence[tf.DType],
    backend: Backend,
    what: str,
    handles: Sequence[tf.Tensor] = (),
) -> Any:
    """Calls Python with eager tensors: at once in eager mode, as one py_function in a graph.

    It is for texts, which no operation of ours has. So it is on the CPU.

    Args:
      function: takes eager tensors; gives a sequence of eager tensors. It raises only ValueError,
        TypeError and MemoryError: TensorFlow keeps the kind of no other.
      inputs: tensors.
      output_dtypes: one per output.
      backend: what `function` computes with; waited for before the outputs go to TensorFlow.
      what: what the call does, for the error text ("A dump of 'user'").
      handles: resources of tables: in a tf.function the call has its place among the operations
        on these.

    Returns:
      A list of tensors in the order of `output_dtypes`; in a TF1 or function graph without
      outputs, the operation.

    Raises:
      NotImplementedError: under `jit_compile=True`, in one of several replicas, or in a graph that
        is exported for serving.
    """
    refuse_replicas(what)
    refuse_while_exporting(what)

    def call(*given: tf.Tensor) -> Sequence[tf.Tensor]:
        return on_device(backend, function, *given)

    if tf.executing_eagerly():
        return list(call(*inputs))
    refuse_xla(what)

    def add() -> Any:
        with tf.device("CPU:0"):
            return tf.py_function(call, list(inputs), list(output_dtypes))

    with scope_of(what):
        result = in_order(lambda: at_place(handles, add))
    return list(result) if output_dtypes else result


def scope_of(what: str) -> Any:
    """Returns a `with` block of a graph, by whose name TensorFlow's profiler shows a call."""
    return tf.name_scope(re.sub(r"[^A-Za-z0-9_.]+", "_", what)[:80])


def refuse_xla(what: str) -> None:
    """Raises in a graph that XLA compiles."""
    if is_for_xla(tf.compat.v1.get_default_graph()):
        raise NotImplementedError(
            f"{what} cannot be compiled by XLA: the table is outside the graph. Remove "
            "`jit_compile=True` from the tf.function around it, or compile only the dense part of "
            "the model in a function of its own. Keras 3 asks for XLA by itself on a machine with "
            "a GPU if a model does not hold its tables: compile(jit_compile=False)."
        )


def refuse_replicas(what: str) -> None:
    """Raises where a tf.distribute strategy runs the caller once for each of several replicas.

    A table is no mirrored variable: every replica would act on the one table there is.
    """
    if not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
        return
    count = tf.distribute.get_strategy().num_replicas_in_sync
    if count > 1:
        raise NotImplementedError(
            f"{what} does not work in a tf.distribute strategy with several replicas: each of the "
            f"{count} would read and update the one table there is. Start one process per GPU "
            "with horovodrun and use sok_lite.init()."
        )


def in_order(call: Callable[[], Any]) -> Any:
    """Returns what `call` gives, in a tf.function as the successor of all host calls before it.

    TensorFlow orders host calls within one function. One in a function called from there, or in a
    branch or a loop, it orders by the variables alone that this function reads or writes: so each
    writes one of its own, else a lookup could pass an update, and ranks each other's collectives.
    """
    if not tf.inside_function():
        return call()
    turn = _turn()
    if turn is None:  # a TF1 graph is outside
        last = kept_by(tf.compat.v1.get_default_graph(), _LAST, list)
        with tf.control_dependencies(last):
            result = call()
        last[:] = tf.nest.flatten(result)[:1]
        return result
    with tf.control_dependencies([tf.raw_ops.ReadVariableOp(resource=turn, dtype=tf.int64)]):
        result = call()
    with tf.control_dependencies(tf.nest.flatten(result)):
        tf.raw_ops.AssignAddVariableOp(resource=turn, value=tf.constant(0, tf.int64))
    return result


def at_place(handles: Sequence[tf.Tensor], call: Callable[[], Any]) -> Any:
    """Returns what `call` gives, in a tf.function in its order among the operations on tables.

    A handle is no input of a py_function: TensorFlow would have the call where the table is, and
    on a GPU there is no text. So two operations that do nothing are where the table is.
    """
    if not handles or not tf.inside_function():
        return call()
    place = operations().module.sok_place
    with tf.control_dependencies([place(handles=handles)]):
        result = call()
    with tf.control_dependencies(tf.nest.flatten(result)):
        place(handles=handles)
    return result


# An attribute of graphs: what the last call gave, where nothing else has them in order.
_LAST = "_sok_lite_last_call"
_PARTS_OF_A_FUNCTION = {name for _, name in BRANCHES_AND_LOOPS}
_turn_variable: tf.Variable | None = None


def make_turn() -> None:
    """Makes the variable that host calls are ordered by, unless a TF1 graph is outside.

    Called where a table is made: a variable that is made while a tf.function is traced has it
    traced twice, and what goes once only, such as a gradient of a tape, is None the second time.
    """
    global _turn_variable
    with tf.init_scope():
        if tf.executing_eagerly() and _turn_variable is None:
            with tf.device("CPU:0"):
                _turn_variable = tf.Variable(0, dtype=tf.int64, trainable=False, name="sok_turn")


def has_turn() -> bool:
    """Whether the graph is a function's whose calls a variable has in order.

    There TensorFlow has what acts on one handle in order too; in a TF1 graph it does not.
    """
    return bool(tf.inside_function()) and _turn() is not None


def _turn() -> tf.Tensor | None:
    """Returns the variable that host calls are ordered by; None where a TF1 graph is outside."""
    with tf.init_scope():
        if not tf.executing_eagerly():
            return None
    make_turn()  # of a table that was made in a TF1 graph
    assert _turn_variable is not None
    return from_function(lambda: graph_of_function().capture(_turn_variable.handle))


def graph_of_function() -> Any:
    """Returns the default graph or, within branches and loops, that of the function around them."""
    return _up_to_function()[-1]


def from_function(make: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Returns what makes a tensor in the graph of the function, for use in the default graph.

    The gradient of a branch can take a tensor from the graph around it only, which may be a branch
    or a loop too: so all graphs on the way there take it.
    """
    *parts, function = _up_to_function()
    with function.as_default():
        tensor = make()
    for part in reversed(parts[1:]):
        tensor = part.capture(tensor)
    return tensor


def _up_to_function() -> list[Any]:
    """Returns the default graph and, of a branch or a loop, those around it up to the function."""
    graphs: list[Any] = [tf.compat.v1.get_default_graph()]
    while any(base.__name__ in _PARTS_OF_A_FUNCTION for base in type(graphs[-1]).__mro__):
        graphs.append(graphs[-1].outer_graph)
    return graphs

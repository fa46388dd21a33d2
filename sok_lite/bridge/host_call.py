"""Calls from TensorFlow into Python that use a backend, and their order.

All of them go through `on_device`: lookups, updates, exports, creation of a table. Most are
operations (operation.py); `host_call` is for texts.
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
from sok_lite.engine.work_counters import WorkCounter
from sok_lite.native.callbacks import operations

Result = TypeVar("Result")
Waits = bool | Callable[[], bool]


def on_device(
    backend: Backend, function: Callable[..., Result], *args: Any, waits: Waits = True
) -> Result:
    """Calls a Python function that uses a backend, on behalf of TensorFlow.

    The thread uses the backend's device while the function runs. The call returns when all work on
    the device is done, also after an error, because kernels access TensorFlow's memory.

    If `waits` is False, or returns that after `function`, kernels write nothing that TensorFlow
    reads, so the call may return before they have run. TensorFlow's memory that they read, also
    that of `args`, is kept until a later call has waited; after a few such calls this one waits.
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
    work: WorkCounter,
    backend: Backend,
    function: Callable[..., Result],
    *args: Any,
    waits: Waits = True,
) -> Result:
    """Calls `on_device` and adds its duration to `work`."""
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
    """Calls Python with eager tensors: directly in eager mode, as one py_function in a graph.

    For texts, which our operations do not handle; runs on the CPU.

    Args:
      function: maps eager tensors to a sequence of eager tensors. Raises only ValueError, TypeError
        and MemoryError, whose types TensorFlow keeps.
      what: names the call in errors ("A dump of 'user'").
      handles: resources of tables; in a tf.function the call is ordered with operations on them.

    Returns:
      A list of tensors, one per dtype; in a graph without outputs, the operation.

    Raises:
      NotImplementedError: in XLA, one of several replicas, or a graph exported for serving.
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
    """Returns a name scope, by which TensorFlow's profiler shows a call."""
    return tf.name_scope(re.sub(r"[^A-Za-z0-9_.]+", "_", what)[:80])


def refuse_xla(what: str) -> None:
    """Raises NotImplementedError in a graph that XLA compiles."""
    if is_for_xla(tf.compat.v1.get_default_graph()):
        raise NotImplementedError(
            f"{what} cannot be compiled by XLA: the table is outside the graph. Remove "
            "`jit_compile=True` from the tf.function around it, or compile only the dense part of "
            "the model in a function of its own. Keras 3 asks for XLA by itself on a machine with "
            "a GPU if a model does not hold its tables: compile(jit_compile=False)."
        )


def refuse_replicas(what: str) -> None:
    """Raises NotImplementedError in one of several replicas, which would all act on one table."""
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
    """Returns `call()`, ordered in a tf.function after all earlier host calls.

    TensorFlow orders host calls within one function. It orders a call in a nested function, branch
    or loop only by the variables that it reads or writes. So every call writes one variable of
    ours; otherwise a lookup could overtake an update, or ranks could meet in different collectives.
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
    """Returns `call()`, ordered in a tf.function with the operations on tables.

    With a handle as input, the py_function would run on the table's device, and a GPU has no texts.
    So two operations that do nothing run on that device, before and after it.
    """
    if not handles or not tf.inside_function():
        return call()
    place = operations().module.sok_place
    with tf.control_dependencies([place(handles=handles)]):
        result = call()
    with tf.control_dependencies(tf.nest.flatten(result)):
        place(handles=handles)
    return result


# Attribute of graphs: the output of the last call, where nothing else orders calls.
_LAST = "_sok_lite_last_call"
_PARTS_OF_A_FUNCTION = {name for _, name in BRANCHES_AND_LOOPS}
_turn_variable: tf.Variable | None = None


def make_turn() -> None:
    """Creates the variable that orders host calls, unless the outermost graph is of TF1.

    Called when a table is created: a variable created during tracing makes TensorFlow trace the
    function twice, and what works only once, such as a gradient of a tape, is None the second time.
    """
    global _turn_variable
    with tf.init_scope():
        if tf.executing_eagerly() and _turn_variable is None:
            with tf.device("CPU:0"):
                _turn_variable = tf.Variable(0, dtype=tf.int64, trainable=False, name="sok_turn")


def has_turn() -> bool:
    """Whether a variable orders host calls here, and TensorFlow the operations on one handle."""
    return bool(tf.inside_function()) and _turn() is not None


def _turn() -> tf.Tensor | None:
    """Returns the variable that orders host calls; None if the outermost graph is of TF1."""
    with tf.init_scope():
        if not tf.executing_eagerly():
            return None
    make_turn()  # for a table that was created in a TF1 graph
    assert _turn_variable is not None
    return from_function(lambda: graph_of_function().capture(_turn_variable.handle))


def graph_of_function() -> Any:
    """Returns the default graph or, in a branch or loop, the graph of the function around it."""
    return _up_to_function()[-1]


def from_function(make: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Makes a tensor in the function's graph and captures it into the default graph.

    The gradient of a branch can use tensors only from the graph right around it, which may be a
    branch or a loop itself: so all graphs in between capture the tensor.
    """
    *parts, function = _up_to_function()
    with function.as_default():
        tensor = make()
    for part in reversed(parts[1:]):
        tensor = part.capture(tensor)
    return tensor


def _up_to_function() -> list[Any]:
    """Returns the default graph and the graphs around it, up to that of the function."""
    graphs: list[Any] = [tf.compat.v1.get_default_graph()]
    while any(base.__name__ in _PARTS_OF_A_FUNCTION for base in type(graphs[-1]).__mro__):
        graphs.append(graphs[-1].outer_graph)
    return graphs

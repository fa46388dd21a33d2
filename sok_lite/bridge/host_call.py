"""The one door from TensorFlow to a backend, and the order of calls through it.

Whatever touches a backend for TensorFlow goes through `on_device`: lookups, updates, exports, and
the making of a table. `host_call` is the same for tensors of any mode, one py_function in a graph.

Where TensorFlow puts a py_function decides what crosses. For tables on a GPU that is TensorFlow's
own choice, the GPU wherever every type has a kernel there: keys from the host are copied to the GPU
once, which a lookup needs anyway, and rows stay there. A single int32 would send the call to the
CPU, and every row to the host and back; so an int32 goes in and out as the bits of a uint32. Texts,
which only checkpoints have, do send a call to the CPU: a file is written from there. For tables on
the CPU the call is put on the CPU, or keys would go to a GPU and come back. There an int32 may be.
"""

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from sok_lite.backend import Backend
from sok_lite.bridge.collective_order import CollectiveCall, in_collective_order, needs_order
from sok_lite.bridge.gpu import check_stream, device_name
from sok_lite.bridge.host_numbers import (
    HostNumbers,
    crossing_inputs,
    from_shapes,
    num_shapes,
    with_shapes,
)
from sok_lite.bridge.serving.mode import refuse_while_exporting
from sok_lite.bridge.tensor import memory_of_call, wait_for_all
from sok_lite.bridge.tf_private import BRANCHES_AND_LOOPS, is_for_xla, kept_by
from sok_lite.engine.work_done import WorkDone
from sok_lite.native.callbacks import operations

Result = TypeVar("Result")


def on_device(
    backend: Backend, function: Callable[..., Result], *args: Any, waits: bool = True
) -> Result:
    """Calls Python that touches a backend, for TensorFlow.

    The thread uses the backend's device while the function runs, and the call returns when all work
    on it is done, after an error too: what kernels read and write is TensorFlow's memory.

    Args:
      backend: what `function` computes with.
      function: called with `args`.
      waits: False: kernels write nothing that TensorFlow reads, so the call may return before they
        have run. TensorFlow's memory that they read is kept until a later call has waited.

    Raises:
      ValueError: the thread's stream is not CUDA's null stream.
    """
    if backend.name == "cpu":
        return function(*args)  # nothing is chosen, kept or waited for
    check_stream(backend)
    with memory_of_call(backend, left_behind=not waits) as memory:
        backend.activate()
        try:
            result = function(*args)
            memory.is_left = not waits
            return result
        finally:
            if not memory.is_left:
                wait_for_all(backend, memory)


def timed_on_device(
    work: WorkDone,
    backend: Backend,
    function: Callable[..., Result],
    *args: Any,
    waits: bool = True,
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
    collective: CollectiveCall | None = None,
    work: WorkDone | None = None,
    counts: int = 0,
    waits: bool = True,
    handles: Sequence[tf.Tensor] = (),
) -> Any:
    """Calls Python with eager tensors: at once in eager mode, as one py_function in a graph.

    Args:
      function: takes eager tensors, and an array or such a tensor for `HostNumbers`; gives a
        sequence of eager tensors. It raises only ValueError, TypeError and MemoryError: TensorFlow
        keeps the kind of no other.
      inputs: tensors, and `HostNumbers`.
      output_dtypes: one per output.
      backend: what `function` computes with; waited for before the outputs go to TensorFlow.
      what: what the call does, for the error text ("A lookup in 'user'").
      collective: the ranks that make it together; None: each by itself.
      work: which kind of work it is, for metrics; None: none that counts.
      counts: the first output is an array of so many int64, none negative, for TensorFlow's host;
        0: it is a tensor as the others are.
      waits: False: nothing that kernels write is an output; see `on_device`.
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

    def call(*given: Any) -> Sequence[tf.Tensor]:
        if work is None:
            return on_device(backend, function, *given, waits=waits)
        return timed_on_device(work, backend, function, *given, waits=waits)

    if tf.executing_eagerly():
        return list(call(*[x.values if isinstance(x, HostNumbers) else x for x in inputs]))
    refuse_xla(what)
    is_on_gpu = backend.name != "cpu"
    place = _gpu_call if is_on_gpu else _cpu_call
    crossing, given_of = crossing_inputs(inputs, by_shape=is_on_gpu)
    num_shaped = num_shapes(counts) if is_on_gpu else 0
    dtypes = [tf.int64] * num_shaped + list(output_dtypes[1 if num_shaped else 0 :])

    def run(*crossed: tf.Tensor) -> Sequence[tf.Tensor]:
        results = call(*(crossed if given_of is None else given_of(crossed)))
        if not num_shaped:
            return results
        return [*with_shapes(results[0], num_shaped, device_name(backend)), *results[1:]]

    with scope_of(what):
        if collective is not None and needs_order(collective):
            result = in_collective_order(collective, place, run, crossing, dtypes, what)
        else:
            result = in_order(lambda: at_place(handles, lambda: place(run, crossing, dtypes)))
    if not output_dtypes:
        return result
    if num_shaped:
        return [from_shapes(result[:num_shaped], counts), *result[num_shaped:]]
    return list(result)


def _cpu_call(
    function: Callable[..., Sequence[tf.Tensor]],
    inputs: Sequence[Any],
    output_dtypes: Sequence[tf.DType],
) -> Any:
    """Returns the py_function of a function, on the CPU."""
    with tf.device("CPU:0"):
        return tf.py_function(function, list(inputs), list(output_dtypes))


# Of equal width: a bitcast moves no byte and starts no work on a GPU.
_CROSSES_AS = {tf.int32: tf.uint32}


def _gpu_call(
    function: Callable[..., Sequence[tf.Tensor]],
    inputs: Sequence[Any],
    output_dtypes: Sequence[tf.DType],
) -> Any:
    """Returns the py_function of a function, with types that let it be on a GPU."""
    tensors = [tf.convert_to_tensor(tensor) for tensor in inputs]
    dtypes = [tensor.dtype for tensor in tensors]
    crossing_dtypes = [_CROSSES_AS.get(dtype, dtype) for dtype in output_dtypes]

    def run(*crossed: tf.Tensor) -> Sequence[tf.Tensor]:
        outputs = function(*map(_bits_as, crossed, dtypes))
        return [*map(_bits_as, outputs, crossing_dtypes)]

    crossing = [_bits_as(tensor, _CROSSES_AS.get(tensor.dtype, tensor.dtype)) for tensor in tensors]
    results = tf.py_function(run, crossing, crossing_dtypes)
    if not output_dtypes:
        return results
    return [*map(_bits_as, results, output_dtypes)]


def _bits_as(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if tensor.dtype == dtype:
        return tensor
    # Eagerly, TensorFlow would first copy what is on the host to its GPU.
    place = tf.device(tensor.backing_device) if tf.executing_eagerly() else contextlib.nullcontext()
    with place:
        return tf.bitcast(tensor, dtype)


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

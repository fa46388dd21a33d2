"""Operations of TensorFlow on tables: eager calls and parts of graphs, by one way.

An operation has the tables' handles as inputs: by them TensorFlow orders what acts on a table, and
knows whose gradient it is. It calls Python with arrays over TensorFlow's memory
(sok_lite/native/callbacks.py).
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.bridge.host_call import (
    in_order,
    on_device,
    refuse_replicas,
    refuse_xla,
    scope_of,
    timed_on_device,
)
from sok_lite.bridge.serving.mode import refuse_while_exporting
from sok_lite.bridge.tensor import with_all_memory
from sok_lite.bridge.tf_private import (
    SYNCHRONOUS,
    FuncGraph,
    context,
    execution_mode,
    graphs_around,
    kept_by,
)
from sok_lite.engine.work_done import WorkDone
from sok_lite.native.callbacks import Call, Frame, operations, raised

# An attribute of tables' handles: the name of the table.
NAME_OF_HANDLE = "_sok_lite_name"
# An attribute of graphs: the calls of their operations.
_CALLS = "_sok_lite_calls"

# Takes arrays, and gives of each output its shape and what writes it.
Run = Callable[["Outputs", list[Array]], None]


class Facts(NamedTuple):
    """What the gradient of an operation is told of its tables. `of` reads it there.

    They are attributes of the operation, so that they are there in whatever TensorFlow makes of it.

    Attributes:
      key_type: of the keys.
      names: of the tables, for errors; none in eager mode, where TensorFlow would keep a kernel for
        each.
      dims: lengths of their rows.
      trainable: whether tapes watch each by themselves.
    """

    key_type: tf.DType
    names: list[str]
    dims: list[int]
    trainable: list[bool]

    @staticmethod
    def of(op: Any) -> "Facts":
        """Returns those of an operation, as a gradient function has it."""
        names = [name.decode() for name in op.get_attr("names")]
        kind = tf.as_dtype(op.get_attr("Tkey"))
        return Facts(kind, names, op.get_attr("dims"), op.get_attr("trainable"))


# Of an operation without a gradient.
NO_FACTS = Facts(tf.int64, [], [], [])


class Outputs:
    """The outputs of an operation that is running.

    Args:
      frame: of the operation.
      dtypes: of the outputs.
      backend: whose memory they are in.
    """

    def __init__(self, frame: Frame, dtypes: Sequence[tf.DType], backend: Backend) -> None:
        self._frame, self._dtypes, self._backend = frame, dtypes, backend
        # What an operation on the host has of a GPU: it is copied at the end.
        self._is_copied = backend.name != "cpu" and not frame.is_on_gpu
        self._memory = "GPU memory" if frame.is_on_gpu else "memory"
        self._copies: list[tuple[np.ndarray, Array]] = []

    def empty(self, number: int, shape: Sequence[int]) -> Array:
        """Returns the memory of an output, to be written; bfloat16 is an array of uint16.

        Raises:
          MemoryError: TensorFlow has not as much.
        """
        try:
            array = self._allocate(number, shape)
        except MemoryError as error:
            size = math.prod(shape) * self._dtypes[number].size
            raise MemoryError(
                f"TensorFlow has no {size:,} bytes of {self._memory} for a result. Take smaller "
                f"batches, or leave it more: tables and TensorFlow share it. ({error})"
            ) from error
        if not self._is_copied:
            return array
        copy = self._backend.xp.empty(array.shape, array.dtype)
        self._copies.append((array, copy))
        return copy

    def _allocate(self, number: int, shape: Sequence[int]) -> Array:
        give = partial(self._frame.output, number, shape, self._dtypes[number].as_datatype_enum)
        if not self._frame.is_on_gpu:
            return give(self._backend)
        array = with_all_memory(self._backend, partial(give, self._backend), MemoryError)
        # TensorFlow gives memory out again while its own stream may still read it.
        self._backend.synchronize_device()
        return array

    def give(self, number: int, array: Array) -> None:
        """Copies an array to an output."""
        self.empty(number, array.shape)[...] = array

    def finish(self) -> None:
        """Brings all outputs where the operation is."""
        for array, copy in self._copies:
            array[...] = self._backend.to_host(copy)


def operation(
    name: str,
    handles: Sequence[tf.Tensor],
    run: Run,
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    backend: Backend,
    what: str,
    facts: Facts = NO_FACTS,
    work: WorkDone | None = None,
) -> Any:
    """Runs an operation, or adds it to the graph.

    Args:
      name: of the operation, as Python calls it: "sok_lookup".
      handles: the tables' resources.
      run: takes the outputs and the inputs as arrays. It raises only ValueError, TypeError,
        NotImplementedError and MemoryError: a graph keeps the kind of no other.
      inputs: tensors.
      dtypes: of the outputs.
      backend: whose arrays `run` takes.
      what: names it in errors and in TensorFlow's profiler: "A lookup in 'user'".
      facts: of the tables, for its gradient.
      work: which kind of work it is, for metrics; None: none that counts.

    Returns:
      A list of tensors; without outputs None, and in a graph the operation.

    Raises:
      NotImplementedError: under `jit_compile=True`, in one of several replicas, or in a graph that
        is exported for serving.
    """
    refuse_replicas(what)
    refuse_while_exporting(what)

    def called(frame: Frame) -> None:
        if work is None:
            on_device(backend, run_on, frame)
        else:
            timed_on_device(work, backend, run_on, frame)

    def run_on(frame: Frame) -> None:
        if frame.is_on_gpu:
            backend.synchronize_device()  # TensorFlow's stream may not have written the inputs yet
        outputs = Outputs(frame, dtypes, backend)
        run(outputs, frame.inputs(backend))
        outputs.finish()

    make = getattr(operations().module, name)
    given: dict[str, Any] = {"inputs": inputs, "numbers": [], "Tout": dtypes, "J": 0}
    given |= {"Tkey": facts.key_type, "dims": facts.dims, "trainable": facts.trainable}
    if tf.executing_eagerly():
        return _run_eagerly(make, called, handles=handles, names=[], **given)
    refuse_xla(what)
    call = Call(called, False)
    _keep(call)
    with ExitStack() as around:
        around.enter_context(scope_of(what))
        with tf.device("CPU:0"):
            number = tf.constant(call.number, tf.int64)
        if backend.name == "cpu":
            around.enter_context(tf.device("CPU:0"))
        given |= {"handles": handles, "call": number, "names": facts.names}
        if not dtypes:
            return in_order(lambda: _operation_itself(name, make, given))
        return in_order(lambda: make(**given).outputs)


def _operation_itself(name: str, make: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Adds an operation without outputs to the graph, and returns it: TensorFlow gives no list."""
    graph = tf.compat.v1.get_default_graph()
    full_name = graph.unique_name(name, mark_as_used=False)
    make(name=name, **given)
    return graph.get_operation_by_name(full_name)


# Calls that eager operations use one after another, with their numbers as tensors: TensorFlow keeps
# for ever what it makes of a number of Python's.
_free: list[tuple[Call, tf.Tensor]] = []


def _run_eagerly(make: Callable[..., Any], called: Callable[[Frame], None], **given: Any) -> Any:
    """Runs an operation now; what Python raises in it is raised as it is."""
    try:
        call, number = _free.pop()
    except IndexError:
        call = Call(called, True)
        with tf.device("CPU:0"):
            number = tf.constant(call.number, tf.int64)
    call.run = called
    raised.pop(call.number, None)  # of one whose caller was interrupted
    error = None
    try:
        # tf.config.experimental.set_synchronous_execution(False) would run it later, when its
        # number may be another call's.
        is_late = context().executor.is_async()
        with execution_mode(SYNCHRONOUS) if is_late else nullcontext():
            made = make(call=number, **given)
    except Exception:
        error = raised.pop(call.number, None)
        if error is None:
            raise
        raise error from None
    finally:
        del error  # its traceback has this frame: TensorFlow's memory would stay with them
        call.run = _nothing
        _free.append((call, number))
    return made if made is None else made.outputs


def _nothing(frame: Frame) -> None:
    raise ValueError("This operation was made by an eager call that has ended.")


def _keep(call: Call) -> None:
    """Has the graph keep a call, and each function around it: any of them may live longest."""
    graphs = list(graphs_around())
    functions = [graph for graph in graphs if isinstance(graph, FuncGraph)]
    for graph in functions or graphs[:1]:
        kept_by(graph, _CALLS, list).append(call)

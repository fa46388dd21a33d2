"""TensorFlow operations on tables, in eager mode and in graphs.

The tables' handles are inputs of an operation: TensorFlow uses them to order operations on a table
and to find whose gradient it is. The operation calls Python with arrays over TensorFlow's memory
(sok_lite/native/callbacks.py).
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.backend.ragged import Shape, split_offsets
from sok_lite.bridge.collective_order import CollectiveCall, needs_order, submit_in_turn
from sok_lite.bridge.host_call import (
    Waits,
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
from sok_lite.engine.work_counters import WorkCounter
from sok_lite.native.callbacks import Call, Frame, operations, raised
from sok_lite.native.plans import LookupPlan, NativeCall, PlannedCall, WritePlan

# Attribute of tables' handles: the name of the table.
NAME_OF_HANDLE = "_sok_lite_name"
# Attribute of graphs: the calls of their operations.
_CALLS = "_sok_lite_calls"

# Takes the outputs and the input arrays; `numbers` come last, as NumPy arrays.
Run = Callable[["Outputs", list[Array]], None]


class Facts(NamedTuple):
    """Facts about the tables of an operation that its gradient needs: one entry per table.

    They are attributes of the operation, so copies that TensorFlow makes of it have them too.

    Attributes:
      handles_of: number of handles of each table.
      trainable: whether tapes watch each table by default.
    """

    key_types: list[tf.DType]
    names: list[str]
    dims: list[int]
    handles_of: list[int]
    trainable: list[bool]

    @staticmethod
    def of_variables(variables: Sequence[Any]) -> "Facts":
        """Returns the facts of tables."""
        return Facts(
            [each.key_type for each in variables],
            [each.name for each in variables],
            [each.dimension for each in variables],
            [len(each.resources) for each in variables],
            [each.trainable for each in variables],
        )

    @staticmethod
    def of_static(variables: Sequence[Any]) -> "Facts":
        """Returns the facts of static tables, without handles: TensorFlow reads their rows."""
        names, dims = [each.name for each in variables], [each.dimension for each in variables]
        trainable = [each.trainable for each in variables]
        return Facts([], names, dims, [0] * len(dims), trainable)

    @staticmethod
    def of(op: Any) -> "Facts":
        """Returns the facts of an operation, in its gradient function."""
        names = [name.decode() for name in op.get_attr("names")]
        handles_of = op.get_attr("handles_of")
        if not names:  # in eager mode TensorFlow would keep a kernel for each name
            places = zip(split_offsets(handles_of)[:-1].tolist(), handles_of, strict=True)
            handles = [op.inputs[i] for i, count in places if count]
            names = [getattr(handle, NAME_OF_HANDLE, "") for handle in handles]
        types = [tf.as_dtype(kind) for kind in op.get_attr("Tkeys")]
        return Facts(types, names, op.get_attr("dims"), handles_of, op.get_attr("trainable"))


# For operations without a gradient.
NO_FACTS = Facts([], [], [], [], [])


class Outputs:
    """The outputs of a running operation, arrays of a backend; `begun`, `call` as in `Frame`."""

    def __init__(self, frame: Frame, dtypes: Sequence[tf.DType], backend: Backend) -> None:
        self._frame, self._dtypes, self._backend = frame, dtypes, backend
        self.begun, self.call = frame.begun, frame.call
        # A host operation's outputs from a GPU backend are copied at the end.
        self._is_copied = backend.name != "cpu" and not frame.is_on_gpu
        self._memory = "GPU memory" if frame.is_on_gpu else "memory"
        self._copies: list[tuple[np.ndarray, Array]] = []
        self._addresses: dict[int, list[int]] = {}  # of memory allocated but not yet requested

    def empty(self, number: int, shape: Sequence[int]) -> Array:
        """Returns the memory of an output, to be written; bfloat16 is an array of uint16.

        Raises MemoryError.
        """
        return self.several(number, [tuple(shape)])[0]

    def several(self, first: int, shapes: Sequence[Shape]) -> Sequence[Array]:
        """Returns the memory of consecutive outputs, to be written; raises MemoryError."""
        if not shapes:
            return []
        kinds = [each.as_datatype_enum for each in self._dtypes[first : first + len(shapes)]]
        if first not in self._addresses:
            self.allocate((first, shapes))
        addresses = self._addresses.pop(first)
        array, backend = self._frame.array, self._backend
        arrays = [array(*each, backend) for each in zip(addresses, kinds, shapes, strict=True)]
        if not self._is_copied:
            return arrays
        copies = [backend.xp.empty(each.shape, each.dtype) for each in arrays]
        self._copies += zip(arrays, copies, strict=True)
        return copies

    def allocate(self, *groups: tuple[int, Sequence[Shape]]) -> None:
        """Allocates memory for later calls of `several`, given their arguments; raises MemoryError.

        On a GPU it waits once for all of them.
        """
        for first, shapes in groups:
            dtypes = self._dtypes[first : first + len(shapes)]
            kinds = [each.as_datatype_enum for each in dtypes]
            give = partial(self._frame.allocate, first, shapes, kinds)
            try:
                if self._frame.is_on_gpu:
                    addresses = with_all_memory(self._backend, give, MemoryError)
                else:
                    addresses = give()
            except MemoryError as error:
                size = sum(math.prod(s) * t.size for s, t in zip(shapes, dtypes, strict=True))
                raise MemoryError(
                    f"TensorFlow has no {size:,} bytes of {self._memory} for a result. Take "
                    "smaller batches, or leave it more: tables and TensorFlow share it. "
                    f"({error})"
                ) from error
            self._addresses[first] = addresses
        if self._frame.is_on_gpu and any(math.prod(s) for _, shapes in groups for s in shapes):
            # TensorFlow reuses memory while its own stream may still read it.
            self._backend.synchronize_device()

    def give(self, number: int, array: Array) -> None:
        """Copies an array to an output."""
        self.give_several(number, [array])

    def give_several(self, first: int, arrays: Sequence[Array]) -> None:
        """Copies arrays, of as many dimensions each, to outputs that follow each other."""
        outputs = self.several(first, [array.shape for array in arrays])
        for output, array in zip(outputs, arrays, strict=True):
            output[...] = array

    def tell(self, number: int, numbers: np.ndarray) -> None:
        """Writes an int64 output of a number, in host memory wherever the operation runs."""
        frame, kind = self._frame, tf.int64.as_datatype_enum
        (address,) = frame.allocate(len(self._dtypes) + number, [numbers.shape], [kind], True)
        frame.array(address, kind, numbers.shape, None)[...] = numbers

    def finish(self) -> None:
        """Copies host outputs from the GPU."""
        for array, copy in self._copies:
            array[...] = self._backend.to_host(copy)


class OwnOutputs(Outputs):
    """Arrays in place of an operation's outputs, for a callback that another one calls.

    Attributes:
      arrays: of each output, once it was requested.
    """

    def __init__(self, dtypes: Sequence[tf.DType], backend: Backend) -> None:
        self._dtypes, self._backend = dtypes, backend
        self.arrays: list[Any] = [None] * len(dtypes)

    def several(self, first: int, shapes: Sequence[Shape]) -> Sequence[Array]:
        end, empty = first + len(shapes), self._backend.xp.empty
        kinds = [each.as_numpy_dtype for each in self._dtypes[first:end]]
        self.arrays[first:end] = map(empty, shapes, kinds)
        return self.arrays[first:end]

    def allocate(self, *groups: tuple[int, Sequence[Shape]]) -> None:
        pass


class OfGradient(NamedTuple):
    """The callback of an operation's gradient, with arguments of `operation`."""

    what: str
    run: Run
    dtypes: Sequence[tf.DType]
    backend: Backend
    work: WorkCounter | None = None
    collective: CollectiveCall | None = None
    plan: LookupPlan | None = None

    def results(self, arrays: list[Array]) -> list[Array]:
        """Returns the gradient's outputs for its inputs, in new memory."""
        outputs = OwnOutputs(self.dtypes, self.backend)
        begun = time.perf_counter()
        self.run(outputs, arrays)
        if self.work is not None:
            self.work.add(time.perf_counter() - begun)
        return outputs.arrays


def operation(
    name: str,
    handles: Sequence[tf.Tensor] | None,
    run: Run,
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    backend: Backend,
    what: str,
    facts: Facts = NO_FACTS,
    work: WorkCounter | None = None,
    numbers: Sequence[tf.Tensor] = (),
    num_told: int = 0,
    gradient: OfGradient | None = None,
    collective: CollectiveCall | None = None,
    waits: Waits = True,
    is_ordered: bool = True,
    plan: LookupPlan | WritePlan | None = None,
    is_planned_later: bool = False,
) -> Any:
    """Runs an operation, or adds it to the graph.

    Args:
      name: of the operation in Python, such as "sok_lookup".
      handles: the tables' resources; None: the operation has none.
      run: takes the outputs and the input arrays, `numbers` last. Raises only ValueError,
        TypeError, NotImplementedError and MemoryError, whose types a graph keeps.
      dtypes: of the outputs.
      backend: of the arrays that `run` takes.
      what: name in errors and in TensorFlow's profiler: "A lookup in 'user'".
      facts: of the tables, for the gradient.
      work: kind of work, for metrics; None: not counted.
      numbers: int64 tensors in host memory, wherever the operation runs.
      num_told: number of int64 outputs in host memory, after the others.
      gradient: if the gradient calls Python too.
      collective: the ranks that make the call together; None: each alone. Its gradient is
        registered also for the operation that waits for its turn: "SokLookupInOrder".
      waits: False: kernels write no output; see `on_device`.
      is_ordered: False: it changes nothing and is not ordered with other host calls. In a
        tf.function it is ordered with operations on the same handles; without any it may run at any
        time, or never.
      plan: for native code; None: none yet.
      is_planned_later: whether `run` may register a plan for the call's number (`Outputs.call`). In
        eager mode the call ends with this operation.

    Returns:
      A list of tensors; without outputs None, and in a graph the operation.

    Raises:
      NotImplementedError: under `jit_compile=True`, in one of several replicas, or in a graph
        exported for serving.
    """
    if tf.executing_eagerly():
        of_call = (name, run, dtypes, backend, what, facts, work, num_told, waits, plan)
        return EagerOperation(*of_call)(handles, inputs, numbers)
    refuse_replicas(what)
    refuse_while_exporting(what)
    given = _inputs_of(handles, inputs, numbers) | _attributes(dtypes, facts, num_told)
    called = _make_callback(run, dtypes, backend, work, waits)
    of_gradient = None
    if gradient is not None:
        of_gradient = _make_callback(
            gradient.run, gradient.dtypes, gradient.backend, gradient.work, True
        )
    is_late = collective is not None and needs_order(collective)
    asks: Callable[..., None] = called
    if collective is not None and is_late:
        name, asks = f"{name}_in_order", submit_in_turn(collective, what, called)
    how = (asks, False, of_gradient, gradient)
    if plan is None or is_late:
        call = NativeCall(*how) if is_planned_later else Call(*how)
    else:
        call = PlannedCall(plan, *how)
    _keep(call)
    with tf.device("CPU:0"):
        number = tf.constant(call.number, tf.int64)
    place = "CPU:0" if backend.name == "cpu" else None
    given |= {"call": number, "names": facts.names}
    return _add_to_graph(name, given, what, place, is_ordered)


def gradient_operation(
    name: str,
    call: tf.Tensor,
    place: str,
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    what: str,
    facts: Facts,
    numbers: Sequence[tf.Tensor],
    is_ordered: bool,
) -> list[tf.Tensor]:
    """Adds the gradient of an operation in a graph, which runs that operation's gradient callback.

    `call` and `place` are the call and device of that operation. The call's number is a tensor: in
    a loop, or after `tf.vectorized_map`, it is unknown while the graph is built.
    """
    refuse_while_exporting(what)
    given = _inputs_of(None, inputs, numbers) | _attributes(dtypes, facts, 0)
    given |= {"call": call, "names": facts.names}
    made: list[tf.Tensor] = _add_to_graph(name, given, what, place, is_ordered)
    return made


def _inputs_of(
    handles: Sequence[tf.Tensor] | None, inputs: Sequence[tf.Tensor], numbers: Sequence[tf.Tensor]
) -> dict[str, Any]:
    of_handles = {} if handles is None else {"handles": handles}
    return of_handles | {"inputs": inputs, "numbers": numbers}


def _attributes(dtypes: Sequence[tf.DType], facts: Facts, num_told: int) -> dict[str, Any]:
    given = {"Tout": dtypes, "J": num_told, "Tkeys": facts.key_types, "dims": facts.dims}
    return given | {"trainable": facts.trainable, "handles_of": facts.handles_of}


def _add_to_graph(
    name: str, given: dict[str, Any], what: str, place: str | None, is_ordered: bool
) -> Any:
    """Adds an operation to the graph; returns its outputs or, if it has none, the operation."""
    refuse_xla(what)
    make = getattr(operations().module, name)

    def add() -> Any:
        if given["Tout"] or given["J"]:
            made = make(**given)
            return [*made.outputs, *made.told]
        graph = tf.compat.v1.get_default_graph()  # TensorFlow would return an empty list
        full_name = graph.unique_name(name, mark_as_used=False)
        make(name=name, **given)
        return graph.get_operation_by_name(full_name)

    with scope_of(what), tf.device(place) if place else nullcontext():
        return in_order(add) if is_ordered else add()


def _make_callback(
    run: Run, dtypes: Sequence[tf.DType], backend: Backend, work: WorkCounter | None, waits: Waits
) -> Callable[[Frame], None]:
    """Returns the callback of an operation."""

    def called(frame: Frame) -> None:
        if work is None:
            on_device(backend, run_on, frame, waits=waits)
        else:
            timed_on_device(work, backend, run_on, frame, waits=waits)

    def run_on(frame: Frame) -> None:
        if frame.is_on_gpu:
            backend.synchronize_device()  # TensorFlow's stream may still be writing the inputs
        outputs = Outputs(frame, dtypes, backend)
        run(outputs, frame.inputs(backend))
        outputs.finish()

    return called


# Calls with their numbers as tensors: TensorFlow never drops what it makes of Python numbers.
_Free = list[tuple[Call, tf.Tensor]]
# Calls that eager operations reuse.
_free: _Free = []


class EagerOperation:
    """The reusable part of an eager operation, with arguments of `operation`. Thread-safe."""

    __slots__ = ("_called", "_free", "_is_planned_later", "_make", "_plan", "_what")

    def __init__(
        self,
        name: str,
        run: Run,
        dtypes: Sequence[tf.DType],
        backend: Backend,
        what: str,
        facts: Facts = NO_FACTS,
        work: WorkCounter | None = None,
        num_told: int = 0,
        waits: Waits = True,
        plan: LookupPlan | WritePlan | None = None,
        is_planned_later: bool = False,
    ) -> None:
        self._what, self._plan = what, plan
        self._is_planned_later = is_planned_later
        attributes = _attributes(dtypes, facts, num_told)
        self._make = partial(getattr(operations().module, name), names=[], **attributes)
        self._called = _make_callback(run, dtypes, backend, work, waits)
        # Native code ties a plan to its call, so no other operation may use the call.
        self._free: _Free = [] if plan is not None or is_planned_later else _free

    def __call__(
        self,
        handles: Sequence[tf.Tensor] | None,
        inputs: Sequence[tf.Tensor],
        numbers: Sequence[tf.Tensor] = (),
    ) -> Any:
        """Runs the operation; errors of Python are raised unchanged. Returns a list, or None.

        Python runs in the caller's thread and may run eager operations itself, such as an
        optimizer's dense step. Raises NotImplementedError in one of several replicas.
        """
        refuse_replicas(self._what)
        try:
            call, number = self._free.pop()
        except IndexError:
            call, number = self._new_call()
        call.run = self._called
        raised.pop(call.number, None)  # left by an interrupted caller
        made: Any = None
        error: BaseException | None = None
        try:
            # tf.config.experimental.set_synchronous_execution(False) would run it later, when
            # another call may have its number.
            is_late = context().executor.is_async()
            with execution_mode(SYNCHRONOUS) if is_late else nullcontext():
                made = self._make(call=number, **_inputs_of(handles, inputs, numbers))
        except Exception as failure:
            error = raised.pop(call.number, failure)
        finally:
            call.run = _raise_ended
            self._free.append((call, number))
        if error is not None:
            try:
                raise error  # outside of the handler, so that TensorFlow's error is not its context
            finally:
                del error  # its traceback refers to this frame, and so to TensorFlow's memory
        return made if made is None else [*made.outputs, *made.told]

    def _new_call(self) -> tuple[Call, tf.Tensor]:
        of_call = (self._called, True)
        if self._plan is not None:
            call: Call = PlannedCall(self._plan, *of_call)
        else:
            call = NativeCall(*of_call) if self._is_planned_later else Call(*of_call)
        with tf.device("CPU:0"):
            return call, tf.constant(call.number, tf.int64)


def _raise_ended(frame: Frame) -> None:
    raise ValueError("This operation was made by an eager call that has ended.")


def _keep(call: Call) -> None:
    """Keeps a call alive in the graph and the functions around it; any of them may live longest."""
    graphs = list(graphs_around())
    functions = [graph for graph in graphs if isinstance(graph, FuncGraph)]
    for graph in functions or graphs[:1]:
        kept_by(graph, _CALLS, list).append(call)

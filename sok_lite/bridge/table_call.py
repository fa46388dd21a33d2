"""Calls of a table from TensorFlow: eagerly, or as an operation of a graph.

Eager mode calls Python directly: an operation would take 70 microseconds more, and program order
suffices. In a graph a call is an operation on the handles of its table, by which TensorFlow orders
all operations on it; the graph keeps no table alive. Our operations take numbers only, so a call
with texts is a py_function between two operations in that order.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.bridge.checks import checked_keys
from sok_lite.bridge.host_call import has_turn, host_call, on_device, refuse_replicas
from sok_lite.bridge.operation import Outputs, operation
from sok_lite.bridge.tensor import empty, to_array, to_tensor
from sok_lite.bridge.type_spec import alive
from sok_lite.engine.dtypes import bfloat16_to_float32
from sok_lite.engine.table import EmbeddingTable
from sok_lite.native.plans import LookupPlan, WritePlan


class Results:
    """The outputs of a call in eager mode, with the interface of `Outputs`."""

    def __init__(self, dtypes: Sequence[tf.DType], backend: Backend) -> None:
        self._dtypes, self._backend = dtypes, backend
        self._arrays: dict[int, Array] = {}

    def empty(self, number: int, shape: Sequence[int]) -> Array:
        """Returns memory for an output, to be written; its tensor takes the memory over."""
        self.give(number, empty(shape, self._dtypes[number], self._backend))
        return self._arrays[number]

    def give(self, number: int, array: Array) -> None:
        """Makes an array an output; it must not be written afterwards."""
        self._arrays[number] = array

    def tensors(self) -> list[tf.Tensor]:
        """Returns all outputs."""
        return [self._tensor(self._arrays[at], dtype) for at, dtype in enumerate(self._dtypes)]

    def _tensor(self, array: Array, dtype: tf.DType) -> tf.Tensor:
        if array.ndim == 0:
            return tf.constant(self._backend.to_host(array), dtype)
        return to_tensor(array, dtype, self._backend)


_unconverted = tf.autograph.experimental.do_not_convert
# Takes the engine's table, the outputs, and the input arrays.
Function = Callable[..., None]


@_unconverted
def table_call(
    variable: Any,
    what: str,
    function: Function,
    inputs: Sequence[Any] = (),
    dtypes: Sequence[tf.DType] = (),
    shapes: Sequence[Any] = (),
    plan: LookupPlan | WritePlan | None = None,
) -> Any:
    """Calls a function of a variable's table and arrays, eagerly or in a graph.

    Args:
      variable: a graph keeps only a weak reference.
      what: names the call in errors: "The export of 'user'".
      function: takes the engine's table, the outputs, to be written, and arrays.
      inputs: tensors of numbers.
      dtypes, shapes: of the outputs.
      plan: for native code in a graph; None: it cannot do the call.

    Returns:
      A list of tensors; without any, None in eager mode and the operation in a graph.
    """
    reference, backend = weakref.ref(variable), variable.table.backend

    def run(outputs: Outputs | Results, arrays: Sequence[Array]) -> None:
        function(alive(reference).table, outputs, *arrays)

    if tf.executing_eagerly():
        refuse_replicas(what)
        return on_device(backend, _call_eagerly, run, inputs, dtypes, backend) or None
    plain = _unconverted(run)  # AutoGraph would convert what it calls as part of the caller's graph
    of_call = (variable.handles, plain, inputs, dtypes, backend, what)
    # A native read is ordered with operations on its own table only.
    is_ordered = not (isinstance(plan, LookupPlan) and has_turn())
    outputs = operation("sok_method", *of_call, plan=plan, is_ordered=is_ordered)
    return _set_shapes(outputs, shapes)


def _call_eagerly(
    run: Callable[..., None],
    inputs: Sequence[Any],
    dtypes: Sequence[tf.DType],
    backend: Backend,
) -> list[tf.Tensor]:
    results = Results(dtypes, backend)
    run(results, [to_array(tensor, backend) for tensor in inputs])
    return results.tensors()


def _set_shapes(outputs: Any, shapes: Sequence[Any]) -> Any:
    """Sets the shapes of tensors and returns them; an operation has none."""
    for output, shape in zip(outputs if shapes else (), shapes, strict=True):
        output.set_shape(shape)
    return outputs


tf.no_gradient("SokMethod")


@_unconverted
def text_call(
    variable: Any,
    what: str,
    function: Callable[..., Sequence[tf.Tensor]],
    inputs: Sequence[Any] = (),
    dtypes: Sequence[tf.DType] = (),
    shapes: Sequence[Any] = (),
) -> Any:
    """As `table_call`, with a function of eager tensors, among them texts."""
    reference = weakref.ref(variable)

    def run(*tensors: tf.Tensor) -> Sequence[tf.Tensor]:
        return function(alive(reference).table, *tensors)

    backend, handles = variable.table.backend, variable.handles
    outputs = host_call(run, inputs, dtypes, backend, what, handles=handles)
    if tf.executing_eagerly():
        return outputs or None
    return _set_shapes(outputs, shapes)


def array_call(
    variable: Any,
    what: str,
    function: Callable[..., Any],
    inputs: Sequence[Any] = (),
    dtypes: Sequence[tf.DType] = (),
    shapes: Sequence[Any] = (),
    plan: WritePlan | None = None,
) -> Any:
    """As `table_call`, with a function that returns its results: an array or a tuple of arrays.

    Or None if `dtypes` is empty. A scalar array may be in host memory.
    """

    def run(table: EmbeddingTable, outputs: Outputs | Results, *arrays: Array) -> None:
        results = function(table, *arrays)
        if dtypes:
            results = results if isinstance(results, tuple) else (results,)
            for number, result in enumerate(results):
                outputs.give(number, result)

    return table_call(variable, what, run, inputs, dtypes, shapes, plan)


def method_call(
    variable: Any,
    method: str,
    function: Callable[..., Any],
    inputs: Sequence[Any] = (),
    dtypes: Sequence[tf.DType] = (),
    shapes: Sequence[Any] = (),
    plan: WritePlan | None = None,
) -> Any:
    """As `array_call`, for a method of a variable once the variable is ready."""
    count = len(inputs)

    def run(table: EmbeddingTable, *arrays: Array) -> Any:
        return function(table, *arrays[:count])

    what = f"{method} of {variable.name!r}"
    inputs = [*inputs, *variable.ready_inputs()]
    return array_call(variable, what, run, inputs, dtypes, shapes, plan)


def of_each_key(
    variable: Any,
    method: str,
    keys: Any,
    function: Callable[[EmbeddingTable, Array], Array],
    dtype: tf.DType,
) -> tf.Tensor:
    """Returns a function of the table and keys (n,), in the keys' shape."""
    keys = checked_keys(variable, keys)

    def run(table: EmbeddingTable, keys: Array) -> Array:
        return function(table, keys.reshape(-1)).reshape(keys.shape)

    (found,) = method_call(variable, method, run, [keys], [dtype], [keys.shape])
    return found


def to_rows(array: Array, dtype: tf.DType, table: EmbeddingTable) -> Array:
    """Returns rows for a table; bits of bfloat16 as float32, unless the table is bfloat16.

    Not every CuPy has that dtype.
    """
    if dtype == tf.bfloat16 and table.row_dtype.name != "bfloat16":
        return bfloat16_to_float32(table.backend.xp, array)
    return array

"""Calls of a table from TensorFlow: now, or as an operation of a graph that keeps no table.

In eager mode Python is called at once: an operation would take 70 microseconds more, and the order
is that of the program. In a graph a call is an operation on the handles of its table, by which
TensorFlow has all that acts on the table in order. What takes or gives texts is no operation of
ours, whose inputs and outputs are numbers: it is a py_function between two places in that order.
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
    """The outputs of a call in eager mode: what `Outputs` are in a graph.

    Args:
      dtypes: of the outputs.
      backend: whose memory they are in.
    """

    def __init__(self, dtypes: Sequence[tf.DType], backend: Backend) -> None:
        self._dtypes, self._backend = dtypes, backend
        self._arrays: dict[int, Array] = {}

    def empty(self, number: int, shape: Sequence[int]) -> Array:
        """Returns memory for an output, to be written, which its tensor takes over."""
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
            return tf.constant(array, dtype)
        return to_tensor(array, dtype, self._backend)


_unconverted = tf.autograph.experimental.do_not_convert
# Takes the engine's table, the outputs, and the inputs as arrays.
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
    """Calls a function of a variable's table and of arrays, at once or from a graph.

    Args:
      variable: a graph keeps a weak reference only.
      what: for errors, with the variable's name: "The export of 'user'".
      function: takes the engine's table, the outputs, which it writes or gives, and arrays.
      inputs: tensors of numbers.
      dtypes, shapes: of the outputs.
      plan: by which native code may do it in a graph; None: it may not.

    Returns:
      A list of tensors; without any, None in eager mode and the operation in a graph.
    """
    reference, backend = weakref.ref(variable), variable.table.backend

    def run(outputs: Outputs | Results, arrays: Sequence[Array]) -> None:
        function(alive(reference).table, outputs, *arrays)

    if tf.executing_eagerly():
        refuse_replicas(what)
        return on_device(backend, _at_once, run, inputs, dtypes, backend) or None
    plain = _unconverted(run)  # what it calls is of the caller's graph, converted by AutoGraph
    of_call = (variable.handles, plain, inputs, dtypes, backend, what)
    # A read by native code is ordered by the table alone: what acts on others may run beside it.
    is_ordered = not (isinstance(plan, LookupPlan) and has_turn())
    outputs = operation("sok_method", *of_call, plan=plan, is_ordered=is_ordered)
    return _shaped(outputs, shapes)


def _at_once(
    run: Callable[..., None],
    inputs: Sequence[Any],
    dtypes: Sequence[tf.DType],
    backend: Backend,
) -> list[tf.Tensor]:
    results = Results(dtypes, backend)
    run(results, [to_array(tensor, backend) for tensor in inputs])
    return results.tensors()


def _shaped(outputs: Any, shapes: Sequence[Any]) -> Any:
    """Returns tensors once their shapes are set, or an operation, which has none."""
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
    """Does what `table_call` does, where a tensor is a text.

    Args:
      function: takes the engine's table and eager tensors, gives eager tensors.
    """
    reference = weakref.ref(variable)

    def run(*tensors: tf.Tensor) -> Sequence[tf.Tensor]:
        return function(alive(reference).table, *tensors)

    backend, handles = variable.table.backend, variable.handles
    outputs = host_call(run, inputs, dtypes, backend, what, handles=handles)
    if tf.executing_eagerly():
        return outputs or None
    return _shaped(outputs, shapes)


def array_call(
    variable: Any,
    what: str,
    function: Callable[..., Any],
    inputs: Sequence[Any] = (),
    dtypes: Sequence[tf.DType] = (),
    shapes: Sequence[Any] = (),
    plan: WritePlan | None = None,
) -> Any:
    """Does what `table_call` does, with a function that gives its results.

    Args:
      function: takes the engine's table and arrays; gives an array, or a tuple of them, or nothing
        where `dtypes` is empty. A number, an array without a dimension, may be the host's.
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
    """Does what `array_call` does for a method of a variable, once the variable is ready.

    Args:
      method: its name, for errors.
    """
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
    """Returns what a function of the table and of keys (n,) gives, in the keys' shape.

    Args:
      method: that a program calls, for errors.
      keys: integers of any shape.
      dtype: of what the function gives.
    """
    keys = checked_keys(variable, keys)

    def run(table: EmbeddingTable, keys: Array) -> Array:
        return function(table, keys.reshape(-1)).reshape(keys.shape)

    (found,) = method_call(variable, method, run, [keys], [dtype], [keys.shape])
    return found


def to_rows(array: Array, dtype: tf.DType, table: EmbeddingTable) -> Array:
    """Returns what is the array of a tensor of rows as one that a table takes for rows.

    Bits of bfloat16 are rows to a table of bfloat16 only, and not every CuPy knows its dtype.
    """
    if dtype == tf.bfloat16 and table.row_dtype.name != "bfloat16":
        return bfloat16_to_float32(table.backend.xp, array)
    return array

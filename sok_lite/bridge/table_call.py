"""Calls of a table from TensorFlow: now, or as an operation of a graph that keeps no table."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.checks import checked_keys
from sok_lite.bridge.host_call import host_call
from sok_lite.bridge.tensor import to_array, to_tensor
from sok_lite.bridge.type_spec import alive
from sok_lite.engine.dtypes import bfloat16_to_float32
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.work_done import WorkDone


def table_call(
    variable: Any,
    what: str,
    function: Callable[..., Sequence[tf.Tensor]],
    inputs: Sequence[Any] = (),
    dtypes: Sequence[tf.DType] = (),
    shapes: Sequence[Any] = (),
    work: WorkDone | None = None,
) -> Any:
    """Calls a function of a variable's table and of eager tensors, at once or from a graph.

    Args:
      variable: a graph keeps a weak reference only.
      what: for errors, with the variable's name: "The export of 'user'".
      function: takes the engine's table and the tensors, gives eager tensors.
      inputs: tensors.
      dtypes, shapes: of what it gives.
      work: which kind of work it is, for metrics; None: none that counts.

    Returns:
      A list of tensors; without any, None in eager mode and the operation in a graph.
    """
    reference = weakref.ref(variable)

    def run(*tensors: tf.Tensor) -> Sequence[tf.Tensor]:
        return function(alive(reference).table, *tensors)

    outputs = host_call(run, inputs, dtypes, variable.table.backend, what, work=work)
    if not dtypes:
        return None if tf.executing_eagerly() else outputs
    for output, shape in zip(outputs, shapes, strict=True):
        output.set_shape(shape)
    return outputs


def array_call(
    variable: Any,
    what: str,
    function: Callable[..., Any],
    inputs: Sequence[Any] = (),
    dtypes: Sequence[tf.DType] = (),
    shapes: Sequence[Any] = (),
) -> Any:
    """Does what `table_call` does, with a function of arrays.

    Args:
      function: takes the engine's table and arrays; gives an array, or a tuple of them, or nothing
        where `dtypes` is empty.
    """

    def run(table: EmbeddingTable, *tensors: tf.Tensor) -> Sequence[tf.Tensor]:
        backend = table.backend
        results = function(table, *(to_array(tensor, backend) for tensor in tensors))
        if not dtypes:
            return ()
        results = results if isinstance(results, tuple) else (results,)

        def made(result: Array, dtype: tf.DType) -> tf.Tensor:
            if result.ndim == 0:
                return tf.constant(result, dtype)
            return to_tensor(result, dtype, backend)

        return [made(result, dtype) for result, dtype in zip(results, dtypes, strict=True)]

    return table_call(variable, what, run, inputs, dtypes, shapes)


def method_call(
    variable: Any,
    method: str,
    function: Callable[..., Any],
    inputs: Sequence[Any] = (),
    dtypes: Sequence[tf.DType] = (),
    shapes: Sequence[Any] = (),
) -> Any:
    """Does what `array_call` does for a method of a variable, once the variable is ready.

    Args:
      method: its name, for errors.
    """
    count = len(inputs)

    def run(table: EmbeddingTable, *arrays: Array) -> Any:
        return function(table, *arrays[:count])

    what = f"{method} of {variable.name!r}"
    return array_call(variable, what, run, [*inputs, *variable.ready_inputs()], dtypes, shapes)


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


def to_rows(values: tf.Tensor, table: EmbeddingTable) -> Array:
    """Returns an eager tensor of rows as an array that a table takes for rows.

    Bits of bfloat16 are rows to a table of bfloat16 only, and not every CuPy knows its dtype.
    """
    rows = to_array(values, table.backend)
    if values.dtype == tf.bfloat16 and table.row_dtype.name != "bfloat16":
        return bfloat16_to_float32(table.backend.xp, rows)
    return rows

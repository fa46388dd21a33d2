"""How rows given by a program get into a table: what `sok.assign` and the scatters share."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.engine.dtypes import bfloat16_to_float32
from sok_lite.engine.table import EmbeddingTable
from sok_lite.host_call import host_call
from sok_lite.local_lookup import checked_keys, without_keras
from sok_lite.tensor import to_array
from sok_lite.variable_spec import alive


class WritesRows:
    """The scatters of a DynamicVariable. They act on this rank's part, and skip unknown keys."""

    name: str
    dtype: tf.DType

    def scatter_add(self, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> Any:
        """Adds rows to the rows of keys that are in the table; repeated keys are summed."""
        return self._scatter(
            "scatter_add", sparse_delta, lambda table, keys, rows: table.accumulate(keys, rows)
        )

    def scatter_sub(self, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> Any:
        """Subtracts rows from the rows of keys that are in the table; repeated keys are summed."""
        return self._scatter(
            "scatter_sub",
            sparse_delta,
            lambda table, keys, rows: table.accumulate(keys, rows, scale=-1.0),
        )

    def scatter_update(self, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> Any:
        """Sets the rows of keys that are in the table; of a repeated key the last row counts."""
        return self._scatter(
            "scatter_update", sparse_delta, lambda table, keys, rows: table.assign(keys, rows)
        )

    def _scatter(
        self, what: str, sparse_delta: Any, write: Callable[[EmbeddingTable, Any, Any], None]
    ) -> Any:
        if not isinstance(sparse_delta, tf.IndexedSlices):
            raise TypeError(
                f"{what} takes a tf.IndexedSlices of keys and rows. "
                f"sparse_delta is not IndexedSlices: {sparse_delta!r}"
            )
        keys = checked_keys(self, sparse_delta.indices)
        values = checked_rows(self, keys, sparse_delta.values, what)
        if what != "scatter_update":
            values = tf.cast(values, tf.float32)
        return write_rows(self, what, keys, values, write)


def checked_rows(variable: Any, keys: tf.Tensor, values: Any, what: str) -> tf.Tensor:
    """Returns rows as a tensor that fits keys (n,) and the variable, or raises."""
    values = without_keras(values)
    if not tf.is_tensor(values):
        # Python numbers have no dtype of their own.
        is_plain = isinstance(values, (list, tuple)) and np.asarray(values).dtype.kind in "if"
        values = tf.convert_to_tensor(values, variable.dtype if is_plain else None)
    if not values.dtype.is_floating:
        raise TypeError(
            f"{what}: `values` must be {variable.dtype.name}. Received: dtype {values.dtype.name}. "
            "Cast them first if they really are rows."
        )
    expected = f"(n, {variable.dimension}), one row for each of the n keys"
    if keys.shape.rank is not None and keys.shape.rank != 1:
        raise ValueError(f"{what}: `indices` must have shape (n,). Received: shape {keys.shape}.")
    if not values.shape.is_compatible_with([keys.shape[0] if keys.shape.rank else None, None]):
        raise ValueError(
            f"{what}: `values` must have shape {expected}. Received: indices of shape "
            f"{keys.shape} and values of shape {values.shape}."
        )
    if not values.shape.is_compatible_with([None, variable.dimension]):
        raise ValueError(
            f"{what}: `values` must have shape {expected}: {variable.name!r} has dimension "
            f"{variable.dimension}. Received: values of shape {values.shape}."
        )
    return values


def to_rows(values: tf.Tensor, table: EmbeddingTable) -> Array:
    """Returns an eager tensor of rows as an array of floats that a table takes for rows.

    Bits of bfloat16 are rows to a table of bfloat16 only, and not every CuPy knows its dtype.
    """
    rows = to_array(values, table.backend)
    if values.dtype == tf.bfloat16 and table.row_dtype.name != "bfloat16":
        return bfloat16_to_float32(table.backend.xp, rows)
    return rows


def write_rows(
    variable: Any,
    what: str,
    keys: tf.Tensor,
    values: tf.Tensor,
    write: Callable[..., None],
    *others: tf.Tensor,
) -> Any:
    """Writes rows, now or as an operation of a graph.

    Args:
      what: for errors.
      keys: (n,).
      values: (n, dimension).
      write: takes the engine's table and keys, rows and `others` as arrays.

    Returns:
      The variable in eager mode, the operation in a graph.
    """
    reference = weakref.ref(variable)
    backend = variable.table.backend

    def run(
        key_tensor: tf.Tensor, value_tensor: tf.Tensor, *other_tensors: tf.Tensor
    ) -> Sequence[tf.Tensor]:
        table = alive(reference).table
        arrays = [to_array(tensor, backend) for tensor in other_tensors]
        write(table, to_array(key_tensor, backend), to_rows(value_tensor, table), *arrays)
        return ()

    done = host_call(run, [keys, values, *others], [], backend, f"{what} on {variable.name!r}")
    return variable if tf.executing_eagerly() else done

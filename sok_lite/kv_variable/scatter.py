"""`insert`, `scatter_add` and the like: methods of a KvVariable that write rows."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.checks import checked_keys, checked_rows
from sok_lite.bridge.table_call import method_call
from sok_lite.bridge.writes import refuse_foreign
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import alone

if TYPE_CHECKING:
    from sok_lite.kv_variable.kv_variable_ops import KvVariable

# Their names, what each does, and the function of rows and values; None: the values are the rows.
OPERATIONS: dict[str, tuple[str, Callable[..., np.ndarray] | None]] = {
    "add": ("Adds values to the rows of keys.", np.add),
    "sub": ("Subtracts values from the rows of keys.", np.subtract),
    "mul": ("Multiplies the rows of keys by values.", np.multiply),
    "div": ("Divides the rows of keys by values.", np.divide),
    "min": ("Makes the rows of keys the smaller of themselves and values.", np.minimum),
    "max": ("Makes the rows of keys the larger of themselves and values.", np.maximum),
    "update": ("Sets the rows of keys.", None),
}


def scatter_method(operation: str) -> Callable[..., Any]:
    """Returns a method of `KvVariable`."""

    def scatter(
        variable: "KvVariable", sparse_delta: Any, use_locking: bool = False, name: Any = None
    ) -> Any:
        return _scatter(variable, operation, sparse_delta)

    scatter.__name__ = f"scatter_{operation}"
    scatter.__qualname__ = f"KvVariable.{scatter.__name__}"
    scatter.__doc__ = f"""{OPERATIONS[operation][0]}

        A key without a row gets one first. What a repeated key has is taken in its order.

        Args:
          sparse_delta: a tf.IndexedSlices of keys (n,) and values (n, dim).
          use_locking, name: not used.

        Returns:
          The variable in eager mode, the operation in a graph.

        Raises:
          TypeError, ValueError: keys or rows do not fit, or other ranks own keys that have no row
            here. Nothing has changed then.
        """
    return scatter


def _scatter(variable: "KvVariable", operation: str, sparse_delta: Any) -> Any:
    if not isinstance(sparse_delta, tf.IndexedSlices):
        raise TypeError(
            f"scatter_{operation} of {variable.name!r} takes a tf.IndexedSlices of keys and rows. "
            f"Received: {type(sparse_delta).__name__}."
        )
    keys = checked_keys(variable, sparse_delta.indices)
    what = f"scatter_{operation}"
    rows = tf.cast(checked_rows(variable, keys, sparse_delta.values, what), variable.dtype)

    _, function = OPERATIONS[operation]

    def run(table: EmbeddingTable, keys: Array, rows: Array) -> None:
        refuse_foreign(table, keys, what)
        if function is None:
            table.insert_or_assign(keys, rows)
        else:
            alone(table, partial(_combine, table, function, keys, rows))

    return done(variable, method_call(variable, what, run, [keys, rows]))


def insert(variable: "KvVariable", indices: Any, values: Any) -> Any:
    """Sets the rows of keys, inserting those that are new; of a repeated key the last counts.

    Args:
      indices: (n,) integers.
      values: (n, dim).

    Returns:
      The variable in eager mode, the operation in a graph.

    Raises:
      TypeError, ValueError: keys or rows do not fit, or other ranks own keys that have no row here.
        Nothing has changed then.
    """
    keys = checked_keys(variable, indices)
    rows = tf.cast(checked_rows(variable, keys, values, "insert"), variable.dtype)

    def run(table: EmbeddingTable, keys: Array, rows: Array) -> None:
        refuse_foreign(table, keys, "insert")
        table.insert_or_assign(keys, rows)

    return done(variable, method_call(variable, "insert", run, [keys, rows]))


def done(variable: "KvVariable", operation: Any) -> Any:
    """Returns what a write returns: the variable in eager mode, the operation in a graph."""
    return variable if tf.executing_eagerly() else operation


def _combine(
    table: EmbeddingTable, function: Callable[..., np.ndarray], keys: Array, values: Array
) -> None:
    """Changes the rows of keys, inserting those that have none with their initial value.

    Args:
      function: of OPERATIONS.
      keys: (n,) of the key type; what a repeated one has is taken in order.
      values: (n, dim) of the rows' storage dtype.
    """
    backend = table.backend
    distinct, inverse = np.unique(backend.to_host(keys), return_inverse=True)
    if not distinct.size:
        return
    # Keys without a row have their initial value, and no lookup is counted.
    old = table.lookup(backend.from_host(distinct), insert=False, missing="initial").values
    # In float32, and back in the rows' format.
    rows, deltas = _floats(table, old), _floats(table, values)
    order = np.argsort(inverse, kind="stable")
    number_of_key = inverse[order]
    # The first of each key, then the second of each that has one, and so on.
    first = np.searchsorted(number_of_key, np.arange(distinct.size))
    place = np.arange(order.size) - first[number_of_key]
    for turn in range(int(place.max()) + 1):
        these = place == turn
        at = number_of_key[these]
        rows[at] = function(rows[at], deltas[order[these]])
    table.insert_or_assign(backend.from_host(distinct), backend.from_host(rows))


def _floats(table: EmbeddingTable, rows: Array) -> np.ndarray:
    """Returns rows of a table as float32 numbers on the host, a copy."""
    backend = table.backend
    return np.array(backend.to_host(table.row_dtype.to_float32(backend.xp, rows)))

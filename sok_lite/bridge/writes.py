"""Writes of given rows to a table: shared code of assignments and scatters.

Functions of a variable; the APIs offer them as its methods. They act on this rank's part, and one
rank may call them alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.checks import checked_keys, checked_rows, checked_scores
from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.native_write import adding, plan_assign
from sok_lite.bridge.table_call import array_call, to_rows
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.foreign_keys import RankInfo, refuse_foreign_write
from sok_lite.engine.table import EmbeddingTable
from sok_lite.native.plans import WritePlan


def insert_or_assign(
    variable: TableVariable, what: str, indices: Any, values: Any, scores: Any = None
) -> Any:
    """Sets the rows of keys, and inserts new keys.

    Args:
      what: the program's call, for errors.
      indices: (n,) integers; for a repeated key the last row is kept.
      values: (n, dimension).
      scores: (n,) non-negative integers, stored with the keys whatever the strategy; None: as a
        lookup would.

    Returns:
      The variable in eager mode, the operation in a graph.

    Raises:
      TypeError: keys are not integers, or rows not of the variable's kind, float or integer.
      ValueError: shapes do not fit, a key or row does not fit its dtype, or another rank owns a key
        without a row here. Nothing has changed then.
    """
    keys = checked_keys(variable, indices)
    rows = checked_rows(variable, keys, values, what)
    others = [] if scores is None else [checked_scores(variable.name, scores)]

    def write(table: EmbeddingTable, keys: Array, *arrays: Array) -> None:
        refuse_foreign(table, keys, what)
        table.insert_or_assign(keys, *arrays)

    plan = None if others else plan_assign(variable, keys, rows, begins_lookup=True)
    return _write(variable, what, [keys, rows, *others], write, plan)


def refuse_foreign(table: EmbeddingTable, keys: Array, what: str) -> None:
    """Raises ForeignKeysError if keys (n,) on the device that would get rows are other ranks'."""
    comm = other_ranks()
    if comm is not None:
        what = f"{what} of table {table.name!r}"
        refuse_foreign_write(table, keys, RankInfo(comm.rank, comm.size), what)


def scatter_add(
    variable: TableVariable, sparse_delta: Any, use_locking: bool = False, name: Any = None
) -> Any:
    """Adds to the rows of keys that are in the table; repeated keys are summed."""
    return _scatter_add(variable, "scatter_add", sparse_delta, 1.0)


def scatter_sub(
    variable: TableVariable, sparse_delta: Any, use_locking: bool = False, name: Any = None
) -> Any:
    """Subtracts from the rows of keys that are in the table; repeated keys are summed."""
    return _scatter_add(variable, "scatter_sub", sparse_delta, -1.0)


def scatter_update(
    variable: TableVariable, sparse_delta: Any, use_locking: bool = False, name: Any = None
) -> Any:
    """Sets the rows of keys that are in the table; for a repeated key the last row is kept."""
    keys, rows = _keys_and_rows(variable, "scatter_update", sparse_delta)
    plan = plan_assign(variable, keys, rows, begins_lookup=False)

    def write(table: EmbeddingTable, keys: Array, rows: Array) -> None:
        table.assign(keys, rows)

    return _write(variable, "scatter_update", [keys, rows], write, plan)


def _scatter_add(variable: TableVariable, what: str, sparse_delta: Any, scale: float) -> Any:
    keys, rows = _keys_and_rows(variable, what, sparse_delta)
    if variable.table.row_dtype.delta_dtype == np.float32:
        rows = tf.cast(rows, tf.float32)
    plan = adding(variable, keys, [rows], begins_lookup=False, scale=scale)

    def write(table: EmbeddingTable, keys: Array, rows: Array) -> None:
        table.accumulate(keys, rows, scale=scale)

    return _write(variable, what, [keys, rows], write, plan)


def _keys_and_rows(
    variable: TableVariable, what: str, sparse_delta: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    if not isinstance(sparse_delta, tf.IndexedSlices):
        raise TypeError(
            f"{what} takes a tf.IndexedSlices of keys and rows. "
            f"sparse_delta is not IndexedSlices: {sparse_delta!r}"
        )
    keys = checked_keys(variable, sparse_delta.indices)
    return keys, checked_rows(variable, keys, sparse_delta.values, what)


def _write(
    variable: TableVariable,
    what: str,
    inputs: Sequence[tf.Tensor],
    write: Callable[..., None],
    plan: WritePlan | None,
) -> Any:
    """Writes rows, eagerly or in a graph; returns the variable, or the operation.

    `inputs` are keys (n,), rows (n, dimension), and further arrays for `write`.
    """
    dtype = inputs[1].dtype

    def run(table: EmbeddingTable, keys: Array, rows: Array, *others: Array) -> None:
        write(table, keys, to_rows(rows, dtype, table), *others)

    done = array_call(variable, f"{what} on {variable.name!r}", run, inputs, plan=plan)
    return variable if tf.executing_eagerly() else done

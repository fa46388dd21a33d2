"""How rows given by a program get into a table: what assigning and the scatters share.

Functions of a variable, which the APIs name as its methods. They act on the part of this rank, and
one rank may call them alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.checks import checked_keys, checked_rows, checked_scores
from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.native_write import adding, assigning
from sok_lite.bridge.table_call import array_call, to_rows
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.foreign_keys import RankInfo, refuse_foreign_write
from sok_lite.engine.table import EmbeddingTable
from sok_lite.native.plans import WritePlan


def insert_or_assign(
    variable: TableVariable, what: str, indices: Any, values: Any, scores: Any = None
) -> Any:
    """Sets the rows of keys, inserting keys that are new.

    Args:
      what: how the program calls it, for errors.
      indices: (n,) integers; of a repeated key the last row counts.
      values: (n, dimension).
      scores: (n,) non-negative integers, kept with the keys whatever the strategy; None: as a
        lookup would.

    Returns:
      The variable in eager mode, the operation in a graph.

    Raises:
      TypeError: keys are no integers, or rows not of the variable's kind, floats or integers.
      ValueError: shapes do not fit, or a key or row not its type, or other ranks own a key, which
        has no row here. Nothing has changed then.
    """
    keys = checked_keys(variable, indices)
    rows = checked_rows(variable, keys, values, what)
    others = [] if scores is None else [checked_scores(variable.name, scores)]

    def write(table: EmbeddingTable, keys: Array, *arrays: Array) -> None:
        refuse_foreign(table, keys, what)
        table.insert_or_assign(keys, *arrays)

    plan = None if others else assigning(variable, keys, rows, begins_lookup=True)
    return _write(variable, what, [keys, rows, *others], write, plan)


def refuse_foreign(table: EmbeddingTable, keys: Array, what: str) -> None:
    """Raises ForeignKeysError if keys that are to get rows belong to other ranks.

    Args:
      keys: (n,) of the key type, on the device.
      what: the program's call.
    """
    comm = other_ranks()
    if comm is not None:
        what = f"{what} of table {table.name!r}"
        refuse_foreign_write(table, keys, RankInfo(comm.rank, comm.size), what)


def scatter_add(
    variable: TableVariable, sparse_delta: Any, use_locking: bool = False, name: Any = None
) -> Any:
    """Adds rows to the rows of keys that are in the table; repeated keys are summed."""
    return _scatter_add(variable, "scatter_add", sparse_delta, 1.0)


def scatter_sub(
    variable: TableVariable, sparse_delta: Any, use_locking: bool = False, name: Any = None
) -> Any:
    """Subtracts rows from the rows of keys that are in the table; repeated keys are summed."""
    return _scatter_add(variable, "scatter_sub", sparse_delta, -1.0)


def scatter_update(
    variable: TableVariable, sparse_delta: Any, use_locking: bool = False, name: Any = None
) -> Any:
    """Sets the rows of keys that are in the table; of a repeated key the last row counts."""
    keys, rows = _keys_and_rows(variable, "scatter_update", sparse_delta)
    plan = assigning(variable, keys, rows, begins_lookup=False)

    def write(table: EmbeddingTable, keys: Array, rows: Array) -> None:
        table.assign(keys, rows)

    return _write(variable, "scatter_update", [keys, rows], write, plan)


def _scatter_add(variable: TableVariable, what: str, sparse_delta: Any, scale: float) -> Any:
    keys, rows = _keys_and_rows(variable, what, sparse_delta)
    if variable.table.row_dtype.added_in == np.float32:
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
    """Writes rows, now or as an operation of a graph.

    Args:
      what: for errors.
      inputs: keys (n,), rows (n, dimension), and what else `write` takes.
      write: takes the engine's table and the inputs as arrays.
      plan: by which native code may do it.

    Returns:
      The variable in eager mode, the operation in a graph.
    """
    dtype = inputs[1].dtype

    def run(table: EmbeddingTable, keys: Array, rows: Array, *others: Array) -> None:
        write(table, keys, to_rows(rows, dtype, table), *others)

    done = array_call(variable, f"{what} on {variable.name!r}", run, inputs, plan=plan)
    return variable if tf.executing_eagerly() else done

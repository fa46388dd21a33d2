"""Exports of a table's keys and rows as tensors: all, some, or in chunks.

Functions of a variable; the APIs offer them as its methods, as those of table_ops.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.checks import check_cutoff
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.operation import Outputs
from sok_lite.bridge.table_call import Results, method_call, table_call
from sok_lite.bridge.tensor import to_tensor
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.table import EmbeddingTable, Entries
from sok_lite.engine.table.locking import with_lock

# Selects entries: keys (n,), rows (n, dimension), scores (n,) uint64, all NumPy -> (n,) bool.
Predicate = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]


def export(variable: TableVariable, cutoff: float | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns this rank's keys, ascending, and their rows.

    Args:
      cutoff: leaves out keys whose row has only |elements| < cutoff, such as 1e-20 for rows of
        zeros; None: none.

    Returns:
      (indices (n,) of the key type, values (n, dimension) of the rows' dtype).

    Raises:
      TypeError, ValueError: the cutoff is not a number above 0.
    """
    check_cutoff(cutoff)
    key_type, dtype = variable.key_type, variable.dtype

    def run(table: EmbeddingTable, outputs: Outputs | Results) -> None:
        keys, _ = table.export(
            out=lambda num_rows: outputs.empty(1, (num_rows, table.dim)), cutoff=cutoff
        )
        outputs.give(0, keys)

    what, shapes = f"The export of {variable.name!r}", [[None], [None, variable.dimension]]
    indices, values = table_call(variable, what, run, [], [key_type, dtype], shapes)
    return indices, values


def export_if(
    variable: TableVariable, predicate: Predicate | None = None, *, min_score: int | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns selected keys, ascending, and their rows.

    Args:
      predicate: called with some entries at a time, NumPy arrays keys (n,), rows (n, dimension) and
        scores (n,) uint64; returns (n,) bool.
      min_score: selects keys with at least this score.

    Returns:
      (indices (n,) of the key type, values (n, dimension) of the rows' dtype).

    Raises:
      ValueError: not exactly one of the two is passed, or the predicate does not return bools.
    """
    if (predicate is None) == (min_score is None):
        raise ValueError(
            "Give `predicate` or `min_score`, one of them. "
            f"Received: predicate={predicate}, min_score={min_score}."
        )
    if min_score is not None and not 0 <= min_score < 2**64:
        raise ValueError(f"`min_score` must be in [0, 2**64). Received: {min_score}.")

    def has_score(entries: Entries) -> Array:
        return entries.scores >= np.uint64(min_score or 0)

    choose = has_score if predicate is None else on_host(variable, predicate)
    indices, values = method_call(
        variable,
        "export_if",
        lambda table: table.export_if(choose),
        [],
        [variable.key_type, variable.dtype],
        [[None], [None, variable.table.dim]],
    )
    return indices, values


def export_chunks(
    variable: TableVariable, num_slots: int = 1 << 20
) -> Iterator[tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
    """Yields the whole table in chunks, in no order. Python only, outside of graphs.

    Args:
      num_slots: index slots per chunk, the largest number of keys in one.

    Yields:
      (indices (n,) of the key type, values (n, dimension) of the rows' dtype, scores (n,) uint64);
      n may be 0.

    Raises:
      RuntimeError: the table changed between two chunks, so keys might be missing: keys were
        inserted or removed, or rows moved between tiers.
    """
    if num_slots < 1:
        raise ValueError(f"`num_slots` must be at least 1. Received: {num_slots}.")
    table = variable.table
    backend = table.backend
    first, version = 0, None

    def chunk() -> tuple[Any, list[tf.Tensor]]:
        now = (table.row_version, table.index.num_rehashes, table.size)
        entries = table.export_chunk(first, num_slots)
        return now, [
            to_tensor(entries.keys, variable.key_type, backend),
            to_tensor(entries.values, variable.dtype, backend),
            to_tensor(entries.scores, tf.uint64, backend),
        ]

    # Checked once more at the end: a table that has shrunk ends before its keys do.
    is_more = True
    while is_more:
        is_more = first < table.num_slots
        now, (keys, values, scores) = on_device(backend, with_lock, table, chunk)
        if now != (version or now):
            raise RuntimeError(
                f"{variable.name!r} has changed during export_chunks(). Export it between two "
                "steps, under sok_lite.inference_mode() if other threads look keys up."
            )
        version = now
        if is_more:
            yield keys, values, scores
        first += num_slots


def on_host(variable: TableVariable, predicate: Predicate) -> Callable[[Entries], Array]:
    """Returns the engine's selection of entries, from a program's predicate of NumPy arrays."""
    backend, dtype = variable.table.backend, variable.dtype

    def choose(entries: Entries) -> Array:
        values = backend.to_host(entries.values)
        if dtype == tf.bfloat16:
            values = values.view(dtype.as_numpy_dtype)
        chosen = predicate(backend.to_host(entries.keys), values, backend.to_host(entries.scores))
        return backend.from_host(np.asarray(chosen))

    return choose

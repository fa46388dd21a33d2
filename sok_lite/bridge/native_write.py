"""Native writes in a graph: the plan of a write whose keys all have rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.native_lookup import are_native, part_of
from sok_lite.native.plans import WritePlan, Writing


def plan_assign(
    variable: Any, keys: tf.Tensor, rows: tf.Tensor, begins_lookup: bool
) -> WritePlan | None:
    """Returns the plan of a write that sets rows, (n, dim); None in eager mode or if impossible.

    With `begins_lookup` it inserts keys without a row; else it skips them.
    """
    if rows.dtype.name != variable.table.row_dtype.name:
        return None
    return _plan(variable, keys, Writing.ASSIGNS, begins_lookup)


def adding(
    variable: Any,
    keys: tf.Tensor,
    rows: Sequence[tf.Tensor],
    begins_lookup: bool,
    has_flags: bool = False,
    scale: float = 1.0,
) -> WritePlan | None:
    """Returns the plan of a write that adds to rows; None in eager mode or if impossible.

    `rows`, (n, dim) each, are the summand and, optionally, what is subtracted from it first.
    """
    in_float32 = variable.table.row_dtype.delta_dtype == np.float32
    if not in_float32 or any(each.dtype != tf.float32 for each in rows):
        return None
    how = (begins_lookup, has_flags, len(rows) > 1, scale)
    return _plan(variable, keys, Writing.ADDS, *how)


def _plan(
    variable: Any,
    keys: tf.Tensor,
    writing: Writing,
    begins_lookup: bool,
    has_flags: bool = False,
    subtracts: bool = False,
    scale: float = 1.0,
) -> WritePlan | None:
    table = variable.table
    if tf.executing_eagerly() or keys.dtype != variable.key_type or not are_native([table]):
        return None
    if table.backend.name != "cpu":
        return None  # repeated keys are summed on the host
    part = part_of(table, keys.dtype, draws=False)
    how = (writing, begins_lookup, has_flags, subtracts, scale)
    return WritePlan(table.backend, *how, part)

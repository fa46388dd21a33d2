"""Which lookups native code may do by itself."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.native.gpu import record_of
from sok_lite.native.plans import Drawing, Part, Rows


def are_native(tables: Sequence[Any]) -> bool:
    """Whether native code can look up in the engine's tables."""
    backend = tables[0].backend
    if backend.name != "cpu" and not _is_native_gpu(backend):
        return False
    return all(table.backend is backend and table.record.allows for table in tables)


def _is_native_gpu(backend: Any) -> bool:
    """Whether native code launches on a GPU. Where TensorFlow sees several, a tensor may be on
    another one: Python sees that."""
    return record_of(backend) is not None and len(tf.config.get_visible_devices("GPU")) < 2


def part_of(
    table: Any,
    key_type: tf.DType,
    combiner: int = 0,
    rows: Rows = Rows.NONE,
    row_length: int = 0,
    weight_rows: Rows = Rows.NONE,
    draws: bool = True,
) -> Part:
    """Returns one table of a plan; what is not of the table is as in `Part`.

    Args:
      draws: whether keys without a row may give their initial values.
    """
    record, row_type = table.record, tf.as_dtype(table.row_dtype.name)
    is_on_cpu = table.backend.name == "cpu"
    return Part(
        ctypes.addressof(record),
        record.generation,
        key_type.as_datatype_enum,
        row_type.as_datatype_enum,
        table.dim,
        combiner,
        rows,
        row_length,
        weight_rows,
        _drawing_of(table) if draws and is_on_cpu else None,
        _beginning_of(table) if draws else None,
    )


def _drawing_of(table: Any) -> Drawing:
    """Returns what draws the initial values of a table's rows into an array, for one key."""
    keys, rows = np.zeros(1, np.int64), np.zeros(1, np.uint32)
    return Drawing.of(table.draw_launch(table.store.output(1), keys, rows), keys)


def _beginning_of(table: Any) -> Drawing:
    """Returns what draws them into the rows themselves."""
    xp = table.backend.xp
    keys, rows = xp.empty(1, np.int64), xp.empty(1, np.uint32)
    where = (table.backend, table.store, rows, keys, table.table_seed)
    return Drawing.of(table.initializer.fill_launch(*where), keys)

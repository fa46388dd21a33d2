"""Native lookups: which tables allow them, and their plans."""

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
    """Whether native code launches on a GPU. With several, only Python sees a tensor's GPU."""
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
    """Returns a `Part` of a plan; `draws`: keys without a row may return their initial values."""
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
        _launch_to_array(table) if draws and is_on_cpu else None,
        _launch_to_rows(table) if draws else None,
    )


def _launch_to_array(table: Any) -> Drawing:
    """Returns the launch that draws initial values of one key into an array."""
    keys, rows = np.zeros(1, np.int64), np.zeros(1, np.uint32)
    return Drawing.of(table.draw_launch(table.store.output(1), keys, rows), keys)


def _launch_to_rows(table: Any) -> Drawing:
    """Returns the launch that draws them into the table's rows."""
    xp = table.backend.xp
    keys, rows = xp.empty(1, np.int64), xp.empty(1, np.uint32)
    where = (table.backend, table.store, rows, keys, table.table_seed)
    return Drawing.of(table.initializer.fill_launch(*where), keys)

"""Reads of this rank's table, without a change or a gradient."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.inference import MissingKeyPolicy
from sok_lite.bridge.native_lookup import are_native, part_of
from sok_lite.bridge.operation import Outputs
from sok_lite.bridge.serving.mode import dispatch_lookup
from sok_lite.bridge.table_call import Results, table_call
from sok_lite.bridge.type_spec import alive
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table import EmbeddingTable
from sok_lite.native.plans import LookupPlan, Policy

# A missing key returns its initial value and gets no row, whatever inference_mode says.
_AS_IT_IS = Policy(training=0, missing=0, has_filter=0, reading_only=0, is_in_pipeline=0)


def read(
    variable: TableVariable, keys: tf.Tensor, with_exists: bool = False
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Returns the rows of keys; a key without a row returns its initial value.

    keys.shape + [dimension] of the rows' dtype; `with_exists` adds a bool of the keys' shape,
    whether each key has a row.
    """
    dim, dtype = variable.dimension, variable.dtype

    def run(table: EmbeddingTable, outputs: Outputs | Results, keys: Array) -> None:
        rows = outputs.empty(0, (*keys.shape, dim)).reshape(-1, dim)
        found = table.lookup(keys.reshape(-1), out=rows, insert=False)
        if with_exists:
            # As uint8: not every TensorFlow accepts bool memory from outside.
            exists = (found.rows != np.uint32(NO_ROW)).view(np.uint8)
            outputs.give(1, exists.reshape(keys.shape))

    shapes: list[Any] = [keys.shape.concatenate([dim]), keys.shape]
    dtypes = [dtype, tf.uint8]
    count = 2 if with_exists else 1
    what = f"A lookup in {variable.name!r}"

    def live(keys: tf.Tensor) -> Sequence[tf.Tensor]:
        plan = None if tf.executing_eagerly() else _plan(variable, with_exists)
        outputs = (dtypes[:count], shapes[:count])
        rows, *exists = table_call(variable, what, run, [keys], *outputs, plan)
        return [rows, *(tf.cast(each, tf.bool) for each in exists)]

    reference = weakref.ref(variable)

    def plain(tables: Any, keys: tf.Tensor) -> Sequence[tf.Tensor]:
        return tables.read(alive(reference), keys, MissingKeyPolicy(missing="initial"))[:count]

    outputs = dispatch_lookup(what, live, plain, [keys])
    return (outputs[0], outputs[1]) if with_exists else outputs[0]


def _plan(variable: TableVariable, tells_found: bool) -> LookupPlan | None:
    """Returns the plan of a read in a graph; None if native code cannot do it."""
    table = variable.table
    # The host determines which keys have a row.
    if not are_native([table]) or (tells_found and table.backend.name != "cpu"):
        return None
    parts = (part_of(table, variable.key_type),)
    return LookupPlan(table.backend, False, None, None, _AS_IT_IS, parts, tells_found)

"""A variable that optimizers train as they come, as small as one of an API can be."""

import numpy as np
import tensorflow as tf

from sok_lite.bridge.saveable import save_with_graph
from sok_lite.bridge.variable import TableVariable, table_for_variable
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import make_table

v1 = tf.compat.v1

KEYS = np.array([5, -7, 2**40, 0, -(2**62), 11, 6])
DIM = 3


def starts():
    """The first rows, of which the dense twin is made."""
    return np.random.default_rng(1).normal(0, 0.5, (len(KEYS), DIM)).astype(np.float32)


class StockRows(TableVariable):
    """Rows by key. Several may be of one table.

    Args:
      table: of the engine; None: a new one.
    """

    kind = "StockRows"
    instead_of_value = instead_of_write = instead_of_copy = instead_of_save = "-"
    trained_by_patched = True
    collections = (v1.GraphKeys.LOCAL_VARIABLES,)
    regularizer = None  # Keras 3 asks each weight of a model for it

    def __init__(self, name="rows", table=None):
        is_new = table is None
        if is_new:

            def make(backend):
                initializer = make_initializer("0.5", DIM, None, "hbm")
                return make_table("hbm", backend, DIM, initializer=initializer, name=name)

            table = table_for_variable(self.kind, make)
        super().__init__(table, name=name, trainable=True)
        if self._in_graph_mode and is_new:
            save_with_graph(self, name)


def filled(name="rows"):
    """Returns a variable whose rows are `starts()`."""
    rows = StockRows(name)
    rows.table.insert_or_assign(KEYS, starts())
    return rows


def rows_of(variable):
    """Returns the rows of KEYS as they are, in any mode."""
    keys, rows = variable.table.export()
    by_key = dict(zip(keys.tolist(), rows, strict=True))
    return np.stack([by_key[key] for key in KEYS.tolist()])

"""Ctrl-C in eager lookups, assignments and updates: the variable is as before or as after.

What a table makes of Ctrl-C in each of its functions is in tests/engine/test_interrupts.py; here
real signals reach what lies between TensorFlow and the table as well.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.engine.table import RefusedError
from sok_lite.native.plans import num_entries
from tests.conftest import QUICK
from tests.support.reference import DictTable
from tests.support.table_audit import assert_lock_is_free, audit
from tests.support.tripwire import CtrlC

DIM = 8


# What runs it, and what it makes of the rows.
OPERATIONS = {
    "lookup": (
        lambda table, optimizer, keys, values: tf.nn.embedding_lookup(table, keys),
        lambda oracle, keys, values: oracle.find_or_insert(keys),
    ),
    "assign": (
        lambda table, optimizer, keys, values: sok.assign(table, keys, values),
        lambda oracle, keys, values: oracle.insert_or_assign(keys, values),
    ),
    "update": (
        lambda table, optimizer, keys, values: optimizer.apply_gradients(
            [(tf.IndexedSlices(values, keys), table)]
        ),
        lambda oracle, keys, values: (
            oracle.find_or_insert(keys),
            oracle.accumulate(keys, values, -1.0),
        ),
    ),
}


def rows_of(rows):
    return {int(key): np.asarray(row).tolist() for key, row in rows}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", ["hbm", "hybrid"])
def test_ctrl_c_in_an_eager_call_leaves_a_variable_as_before_or_as_after(kind, name):
    """Real signals, where functions begin; elsewhere TensorFlow may make them errors of its own."""
    options = {"init_capacity": 1 << 10, "max_capacity": 1 << 20} if kind == "hybrid" else {}
    variable = sok.DynamicVariable(DIM, initializer="0", var_type=kind, **options)
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
    work, model = OPERATIONS[name]
    rng, interrupted = np.random.default_rng(0), 0
    oracle = DictTable(DIM, lambda key: np.zeros(DIM))
    variable.sparse_read(tf.zeros([60], tf.int64), training=False)  # by Python the first time
    # Most functions are of the bridge, which both kinds have in common: others in each.
    first = 1 + (kind == "hybrid")
    for at in range(first, 5000, 7 if QUICK else 2):
        keys = rng.integers(0, 4000, 60)
        values = rng.integers(-8, 8, (60, DIM)).astype(np.float32)
        arguments = tf.constant(keys), tf.constant(values)
        before, steps, wire = dict(oracle.rows), int(optimizer.iterations), CtrlC(at)
        try:
            wire.run(lambda arguments=arguments: work(variable, optimizer, *arguments))
        except KeyboardInterrupt:
            interrupted += 1
        assert_lock_is_free(variable.table)
        entries = num_entries()
        variable.sparse_read(arguments[0], training=False)
        assert num_entries() == entries, f"native code has no table after {wire.place}"
        audit(variable.table)
        model(oracle, keys, values)
        now = rows_of(zip(*(part.numpy() for part in sok.export(variable)), strict=True))
        if now != rows_of(oracle.rows.items()):
            assert now == rows_of(before.items()) and wire.place is not None, wire.place
            oracle.rows = before
        elif name == "update":
            steps += 1
        assert int(optimizer.iterations) == steps, wire.place
        if wire.place is None:
            break
    assert interrupted > 5


def test_a_step_that_refuses_keys_counts():
    """The rows of the other keys have moved."""
    table = sok.DynamicVariable(
        2, "zeros", "hybrid", name="refusing", init_capacity=16, max_capacity=16, on_refused="error"
    )
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
    keys = tf.range(100, dtype=tf.int64)
    gradient = tf.IndexedSlices(-tf.ones([100, 2]), keys, tf.constant([100, 2]))
    with pytest.raises(RefusedError):
        optimizer.apply_gradients([(gradient, table)])
    rows = sok.export(table)[1].numpy()
    assert len(rows) > 10 and (rows == 1).all()
    assert int(optimizer.iterations) == 1

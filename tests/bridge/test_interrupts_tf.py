"""Ctrl-C in eager lookups, assignments and updates: the variable is as before or as after.

What a table makes of Ctrl-C in each of its functions is in tests/engine/test_interrupts.py; here
real signals reach what lies between TensorFlow and the table as well.
"""

import keras
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.engine.table import RefusedError
from tests.conftest import QUICK
from tests.support.own_process import run_limited
from tests.support.tripwire import CtrlC

PROGRAM = """
    import random
    import sys
    import time

    import numpy as np
    import tensorflow as tf

    import sok_lite as sok
    from tests.support.signal_rounds import Alarm, added, assigned, content, same, which
    from tests.support.table_audit import audit

    kind, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sok.init()
    dim, batch = 8, 5_000
    options = {"init_capacity": 1 << 16, "max_capacity": 1 << 21} if kind == "hybrid" else {}
    variable = sok.DynamicVariable(dim, initializer="0", var_type=kind, **options)
    table = variable.table
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
    dice, alarm, took = random.Random(seed), Alarm(), {}
    def update(keys, values):
        optimizer.apply_gradients([(tf.IndexedSlices(values, keys), variable)])

    def looked_up(rows, keys, values):
        new = np.setdiff1d(keys, rows.keys)
        return rows.written(new, np.zeros((new.size, dim), np.float32))

    # What runs it, and what it makes of the rows.
    operations = {
        "lookup": (lambda keys, values: tf.nn.embedding_lookup(variable, keys), looked_up),
        "assign": (
            lambda keys, values: sok.assign(variable, keys, values),
            lambda rows, keys, values: assigned(rows, keys, values, True),
        ),
        "update": (
            update,
            lambda rows, keys, values: added(looked_up(rows, keys, values), keys, values, -1),
        ),
    }
    interrupted = done = 0
    while interrupted < count and done < 20 * count:
        done += 1
        name = dice.choice(list(operations))
        rng = np.random.default_rng(dice.getrandbits(32))
        ids = rng.integers(0, 200_000, batch)
        values = rng.integers(-8, 8, (batch, dim)).astype(np.float32)
        arguments = tf.constant(ids), tf.constant(values)
        before = content(table)
        # The first call of each takes long.
        seconds = 300.0 if name not in took else dice.uniform(1e-5, 1.2 * took[name])
        start = time.perf_counter()
        was_interrupted = alarm.run(seconds, operations[name][0], *arguments)
        if not was_interrupted:
            took[name] = time.perf_counter() - start
        interrupted += was_interrupted
        try:
            audit(table)
            after = operations[name][1](before, ids, values)
            state = which(content(table), before, after, ids, None)
            assert was_interrupted or state == "after" or same(before, after), "nothing was done"
        except AssertionError as error:
            raise SystemExit(f"{kind}, seed {seed}, round {done}: {name} interrupted: {error}")
    print("interrupted", interrupted)
"""


@pytest.mark.full_only("tests/engine/test_interrupts.py is the smoke")
@pytest.mark.parametrize("kind", ["hbm", "hybrid"])
def test_signals_in_eager_calls(kind):
    count = 20 if QUICK else 100
    assert run_limited(PROGRAM, kind, count, 0, timeout=600)[-2:] == ["interrupted", str(count)]


def test_an_interrupted_step_counts_if_its_rows_have_moved():
    """A gradient of -1 and a rate of 1: every element of a row is the number of steps."""
    table = sok.DynamicVariable(2, "zeros", name="steps")
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(1.0))
    keys = tf.constant([1, 2, 3], tf.int64)
    tf.nn.embedding_lookup(table, keys)
    gradient = tf.IndexedSlices(-tf.ones([3, 2]), keys, tf.constant([3, 2]))

    def step():
        optimizer.apply_gradients([(gradient, table)])

    def rows():
        return set(sok.export(table)[1].numpy().reshape(-1).tolist())

    step()
    interrupted = 0
    for at in range(1, 2000):
        wire = CtrlC(at)
        try:
            wire.run(step)
        except KeyboardInterrupt:
            interrupted += 1
        assert rows() == {float(optimizer.iterations)}, wire.place
        if wire.place is None:
            break
    assert interrupted > 50


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

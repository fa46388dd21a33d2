"""`sok.profile` measures what runs, in every mode, and is gone after its block."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge.profile import STAGES


def make_step(names="ab"):
    tables = [sok.DynamicVariable(4, name=name) for name in names]
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD())

    def step(ids):
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse(tables, [ids] * len(tables), combiners="sum")
            loss = tf.add_n([tf.reduce_sum(each) for each in rows])
        gradients = tape.gradient(loss, tables)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))
        return loss

    return step, tables


def stages_of(profile):
    return {(each.stage, "".join(each.tables)): each.calls for each in profile.report()}


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function], ids=["eager", "tf.function"])
def test_every_stage_of_a_step_is_measured_with_its_tables(wrap):
    step = wrap(make_step()[0])
    step(tf.range(10, dtype=tf.int64))  # traced before: what is measured is looked up when it runs
    with sok.profile() as profile:
        for _ in range(3):
            step(tf.range(20, dtype=tf.int64))
    found = stages_of(profile)
    for stage in ("lookup", "find and insert", "gradient", "sum gradients", "find rows of step"):
        assert found[stage, "ab"] >= 3, stage
    assert found["lookup", "ab"] == found["gradient", "ab"] == 3
    assert all(each.seconds > 0 for each in profile.report()) and profile.seconds > 0


def test_a_lookup_of_one_table_is_measured():
    table = sok.DynamicVariable(2, name="one")
    with sok.profile() as profile:
        tf.nn.embedding_lookup(table, np.arange(5))
    assert stages_of(profile)["find and insert", "one"] == 1


def test_results_are_those_without_a_profile():
    ids = tf.constant(np.random.default_rng(0).integers(0, 50, 200))
    rows = []
    for context in (sok.profile, threading.Lock):  # a lock stands for no profile
        step, tables = make_step(["x", "y"])
        with context():
            losses = [float(step(ids)) for _ in range(3)]
        rows.append([losses, *(sok.export(table)[1].numpy().tobytes() for table in tables)])
    assert rows[0] == rows[1]


def test_nothing_is_left_of_it():
    """So a step that nobody profiles does what it would without `profile`, and no call more."""
    before = [vars(stage.owner)[stage.attribute] for stage in STAGES]
    with pytest.raises(ZeroDivisionError), sok.profile():
        assert all(
            vars(stage.owner)[stage.attribute] is not function
            for stage, function in zip(STAGES, before, strict=True)
        )
        1 / 0  # noqa: B018
    after = [vars(stage.owner)[stage.attribute] for stage in STAGES]
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_there_is_one_at_a_time():
    with sok.profile(), pytest.raises(RuntimeError, match="A profile goes on already"):
        with sok.profile():
            pass
    with sok.profile():
        pass

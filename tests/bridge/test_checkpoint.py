"""tf.train.Checkpoint keeps keys, rows, optimizer states and the step counter."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import checkpoint
from sok_lite.engine.table import clock, named_arrays


def trained(seed):
    table = sok.DynamicVariable(3, name="table", initializer="uniform")
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.1))
    step(table, optimizer, seed, 4)
    return table, optimizer


def step(table, optimizer, seed, steps):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        keys = tf.constant(rng.integers(-20, 20, 30))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, keys) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])


def facts(table):
    keys, values = sok.export(table)
    states = [table.table.export(name)[1] for name in table.table.store.state_names]
    return [keys.numpy(), values.numpy(), *states]


def adagrad(initial):
    return sok.OptimizerWrapper(keras.optimizers.Adagrad(0.1, initial_accumulator_value=initial))


def ftrl(initial):
    return sok.OptimizerWrapper(keras.optimizers.Ftrl(0.1, initial_accumulator_value=initial))


OTHERS = {
    "another initial value": (adagrad, lambda: adagrad(0.5)),
    "more states": (adagrad, lambda: ftrl(0.3)),
    "fewer states": (ftrl, lambda: adagrad(0.3)),
}


@pytest.mark.parametrize("into", ["a new table", "its table"])
@pytest.mark.parametrize("other", OTHERS)
def test_an_optimizer_takes_no_restored_states_for_its_own_that_are_not(tmp_path, other, into):
    def new_table():
        return sok.DynamicVariable(3, name="table", initializer="uniform")

    saved_one, other_one = OTHERS[other]
    table, first, second = new_table(), saved_one(0.3), other_one()
    step(table, first, 0, 4)
    path = tf.train.Checkpoint(table=table).save(str(tmp_path / "c"))
    restored, plain = new_table(), new_table()
    if into == "its table":
        step(restored, second, 1, 2)
    tf.train.Checkpoint(table=restored).restore(path).assert_consumed()
    sok.assign(plain, *sok.export(table))
    for each in (restored, plain):
        step(each, second, 2, 3)
    np.testing.assert_array_equal(sok.export(restored)[1], sok.export(plain)[1])
    # They wait for the optimizer that has them.
    again = saved_one(0.3)
    keys, state = again.get_slot(restored, "accumulator").export()
    saved_keys, saved = first.get_slot(table, "accumulator").export()
    at = np.searchsorted(keys, saved_keys)
    np.testing.assert_array_equal(keys.numpy()[at], saved_keys)
    np.testing.assert_array_equal(state.numpy()[at], saved)


def test_a_checkpoint_that_does_not_tell_what_belongs_together_is_restored(tmp_path, monkeypatch):
    """As versions before this one wrote it."""
    table, adam = trained(0)
    other = adagrad(0.3)
    step(table, other, 1, 2)

    def flat(states):
        return {name: facts for group in columns_of(states) for name, facts in group.items()}

    columns_of = named_arrays.columns_of
    monkeypatch.setattr(named_arrays, "columns_of", flat)
    path = tf.train.Checkpoint(table=table).save(str(tmp_path / "c"))
    monkeypatch.undo()
    fresh = sok.DynamicVariable(3, name="table", initializer="uniform")
    tf.train.Checkpoint(table=fresh).restore(path).assert_consumed()
    # Once more through a checkpoint of this version, before anybody has taken them over.
    path = tf.train.Checkpoint(table=fresh).save(str(tmp_path / "d"))
    again = sok.DynamicVariable(3, name="table", initializer="uniform")
    tf.train.Checkpoint(table=again).restore(path).assert_consumed()
    for each in (fresh, again):
        theirs = adagrad(0.3), sok.OptimizerWrapper(keras.optimizers.Adam(0.1))
        for mine, its in zip((other, adam), theirs, strict=True):
            for name in mine.get_slot_names():
                np.testing.assert_array_equal(
                    its.get_slot(each, name).export()[1], mine.get_slot(table, name).export()[1]
                )
        step(each, theirs[0], 2, 2)
    step(table, other, 2, 2)
    for each in (fresh, again):
        np.testing.assert_array_equal(sok.export(each)[1], sok.export(table)[1])


def test_a_checkpoint_restored_before_the_variable_is_made(tmp_path):
    table, _ = trained(0)
    path = tf.train.Checkpoint(table=table).save(str(tmp_path / "c"))
    late = tf.train.Checkpoint()
    late.restore(path)
    late.table = sok.DynamicVariable(3, name="table", initializer="uniform")
    for restored, saved in zip(facts(late.table), facts(table), strict=True):
        np.testing.assert_array_equal(restored, saved)


# ---------------------------------------------------------------- hybrid tables

HYBRID = {
    "var_type": "hybrid",
    "init_capacity": 16,
    "max_capacity": 64,
    "on_refused": "ignore",
}


def full(strategy, seed=0, dtype=tf.float32):
    """A hybrid table without a free slot, trained by Adam."""
    table = sok.DynamicVariable(3, name="table", dtype=dtype, evict_strategy=strategy, **HYBRID)
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.1))
    rng = np.random.default_rng(seed)
    while table.table.size < 64:
        adam_step(table, optimizer, rng.integers(-1000, 1000, 6))
    table.epoch = 2
    adam_step(table, optimizer, rng.integers(-1000, 1000, 6))
    return table, optimizer


def adam_step(table, optimizer, keys):
    with tf.GradientTape() as tape:
        rows = tf.cast(tf.nn.embedding_lookup(table, keys), tf.float32)
        loss = tf.reduce_sum(tf.sin(rows))
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])


def assert_equal(table, other):
    for one, another in zip(facts(table), facts(other), strict=True):
        np.testing.assert_array_equal(one, another)
    keys = sok.export(table)[0]
    np.testing.assert_array_equal(table.scores(keys), other.scores(keys))


@pytest.mark.parametrize(
    ("strategy", "dtype"), [("kLru", tf.bfloat16), ("kEpochLfu", tf.float32)], ids=str
)
def test_a_full_hybrid_table_trains_and_evicts_on_as_if_nothing_had_been(tmp_path, strategy, dtype):
    table, optimizer = full(strategy, dtype=dtype)
    path = tf.train.Checkpoint(table=table, optimizer=optimizer).save(str(tmp_path / "c"))
    other, other_optimizer = full(strategy, seed=5, dtype=dtype)
    tf.train.Checkpoint(table=other, optimizer=other_optimizer).restore(path).assert_consumed()
    assert other.table.size == 64
    assert_equal(table, other)
    assert int(other_optimizer.iterations) == int(optimizer.iterations) > 0
    rng = np.random.default_rng(9)
    for _ in range(30):
        key = rng.integers(-1000, 1000, 1)
        for each, each_optimizer in ((table, optimizer), (other, other_optimizer)):
            adam_step(each, each_optimizer, key)
    assert_equal(table, other)
    assert other.epoch == 2
    assert table.statistics().evicted_total > other.statistics().evicted_total > 20


def test_what_does_not_fit_is_refused_before_a_key_is_lost(tmp_path):
    saved = full("kLru")[0], full("kLru")[0], tf.Variable(tf.zeros([2, 3]))
    small = sok.DynamicVariable(3, **(HYBRID | {"max_capacity": 32}))
    wide, other = sok.DynamicVariable(5), sok.DynamicVariable(3)
    texts = "64 keys that were saved: max_capacity is 32 slots", "has dimension 5", ""
    for source, target, text in zip(saved, (small, wide, other), texts, strict=True):
        path = tf.train.Checkpoint(table=source).save(str(tmp_path / "c"))
        rows = tf.range(float(target.dimension))[None]
        sok.assign(target, [5], rows)
        with pytest.raises((ValueError, tf.errors.NotFoundError), match=text):
            tf.train.Checkpoint(table=target).restore(path).assert_consumed()
        keys, found = sok.export(target)
        assert keys.numpy().tolist() == [5] and (found == rows).numpy().all()


@pytest.mark.parametrize("old", [False, True])
def test_times_are_kept(tmp_path, monkeypatch, old):
    """But for old checkpoints, which did not: what they have counts as seen when it is restored."""

    def table():
        return sok.DynamicVariable(3, name="table", enter_threshold=2, **HYBRID)

    source, target = table(), table()
    now = [1e9]
    monkeypatch.setattr(clock, "time", SimpleNamespace(time=lambda: now[0]))
    # Half of the numbers are below 0 where they are signed.
    source.table.clock.prepare_restart(2**31 + 5)()
    for keys in ([1, 2, 3], [1], [2], [4]):
        source.table.lookup(np.array(keys))  # by Python's clock, not by that of native code
        now[0] += 100
    if old:
        arrays_of = checkpoint.named_arrays

        def without_spans(content):
            facts = {name: fact for name, fact in content.facts.items() if name != "spans"}
            return arrays_of(content._replace(facts=facts))

        monkeypatch.setattr(checkpoint, "named_arrays", without_spans)
    path = tf.train.Checkpoint(table=source).save(str(tmp_path / "c"))
    tf.nn.embedding_lookup(target, [8])
    tf.train.Checkpoint(table=target).restore(path).assert_consumed()
    times = [1e9 + 100, 1e9 + 200, 1e9, 1e9 + 300, 0]
    if old:
        times[:4] = [now[0]] * 4
    assert target.table.times([1, 2, 3, 4, 8]).tolist() == times
    assert int(target.expire(seconds=250)) == (0 if old else 1)  # 1, and the sighting of 3
    target.table.lookup(np.array([3, 4, 8]))
    assert sok.export(target)[0].numpy().tolist() == ([1, 2, 3, 4] if old else [2, 4])


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16], ids=lambda d: d.name)
def test_a_session_saves_what_is_there_when_it_saves(tmp_path, dtype):
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        table = sok.DynamicVariable(3, name="table", dtype=dtype, **HYBRID)
        keys = v1.placeholder(tf.int64, [None])
        read = tf.nn.embedding_lookup(table, keys)
        exported = sok.export(table)
        session.run(v1.global_variables_initializer())
        checkpoint = v1.train.Checkpoint(table=table)
        expected, paths = [], []
        for first in (0, 10):
            session.run(read, {keys: np.arange(first, first + 10)})
            expected.append(session.run(exported))
            paths.append(checkpoint.save(str(tmp_path / "c"), session=session))
        assert len(expected[1][0]) == 20
    for path, (saved_keys, saved_rows) in zip(paths, expected, strict=True):
        with tf.Graph().as_default(), v1.Session() as session:
            table = sok.DynamicVariable(3, name="table", dtype=dtype, seed=3, **HYBRID)
            session.run(v1.global_variables_initializer())
            status = v1.train.Checkpoint(table=table).restore(path)
            status.assert_consumed().run_restore_ops(session)
            restored_keys, restored_rows = session.run(sok.export(table))
        np.testing.assert_array_equal(restored_keys, saved_keys)
        np.testing.assert_array_equal(restored_rows, saved_rows)

"""Counts and times of keys, admission by counts, removal by time: against a dict."""

import numpy as np
import pytest
import tensorflow as tf

from sok_lite import kv_variable as kv
from sok_lite.kv_variable import get_kv_variable

tf1 = tf.compat.v1


@pytest.fixture
def now(monkeypatch):
    """The time of the clock of tables; `now.time += seconds` lets it pass."""

    class Now:
        time = 1_000_000_000.0

    monkeypatch.setattr("time.time", lambda: Now.time)
    return Now


def look_up(here, variable, keys):
    return here.run(lambda ids: tf.nn.embedding_lookup(variable, ids), keys)


def keys_of(here, variable):
    return here.run(variable.export)[0].tolist()


@pytest.mark.pairs
@pytest.mark.parametrize("threshold", [0, 1, 2, 3])
def test_a_key_is_admitted_when_it_was_seen_often_enough(here, made, threshold):
    variable = made(enter_threshold=threshold, initializer=tf1.ones_initializer())
    assert variable.enter_threshold == threshold
    seen = {}
    for batch in ([5, -6, 5], [7], [7, -6], [8, 8, 8, 8], [-6, 9]):
        look_up(here, variable, batch)
        for key in batch:
            seen[key] = seen.get(key, 0) + 1
        admitted = sorted(key for key, count in seen.items() if count >= threshold)
        assert keys_of(here, variable) == admitted
        asked = [*seen, 77]
        counts = here.run(variable.get_counting, asked)
        assert counts.tolist() == [*seen.values(), 0] and counts.dtype == np.int64
        assert here.run(lambda: variable.total_count) == len(admitted)
        assert here.run(lambda: variable.total_freq) == sum(seen[key] for key in admitted)
    # A prediction gives zeros, as of any key without a row; training what TFPlus gives as well.
    predicted = here.run(lambda ids: kv.embedding_lookup(variable, ids, training=False), [99, 9])
    assert (predicted[0] == 0).all() and (predicted[1] == (threshold <= 1)).all()
    rows = look_up(here, variable, [99, 99])
    assert (rows == rows[0]).all() and rows[0, 0] in (0.0, 1.0)


def test_no_row_before_admission():
    variable = get_kv_variable("kv", 64, enter_threshold=2)
    tf.nn.embedding_lookup(variable, tf.range(5000, dtype=tf.int64))
    assert variable.table.store.num_rows == 0
    assert variable.storage_size_count.numpy().tolist() == [0, 0]
    tf.nn.embedding_lookup(variable, tf.range(10, dtype=tf.int64))
    assert variable.storage_size_count.numpy().tolist() == [10, 0]


@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
def test_a_sparse_lookup_counts_every_occurrence(here, made, combiner):
    variable = made(enter_threshold=3)

    def run(keys):
        ids = tf.RaggedTensor.from_row_lengths(keys, [2, 0, 3])
        return tf.nn.embedding_lookup_sparse(variable, ids, None, combiner=combiner)

    here.run(run, [5, -6, 5, 7, 5])
    assert here.run(variable.get_counting, [5, -6, 7, 8]).tolist() == [3, 1, 1, 0]
    assert keys_of(here, variable) == [5]
    here.run(run, [5, -6, 5, 7, -6])
    assert here.run(variable.get_counting, [5, -6, 7, 8]).tolist() == [5, 3, 2, 0]
    assert keys_of(here, variable) == [-6, 5]


def test_counts_of_ones_own(here, made):
    variable = made(enter_threshold=4)
    here.run(variable.sparse_read_with_counts, [5, -6], np.array([3, 4]))
    assert keys_of(here, variable) == [-6]
    here.run(variable.sparse_read_with_counts, [[5, 7]], np.array([[1, 1]]))
    here.run(variable.increase_counting, [7], np.array([2]))
    assert here.run(variable.get_counting, [[5, -6], [7, 8]]).tolist() == [[4, 4], [3, 0]]
    assert keys_of(here, variable) == [-6, 5]
    here.run(lambda ids: kv.embedding_lookup(variable, ids, training=False), [7, 7])
    assert here.run(variable.get_counting, [7]).tolist() == [3]


def test_a_count_of_16_bits_goes_on():
    variable = get_kv_variable("kv", 2)
    for _ in range(3):
        variable.increase_counting([1], [40_000])
    assert variable.get_counting([1]).numpy().tolist() == [120_000]


def test_a_key_below_the_threshold_is_not_trained(here, made):
    variable = made(enter_threshold=2, initializer=tf1.ones_initializer())
    sources = list(variable) if isinstance(variable, kv.PartitionedKvVariable) else [variable]
    made_once = []

    def step(ids):
        if not made_once:
            made_once.append(tf1.train.GradientDescentOptimizer(0.25))
        (optimizer,) = made_once
        if here.is_graph:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, ids))
            return optimizer.apply_gradients(optimizer.compute_gradients(loss, sources))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, ids))
        gradients = tape.gradient(loss, sources)
        optimizer.apply_gradients(list(zip(gradients, sources, strict=True)))
        return loss

    here.run(step, [3, 4, 4])
    keys, rows = here.run(variable.export)
    assert keys.tolist() == [4]
    np.testing.assert_allclose(rows[0], 0.5)  # both occurrences have a gradient
    here.run(step, [3])
    keys, rows = here.run(variable.export)
    assert keys.tolist() == [3, 4]
    np.testing.assert_allclose(rows[0], 0.75)  # of one step, not of two


# ---- times, removal ------------------------------------------------------------------------------


def test_a_time_is_that_of_the_last_lookup_in_training(here, made, now):
    variable = made(enter_threshold=2)
    look_up(here, variable, [5, 5, 6])
    now.time += 100
    look_up(here, variable, [6, 7])
    now.time += 100
    here.run(lambda ids: kv.embedding_lookup(variable, ids, training=False), [5, 6, 7])
    start = 1_000_000_000
    found = here.run(variable.get_timestamp, [[5, 6], [7, 8]])
    assert found.dtype == np.int64
    assert found.tolist() == [[start, start + 100], [start + 100, 0]]


@pytest.mark.parametrize("unit", ["days", "seconds"])
def test_keys_that_were_not_seen_lately_are_removed(here, made, now, unit):
    variable = made()
    length = 86400 if unit == "days" else 1

    def remove(threshold):
        if unit == "days":
            return here.run(lambda: variable.delete_with_timestamp(threshold))
        return here.run(lambda: variable.delete_with_timestamp(seconds=threshold))

    look_up(here, variable, [5, -6])
    now.time += 400 * length
    look_up(here, variable, [7])
    here.run(lambda ids, rows: variable.insert(ids, rows), [99], np.ones((1, 3), np.float32))
    now.time += 300 * length
    look_up(here, variable, [8])
    assert remove(900).tolist() == []
    assert sorted(remove(600).tolist()) == [-6, 5]
    assert set(keys_of(here, variable)) >= {7, 8}
    assert here.run(variable.get_counting, [5, -6, 7]).tolist() == [0, 0, 1]
    assert 7 in remove(200).tolist()
    assert 8 in keys_of(here, variable)


def test_keys_without_a_row_are_forgotten_as_well(here, made, now):
    variable = made(enter_threshold=2, initializer=tf1.ones_initializer())
    look_up(here, variable, [5, -6, 7, 7])
    now.time += 100
    look_up(here, variable, [8, 10, 10])
    gone = here.run(lambda: variable.delete_with_timestamp(seconds=50))
    assert sorted(gone.tolist()) == [-6, 5, 7]
    assert here.run(variable.get_counting, [5, -6, 7, 8, 10]).tolist() == [0, 0, 0, 1, 2]
    assert here.run(variable.get_timestamp, [5, -6, 7]).tolist() == [0, 0, 0]
    look_up(here, variable, [5, 8])
    assert keys_of(here, variable) == [8, 10]  # 5 is counted anew


def test_what_a_partition_removes_are_its_keys_without_a_row_as_well():
    with tf.Graph().as_default():
        two = tf1.fixed_size_partitioner(2)
        variable = get_kv_variable("kv", 2, enter_threshold=3, partitioner=two)
        other = get_kv_variable("other", 2, partitioner=two)
        odd = list(variable)[1]
        train = tf.nn.embedding_lookup(variable, [1, -1, -2, 4])
        assign, counting = odd.assign(list(other)[1]), variable.get_counting([1, -1, -2, 4])
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for remove in (odd.initializer, assign):
                session.run([train])
                assert session.run(counting)[:2].tolist() == [1, 1]
                session.run(remove)
                assert session.run(counting)[:2].tolist() == [0, 0]
            assert session.run(counting)[2:].tolist() == [2, 2]
            session.run(variable.initializer)
            assert session.run(counting).tolist() == [0, 0, 0, 0]


def test_the_default_is_seven_days_and_written_keys_expire_from_the_write_on(now):
    variable = get_kv_variable("kv", 2)
    for keys in ([1, 2], [2, 3]):
        kv.insert_kv_embedding(variable, keys, [[1.0, 1.0]] * 2)
        now.time += 1000
    start = 1_000_000_000
    assert variable.get_timestamp([1, 2, 3]).numpy().tolist() == [start, start + 1000, start + 1000]
    assert variable.delete_with_timestamp(seconds=1500).numpy().tolist() == [1]
    now.time += 6.9 * 86400
    assert variable.delete_with_timestamp().shape == (0,)
    now.time += 0.2 * 86400
    assert variable.delete_with_timestamp().numpy().tolist() == [2, 3]
    for wrong in ({"threshold": -1}, {"seconds": float("nan")}):
        with pytest.raises(ValueError, match="0 or more"):
            variable.delete_with_timestamp(**wrong)


def test_delete_removes_rows_and_counts(here, made):
    variable = made(enter_threshold=2, initializer=tf1.ones_initializer())
    look_up(here, variable, [5, 5, -6, -6, 7])
    here.run(variable.delete, [[5, 7], [99, 5]])
    assert keys_of(here, variable) == [-6]
    assert here.run(variable.get_counting, [5, -6, 7]).tolist() == [0, 2, 0]
    look_up(here, variable, [5])
    assert keys_of(here, variable) == [-6]  # it is counted anew


def test_delete_frees_optimizer_states():
    with tf.Graph().as_default():
        variable = get_kv_variable("kv", 2)
        optimizer = tf1.train.AdagradOptimizer(0.1, initial_accumulator_value=0.5)
        rows = tf.nn.embedding_lookup(variable, [1, 2])
        step = optimizer.minimize(tf.reduce_sum(rows))
        delete = variable.delete([1])
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            session.run(step)
            first = session.run(rows)
            session.run(delete)
            session.run(rows)  # begins anew
            session.run(step)
            again = dict(zip(*map(np.ndarray.tolist, session.run(variable.export())), strict=True))
    assert again[1] == first[0].tolist()  # one step of a new accumulator
    assert again[2] != first[1].tolist()


def test_a_partition_lists_and_removes_its_own_keys(now):
    variable = get_kv_variable("kv", 2, partitioner=tf1.fixed_size_partitioner(3))
    tf.nn.embedding_lookup(variable, [0, 1, 2, 3, 4, -1])
    parts = [part.export()[0].numpy().tolist() for part in variable]
    assert parts == [[0, 3], [1, 4], [-1, 2]]
    assert [int(part.total_count) for part in variable] == [2, 2, 2]
    now.time += 100
    assert list(variable)[1].delete_with_timestamp(seconds=50).numpy().tolist() == [1, 4]
    assert variable.export()[0].numpy().tolist() == [-1, 0, 2, 3]
    assert (int(variable.total_count), int(variable.total_freq)) == (4, 4)

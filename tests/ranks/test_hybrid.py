"""Hybrid tables over real ranks: eviction, the filter, inference mode, what must be equal."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

DIM = 2
SMALL = {"init_capacity": 16, "max_capacity": 64, "on_refused": "ignore"}


def hybrid(initializer="0", name="table", **options):
    return sok.DynamicVariable(DIM, initializer, "hybrid", name=name, **(SMALL | options))


def column(keys):
    return tf.RaggedTensor.from_row_lengths(keys, tf.ones_like(keys))


def all_keys(comm, table):
    """The keys of all ranks, each with its row; checks that each lies where it belongs."""
    keys, rows = (tensor.numpy() for tensor in sok.export(table))
    assert (keys % comm.size == comm.rank).all()
    gathered = comm.allgatherv(keys).rows, comm.allgatherv(rows).rows
    return dict(zip(gathered[0].tolist(), gathered[1][:, 0].tolist(), strict=True))


def test_training_beyond_the_limit(comm, run):
    table = hybrid()
    optimizer = sok.SGD(1.0)

    @run
    def train(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(table, column(keys), combiners="sum"))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    expected = {}
    for step in range(24):
        # Every rank asks for other keys, of all ranks.
        batches = [np.random.default_rng([step, r]).choice(500, 5) for r in range(comm.size)]
        train(tf.constant(batches[comm.rank]))
        asked, counts = np.unique(np.concatenate(batches), return_counts=True)
        held = all_keys(comm, table)
        assert set(asked.tolist()) <= set(held)
        for key, count in zip(asked.tolist(), counts.tolist(), strict=True):
            expected[key] = expected.get(key, 0.0) - count
        expected = {key: value for key, value in expected.items() if key in held}
        assert held == expected
    counts = table.statistics()
    assert counts.size == counts.inserted_total - counts.evicted_total <= 64
    if comm.size <= 2:
        assert counts.evicted_total > 10


def test_the_filter_draws_at_the_owner(comm, run):
    table = hybrid(filter_ratio=0.5, max_capacity=4096, init_capacity=4096)
    keys = tf.range(600, dtype=tf.int64) + 100 * comm.rank
    look_up = run(
        lambda ids: sok.lookup_sparse(
            table, ids, combiners="sum", use_low_frequency_filter=True, missing="initial"
        )
    )
    look_up(column(keys))
    held = all_keys(comm, table)
    num_asked = 500 + 100 * comm.size
    # A key that two ranks ask for is drawn once: the standard deviation is below 0.02.
    assert abs(len(held) / num_asked - 0.5) < 0.1


def test_inference_mode_on_all_ranks_and_that_of_the_owner_counts(comm, run):
    table = hybrid(initializer="3")
    look_up = run(lambda keys: sok.lookup_sparse(table, column(keys), combiners="sum"))
    keys = tf.range(12, dtype=tf.int64)
    with sok.inference_mode(missing="zeros"):
        np.testing.assert_array_equal(look_up(keys), np.zeros((12, DIM)))
    assert all_keys(comm, table) == {}
    with sok.inference_mode(missing="zeros") if comm.rank == 0 else contextlib.nullcontext():
        rows = look_up(keys)
    mine = [0.0 if key % comm.size == 0 else 3.0 for key in range(12)]
    np.testing.assert_array_equal(rows[:, 0], mine)
    assert sorted(all_keys(comm, table)) == [key for key in range(12) if key % comm.size]
    look_up(keys)
    assert sorted(all_keys(comm, table)) == list(range(12))
    with sok.inference_mode(missing="zeros"):
        np.testing.assert_array_equal(look_up(keys), np.full((12, DIM), 3.0))


def test_what_a_rank_evicts_is_its_own(comm, run):
    table = hybrid(initializer="1", max_capacity=16)
    read = run(lambda keys: sok.sparse_read_and_evict(table, keys))
    held = set()
    for first in range(0, 64, 8):
        keys = (np.arange(first, first + 8) * comm.size) + comm.rank
        _, evicted, rows = read(tf.constant(keys))
        held = (held | set(keys.tolist())) - set(evicted.numpy().tolist())
        np.testing.assert_array_equal(rows, np.ones((len(evicted), DIM)))
        assert {key for key in all_keys(comm, table) if key % comm.size == comm.rank} == held
    assert len(held) <= 16


def test_each_rank_evicts_by_its_own_capacity_and_loads_into_it(comm, run, folder):
    most = 64 << comm.rank
    table = hybrid("ones", max_capacity=most, max_load_factor=1.0)
    look_up = run(lambda keys: sok.lookup_sparse(table, column(keys), training=True))
    for first in range(0, 1024, 64):
        keys = np.arange(first, first + 64)
        rows = look_up(tf.constant(keys))  # each rank asks for the keys of all
        np.testing.assert_array_equal(rows, np.ones((64, DIM)))
    owned = np.arange(comm.rank, 1024, comm.size)
    assert table.table.size == min(most, owned.size)
    sok.dump(folder, [table])
    held = all_keys(comm, table)
    sok.load(folder, [table])
    assert all_keys(comm, table) == held
    # No rank has room where one has not.
    small = hybrid("ones", max_capacity=most if comm.rank else 32, max_load_factor=1.0)
    with pytest.raises((ValueError, RuntimeError), match="no room|rank 0"):
        sok.load(folder, [small])
    assert small.table.size == 0
    sok.load(folder, [small], on_full="evict")
    assert small.table.size == (min(most, owned.size) if comm.rank else 32)

"""Tables with hot keys on real ranks: the same model, bit for bit, as without."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job
from sok_lite.engine.table import hot_keys

DIM = 5


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if `sok.init` had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)
    monkeypatch.setattr(hot_keys, "WINDOW", 3)
    monkeypatch.setattr(hot_keys, "COUNTED", 1)


def batch(step, rank, key_type):
    """Ragged ids, of which few are most, and weights."""
    rng = np.random.default_rng([step, rank])
    lengths = rng.integers(0, 4, 9)
    ids = np.minimum(rng.zipf(1.3, lengths.sum()), 200)
    splits = np.append(0, np.cumsum(lengths))
    weights = rng.normal(size=len(ids)).astype(np.float32)
    return (
        tf.RaggedTensor.from_row_splits(tf.constant(ids, key_type), splits),
        tf.RaggedTensor.from_row_splits(tf.constant(weights), splits),
    )


def trained(comm, num_hot, in_graph):
    """Trains, reads, looks ahead, changes rows; returns all outputs and rows, and the tables."""
    tables = [
        sok.DynamicVariable(DIM, "uniform", name="a", hot_keys=num_hot),
        sok.DynamicVariable(DIM, "uniform", name="b", partitioner="hash", hot_keys=num_hot),
        sok.DynamicVariable(DIM, "uniform", name="c", key_type=tf.int32, dtype=tf.float16),
    ]
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.05))
    combiners = ["mean", "sum", "sqrtn"]
    seen = []

    def forward(ids, weights, **how):
        return sok.lookup_sparse(tables, ids, weights, combiners=combiners, **how)

    def step(ids, weights):
        with tf.GradientTape() as tape:
            tape.watch([each.flat_values for each in weights])
            rows = forward(ids, weights)
            loss = tf.add_n([tf.reduce_sum(tf.sin(tf.cast(each, tf.float32))) for each in rows])
        *gradients, by_weights = tape.gradient(loss, [*tables, weights[0].flat_values])
        optimizer.apply_gradients(zip(gradients, tables, strict=True))
        return [*rows, by_weights]

    if in_graph:
        step = tf.function(step, reduce_retracing=True)
    for number in range(10):
        pairs = [batch(number, comm.rank, t.key_type) for t in tables]
        ids, weights = ([each[i] for each in pairs] for i in range(2))
        seen += step(ids, weights)
        seen += forward(ids, weights, training=False)
        if number == 6:  # a row changes by itself, and one goes
            keys = np.array([1, 2, 3])
            mine = keys[keys % comm.size == comm.rank]
            sok.assign(tables[0], mine, np.full((len(mine), DIM), 7, np.float32))
            tables[1].erase([1, 2, 3])
            ahead = sok.prefetch(tables, ids)
            sok.assign(tables[0], mine, np.full((len(mine), DIM), 8, np.float32))
            seen += forward(ahead, weights)
    return (
        [each.numpy() for each in seen],
        [[each.numpy() for each in sok.export(table)] for table in tables],
        tables,
    )


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "function"])
def test_a_model_is_the_same_with_hot_keys(comm, in_graph):
    (seen, rows, _), (hot_seen, hot_rows, tables) = (
        trained(comm, num_hot, in_graph) for num_hot in (0, 12)
    )
    for want, got in zip(seen, hot_seen, strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    for want, got in zip(rows, hot_rows, strict=True):
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1].view(np.uint8), want[1].view(np.uint8))
    for table in tables[:2]:
        counted = table.statistics()
        if comm.size == 1:
            assert (counted.hot_keys, counted.hot_asked_total) == (0, 0)
        else:
            assert (
                counted.hot_keys > 3 and counted.hot_asked_total > counted.hot_refreshed_total > 0
            )
    comm.barrier()


def test_ranks_with_other_numbers_of_hot_keys_are_told(comm):
    if comm.size == 1:
        pytest.skip("one rank")
    table = sok.DynamicVariable(DIM, name="differs", hot_keys=comm.rank)
    with pytest.raises(ValueError, match="hot_keys of table 0 is 0 on rank 0 and 1 on rank 1"):
        sok.lookup_sparse(table, tf.ragged.constant([[1, 2]], dtype=tf.int64), combiners="sum")

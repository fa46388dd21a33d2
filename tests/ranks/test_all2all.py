"""sok.all2all_dense_embedding over real ranks, against tf.gather of all rows."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job

DIM = 3
NUM_KEYS = 40
ROWS = np.random.default_rng(0).normal(size=(NUM_KEYS, DIM)).astype(np.float32)


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if `sok.init` had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)


def batch_of(rank, step):
    """Keys and output gradients of a rank; in every third step the first rank has none."""
    rng = np.random.default_rng([rank, step])
    n = 0 if rank == 0 and step % 3 == 2 else 5 + 20 * rank + step
    return rng.integers(0, NUM_KEYS, n), rng.normal(size=(n, DIM)).astype(np.float32)


def eagerly(function):
    return function


def traced(function):
    signature = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DIM])]
    return tf.function(function, input_signature=signature)


@pytest.mark.parametrize("run", [eagerly, traced], ids=["eager", "tf.function"])
@pytest.mark.parametrize("placed", ["distributed", "localized:0", "localized:last"])
def test_rows_and_gradients_are_those_of_all_ranks_together(comm, placed, run):
    owner_of_all = {"localized:0": 0, "localized:last": comm.size - 1}.get(placed)
    mode = placed if owner_of_all is None else f"localized:{owner_of_all}"
    table = sok.DynamicVariable(DIM, name="table", mode=mode)

    def is_mine(key):
        return (key % comm.size if owner_of_all is None else owner_of_all) == comm.rank

    mine = np.array([key for key in range(NUM_KEYS) if is_mine(key)], np.int64)
    sok.assign(table, mine, ROWS[mine])

    def step(keys, out_grads):
        with tf.GradientTape() as tape:
            rows = sok.all2all_dense_embedding(table, keys)
            loss = tf.reduce_sum(rows * out_grads)
        return rows, tape.gradient(loss, table)

    call = run(step)
    for number in range(4):
        keys, out_grads = batch_of(comm.rank, number)
        rows, gradient = call(tf.constant(keys), tf.constant(out_grads))
        np.testing.assert_array_equal(rows, tf.gather(ROWS, keys))
        expected = np.zeros_like(ROWS)
        for rank in range(comm.size):
            np.add.at(expected, *batch_of(rank, number))
        indices = gradient.indices.numpy()
        asked = {key for rank in range(comm.size) for key in batch_of(rank, number)[0].tolist()}
        assert sorted(indices.tolist()) == sorted(key for key in asked if is_mine(key))
        np.testing.assert_allclose(gradient.values, expected[indices], rtol=0, atol=1e-4)


def test_arguments_that_do_not_fit_raise_before_any_rank_waits(comm):
    table = sok.DynamicVariable(DIM, name="table")
    before = comm.turn
    with pytest.raises(ValueError, match="shape"):
        sok.all2all_dense_embedding(table, [[1]])
    with pytest.raises(TypeError, match="integers"):
        sok.all2all_dense_embedding(table, [0.5])
    assert comm.turn == before

"""Steps of patched optimizers on KvVariables over several ranks, in sessions and eagerly."""

import numpy as np
import pytest
import tensorflow as tf

from sok_lite.bridge import job
from sok_lite.kv_variable import get_kv_variable

tf1 = tf.compat.v1
RATE, STEPS, DIM = 0.1, 5, 3


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if `sok_lite.init` had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)


@pytest.fixture(params=[None, 1, 3], ids=["whole", "1 part", "3 parts"])
def partitioner(request):
    return None if request.param is None else tf1.fixed_size_partitioner(request.param)


def ids_of(rank, step):
    """The keys of a rank's batch, which repeat within it and on other ranks."""
    return np.array([step, -7, 5 + rank, 2**62 + step % 2, -7, 100 * rank - 1], np.int64)


def weights_of(rank):
    return np.linspace(1.0, 2.0, 6, dtype=np.float32) * (rank + 1)


def trained(num_ranks):
    """What SGD makes of rows of ones, by a dict: each rank's loss is its sum of w * |row|^2."""
    rows = {}
    for step in range(STEPS):
        grads = {}
        for rank in range(num_ranks):
            for key, weight in zip(ids_of(rank, step).tolist(), weights_of(rank), strict=True):
                row = rows.setdefault(key, np.ones(DIM))
                grads[key] = grads.get(key, 0) + 2 * weight * row
        rows |= {key: rows[key] - RATE * grad for key, grad in grads.items()}
    return rows


def check_held(comm, keys, rows, expected):
    mine = sorted(key for key in expected if key % comm.size == comm.rank)
    assert keys.tolist() == mine
    np.testing.assert_allclose(rows, [expected[key] for key in mine], 1e-5)


def test_a_session_trains_the_table_of_one_rank(comm, partitioner):
    with tf.Graph().as_default():
        variable = get_kv_variable(
            "kv", DIM, initializer=tf1.ones_initializer(), partitioner=partitioner
        )
        ids = tf1.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(variable, ids)
        loss = tf.reduce_sum(rows * rows * weights_of(comm.rank)[:, None])
        step = tf1.train.GradientDescentOptimizer(RATE).minimize(loss)
        exported = variable.export()
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for number in range(STEPS):
                session.run(step, {ids: ids_of(comm.rank, number)})
            expected = trained(comm.size)
            check_held(comm, *session.run(exported), expected)
            keys = np.array(sorted(expected))
            values = session.run(rows, {ids: keys})  # any rank's
            np.testing.assert_allclose(values, [expected[key] for key in keys.tolist()], 1e-5)


def test_eager_steps_of_keras_train_the_table_of_one_rank(comm, partitioner):
    variable = get_kv_variable(
        "kv", DIM, initializer=tf1.ones_initializer(), partitioner=partitioner
    )
    parts = [variable] if partitioner is None else list(variable)
    optimizer = tf.keras.optimizers.SGD(RATE)
    for number in range(STEPS):
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(variable, ids_of(comm.rank, number))
            loss = tf.reduce_sum(rows * rows * weights_of(comm.rank)[:, None])
        grads = tape.gradient(loss, parts)
        optimizer.apply_gradients(zip(grads, parts, strict=True))
    keys, rows = variable.export()
    check_held(comm, keys.numpy(), rows.numpy(), trained(comm.size))

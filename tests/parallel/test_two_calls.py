"""Two calls of `lookup_sparse` in one step, and steps on keys that lost their rows: real ranks."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import job

STEPS = 20


@pytest.fixture(autouse=True)
def over(comm, monkeypatch):
    """Every test runs over each transport, as if `sok.init` had chosen it."""
    monkeypatch.setattr(job, "_communicator", comm)


def ids_of(*keys):
    return tf.RaggedTensor.from_tensor(tf.constant([keys], tf.int64))


def held(comm, keys):
    """Those of some keys that are this rank's."""
    return [key for key in keys if key % comm.size == comm.rank]


def rows_of(table):
    keys, rows = sok.export(table)
    return dict(zip(keys.numpy().tolist(), rows.numpy()[:, 0].tolist(), strict=True))


def test_two_calls_of_one_session_run_in_the_order_that_the_program_gives(comm):
    """By control dependencies: of the second lookup on the first, and of its gradient."""
    first_ids, second_ids = [1, 2, 3], [2, 3, 4]
    with tf.Graph().as_default():
        tables = [sok.DynamicVariable(2, "ones", name=name) for name in ("one", "two")]
        one = sok.lookup_sparse(tables[0], ids_of(*first_ids), combiners="sum")
        with tf.control_dependencies([one]):
            two = sok.lookup_sparse(tables[1], ids_of(*second_ids), combiners="sum")
        loss = tf.reduce_sum(one * two)
        (of_one,) = tf.gradients(loss, [tables[0]])
        with tf.control_dependencies([of_one.values]):
            (of_two,) = tf.gradients(loss, [tables[1]])
        optimizer = sok.SGD(0.0)
        step = optimizer.apply_gradients([(of_one, tables[0]), (of_two, tables[1])])
        exported = [sok.export(table) for table in tables]
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for _ in range(STEPS):
                values = session.run([one, two, of_one.values, of_two.values, step])
                np.testing.assert_array_equal(values[0], [[3, 3]])
                np.testing.assert_array_equal(values[1], [[3, 3]])
                for grads in values[2:4]:
                    np.testing.assert_array_equal(grads, np.full(grads.shape, 3 * comm.size))
            np.testing.assert_array_equal(session.run(one), [[3, 3]])  # without the second
            for ids, (keys, _) in zip([first_ids, second_ids], session.run(exported), strict=True):
                np.testing.assert_array_equal(keys, held(comm, ids))


@pytest.mark.parametrize("kind", ["hbm", "hybrid"])
def test_a_key_that_its_rank_erased_before_the_step_begins_anew(comm, kind):
    table, optimizer = sok.DynamicVariable(2, "ones", kind), sok.SGD(1.0)
    keys = [1, 2, 3, 4, 2**40]
    for doomed in ([], [2], [3, 4], [999]):
        before = rows_of(table)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(table, ids_of(*keys), combiners="sum"))
        gradient = tape.gradient(loss, table)
        table.erase(tf.constant(doomed, tf.int64))
        optimizer.apply_gradients([(gradient, table)])
        expected = {
            key: (1.0 if key in doomed else before.get(key, 1.0)) - comm.size
            for key in held(comm, keys)
        }
        assert rows_of(table) == expected

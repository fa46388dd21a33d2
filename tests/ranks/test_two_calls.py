"""Two calls of `lookup_sparse` in one step, and steps on keys that lost their rows: real ranks."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from tests.support.helpers import run_threads

STEPS = 20


IN_TURN = "comm"


def ids_of(*keys):
    return tf.RaggedTensor.from_tensor(tf.constant([keys], tf.int64))


def held(comm, keys):
    """Those of some keys that are this rank's."""
    return [key for key in keys if key % comm.size == comm.rank]


@pytest.mark.parametrize("has_order", [True, False])
def test_two_calls_of_one_session_run_in_one_order_on_all_ranks(comm, has_order):
    """That of the program, by control dependencies, or any."""
    first_ids, second_ids = [1, 2, 3], [2, 3, 4]
    with tf.Graph().as_default():
        tables = [sok.DynamicVariable(2, "ones", name=name) for name in ("one", "two")]
        one = sok.lookup_sparse(tables[0], ids_of(*first_ids), combiners="sum")
        with tf.control_dependencies([one] if has_order else []):
            two = sok.lookup_sparse(tables[1], ids_of(*second_ids), combiners="sum")
        loss = tf.reduce_sum(one * two)
        (of_one,) = tf.gradients(loss, [tables[0]])
        with tf.control_dependencies([of_one.values] if has_order else []):
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
            np.testing.assert_array_equal(session.run(two), [[3, 3]])
            for ids, (keys, _) in zip([first_ids, second_ids], session.run(exported), strict=True):
                np.testing.assert_array_equal(keys, held(comm, ids))


def test_operations_and_host_calls_of_one_session_run_in_one_order(comm):
    """Sums, which are operations, and lookups with their gradients, in a session of one thread."""
    count = 4
    with tf.Graph().as_default():
        table = sok.DynamicVariable(2, "ones", name="table")
        given = tf.compat.v1.placeholder(tf.float32, [])
        sums, rows = [], []
        for i in range(count):
            sums.append(sok.communication.allreduce(given + i, "sum"))
            rows.append(sok.lookup_sparse(table, ids_of(i, i + 1 + comm.rank), combiners="sum"))
        grads = tf.gradients(tf.add_n(rows), [table])[0]
        largest = [sok.communication.allreduce(tf.reduce_max(row), "max") for row in rows]
        assert {each.op.inputs[0].op.type for each in sums} <= {"SokCollectiveInOrder", "Const"}
        config = tf.compat.v1.ConfigProto(
            use_per_session_threads=True, inter_op_parallelism_threads=1
        )
        with tf.compat.v1.Session(config=config) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for step in range(STEPS):
                found = session.run([sums, rows, grads, largest], {given: step + comm.rank})
                of_ranks = [step + rank for rank in range(comm.size)]
                assert found[0] == [sum(value + i for value in of_ranks) for i in range(count)]
                np.testing.assert_array_equal(found[1], np.full((count, 1, 2), 2))
                assert found[3] == [2] * count


def test_graphs_in_two_threads_have_their_own_rows(comm):
    """Two graphs whose tables and calls have the same names."""
    mine = held(comm, range(40))
    calls = []
    for first_key in (100, 5000):
        with tf.Graph().as_default() as graph:
            table = sok.DynamicVariable(1, "ones", name="table")
            ids = tf.compat.v1.placeholder(tf.int64, [None])
            ragged = tf.RaggedTensor.from_row_splits(ids, [0, tf.size(ids)])
            rows = sok.lookup_sparse(table, ragged, combiners="sum")
            values = [[first_key + key] for key in mine]
            assigned = sok.assign(table, mine, tf.constant(values, tf.float32))
            session = tf.compat.v1.Session(graph=graph)
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(assigned)
            calls.append((first_key, session, rows, ids, table))

    def look_up(number):
        first_key, session, rows, ids, _ = calls[number]
        for step in range(STEPS):
            keys = [step, 20 + (step + 7 * number) % 20]
            found = session.run(rows, {ids: keys})[0, 0]
            assert found == sum(first_key + key for key in keys), (first_key, keys)

    run_threads(look_up, 2)

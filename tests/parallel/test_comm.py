"""The facts of communicators over real transports."""

import threading

import numpy as np
import pytest

from tests.comm_facts import FACTS, check_alltoallv, uneven


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
def test_fact(comm, fact):
    fact(comm)


def test_calls_from_another_thread(comm):
    """TensorFlow calls from threads of its own."""
    errors = []

    def run():
        try:
            check_alltoallv(comm, uneven(comm, 33), (2,), "float32")
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert errors == []


@pytest.mark.parametrize("graph", [False, True])
def test_calls_from_inside_a_py_function(comm, graph):
    tf = pytest.importorskip("tensorflow")

    def body(x):
        rows = np.repeat(x.numpy()[None], comm.size, axis=0)
        return comm.alltoallv(rows, np.ones(comm.size, np.int32)).rows

    def call(x):
        return tf.py_function(body, [x], tf.int64)

    function = tf.function(call) if graph else call
    for step in range(3):
        got = function(tf.constant([comm.rank, step], tf.int64)).numpy()
        np.testing.assert_array_equal(got, [[r, step] for r in range(comm.size)])


def test_calls_while_a_function_is_traced(comm):
    tf = pytest.importorskip("tensorflow")

    @tf.function
    def traced(x):
        return x + float(comm.allreduce(comm.rank + 1))

    assert float(traced(tf.constant(1.0))) == 1 + comm.size * (comm.size + 1) / 2

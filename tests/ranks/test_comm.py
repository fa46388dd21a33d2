"""The facts of communicators over real transports."""

import os
import threading

import numpy as np
import pytest

from sok_lite.comm import CommunicatorError
from sok_lite.comm.local import LocalCommunicator, MultiHostCommunicator, connect_local
from tests.support.comm_facts import FACTS, check_alltoallv, uneven


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

    @tf.function(autograph=False)  # it would convert the communicator, which takes 5 s
    def traced(x):
        return x + float(comm.allreduce(comm.rank + 1))

    assert float(traced(tf.constant(1.0))) == 1 + comm.size * (comm.size + 1) / 2


# By what differs: the call of rank 1, and that of all others.
DIFFERENT_CALLS = {
    "op": (
        lambda comm: comm.allreduce(np.zeros(4), "max"),
        lambda comm: comm.allreduce(np.zeros(4)),
    ),
    "root": (
        lambda comm: comm.broadcast(np.zeros(4), 1),
        lambda comm: comm.broadcast(np.zeros(4), 0),
    ),
    "name": (
        lambda comm: one_row_each(comm, recv_splits=np.ones(comm.size, int), call="other"),
        lambda comm: one_row_each(comm),
    ),
    "kind": (lambda comm: comm.allreduce(np.zeros(1)), lambda comm: one_row_each(comm)),
    "dtype": (
        lambda comm: comm.allgatherv(np.zeros((2, 2), np.float32)),
        lambda comm: comm.allgatherv(np.zeros((2, 2), np.int32)),
    ),
}


def one_row_each(comm, **options):
    return comm.alltoallv(np.zeros(comm.size), np.ones(comm.size, int), **options)


@pytest.mark.parametrize(
    ("of_rank_1", "of_others"), DIFFERENT_CALLS.values(), ids=DIFFERENT_CALLS.keys()
)
def test_ranks_in_different_calls_all_raise(comm, of_rank_1, of_others):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    if isinstance(comm, (MultiHostCommunicator, LocalCommunicator)):
        comm = connect_local(comm._base)  # ranks that have disagreed do not go on with it
    with pytest.raises(CommunicatorError, match="different calls"):
        (of_rank_1 if comm.rank == 1 else of_others)(comm)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_cannot_talk_to_other_ranks(comm):
    child = os.fork()
    if child == 0:
        try:
            comm.barrier()
        except CommunicatorError as error:
            os._exit(7 if "forked child" in str(error) else 1)
        os._exit(0)
    # One rank has nobody to disturb.
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (7 if comm.size > 1 else 0)
    check_alltoallv(comm, uneven(comm, 33), (2,), "float32")

"""Whole jobs of two ranks, started by the real launchers: what is said when a rank dies or errs."""

import re
import textwrap

import pytest

from sok_lite.comm import launched_ranks
from tests.support.rank_jobs import run_job

pytestmark = pytest.mark.skipif(launched_ranks() > 1, reason="a rank does not launch ranks")

HEAD = """
import os, signal, sys, threading
import numpy as np
from sok_lite.comm import CommunicatorError, make_communicator
comm = make_communicator("horovod")
"""


def launch(folder, program, local=True):
    """Runs a program on two ranks of Horovod; returns its exit status and all it printed."""
    source = HEAD + textwrap.dedent(program)
    job = run_job("horovod", source, folder, 2, local, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="60")
    return job.code, job.output


def test_a_killed_rank_ends_the_job(tmp_path):
    """SIGKILL hits rank 1 among a stream of collectives, at a moment of no one's choice."""
    code, output = launch(
        tmp_path,
        """
        if comm.rank == 0:
            # horovodrun ends rank 0 too, after 5 s if need be: let it say first what it saw.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        rows, splits = np.zeros((200_000, 8), np.float32), [100_000, 100_000]
        comm.alltoallv(rows, splits)
        if comm.rank == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            while True:
                comm.alltoallv(rows, splits)
        except CommunicatorError as error:
            print(f"rank {comm.rank} saw: {error}", flush=True)
            sys.exit(5)
        """,
        local=False,
    )
    assert code != 0, output
    assert "rank 0 saw: `alltoallv` failed on rank 0 of 2: another rank has died" in output
    assert "Horovod says" in output


@pytest.mark.full_only("starts ranks with TensorFlow")
def test_abort_ends_the_job_with_its_message(tmp_path):
    code, output = launch(
        tmp_path,
        """
        if comm.rank == 1:
            comm.abort("no more disk")
        comm.barrier()
        print("never printed")
        """,
    )
    assert code != 0
    assert "sok_lite: rank 1 aborts: no more disk" in output
    assert "never printed" not in output


ENDS_IN_ONE_LINE = {
    # What a rank finds out of the others, and what all find out.
    "different calls": (
        "comm.allreduce(1) if comm.rank else comm.broadcast(1)",
        r"\w+\.py:\d+: Ranks make different calls: rank \d is in (allreduce|broadcast)",
    ),
    "not the same": (
        "check_equal_on_all_ranks(comm, {'dim': comm.rank}, 'table x')",
        r"\w+\.py:\d+: table x must be the same on all ranks\. Received: dim is 0 on rank 0",
    ),
    # TensorFlow has the text of such an error in a graph within its own.
    "in a graph": (
        "raise RuntimeError('Graph error:\\n\\nCommunicatorError: gone\\nTraceback: ...')",
        r"\w+\.py:\d+: gone$",
    ),
}


@pytest.mark.parametrize("what", ENDS_IN_ONE_LINE)
def test_errors_about_ranks_end_in_one_line(what, tmp_path):
    statement, text = ENDS_IN_ONE_LINE[what]
    program = f"""
from sok_lite.comm import make_communicator
from sok_lite.engine.agreement import check_equal_on_all_ranks
comm = make_communicator("mpi")
{statement}
"""
    for wants_trace, is_traced in (("", False), ("1", True))[: 1 + (what == "in a graph")]:
        job = run_job("mpi", program, tmp_path, SOK_LITE_COMM_TRACE=wants_trace)
        said = [line for line in job.output.splitlines() if line.startswith("sok_lite: rank")]
        aborts = [line for line in said if " aborts: " in line]
        assert job.code == 1 and aborts, job.output
        # One that sees the other's end first says so.
        assert any(re.search(text, line) for line in aborts), job.output
        assert ("Traceback (most" in job.output) == is_traced, job.output


def test_an_exception_of_one_rank_shows_its_traceback(tmp_path):
    program = """
from sok_lite.comm import make_communicator
comm = make_communicator("mpi")
if comm.rank:
    raise RuntimeError("no such file\\nin the folder")
comm.barrier()
"""
    job = run_job("mpi", program, tmp_path)
    assert job.code == 1 and "Traceback (most" in job.output
    why = "an exception has ended its program: RuntimeError: no such file"
    assert f"sok_lite: rank 1 aborts: {why}\n" in job.output


@pytest.mark.full_only("waits for Horovod: 14 s")
def test_horovod_errors_keep_their_text_and_harm_nothing(tmp_path):
    code, output = launch(
        tmp_path,
        """
        import horovod.tensorflow as hvd
        try:
            comm.allgatherv(np.zeros((2, 3 + comm.rank), np.float32))
        except CommunicatorError as error:
            assert "ranks make different calls" in str(error), error
            print(f"rank {comm.rank} mismatch: {error}", flush=True)
        assert comm.allreduce(comm.rank + 1) == 3
        hvd.shutdown()
        try:
            comm.barrier()
        except CommunicatorError as error:
            print(f"rank {comm.rank} shutdown: {error}", flush=True)
        """,
        local=False,
    )
    assert code == 0, output
    for rank in (0, 1):
        assert f"rank {rank} mismatch: `allgatherv` failed on rank {rank} of 2" in output
        assert f"rank {rank} shutdown: `allgatherv` failed on rank {rank} of 2" in output
    assert "Mismatched ALLTOALL tensor shapes" in output


@pytest.mark.full_only("starts ranks with TensorFlow")
def test_horovod_in_a_tensorflow_1_program(tmp_path):
    """With eager execution off, a collective still runs at once, in and outside a session."""
    code, output = launch(
        tmp_path,
        """
        import tensorflow as tf
        tf.compat.v1.disable_eager_execution()
        assert comm.allreduce(comm.rank + 1) == 3
        x = tf.constant(1.5) + comm.rank
        step = tf.numpy_function(lambda x: comm.allreduce(x), [x], tf.float32)
        with tf.compat.v1.Session() as session:
            print("total", session.run(step), flush=True)
        """,
        local=False,
    )
    assert code == 0, output
    assert output.count("total 4.0") == 2

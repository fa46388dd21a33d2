"""Jobs on several machines, which namespaces stand in for: what holds there, and what ends them."""

import pytest

from sok_lite.comm import launched_ranks
from tests.support.machines import launch, machines, unavailable
from tests.support.rank_jobs import run_job

NO_MACHINES = unavailable()
pytestmark = [
    pytest.mark.skipif(launched_ranks() > 1, reason="a rank does not launch ranks"),
    pytest.mark.skipif(NO_MACHINES is not None, reason=str(NO_MACHINES)),
]

# However little ranks of one machine have for each other, it goes through memory.
TESTS = """
import sys
import pytest
from sok_lite.comm import local

local._MIN_SHARED_BYTES = 0
sys.exit(pytest.main(["-q", "-x", "--color=no", "-p", "no:cacheprovider", *{arguments}]))
"""

# Collectives until one fails; the culprit says when that may be.
STREAM = """
import os, signal, sys, time
import numpy as np
from sok_lite.comm import CommunicatorError, make_communicator

comm = make_communicator(sys.argv[1])
try:
    for turn in range(100_000):
        if turn == 5 and comm.rank == comm.size - 1:
            print("ENDS", time.time(), flush=True)
            {end}
        comm.allgatherv(np.zeros((1000, 4)))
        time.sleep(0.01)
except CommunicatorError as error:
    print(f"rank {{comm.rank}} saw: {{error}}", flush=True)
    sys.exit(5)
"""


def run_on_machines(tool, number, ranks, program, folder, **settings):
    with machines(number, folder) as (head, hosts):
        command = launch(tool, head, hosts, ranks, folder)
        return run_job(tool, program, folder, launch=command, **settings)


def check_tests(tool, number, ranks, folder, *arguments, timeout=300):
    """Runs tests of tests/ranks, on all ranks."""
    program = TESTS.format(arguments=list(arguments))
    job = run_on_machines(tool, number, ranks, program, folder, timeout=timeout)
    assert job.code == 0, job.output
    assert job.output.count(" passed") == number * ranks, job.output
    # The tests' own files stay.
    assert [name for name in job.left if name.startswith("process")] == []


def test_each_machine_has_a_name_and_ranks_of_its_own(tmp_path):
    program = """
        import socket, sys
        from sok_lite.comm import make_communicator
        comm = make_communicator(sys.argv[1])
        print(f"rank {comm.rank} is {comm.local_rank} of {socket.gethostname()}", flush=True)
        """
    job = run_on_machines("mpi", 2, 2, program, tmp_path)
    assert job.code == 0, job.output
    for rank, place in enumerate(["0 of machine1", "1 of machine1", "0 of machine2"]):
        assert f"rank {rank} is {place}" in job.output


@pytest.mark.full_only("starts two machines and jobs on them")
def test_facts_over_horovod_on_two_machines(tmp_path):
    """Ranks of one machine share memory; a table is trained as on one rank, saved and loaded."""
    files = [f"tests/ranks/test_{name}.py" for name in ("comm", "lookup", "dump_load")]
    chosen = "local and (test_fact or each_rank or any_number_of_ranks) and not Adam"
    check_tests("horovod", 2, 2, tmp_path, *files, "-k", chosen)


@pytest.mark.full_only("runs four rooms of tests on two machines")
def test_all_facts_over_mpi_on_two_machines(tmp_path):
    files = [f"tests/ranks/test_{name}.py" for name in ("comm", "lookup", "training", "dump_load")]
    # Training with one optimizer: how its gradients travel is the same for all.
    chosen = "not SGD and not Adagrad"
    check_tests("mpi", 2, 1, tmp_path, *files, "-k", chosen, timeout=1200)


@pytest.mark.full_only("starts two machines and jobs on them")
@pytest.mark.parametrize("tool", ["mpi", "horovod"])
def test_a_rank_that_is_killed_on_another_machine_ends_the_job(tmp_path, tool):
    program = STREAM.format(end="os.kill(os.getpid(), signal.SIGKILL)")
    job = run_on_machines(tool, 2, 2, program, tmp_path)
    assert job.code != 0, job.output
    assert job.ended_s < 60, job.output  # of a job that would last 1000 s
    assert job.left == []

"""Jobs whose ranks are on two machines, by what these ranks are told of where they are."""

import subprocess
import sys

import pytest

from sok_lite.comm import launched_ranks, local
from tests.support.rank_jobs import ROOT, run_job

pytestmark = [
    pytest.mark.skipif(launched_ranks() > 1, reason="a rank does not launch ranks"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

# Two ranks of each machine. However little they have for each other, it goes through memory.
PLACED = """
import os, signal, sys, time
import numpy as np
import pytest
from sok_lite.comm import CommunicatorError, local, make_communicator

local._machine_id = lambda: b"machine %d" % (int(os.environ["HOROVOD_RANK"]) // 2)
local._MIN_SHARED_BYTES = 0
"""

TESTS = """
chosen = ["tests/ranks/test_comm.py", "-k", "local and test_fact"]
sys.exit(pytest.main(["-q", "-x", "--color=no", "-p", "no:cacheprovider", *chosen]))
"""

# Collectives until the last rank is killed.
STREAM = """
comm = make_communicator("horovod")
print("over", type(comm).__name__, flush=True)
try:
    for turn in range(100_000):
        if turn == 5 and comm.rank == comm.size - 1:
            print("ENDS", time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        comm.allgatherv(np.zeros((1000, 4)))
        time.sleep(0.01)
except CommunicatorError as error:
    print(f"rank {comm.rank} saw: {error}", flush=True)
    sys.exit(5)
"""


@pytest.mark.full_only("runs tests on four ranks")
def test_facts_on_two_machines(tmp_path):
    job = run_job("horovod", PLACED + TESTS, tmp_path, 4)
    assert job.code == 0, job.output
    assert job.output.count(" passed") == 4, job.output
    # The tests' own files stay.
    assert [name for name in job.left if name.startswith("process")] == []


@pytest.mark.full_only("starts four ranks")
def test_a_rank_that_is_killed_on_another_machine_ends_the_job(tmp_path):
    job = run_job("horovod", PLACED + STREAM, tmp_path, 4)
    assert job.output.count("over MultiHostCommunicator") == 4, job.output
    assert job.code != 0, job.output
    assert job.ended_s < 60, job.output  # of a job that would last 1000 s
    assert job.left == []


def test_a_machine_is_one_boot_and_one_network():
    """Ranks of two containers do not reach each other's memory."""
    program = "from sok_lite.comm import local; print(local._machine_id().decode())"
    command = ["unshare", "--net", sys.executable, "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except OSError:
        pytest.skip("no unshare here")
    if done.returncode != 0:
        pytest.skip(f"no namespaces here: {done.stderr}")
    here, there = local._machine_id().decode().split(), done.stdout.split()
    assert here[0] == there[0] and here[1] != there[1]

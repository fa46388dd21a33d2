"""Communicators: the facts on threads and on one process, broken runs, and what a process gets."""

import re
import sys
import threading
import time

import numpy as np
import pytest

from sok_lite.comm import (
    CommunicatorError,
    JobAborted,
    SingleCommunicator,
    launched_ranks,
    make_communicator,
    run_ranks,
    threads,
)
from sok_lite.comm.header import FAREWELL, Header, disagreement, load_by, save_by
from tests.support.comm_facts import FACTS

LAUNCHER_VARIABLES = [
    "HOROVOD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
]


@pytest.fixture
def not_launched(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
@pytest.mark.parametrize("size", ["single", 1, 2, 4])
def test_fact(fact, size):
    if size == "single":
        fact(SingleCommunicator())
    else:
        run_ranks(size, fact)


def test_one_process_copies_nothing():
    comm, rows = SingleCommunicator(), np.arange(6.0).reshape(3, 2)
    for result in (
        comm.alltoallv(rows, [3]).rows,
        comm.allgatherv(rows).rows,
        comm.allreduce(rows),
        comm.broadcast(rows),
    ):
        assert np.shares_memory(result, rows)


def test_what_is_no_array_of_numpy_is_refused_with_the_way_out():
    class OnTheGpu:
        __cuda_array_interface__ = ()

    with pytest.raises(TypeError, match="to_host"):
        SingleCommunicator().allgatherv(OnTheGpu())
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(TypeError, match="View it as uint16"):
        SingleCommunicator().allgatherv(np.zeros(3, ml_dtypes.bfloat16))


def test_trace_prints_one_line_per_collective(monkeypatch, capsys):
    monkeypatch.setenv("SOK_LITE_COMM_TRACE", "1")
    comm = SingleCommunicator()
    comm.alltoallv(np.zeros((3, 2), np.float32), [3])
    comm.barrier()
    assert capsys.readouterr().err == "r0 | alltoallv float32[3, 2] -> [3]\nr0 | barrier\n"


# ---- runs that break ----------------------------------------------------------------------------


def elapsed(function):
    start = time.monotonic()
    function()
    return time.monotonic() - start


@pytest.mark.parametrize("bad", [0, 2])
def test_an_error_on_one_rank_ends_the_run_with_that_error(bad):
    seen = {}

    def program(comm):
        if comm.rank == bad:
            raise KeyError("lost")
        try:
            comm.barrier()
        except CommunicatorError as error:
            seen[comm.rank] = str(error)
            raise

    def run():
        with pytest.raises(KeyError, match="lost"):
            run_ranks(3, program, timeout=50)

    assert elapsed(run) < 25  # at once, not when the others' patience ends
    assert len(seen) == 2
    assert all(f"Rank {bad} failed: KeyError" in text for text in seen.values())


def test_a_rank_that_returns_early_ends_the_run():
    def program(comm):
        if comm.rank != 1:
            comm.barrier()

    def run():
        with pytest.raises(CommunicatorError, match=r"Rank 1 returned, rank \d is in barrier"):
            run_ranks(3, program, timeout=50)

    assert elapsed(run) < 25


FLOATS = np.zeros((2, 3), np.float32)
# Calls of rank 0 and of rank 1, and what both are told.
DIFFERENT = {
    "another collective": (
        lambda comm: comm.allgatherv(FLOATS),
        lambda comm: comm.alltoallv(FLOATS, [1, 1]),
        r"Ranks make different calls.*rank 0: allgatherv float32\(n, 3\), rank 1: alltoallv",
    ),
    "another dim": (
        lambda comm: comm.allgatherv(FLOATS),
        lambda comm: comm.allgatherv(np.zeros((2, 4), np.float32)),
        "different calls",
    ),
    "another dtype": (
        lambda comm: comm.allgatherv(FLOATS),
        lambda comm: comm.allgatherv(np.zeros((2, 3), np.int32)),
        "different calls",
    ),
    "another shape": (
        lambda comm: comm.allreduce(np.zeros(3)),
        lambda comm: comm.allreduce(np.zeros(4)),
        "different calls",
    ),
    "wrong splits": (
        *[lambda comm: comm.alltoallv(np.zeros(4), [2, 2], np.array([2, 3], np.int32))] * 2,
        r"expected \[2, 3\].*received \[2, 2\]",
    ),
}


@pytest.mark.cases("what")
@pytest.mark.parametrize("what", DIFFERENT)
def test_different_calls_on_different_ranks_raise_on_all(what):
    *calls, text = DIFFERENT[what]

    def program(comm):
        with pytest.raises(CommunicatorError, match=text):
            calls[comm.rank](comm)

    run_ranks(2, program)


TOLD = [
    (save_by("model.save()"), r"Rank 1 saves, and rank 0 does not: .* call model.save\(\), or"),
    (load_by("load()"), r"Rank 1 loads, and rank 0 does not: every .* call load\(\), or"),
    ("dump", "All ranks must make the same calls in the same order"),
]


@pytest.mark.cases("call")
@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("call, told", TOLD)
def test_a_call_that_programs_make_on_one_rank_is_told_by_what_it_does(call, told, returns):
    def program(comm):
        if comm.rank == 1:
            comm.barrier(call)
        elif not returns:
            comm.barrier("a training step of fit()")

    with pytest.raises(CommunicatorError, match=re.escape(call)) as raised:
        run_ranks(2, program)
    assert re.search(told, str(raised.value))


@pytest.mark.cases("call")
@pytest.mark.parametrize("other", ["a training step of fit()", FAREWELL])
@pytest.mark.parametrize("call, told", TOLD)
def test_ranks_of_a_job_are_told_the_same(call, told, other):
    headers = {1: Header(7, call, "|u1", 1), 0: Header(7, other, "|u1", 1)}
    for rank, mine in headers.items():
        (theirs,) = headers[1 - rank].pack([0])
        text = disagreement(rank, mine, {1 - rank: theirs})
        assert call in text
        assert re.search(told, text)


def test_a_rank_that_hangs_is_named(monkeypatch):
    release, is_told = threading.Event(), threading.Event()

    def program(comm):
        if comm.rank == 1:
            while not comm._world.waiting():
                time.sleep(0.001)
            is_told.set()
            release.wait(60)
        comm.barrier()

    class Clock:
        """It starts at 0; the next time that it says is when rank 0 waits, however late that is."""

        def monotonic():
            if not hasattr(Clock, "start"):
                Clock.start = 0.0
                return Clock.start
            assert is_told.wait(60)
            return 1.0

    monkeypatch.setattr(threads, "time", Clock)
    with pytest.raises(
        TimeoutError, match=r"still running after 0.2 s\. Rank 0 waits in barrier\.$"
    ):
        run_ranks(2, program, timeout=0.2)
    release.set()


def test_ranks_that_run_too_long_are_named():
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"Ranks \[0, 1\] were still running after 0.2 s"):
        run_ranks(2, lambda comm: release.wait(60), timeout=0.2)
    release.set()


def test_abort_ends_all_ranks():
    seen = []

    def program(comm):
        if comm.rank == 0:
            comm.abort("no more disk")
        try:
            comm.barrier()
        except CommunicatorError as error:
            seen.append(str(error))
            raise

    with pytest.raises(JobAborted, match="no more disk"):
        run_ranks(2, program)
    assert seen == ["Rank 0 aborted: no more disk"]


def test_abort_of_one_process_raises():
    with pytest.raises(JobAborted, match="why"):
        SingleCommunicator().abort("why")


# ---- what a process gets ------------------------------------------------------------------------


def test_unknown_tool_names_the_known_ones():
    with pytest.raises(ValueError, match="'horovod', 'mpi', 'single'.*'nccl'"):
        make_communicator("nccl")


@pytest.mark.cases("name")
@pytest.mark.parametrize("name", LAUNCHER_VARIABLES)
def test_launched_ranks_reads_the_launcher(not_launched, name):
    assert launched_ranks() == 1
    not_launched.setenv(name, "3")
    assert launched_ranks() == 3
    not_launched.setenv(name, "many")
    assert launched_ranks() == 1


@pytest.mark.parametrize("tool", ["horovod", "mpi", "single"])
def test_one_rank_needs_nothing_installed_and_refuses_what_several_refuse(not_launched, tool):
    hide(not_launched)
    assert isinstance(make_communicator(tool), SingleCommunicator)
    not_launched.setenv("SOK_LITE_COMM_LOCAL", "maybe")
    with pytest.raises(ValueError, match="SOK_LITE_COMM_LOCAL must be 0 or 1. Received: 'maybe'"):
        make_communicator(tool)


@pytest.mark.parametrize("tool, package", [("horovod", "Horovod"), ("mpi", "mpi4py")])
def test_several_ranks_without_the_tool_raise_one_clear_error(not_launched, tool, package):
    hide(not_launched)
    not_launched.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(
        CommunicatorError, match=f"2 ranks were launched.*{tool}.*{package} cannot be imported"
    ):
        make_communicator(tool)


def test_single_is_obeyed_among_several_ranks_with_a_warning(not_launched):
    not_launched.setenv("PMI_SIZE", "2")
    with pytest.warns(RuntimeWarning, match="2 ranks were launched"):
        assert isinstance(make_communicator("single"), SingleCommunicator)


def hide(monkeypatch):
    """Makes both tools impossible to import, as on a machine that has neither."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("horovod", "mpi4py"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "horovod", None)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
    monkeypatch.setitem(sys.modules, "mpi4py", None)

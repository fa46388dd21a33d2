"""Ranks that share memory: the facts, growing memory, ranks that leave, and ways to stay apart."""

import gc
import itertools
import math
import os
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from sok_lite.comm import CommunicatorError, local, run_ranks
from sok_lite.comm.local import SWITCH_VARIABLE, LocalCommunicator, connect_local, stall_timeouts
from tests.support.comm_facts import FACTS, check_alltoallv, uneven
from tests.support.helpers import check_interrupts_at_lines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and abstract sockets")


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.delenv(SWITCH_VARIABLE, raising=False)


def run_local(size, program):
    """Runs a program on ranks that are threads, brought together by their own communicator."""

    def connected(base):
        comm = connect_local(base)
        assert isinstance(comm, LocalCommunicator)
        assert (comm.rank, comm.size, comm.local_rank) == (base.rank, base.size, base.local_rank)
        try:
            return program(comm)
        finally:
            for link in comm._boxes.links.values():
                link.close()

    return run_ranks(size, connected)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_on_threads(fact, size):
    run_local(size, fact)


def test_memory_that_grows_and_is_used_again():
    """Sizes go up and down, so both outboxes are replaced several times and reused in between."""

    def program(comm):
        for most in [1, 40_000, 3, 90_000, 90_000, 7, 200_000, 0, 1, 90_000]:
            check_alltoallv(comm, uneven(comm, most), (3,), "float32")

    run_local(3, program)


def test_ranks_that_are_done_leave_no_files_open():
    def open_files():
        return set(os.listdir("/proc/self/fd"))

    def program(comm):
        for most in [10, 90_000, 10]:
            check_alltoallv(comm, uneven(comm, most), (3,), "float32")

    run_local(3, program)
    gc.collect()
    before = open_files()
    run_local(3, program)
    gc.collect()
    assert len(open_files()) <= len(before)


def test_a_fast_rank_does_not_overwrite_what_a_slow_one_still_reads():
    """Rank 1 reads late: rank 0 is told to be two collectives ahead, which it cannot be."""

    def program(comm):
        for turn in range(300):
            if turn % 7 == comm.rank:
                sum(range(20_000))
            got = comm.allgatherv(np.full((500, 4), 10 * turn + comm.rank))
            np.testing.assert_array_equal(
                got.rows[:, 0], np.repeat(10 * turn + np.arange(comm.size), 500)
            )

    run_local(3, program)


def test_different_calls_raise_on_all_ranks():
    def program(comm):
        rows = np.zeros((3, 2), np.float32)
        with pytest.raises(
            CommunicatorError, match="Ranks make different calls: rank 0 is in|rank 1"
        ):
            if comm.rank == 1:
                comm.alltoallv(rows, [1, 1, 1])
            else:
                comm.allgatherv(rows)
        with pytest.raises(CommunicatorError, match="different calls"):  # and ever after
            comm.barrier()

    run_local(3, program)


@pytest.mark.parametrize(
    "rows", [np.zeros((2, 4), np.float32), np.zeros((2, 3), np.int32)], ids=["dim", "dtype"]
)
def test_rows_of_another_format_raise_on_all_ranks(rows):
    def program(comm):
        with pytest.raises(CommunicatorError, match=r"different calls.*<f4 rows of 12 bytes"):
            comm.allgatherv(rows if comm.rank else np.zeros((2, 3), np.float32))

    run_local(2, program)


def test_a_rank_that_leaves_is_named():
    def program(comm):
        comm.barrier()
        if comm.rank == 1:
            return  # closes its sockets, as the end of a process does
        with pytest.raises(CommunicatorError, match="Rank 1 has died or has left, seen by rank 0"):
            comm.barrier()

    run_local(2, program)


def test_a_rank_that_does_not_call_is_named(monkeypatch, capfd):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.1")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0.35")
    # A clock of looks at it: only rank 0 waits, and on a busy machine both limits would be over
    # before it looked for the first time.
    looks = itertools.count()
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: next(looks) / 20))

    def program(comm):
        if comm.rank == 0:
            with pytest.raises(CommunicatorError, match="Rank 1 did not call gather within"):
                comm.barrier()
        else:
            comm._boxes.links[0].recv(100)  # the signal, which is never answered
            comm._boxes.links[0].settimeout(30)
            assert comm._boxes.links[0].recv(100) == b""

    run_local(2, program)
    assert "rank 0 has waited 0 s in gather for rank 1" in capfd.readouterr().err


def test_one_rank_that_is_elsewhere_keeps_all_on_the_slow_way(monkeypatch):
    here = local._machine_id()
    assert here
    answers = iter([b"elsewhere", here])
    monkeypatch.setattr(local, "_machine_id", lambda: next(answers))
    assert run_ranks(2, lambda base: connect_local(base) is base) == [True, True]


def test_ranks_that_cannot_connect_stay_on_the_slow_way(monkeypatch):
    def refuse(links, listener, rank, names, tokens):
        if rank == 1:
            raise ConnectionRefusedError("closed")

    monkeypatch.setattr(local, "_connect", refuse)
    assert run_ranks(2, lambda base: connect_local(base) is base) == [True, True]


def test_one_rank_without_sockets_keeps_all_on_the_slow_way(monkeypatch):
    original = local._socket

    def refuse():
        if threading.current_thread().name == "rank-1":
            raise PermissionError("no sockets here")
        return original()

    def program(base):
        assert connect_local(base) is base
        return base.allreduce(base.rank).tolist()  # the ranks are still in step

    monkeypatch.setattr(local, "_socket", refuse)
    assert run_ranks(3, program) == [3, 3, 3]


def test_the_switch_keeps_ranks_on_the_slow_way(monkeypatch):
    monkeypatch.setenv(SWITCH_VARIABLE, "0")
    assert run_ranks(2, lambda base: connect_local(base) is base) == [True, True]


def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch):
    monkeypatch.setenv(SWITCH_VARIABLE, "off")
    with pytest.raises(ValueError, match="SOK_LITE_COMM_LOCAL must be 0 or 1. Received: 'off'"):
        run_ranks(2, connect_local)


def test_one_rank_has_nothing_to_connect():
    assert run_ranks(1, lambda base: connect_local(base) is base) == [True]


def test_a_stranger_cannot_join():
    """A process that calls without the job's token is turned away; the ranks still connect."""

    def program(base):
        def when_all_listen(x, op, original=base.allreduce):
            reduced = original(x, op)
            if base.rank == 1 and not strangers:
                stranger = local._socket()
                stranger.connect(b"\0" + names[0])
                stranger.send(local._HELLO.pack(1, b"?" * 16))
                strangers.append(stranger)
            return reduced

        def remember(row, original=base.allgatherv):
            gathered = original(row)
            card = gathered.rows[0].tobytes()
            names.append(card[64:128].rstrip())
            return gathered

        base.allreduce, base.allgatherv = when_all_listen, remember
        comm = connect_local(base)
        comm.barrier()
        return type(comm)

    names, strangers = [], []
    assert run_ranks(2, program) == [LocalCommunicator] * 2
    assert strangers[0].recv(10) == b""  # closed by the rank
    strangers[0].close()


# ---- calls that break off ------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [4, 1])
def test_an_interrupt_at_any_line_of_a_collective_leaves_no_rank_out_of_step(stride):
    check_interrupts_at_lines(lambda program: run_local(3, program), stride)


def test_a_rank_that_cannot_allocate_in_the_middle_is_named_by_all(monkeypatch):
    original = local.Outbox.reserve

    def reserve(self, num_bytes):
        if threading.current_thread().name == "rank-2" and num_bytes > 1000:
            raise MemoryError("no more")
        return original(self, num_bytes)

    monkeypatch.setattr(local.Outbox, "reserve", reserve)

    def program(comm):
        comm.barrier()
        error = MemoryError if comm.rank == 2 else CommunicatorError
        with pytest.raises(error, match="no more"):
            comm.allgatherv(np.zeros((1000, 2)))
        with pytest.raises(CommunicatorError, match="Rank 2 broke off in 'allgatherv': MemoryErr"):
            comm.barrier()

    run_local(3, program)


def test_a_rank_that_leaves_in_order_is_named_by_those_who_wait():
    def program(comm):
        comm.barrier()
        if comm.rank == 1:
            comm.leave()
            return
        with pytest.raises(CommunicatorError, match="Rank 1 has come to the end of its program, s"):
            comm.barrier()

    run_local(3, program)


# ---- settings of Horovod that users have --------------------------------------------------------


@pytest.mark.parametrize("value", ["0", "", "60", "99.5", "abc", "30s", "-5", "nan", "inf", "1e99"])
@pytest.mark.parametrize(
    "name", ["HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]
)
def test_a_setting_for_stalls_breaks_no_job(monkeypatch, name, value):
    monkeypatch.setenv(name, value)

    def program(comm):
        if comm.rank == 1:
            time.sleep(0.05)
        return comm.allreduce(comm.rank).tolist()

    assert run_local(2, program) == [1, 1]


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({}, (60, math.inf)),
        ({"CHECK_TIME_SECONDS": "5", "SHUTDOWN_TIME_SECONDS": "7.5"}, (5, 7.5)),
        ({"CHECK_TIME_SECONDS": "0", "SHUTDOWN_TIME_SECONDS": "0"}, (math.inf, math.inf)),
        ({"CHECK_TIME_SECONDS": "abc", "SHUTDOWN_TIME_SECONDS": "-1"}, (60, math.inf)),
        ({"CHECK_DISABLE": "1", "SHUTDOWN_TIME_SECONDS": "7"}, (math.inf, math.inf)),
        ({"CHECK_DISABLE": "0", "SHUTDOWN_TIME_SECONDS": "7"}, (60, 7)),
    ],
)
def test_stall_limits(monkeypatch, settings, limits):
    for name in ("CHECK_TIME_SECONDS", "SHUTDOWN_TIME_SECONDS", "CHECK_DISABLE"):
        monkeypatch.delenv(f"HOROVOD_STALL_{name}", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(f"HOROVOD_STALL_{name}", value)
    assert stall_timeouts() == limits

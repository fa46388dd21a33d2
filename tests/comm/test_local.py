"""Ranks that share memory, all of them or those of a machine: the facts, and ranks that fail.

Ranks are threads; which machine one is on, it says itself.
"""

import contextlib
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
from sok_lite.comm.local import (
    SWITCH_VARIABLE,
    LocalCommunicator,
    MultiHostCommunicator,
    connect_local,
    stall_timeouts,
)
from sok_lite.comm.threads import ThreadsCommunicator
from tests.support import comm_facts, exchange_facts
from tests.support.comm_facts import check_alltoallv, uneven
from tests.support.tripwire import Interrupt, Tripwire

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and abstract sockets")

# The machine of rank 0, 1, and so on.
ONE_MACHINE = ["aa", "aaa", "aaaa"]
SEVERAL = ["aab", "aabb", "abab", "abbca"]


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.delenv(SWITCH_VARIABLE, raising=False)


def lay_out(monkeypatch, layout):
    def place():
        name = threading.current_thread().name.removeprefix("rank-")
        return layout[int(name)].encode().strip()

    monkeypatch.setattr(local, "_machine_id", place)


@pytest.fixture
def run_local(monkeypatch):
    """Runs a program on ranks on the machines of a layout.

    Ranks of one machine share memory, however little they have for each other.
    """
    monkeypatch.setattr(local, "_MIN_SHARED_BYTES", 0)

    def run(layout, program):
        lay_out(monkeypatch, layout)

        def connected(base):
            comm = connect_local(base)
            several = len(set(layout)) > 1
            assert type(comm) is (MultiHostCommunicator if several else LocalCommunicator)
            own = (comm.rank, comm.size, comm.local_rank)
            assert own == (base.rank, base.size, base.local_rank)
            try:
                return program(comm)
            finally:
                comm._boxes.close()

        return run_ranks(len(layout), connected)

    return run


@pytest.mark.parametrize("fact", comm_facts.FACTS, ids=lambda fact: fact.__name__)
@pytest.mark.parametrize("layout", [*ONE_MACHINE, *SEVERAL])
def test_fact(run_local, fact, layout):
    run_local(layout, fact)


@pytest.mark.parametrize("fact", exchange_facts.FACTS, ids=lambda fact: fact.__name__)
@pytest.mark.parametrize("layout", ["aaa", "abbca"])
def test_round_trip(run_local, fact, layout):
    run_local(layout, fact)


@pytest.mark.parametrize("layout", SEVERAL)
def test_only_rows_for_other_machines_leave_the_machine(run_local, layout):
    def program(comm):
        sent = []

        def remember(call, rows, splits, original=comm._base._alltoallv):
            sent.append(splits.tolist())
            return original(call, rows, splits)

        comm._base._alltoallv = remember
        comm.alltoallv(np.zeros((3 * comm.size, 2)), [3] * comm.size)
        comm.allgatherv(np.zeros((5, 2)))
        mine = layout[comm.rank]
        for splits, each in zip(sent, [3, 5], strict=True):
            assert splits == [0 if place == mine else each for place in layout]

    run_local(layout, program)


@pytest.mark.parametrize("layout", ["aab", "abbca"])
def test_what_is_little_goes_with_the_rest(run_local, monkeypatch, layout):
    """Some ranks have much for one of their machine, in some calls; others have little."""
    monkeypatch.setattr(local, "_MIN_SHARED_BYTES", 100)

    def program(comm):
        filled = []
        send = comm._boxes.send
        comm._boxes.send = lambda *args: (filled.append(True), send(*args))
        for most in [1, 40, 3, 9, 12, 90, 8, 0, 1000, 10, 2, 15]:
            check_alltoallv(comm, uneven(comm, most), (3,), "float32")
            comm_facts.broadcast_gives_the_array_of_the_root(comm)
        return len(filled)

    filled = run_local(layout, program)
    assert 0 < min(filled[:2]) != max(filled)


def grow(comm):
    """Sizes go up and down, so both outboxes are replaced several times and reused in between."""
    for most in [1, 40_000, 3, 90_000, 90_000, 7, 200_000, 0, 1, 90_000]:
        if isinstance(comm, MultiHostCommunicator):
            comm.barrier()
        check_alltoallv(comm, uneven(comm, most), (3,), "float32")


@pytest.mark.parametrize("layout", ["aaa", "aba"])
def test_memory_that_grows_and_is_used_again_leaves_no_files_open(run_local, layout):
    run_local(layout, grow)
    gc.collect()
    before = os.listdir("/proc/self/fd")
    run_local(layout, grow)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@pytest.mark.parametrize("layout", ["aaa", "aaba"])
def test_a_fast_rank_does_not_overwrite_what_a_slow_one_still_reads(run_local, layout):
    """A rank is told to be two collectives ahead, which it cannot be. With barriers at odd places
    outboxes are not always taken in turn."""

    def program(comm):
        for turn in range(300):
            if turn % 7 == comm.rank:
                sum(range(20_000))
            if turn % 5 == 0:
                comm.barrier()
            got = comm.allgatherv(np.full((500, 4), 10 * turn + comm.rank))
            np.testing.assert_array_equal(
                got.rows[:, 0], np.repeat(10 * turn + np.arange(comm.size), 500)
            )

    run_local(layout, program)


# ---- ranks that fail


FLOATS = np.zeros((3, 3), np.float32)
DIFFERENT = {
    "another collective": lambda comm: comm.alltoallv(FLOATS, [1, 1, 1]),
    "another dim": lambda comm: comm.allgatherv(np.zeros((3, 4), np.float32)),
    "another dtype": lambda comm: comm.allgatherv(np.zeros((3, 3), np.int32)),
}


@pytest.mark.cases("call")
@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("layout", ["aaa", "aab"])
@pytest.mark.parametrize("call", DIFFERENT)
def test_different_calls_raise_on_all_ranks(run_local, layout, culprit, call):
    def program(comm):
        text = "different calls.*<f4 rows of 12 bytes" if layout == "aaa" else "different calls"
        with pytest.raises(CommunicatorError, match=text):
            if comm.rank == culprit:
                DIFFERENT[call](comm)
            else:
                comm.allgatherv(FLOATS)
        with pytest.raises(CommunicatorError, match="different calls"):  # and ever after
            comm.barrier()

    run_local(layout, program)


@pytest.mark.cases("text")
@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize(
    ("layout", "text"), [("aaa", "has come to the end of its program, s"), ("aab", "returned")]
)
def test_a_rank_that_leaves_in_order_is_known_to_all(run_local, layout, text, culprit):
    def program(comm):
        comm.barrier()
        if comm.rank == culprit:
            return comm.leave()
        with pytest.raises(CommunicatorError, match=f"Rank {culprit} {text}"):
            comm.barrier()

    run_local(layout, program)


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("layout", ["aaa", "aabb"])
def test_a_rank_that_cannot_allocate_in_the_middle_is_named_by_all(
    run_local, monkeypatch, layout, culprit
):
    original = local.Outbox.reserve

    def reserve(self, num_bytes):
        if threading.current_thread().name == f"rank-{culprit}" and num_bytes > 1000:
            raise MemoryError("no more")
        return original(self, num_bytes)

    monkeypatch.setattr(local.Outbox, "reserve", reserve)

    def program(comm):
        comm.barrier()
        error = MemoryError if comm.rank == culprit else CommunicatorError
        with pytest.raises(error, match="no more"):
            comm.allgatherv(np.zeros((1000, 2)))
        with pytest.raises(CommunicatorError, match=f"Rank {culprit} broke off in 'allgatherv': M"):
            comm.barrier()

    run_local(layout, program)


def test_a_rank_that_dies_is_named(run_local):
    def program(comm):
        comm.barrier()
        if comm.rank == 1:
            return  # closes its sockets, as the end of a process does
        with pytest.raises(CommunicatorError, match="Rank 1 has died or has left, seen by rank 0"):
            comm.barrier()

    run_local("aa", program)


def test_a_link_that_is_closed_is_known_on_all_machines(run_local):
    """Rank 1 lets go of its links and goes on, as no rank does. Rank 2 hears of it one later."""

    def program(comm):
        comm.barrier()
        if comm.rank == 1:
            comm._boxes.close()
        if comm.rank == 2:
            comm.allgatherv(np.zeros((1, 2)))
        with pytest.raises(CommunicatorError, match=r"Rank [01] has died or has left, seen by"):
            comm.allgatherv(np.zeros((1, 2)))

    run_local("aab", program)


@pytest.mark.parametrize("layout", ["aaa", "aab"])
def test_an_interrupt_at_any_line_of_a_collective_leaves_no_rank_out_of_step(run_local, layout):
    """After one of rank 1 all ranks make other calls, which succeed or fail on every rank."""

    def program(comm, wire):
        rows = np.full((3, 2), 10.0 + comm.rank)

        def collective():
            return comm.alltoallv(rows, [1, 1, 1]).rows[:, 0].tolist()

        try:
            if comm.rank == 1:
                with contextlib.suppress(Interrupt):
                    wire.run(collective)
            else:
                assert collective() == [10.0, 11.0, 12.0]
            assert comm.allreduce(comm.rank + 1).tolist() == 6
        except CommunicatorError as error:
            with pytest.raises(CommunicatorError):  # it stays refused
                comm.barrier()
            return str(error)
        return None

    outcomes = []
    for number in itertools.count(1):
        wire = Tripwire(number)
        errors = run_local(layout, lambda comm, wire=wire: program(comm, wire))
        assert None not in errors or errors == [None] * 3
        assert all(error is None or "ank 1" in error for error in errors), errors
        outcomes.append(errors[0] is None)
        if wire.place is None:
            break
    assert len(outcomes) > 100
    assert set(outcomes) == {True, False}  # before and after the rows travelled; in the middle


def test_a_rank_that_does_not_call_is_named(run_local, monkeypatch, capfd):
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

    run_local("aa", program)
    assert "rank 0 has waited 0 s in gather for rank 1" in capfd.readouterr().err


# ---- ranks that stay on the slow way


def stays_on_base(monkeypatch, layout):
    lay_out(monkeypatch, layout)

    def program(base):
        is_base = connect_local(base) is base
        assert base.allreduce(base.rank) == sum(range(base.size))  # they are still in step
        return is_base

    (is_base,) = set(run_ranks(len(layout), program))
    return is_base


@pytest.mark.parametrize("layout", ["ab", "abcd", "aa b", "    "])
def test_ranks_that_are_alone_or_do_not_know_their_machine(monkeypatch, layout):
    assert stays_on_base(monkeypatch, layout)
    assert run_ranks(1, lambda base: connect_local(base) is base) == [True]


def test_a_transport_that_shares_memory_itself(monkeypatch):
    monkeypatch.setattr(ThreadsCommunicator, "shares_memory", True)
    assert stays_on_base(monkeypatch, "aab")
    assert not stays_on_base(monkeypatch, "aaa")


@pytest.mark.parametrize("layout", ["aa", "aaa", "aabb"])
@pytest.mark.parametrize("lacking", ["connection", "socket"])
def test_one_rank_that_cannot_connect_keeps_all_on_the_slow_way(monkeypatch, layout, lacking):
    last, name = len(layout) - 1, {"connection": "_connect", "socket": "_socket"}[lacking]
    original = getattr(local, name)

    def refuse(*args):
        if threading.current_thread().name == f"rank-{last}":
            raise {"_connect": ConnectionRefusedError, "_socket": PermissionError}[name]("closed")
        return original(*args)

    monkeypatch.setattr(local, "_CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(local, name, refuse)
    assert stays_on_base(monkeypatch, layout)


def test_the_switch_keeps_ranks_on_the_slow_way_and_is_on_or_off(monkeypatch):
    monkeypatch.setenv(SWITCH_VARIABLE, "0")
    assert run_ranks(2, lambda base: connect_local(base) is base) == [True, True]
    monkeypatch.setenv(SWITCH_VARIABLE, "off")
    with pytest.raises(ValueError, match="SOK_LITE_COMM_LOCAL must be 0 or 1. Received: 'off'"):
        run_ranks(2, connect_local)


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


# ---- settings of Horovod that users have


@pytest.mark.parametrize("value", ["", "0", "99.5", "nan", "inf", "1e99"])
def test_a_setting_for_stalls_breaks_no_job(run_local, monkeypatch, value):
    for name in ("CHECK", "SHUTDOWN"):
        monkeypatch.setenv(f"HOROVOD_STALL_{name}_TIME_SECONDS", value)

    def program(comm):
        if comm.rank == 1:
            time.sleep(0.05)
        return comm.allreduce(comm.rank).tolist()

    assert run_local("aa", program) == [1, 1]


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

"""Ranks of which some share a machine: the facts, what goes which way, and ranks that fail.

Ranks are threads; which machine one is on, it says itself.
"""

import sys
import threading

import numpy as np
import pytest

from sok_lite.comm import CommunicatorError, local, run_ranks
from sok_lite.comm.local import SWITCH_VARIABLE, MultiHostCommunicator, connect_local
from sok_lite.comm.threads import ThreadsCommunicator
from tests.support import comm_facts, exchange_facts
from tests.support.comm_facts import check_alltoallv, uneven
from tests.support.helpers import check_interrupts_at_lines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and abstract sockets")

# The machine of rank 0, 1, and so on.
LAYOUTS = ["aab", "aabb", "abab", "abbca"]


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.delenv(SWITCH_VARIABLE, raising=False)


@pytest.fixture
def run_hosts(monkeypatch):
    """Runs a program on ranks that are threads, on the machines of a layout.

    Ranks of one machine share memory, however little they have for each other.
    """
    monkeypatch.setattr(local, "_MIN_SHARED_BYTES", 0)

    def run(layout, program):
        def place():
            return layout[int(threading.current_thread().name.removeprefix("rank-"))].encode()

        def connected(base):
            comm = connect_local(base)
            assert isinstance(comm, MultiHostCommunicator)
            assert (comm.rank, comm.size, comm.local_rank) == (
                base.rank,
                base.size,
                base.local_rank,
            )
            try:
                return program(comm)
            finally:
                comm._boxes.close()

        monkeypatch.setattr(local, "_machine_id", place)
        return run_ranks(len(layout), connected)

    return run


@pytest.mark.parametrize("fact", comm_facts.FACTS, ids=lambda fact: fact.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fact(run_hosts, fact, layout):
    run_hosts(layout, fact)


@pytest.mark.parametrize("fact", exchange_facts.FACTS, ids=lambda fact: fact.__name__)
@pytest.mark.parametrize("layout", ["aabb", "abbca"])
def test_round_trip(run_hosts, fact, layout):
    run_hosts(layout, fact)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_rows_for_other_machines_leave_the_machine(run_hosts, layout):
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

    run_hosts(layout, program)


@pytest.mark.parametrize("layout", ["aab", "abbca"])
def test_what_is_little_goes_with_the_rest(run_hosts, monkeypatch, layout):
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

    filled = run_hosts(layout, program)
    assert 0 < min(filled[:2]) != max(filled)


def test_memory_that_grows_and_is_used_again(run_hosts):
    def program(comm):
        for most in [1, 40_000, 3, 90_000, 90_000, 7, 200_000, 0, 1, 90_000]:
            comm.barrier()
            check_alltoallv(comm, uneven(comm, most), (3,), "float32")

    run_hosts("aba", program)


def test_a_fast_rank_does_not_overwrite_what_a_slow_one_still_reads(run_hosts):
    """With barriers at odd places, so that outboxes are not always taken in turn."""

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

    run_hosts("aaba", program)


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_different_calls_raise_on_all_ranks(run_hosts, culprit):
    def program(comm):
        rows = np.zeros((3, 2), np.float32)
        with pytest.raises(CommunicatorError, match="different calls"):
            if comm.rank == culprit:
                comm.alltoallv(rows, [1, 1, 1])
            else:
                comm.allgatherv(rows)
        with pytest.raises(CommunicatorError, match="different calls"):  # and ever after
            comm.barrier()

    run_hosts("aab", program)


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_leaves_is_known_on_all_machines(run_hosts, culprit):
    def program(comm):
        comm.barrier()
        if comm.rank == culprit:
            return comm.leave()
        with pytest.raises(CommunicatorError, match=f"Rank {culprit} returned"):
            comm.barrier()

    run_hosts("aab", program)


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_cannot_allocate_in_the_middle_is_known_on_all_machines(
    run_hosts, monkeypatch, culprit
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

    run_hosts("aabb", program)


def test_a_link_that_is_closed_is_known_on_all_machines(run_hosts):
    """Rank 1 lets go of its links and goes on, as no rank does. Rank 2 hears of it one later."""

    def program(comm):
        comm.barrier()
        if comm.rank == 1:
            comm._boxes.close()
        if comm.rank == 2:
            comm.allgatherv(np.zeros((1, 2)))
        with pytest.raises(CommunicatorError, match=r"Rank [01] has died or has left, seen by"):
            comm.allgatherv(np.zeros((1, 2)))

    run_hosts("aab", program)


@pytest.mark.parametrize("stride", [4, 1])
def test_an_interrupt_at_any_line_of_a_collective_leaves_no_rank_out_of_step(run_hosts, stride):
    check_interrupts_at_lines(lambda program: run_hosts("aab", program), stride)


# ---- when ranks of one machine stay on the slow way ---------------------------------------------


def stays_on_base(monkeypatch, layout):
    monkeypatch.setattr(
        local,
        "_machine_id",
        lambda: layout[int(threading.current_thread().name.removeprefix("rank-"))].encode().strip(),
    )
    return all(run_ranks(len(layout), lambda base: connect_local(base) is base))


@pytest.mark.parametrize("layout", ["ab", "abcd", "aa b", "    "])
def test_ranks_that_are_alone_or_do_not_know_their_machine(monkeypatch, layout):
    assert stays_on_base(monkeypatch, layout)


def test_a_transport_that_shares_memory_itself(monkeypatch):
    monkeypatch.setattr(ThreadsCommunicator, "shares_memory", True)
    assert stays_on_base(monkeypatch, "aab")
    assert not stays_on_base(monkeypatch, "aaa")


def test_a_machine_whose_ranks_cannot_connect(monkeypatch):
    original = local._connect

    def refuse(links, listener, rank, names, tokens):
        if rank == 3:
            raise ConnectionRefusedError("closed")
        original(links, listener, rank, names, tokens)

    monkeypatch.setattr(local, "_CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(local, "_connect", refuse)
    assert stays_on_base(monkeypatch, "aabb")

"""Arrays from GPU to GPU by NCCL, for ranks that are threads, over a stand-in of NCCL.

tests/engine/test_exchange.py and test_lookup_ranks.py run what must hold whatever carries them.
"""

import threading
import time

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.comm import CommunicatorError, alarm, nccl, run_ranks
from sok_lite.engine.exchange import return_rows, send_grads
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from tests.support import nccl_stand_in
from tests.support.comm_facts import FACTS as COMM_FACTS
from tests.support.exchange_facts import FACTS, send
from tests.support.helpers import new_table, on
from tests.support.nccl_stand_in import World, die, run_ranks_by_nccl
from tests.support.parts import Part, forward_parts
from tests.support.simt.backend import is_simulated

CPU = get_backend("cpu")
KEYS = np.arange(-3, 30, dtype=np.int64)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_round_trip(fact, size):
    world = World(size)
    run_ranks_by_nccl(size, lambda comm: fact(comm, CPU), CPU, world)
    assert not world.unmatched


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
def test_round_trip_of_device_arrays(fact, backend):
    if not is_simulated(backend):
        pytest.skip("by arrays of the simulated GPU alone")
    world = World(3)
    run_ranks_by_nccl(3, lambda comm: fact(comm, backend), backend, world)
    assert not world.unmatched


@pytest.mark.parametrize("fact", COMM_FACTS, ids=lambda fact: fact.__name__)
def test_arrays_of_the_host_go_as_before(fact):
    run_ranks_by_nccl(2, fact)


def trip(comm, keys=KEYS, backend=CPU):
    """Sends keys and gets a row for each, which is the key itself."""
    (received,), route = send(backend, comm, [keys], ["int64"])
    route.check()
    (rows,) = return_rows(route, [received.reshape(-1, 1).view(np.float32)])
    np.testing.assert_array_equal(rows.view(np.int64).reshape(-1), keys)
    return route


def counted(comm, name):
    """Counts the calls of a collective of the host."""
    calls, original = [], getattr(comm, name)

    def call(*args):
        calls.append(args[0])
        return original(*args)

    setattr(comm, name, call)
    return calls


def test_nothing_goes_by_the_host():
    def program(comm):
        calls = [counted(comm, name) for name in ("_alltoallv", "_allgatherv", "_barrier")]
        route = trip(comm)
        send_grads(route, [np.zeros((len(KEYS), 2), np.float32)])
        assert calls == [[], [], []]

    world = World(3)
    run_ranks_by_nccl(3, program, world=world)
    # To connect; control and then keys; rows; gradients. Each is one group, whatever its messages.
    assert world.num_groups == 3 * 5


def test_more_tables_than_a_block_has_room_for_cost_one_more_group_once():
    groups = []

    def program(comm):
        for number_of_tables in (40, 40, 33, 3):
            comm.barrier()
            before = world.num_groups
            comm.barrier()
            send(CPU, comm, [KEYS[:5]] * number_of_tables, ["int64"] * number_of_tables)
            comm.barrier()
            groups.append((world.num_groups - before) / comm.size)

    world = World(2)
    run_ranks_by_nccl(2, program, world=world)
    assert groups[::2] == [3, 2, 2, 2]


# ---- what the stand-in finds --------------------------------------------------------------------


def rows_of(comm):
    """Sends 4 rows to each rank; gives those that came."""
    splits = np.full(comm.size, 4)
    message = np.full((4 * comm.size, 2), comm.rank + 1, np.int64)
    return comm.gpu_transport.rows("rows", message, splits, splits)


def test_rows_that_nobody_waits_for_are_poison(monkeypatch):
    monkeypatch.setattr(nccl, "_ANNOUNCED_S", 0.1)

    def program(comm):
        comm.barrier()  # ranks are connected
        monkeypatch.setattr(nccl_stand_in._Compute, "wait_event", lambda self, event: None)
        with pytest.raises(CommunicatorError):
            rows_of(comm)

    run_ranks_by_nccl(2, program)


def test_rows_that_are_not_ready_are_found(backend, monkeypatch):
    if not is_simulated(backend):
        pytest.skip("the work of a CPU is done when it is asked for")
    monkeypatch.setattr(nccl, "_ANNOUNCED_S", 0.1)

    def program(comm):
        comm.barrier()  # ranks are connected
        monkeypatch.setattr(nccl_stand_in.Stream, "wait_event", lambda self, event: None)
        with pytest.raises((CommunicatorError, AssertionError)):
            trip(comm, KEYS, backend)
            raise AssertionError

    with pytest.raises(AssertionError):
        run_ranks_by_nccl(2, program, backend)
        raise AssertionError("nobody has read too early")


def test_rows_that_change_while_they_are_sent_are_found(monkeypatch):
    note, message = nccl_stand_in._Part.note, np.ones((8, 2), np.int64)

    def noted(part):
        note(part)
        if not part.is_receive:
            message[:] += 1

    def program(comm):
        monkeypatch.setattr(nccl_stand_in._Part, "note", noted)
        comm.gpu_transport.rows("rows", message, np.full(2, 4), np.full(2, 4))

    with pytest.raises(AssertionError, match="wrote what was being sent"):
        run_ranks_by_nccl(2, program)


def test_other_arrays_are_refused_before_anything_is_sent():
    class Elsewhere(np.ndarray):
        """An array of another backend."""

    def program(comm):
        transport, one_each = comm.gpu_transport, np.ones(2, np.int64)
        before = comm.turn
        for message in ([1, 2], np.float64(1)):
            with pytest.raises(TypeError, match="'nccl' transport takes arrays of the cpu backend"):
                transport.rows("rows", message, one_each, one_each)
        assert comm.turn == before
        trip(comm)

    run_ranks_by_nccl(2, program)


# ---- failures -----------------------------------------------------------------------------------


def test_a_rank_without_keys_lets_all_raise_its_reason_and_all_go_on():
    def program(comm):
        for _ in range(2):
            error = KeyError if comm.rank == 1 else CommunicatorError
            with pytest.raises(error, match="lost"):
                with shared_failure(comm):
                    if comm.rank == 1:
                        raise KeyError("lost")
                trip(comm)
            trip(comm)

    run_ranks_by_nccl(3, program)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("when", ["before rows", "before gradients"])
def test_a_rank_that_fails_between_trips_lets_all_raise_and_all_go_on(size, when):
    def program(comm):
        for bad in range(size):
            route = trip(comm)
            error = KeyError if comm.rank == bad else CommunicatorError
            with pytest.raises(error, match="lost"):
                if when == "before rows":
                    (received,), route = send(CPU, comm, [KEYS], ["int64"])
                with failure_known_to_all(comm):
                    if comm.rank == bad:
                        raise KeyError("lost")
                    if when == "before rows":
                        route.check()
                if when == "before rows":
                    return_rows(route, [np.zeros((len(received), 1), np.float32)])
                send_grads(route, [np.zeros((len(KEYS), 1), np.float32)])
        trip(comm)

    run_ranks_by_nccl(size, program)


def fail_between_trips(comm, bad):
    """Lets one rank fail while the others wait for its rows, or come to that."""
    with pytest.raises(KeyError if comm.rank == bad else CommunicatorError, match="lost"):
        (received,), route = send(CPU, comm, [KEYS], ["int64"])
        with failure_known_to_all(comm):
            if comm.rank == bad:
                raise KeyError("lost")
        return_rows(route, [np.zeros((len(received), 1), np.float32)])


def test_all_go_on_however_long_nccl_takes_to_connect_anew(monkeypatch):
    """Whoever looks for errors of NCCL meanwhile finds a communicator that was aborted."""
    monkeypatch.setattr(alarm, "_TICK_S", 0.01)
    world = World(3)

    def program(comm):
        world.connect_s = 0.2
        fail_between_trips(comm, 1)
        trip(comm)

    run_ranks_by_nccl(3, program, world=world)


def test_all_go_on_where_nccl_fails_in_the_call_that_is_aborted():
    """It does so in a group that was connecting, and a little before ranks know why."""
    world = World(3)

    def program(comm):
        transport = comm.gpu_transport
        travel = transport._link.travel

        def late(messages):
            travel(messages)
            if comm.rank == 2 and len(messages) == 2:  # rows
                time.sleep(0.1)
                raise nccl_stand_in.NcclError("NCCL_ERROR_REMOTE_ERROR: remote process exited")

        transport._link.travel = late
        if comm.rank == 1:
            fail = transport._alarm.fail
            transport._alarm.fail = lambda reason: (time.sleep(0.3), fail(reason))
        fail_between_trips(comm, 1)
        transport._link.travel = travel
        trip(comm)

    run_ranks_by_nccl(3, program, world=world)


def test_all_ranks_that_fail_alike_go_on():
    def program(comm):
        with pytest.raises(KeyError, match="lost"), failure_known_to_all(comm):
            raise KeyError("lost")
        trip(comm)

    run_ranks_by_nccl(3, program)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("when", ["counts", "keys", "return_rows", "send_grads"])
def test_a_rank_that_dies_lets_no_other_wait(size, when):
    """Whoever it had messages for or not: the last rank has all keys that were sent."""

    class Death(Exception):
        pass

    told = []

    def program(comm):
        transport = comm.gpu_transport
        comm.barrier()
        if comm.rank == size - 1:
            if when == "counts":
                raise Death
            original = transport._link.travel

            def fatal(messages):
                program.left -= 1
                if program.left < 0:
                    raise Death
                return original(messages)

            program.left = {"keys": 1, "return_rows": 2, "send_grads": 3}[when]
            transport._link.travel = fatal
        try:
            (received,), route = send(CPU, comm, [KEYS], ["int64"])
            route.check()
            return_rows(route, [np.zeros((len(received), 1), np.float32)])
            send_grads(route, [np.zeros((len(KEYS), 1), np.float32)])
        except CommunicatorError as error:
            told.append(str(error))
        with pytest.raises(CommunicatorError):
            trip(comm)

    def dying(comm):
        # As a process dies: its sockets close before anybody can say why.
        if comm.rank == size - 1:
            comm.gpu_transport._watching = lambda turn=None: _nothing()
            try:
                program(comm)
            except Death:
                die(comm)
        else:
            program(comm)

    run_ranks_by_nccl(size, dying)
    assert len(told) == size - 1
    assert all("has died" in text for text in told)


@pytest.mark.parametrize("then", ["leaves", "makes another call"])
def test_a_rank_that_breaks_off_before_its_keys_lets_no_other_wait(then, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    def program(comm):
        if comm.rank == 1:
            monkeypatch.setattr(comm.gpu_transport, "keys", interrupted)
            with pytest.raises(KeyboardInterrupt):
                trip(comm)
            if then == "leaves":
                return
            monkeypatch.undo()
        with pytest.raises(CommunicatorError, match="Rank 1 broke off before it sent its keys"):
            trip(comm)

    run_ranks_by_nccl(2, program)


def test_keys_of_a_rank_that_dies_reach_no_table(backend):
    if backend.name == "cuda" and not is_simulated(backend):
        pytest.skip("NCCL is a stand-in here, and has no GPU")
    has_launched = threading.Event()

    def program(comm):
        table = new_table(backend)
        arrays = on(backend, KEYS, np.arange(len(KEYS) + 1))
        transport = comm.gpu_transport
        travel, check = transport._link.travel, transport.check

        def last(messages):
            transport._link.travel = dies if comm.rank == 1 else waits
            return travel(messages)  # control goes

        def dies(messages):
            assert has_launched.wait(30)
            die(comm)
            raise KeyError

        def waits(messages):
            has_launched.set()  # on a GPU the host goes on, and is held up by what reads the keys

        def checked(turn):
            assert transport._alarm.wait(30)
            check(turn)

        transport._link.travel, transport.check = last, checked
        if comm.rank == 1:
            transport._watching = lambda turn=None: _nothing()
        with pytest.raises(KeyError if comm.rank == 1 else CommunicatorError):
            forward_parts(backend, comm, [Part(table, *arrays, None, "sum")])
        assert table.size == 0

    run_ranks_by_nccl(2, program, backend)


class _nothing:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def test_what_nccl_finds_later_ends_all_ranks():
    def program(comm):
        route = trip(comm)
        if comm.rank == 1:
            comm.gpu_transport._link.nccl.failure = RuntimeError("a link is down")
        with pytest.raises(CommunicatorError, match="NCCL failed on rank 1: a link is down"):
            if comm.rank != 0:
                send_grads(route, [np.zeros((len(KEYS), 1), np.float32)])
            else:
                assert comm.gpu_transport._alarm.wait(30)  # it is busy with something else
                send_grads(route, [np.zeros((len(KEYS), 1), np.float32)])

    run_ranks_by_nccl(3, program)


def test_a_rank_that_has_ended_lets_no_other_wait():
    def program(comm):
        trip(comm)
        if comm.rank != 1:
            with pytest.raises(CommunicatorError, match="Rank 1 has come to the end"):
                trip(comm)

    run_ranks_by_nccl(3, program)


def test_ranks_with_messages_of_other_lengths_raise_on_all_ranks():
    world = World(2)

    def program(comm):
        _, route = send(CPU, comm, [KEYS], ["int64"])
        route.check()
        rows = np.zeros((int(route.num_received[0]), 2 + 4 * comm.rank), np.float32)
        alarm = comm.gpu_transport._alarm
        begin = alarm.begin
        # Late: they have begun to wait on their GPUs.
        alarm.begin = lambda call: threading.Timer(0.2, begin, [call]).start()
        with pytest.raises(CommunicatorError, match="different calls"):
            return_rows(route, [rows])

    run_ranks_by_nccl(2, program, world=world)
    assert world.unmatched, "nobody has hung"


def test_keys_that_were_lost_are_not_used_later():
    both = threading.Barrier(2)

    def program(comm):
        _, route = send(CPU, comm, [KEYS], ["int64"])
        both.wait(30)
        if comm.rank == 0:
            with pytest.raises(KeyError), failure_known_to_all(comm):
                raise KeyError("lost")
        else:
            assert comm.gpu_transport._alarm.wait(30)
        with pytest.raises(CommunicatorError, match=r"lost|on their way"):
            route.check()
        with pytest.raises(CommunicatorError, match="on their way when a rank failed"):
            route.check()
        trip(comm)

    run_ranks_by_nccl(2, program)


def test_a_wait_for_a_rank_that_does_not_come_is_noted_and_ends(monkeypatch, capsys):
    monkeypatch.setattr(alarm, "stall_limits", lambda: (0.5, 2.0))

    def program(comm):
        trip(comm)
        if comm.rank == 1:
            assert comm.gpu_transport._alarm.wait(30)
        with pytest.raises(CommunicatorError, match=r"Rank 0 has waited \d s in send_keys"):
            trip(comm)

    run_ranks_by_nccl(2, program)
    assert "rank 0 has waited 1 s in send_keys for rank 1. Do all ranks" in capsys.readouterr().err


def test_a_wait_for_nccl_to_connect_is_noted(monkeypatch, capsys):
    monkeypatch.setattr(alarm, "stall_limits", lambda: (0.2, 100.0))
    monkeypatch.setattr(alarm, "_TICK_S", 0.05)
    world = World(2)
    world.connect_s = 0.5
    run_ranks_by_nccl(2, trip, world=world)
    assert "has waited 0 s in its GPU, in connect by NCCL. Do all" in capsys.readouterr().err


# ---- large messages -----------------------------------------------------------------------------


def test_messages_of_more_than_2_31_bytes_are_counted_right(monkeypatch):
    """Memory that nobody touches: what is checked is what NCCL is asked for."""
    splits = np.array([2**27 + 5, 3])  # rows of 16 bytes
    asked = []
    issue = nccl_stand_in._Cuda.issue

    def noted(self, session, part, stream):
        asked.append((part.is_receive, part.pair, part.num_bytes))
        issue(self, session, part, stream)

    monkeypatch.setattr(nccl_stand_in._Cuda, "issue", noted)

    def program(comm):
        came = np.full(2, splits[comm.rank])
        message = np.zeros((int(splits.sum()), 2), np.int64)
        assert len(comm.gpu_transport.rows("rows", message, splits, came)) == came.sum()

    run_ranks_by_nccl(2, program)
    large = {each for each in asked if each[2] > 2**31}
    assert large == {(way, (rank, 0), 2**31 + 80) for way in (False, True) for rank in (0, 1)}


# ---- the beginning ------------------------------------------------------------------------------


def test_ranks_that_share_a_gpu_are_refused_on_all_ranks():
    world = World(3)
    world.gpu_of = [0, 1, 1]

    def program(comm):
        with pytest.raises(
            CommunicatorError, match=r"NCCL cannot connect rank \d: .*Duplicate GPU"
        ):
            world.gpu_transport(comm, CPU)

    run_ranks(3, program)


def test_a_rank_that_nccl_refuses_lets_no_other_wait():
    world = World(3)
    world.refuses_rank = 2

    def program(comm):
        with pytest.raises(CommunicatorError, match="NCCL cannot connect rank 2"):
            world.gpu_transport(comm, CPU)

    run_ranks(3, program)

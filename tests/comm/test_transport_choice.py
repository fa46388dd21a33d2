"""By which way arrays of GPUs travel, chosen by all ranks together; NCCL itself is a stand-in."""

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.comm import (
    TRANSPORTS,
    CommunicatorError,
    TransportKind,
    checked_transport,
    choose_transport,
    run_ranks,
    transport_choice,
)
from tests.support import nccl_stand_in
from tests.support.nccl_stand_in import World
from tests.support.simt.backend import is_simulated


@pytest.fixture
def gpus(backend, monkeypatch):
    """A backend with a GPU for each of two ranks, where NCCL is; tests change what they must."""
    if backend.name != "cuda":
        pytest.skip("nothing is to be chosen without a GPU")
    if not is_simulated(backend):
        pytest.skip("NCCL is a stand-in here, which reaches no memory of a GPU")
    world = World(2)
    # Each costs seconds of a compiler where the GPU is simulated.
    monkeypatch.setattr(type(backend), "load_kernels", lambda self: None)
    monkeypatch.setattr(transport_choice, "nccl_unavailable", lambda: None)
    monkeypatch.setattr(transport_choice, "_nccl", world.gpu_transport)
    monkeypatch.setattr(
        transport_choice, "_cards", _as_if_each_had_its_gpu(transport_choice._cards)
    )
    monkeypatch.setattr(transport_choice, "_gpu", lambda backend: "a GPU")
    return backend


def _as_if_each_had_its_gpu(cards):
    def own(comm, card):
        return cards(comm, card | {"gpu": f"a GPU of rank {comm.rank}"})

    return own


def failing_on_rank_1(world, reason):
    """Returns what makes transports, but for rank 1, which fails when it has connected."""

    def make(comm, backend):
        transport = world.gpu_transport(comm, backend)
        if comm.rank == 1:
            transport.leave()
            raise CommunicatorError(reason)
        return transport

    return make


@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_nccl_is_taken_where_all_ranks_have_it(gpus, transport):
    def program(comm):
        assert choose_transport(comm, gpus, transport) == "NCCL, from GPU to GPU"
        assert comm.gpu_transport.name == "nccl"
        comm.gpu_transport.leave()

    run_ranks(2, program)


def test_horovod_goes_before_a_communicator_beside_it(gpus):
    def by_horovod(comm, backend):
        transport = world.gpu_transport(comm, backend)
        transport.what = "Horovod's"
        return transport

    def program(comm):
        for lacking, expected in ((None, "Horovod's"), ("no Horovod", "NCCL, from GPU to GPU")):
            mine = lacking if comm.rank == 1 else None
            kinds = {"horovod": TransportKind(lambda _, mine=mine: mine, by_horovod)}
            assert choose_transport(comm, gpus, "auto", kinds) == expected
            assert comm.gpu_transport.what == expected
            comm.gpu_transport.leave()

    world = World(2)
    run_ranks(2, program)


def test_nccl_follows_where_horovod_cannot_connect_a_rank(gpus):
    reason = "Horovod cannot carry a word between GPUs"
    first, second = (failing_on_rank_1(World(2), reason) for _ in range(2))

    def program(comm):
        kinds = {"horovod": TransportKind(lambda _: None, first)}
        assert choose_transport(comm, gpus, "auto", kinds) == "NCCL, from GPU to GPU"
        comm.gpu_transport.leave()
        without = TransportKind(lambda _: "CuPy finds no NCCL", World(2).gpu_transport)
        kinds = {"horovod": TransportKind(lambda _: None, second), "nccl": without}
        said = choose_transport(comm, gpus, "auto", kinds)
        assert said == f"the host's memory ({reason}; rank 0: CuPy finds no NCCL)"
        assert comm.gpu_transport is None

    run_ranks(2, program)


def test_every_rank_has_loaded_all_kernels_before_they_connect(gpus, monkeypatch):
    """A kernel that is loaded while NCCL's are waiting on the GPU may wait for those."""
    loaded = []
    monkeypatch.setattr(type(gpus), "load_kernels", lambda self: loaded.append(self))
    connect = transport_choice._nccl

    def connected(comm, backend):
        assert len(loaded) == 2
        return connect(comm, backend)

    monkeypatch.setattr(transport_choice, "_nccl", connected)

    def program(comm):
        choose_transport(comm, gpus, "auto")
        assert comm.gpu_transport.name == "nccl"
        comm.gpu_transport.leave()

    run_ranks(2, program)


def test_the_host_is_taken_where_it_was_asked_for(gpus):
    def program(comm):
        assert choose_transport(comm, gpus, "host") == "the host's memory"
        assert comm.gpu_transport is None

    run_ranks(2, program)


def test_what_one_rank_lacks_none_takes(gpus):
    def program(comm):
        mine = "CuPy finds no NCCL" if comm.rank == 1 else None
        kinds = {"nccl": TransportKind(lambda _: mine, World(2).gpu_transport)}
        said = choose_transport(comm, gpus, "auto", kinds)
        assert said == "the host's memory (rank 1: CuPy finds no NCCL)"
        assert comm.gpu_transport is None
        with pytest.raises(CommunicatorError, match="'nccl' is not possible: rank 1: CuPy finds"):
            choose_transport(comm, gpus, "nccl", kinds)
        comm.barrier()

    run_ranks(2, program)


@pytest.mark.parametrize("when", ["at once", "when others have connected"])
def test_ranks_that_nccl_cannot_connect_go_by_the_host(gpus, when):
    world = World(3)
    if when == "at once":
        world.refuses_rank = 1

    make = failing_on_rank_1(world, "NCCL cannot connect rank 1")

    def program(comm):
        kinds = {"nccl": TransportKind(lambda _: None, make)}
        said = choose_transport(comm, gpus, "auto", kinds)
        assert said.startswith("the host's memory (NCCL cannot connect rank 1")
        assert comm.gpu_transport is None
        comm.barrier()

    run_ranks(3, program)


@pytest.mark.parametrize("what", ["raises", "sends nothing whole"])
def test_gpus_that_cannot_reach_each_other_are_found_before_a_table_needs_them(
    gpus, what, monkeypatch
):
    """NCCL connects two GPUs when the first message goes from one to the other."""
    world = World(2)
    send = nccl_stand_in._Communicator.send

    def sent(self, pointer, count, *args):
        if self._rank == 1:
            if what == "raises":
                raise nccl_stand_in.NcclError("NCCL_ERROR_SYSTEM_ERROR: no shared memory")
            pointer = zeros.ctypes.data
        send(self, pointer, count, *args)

    def program(comm):
        kinds = {"nccl": TransportKind(lambda _: None, world.gpu_transport)}
        said = choose_transport(comm, gpus, "auto", kinds)
        assert said.startswith("the host's memory (NCCL cannot connect rank")
        assert comm.gpu_transport is None
        comm.barrier()

    zeros = np.zeros(1, np.int64)
    monkeypatch.setattr(nccl_stand_in._Communicator, "send", sent)
    run_ranks(2, program)


def test_ranks_that_share_a_gpu_go_by_the_host(gpus, monkeypatch):
    cards = transport_choice._cards
    monkeypatch.setattr(
        transport_choice, "_cards", lambda comm, card: [c | {"gpu": "x"} for c in cards(comm, card)]
    )

    def program(comm):
        assert "ranks 0 and 1 share a GPU" in choose_transport(comm, gpus, "auto")
        assert comm.gpu_transport is None
        with pytest.raises(CommunicatorError, match="ranks 0 and 1 share a GPU"):
            choose_transport(comm, gpus, "nccl")

    run_ranks(2, program)


def test_ranks_that_ask_for_other_transports_raise_on_all_ranks():
    def program(comm):
        with pytest.raises(ValueError, match=r"same on all ranks. Received: \['auto', 'host'\]"):
            choose_transport(comm, get_backend("cpu"), "host" if comm.rank else "auto")

    run_ranks(2, program)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_cpu_has_the_host_alone(transport):
    def program(comm):
        if transport in ("auto", "host"):
            assert choose_transport(comm, get_backend("cpu"), transport).startswith("the host's")
            assert comm.gpu_transport is None
        else:
            with pytest.raises(CommunicatorError, match="rank 0: its tables are not on a GPU"):
                choose_transport(comm, get_backend("cpu"), transport)
        comm.barrier()

    run_ranks(2, program)


def test_the_name_comes_from_the_call_or_from_the_environment(monkeypatch):
    monkeypatch.delenv("SOK_LITE_GPU_TRANSPORT", raising=False)
    assert checked_transport(None) == "auto"
    monkeypatch.setenv("SOK_LITE_GPU_TRANSPORT", "host")
    assert checked_transport(None) == "host"
    assert checked_transport("nccl") == "nccl"
    with pytest.raises(ValueError, match="gpu_transport must be one of 'auto'.*Received: 'tcp'"):
        checked_transport("tcp")
    with pytest.raises(ValueError, match="gpu_transport='mpi' is gone: .*Use 'auto'"):
        checked_transport("mpi")
    monkeypatch.setenv("SOK_LITE_GPU_TRANSPORT", "tcp")
    with pytest.raises(ValueError, match="SOK_LITE_GPU_TRANSPORT must be .*Received: 'tcp'"):
        checked_transport(None)

"""Transports of GPUs: control goes by the host, no rank waits in what carries; all choose one."""

import copy

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.comm import (
    TRANSPORTS,
    CommunicatorError,
    TransportKind,
    checked_transport,
    choose_transport,
    gpu_transport,
    run_ranks,
)
from sok_lite.engine.exchange import send_keys
from tests.support.exchange_facts import FACTS, rule_of
from tests.support.meeting_transport import MeetingTransport, run_ranks_by_transport
from tests.support.shortage import Shortage

SIZE = 3
REASON = "Horovod cannot carry a word between GPUs"


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
def test_round_trip(backend, fact):
    run_ranks_by_transport(SIZE, lambda comm: fact(comm, backend), backend)


def test_a_rank_without_memory_for_keys_lets_no_other_wait():
    def program(comm):
        backend = copy.copy(get_backend("cpu"))
        comm.gpu_transport._backend = backend
        counts, shortage = comm.gpu_transport.counts, Shortage(backend, at=1, for_good=True)

        def counted(*args):
            result = counts(*args)
            shortage.__enter__()
            return result

        if comm.rank == 1:
            comm.gpu_transport.counts = counted
        error = MemoryError if comm.rank == 1 else CommunicatorError
        with pytest.raises(error, match="rank 1: no call" if comm.rank != 1 else None):
            send_keys(backend, comm, np.arange(9), [9], ["int64"], [rule_of("mod", SIZE)])
        shortage.__exit__()

    run_ranks_by_transport(SIZE, program)


def kinds(unavailable=lambda comm: None, make=None):
    make = make or (lambda comm, backend: MeetingTransport(comm, backend, None))
    return {"horovod": TransportKind(unavailable, make)}


@pytest.fixture
def gpus(backend, monkeypatch):
    """A backend with a GPU for each of two ranks; tests change what they must."""
    if backend.name != "cuda":
        pytest.skip("nothing is to be chosen without a GPU")
    # Each costs seconds of a compiler where the GPU is simulated.
    monkeypatch.setattr(type(backend), "load_kernels", lambda self: None)
    monkeypatch.setattr(
        gpu_transport, "_gather_json", _as_if_each_had_its_gpu(gpu_transport._gather_json)
    )
    monkeypatch.setattr(gpu_transport, "_gpu", lambda backend: "a GPU")
    return backend


def _as_if_each_had_its_gpu(cards):
    def own(comm, card):
        return cards(comm, card | {"gpu": f"a GPU of rank {comm.rank}"})

    return own


@pytest.mark.parametrize("transport", ["auto", "horovod", "host"])
def test_horovod_is_taken_where_all_ranks_have_it_but_for_one_that_asks_for_the_host(
    gpus, transport
):
    def program(comm):
        said = choose_transport(comm, gpus, transport, kinds())
        if transport == "host":
            assert (said, comm.gpu_transport) == ("the host's memory", None)
        else:
            assert (said, comm.gpu_transport.name) == (MeetingTransport.what, "meeting")

    run_ranks(2, program)


def test_every_rank_has_loaded_all_kernels_before_they_connect(gpus, monkeypatch):
    """A kernel that is loaded while NCCL's are waiting on the GPU may wait for those."""
    loaded = []
    monkeypatch.setattr(type(gpus), "load_kernels", lambda self: loaded.append(self))

    def connected(comm, backend):
        assert len(loaded) == 2
        return MeetingTransport(comm, backend, None)

    def program(comm):
        choose_transport(comm, gpus, "auto", kinds(make=connected))
        assert comm.gpu_transport.name == "meeting"

    run_ranks(2, program)


def none_on_one(comm, backend):
    if comm.rank == 1:
        raise CommunicatorError(REASON)
    return MeetingTransport(comm, backend, None)


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        (kinds(lambda comm: "no Horovod" if comm.rank == 1 else None), "rank 1: no Horovod"),
        (kinds(make=none_on_one), REASON),
        ("a GPU each", "ranks 0 and 1 share a GPU"),
    ],
)
def test_what_one_rank_lacks_none_takes(gpus, monkeypatch, lacking, reason):
    if lacking == "a GPU each":
        lacking, cards = kinds(), gpu_transport._gather_json
        same = lambda comm, card: [each | {"gpu": "x"} for each in cards(comm, card)]  # noqa: E731
        monkeypatch.setattr(gpu_transport, "_gather_json", same)

    def program(comm):
        said = choose_transport(comm, gpus, "auto", lacking)
        assert said.startswith("the host's memory (") and reason in said
        assert comm.gpu_transport is None
        if reason != REASON:  # that shows when they connect, by whatever name
            with pytest.raises(CommunicatorError, match=reason):
                choose_transport(comm, gpus, "horovod", lacking)
        comm.barrier()

    run_ranks(2, program)


def test_ranks_that_ask_for_other_transports_raise_on_all_ranks():
    def program(comm):
        with pytest.raises(ValueError, match=r"same on all ranks. Received: \['auto', 'host'\]"):
            choose_transport(comm, get_backend("cpu"), "host" if comm.rank else "auto", kinds())

    run_ranks(2, program)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_cpu_has_the_host_alone(transport):
    def program(comm):
        cpu = get_backend("cpu")
        if transport in ("auto", "host"):
            assert choose_transport(comm, cpu, transport, kinds()).startswith("the host's")
            assert comm.gpu_transport is None
        else:
            with pytest.raises(CommunicatorError, match="rank 0: its tables are not on a GPU"):
                choose_transport(comm, cpu, transport, kinds())
        comm.barrier()

    run_ranks(2, program)


def test_the_name_comes_from_the_call_or_from_the_environment(monkeypatch):
    monkeypatch.delenv("SOK_LITE_GPU_TRANSPORT", raising=False)
    assert checked_transport(None) == "auto"
    monkeypatch.setenv("SOK_LITE_GPU_TRANSPORT", "host")
    assert checked_transport(None) == "host"
    assert checked_transport("horovod") == "horovod"
    with pytest.raises(ValueError, match="gpu_transport must be one of 'auto'.*Received: 'tcp'"):
        checked_transport("tcp")
    for gone in ("mpi", "nccl"):
        with pytest.raises(ValueError, match=f"gpu_transport='{gone}' is gone.*Use 'auto'"):
            checked_transport(gone)
    monkeypatch.setenv("SOK_LITE_GPU_TRANSPORT", "tcp")
    with pytest.raises(ValueError, match="SOK_LITE_GPU_TRANSPORT must be .*Received: 'tcp'"):
        checked_transport(None)

"""Transports of real libraries. Without GPUs they carry arrays of the CPU: the code is the same."""

import os

import numpy as np
import pytest

from sok_lite.backend import cuda_unavailable, get_backend
from sok_lite.backend.nccl import nccl_unavailable
from sok_lite.comm import CommunicatorError, choose_transport
from sok_lite.engine.failure import shared_failure
from tests.support.exchange_facts import FACTS, send

CPU = get_backend("cpu")


def _nccl(comm):
    reason = cuda_unavailable() or nccl_unavailable()
    if reason is None and get_backend("cuda").num_devices < comm.size:
        reason = "NCCL takes a GPU for each rank"
    if reason is not None:
        pytest.skip(reason)
    choose_transport(comm, get_backend("cuda"), "nccl")
    return comm.gpu_transport


def _horovod(comm):
    pytest.importorskip("tensorflow")
    from sok_lite.bridge.horovod_transport import connected, horovod_unable

    pytest.importorskip("horovod.tensorflow")
    if "does not connect" in (horovod_unable(comm) or ""):
        pytest.skip("Horovod does not connect these ranks")
    return connected(comm, CPU)


# What would be skipped is not made, since quick takes one variant: NCCL needs a GPU.
WAYS = {"horovod": _horovod}
if cuda_unavailable() is None:
    WAYS["nccl"] = _nccl


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def carried(comm, request, monkeypatch):
    """A communicator whose arrays a library carries."""
    monkeypatch.setattr(comm, "gpu_transport", None)
    comm.gpu_transport = request.param(comm)
    return comm


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
def test_round_trip(carried, fact):
    fact(carried, get_backend("cuda") if carried.gpu_transport.name == "nccl" else CPU)


def test_a_rank_that_fails_lets_all_raise_and_all_go_on(carried):
    comm, keys = carried, np.arange(9)
    backend = get_backend("cuda") if comm.gpu_transport.name == "nccl" else CPU
    if comm.size == 1:
        pytest.skip("one rank raises what it raises")
    for _ in range(2):
        error = KeyError if comm.rank == 1 else CommunicatorError
        with pytest.raises(error, match="lost"):
            with shared_failure(comm):
                if comm.rank == 1:
                    raise KeyError("lost")
            send(backend, comm, [keys], ["int64"])
        send(backend, comm, [keys], ["int64"])


def test_whether_horovod_carries_arrays_of_gpus_is_known(comm):
    pytest.importorskip("horovod.tensorflow")
    from sok_lite.bridge.horovod_transport import horovod_unable

    reason = horovod_unable(comm)
    if os.environ.get("HOROVOD_SIZE"):
        assert reason is None or "without HOROVOD_GPU_OPERATIONS=NCCL" in reason
    else:
        assert reason is not None

"""Horovod's transport. Without GPUs it carries arrays of the CPU: the code is the same."""

import os

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.comm import CommunicatorError
from sok_lite.engine.failure import shared_failure
from tests.support.exchange_facts import FACTS, send

CPU = get_backend("cpu")


def _horovod(comm):
    pytest.importorskip("tensorflow")
    from sok_lite.bridge.horovod_transport import connect, horovod_unable

    pytest.importorskip("horovod.tensorflow")
    if "does not connect" in (horovod_unable(comm) or ""):
        pytest.skip("Horovod does not connect these ranks")
    return connect(comm, CPU)


@pytest.fixture
def carried(comm, monkeypatch):
    """A communicator whose arrays Horovod carries."""
    monkeypatch.setattr(comm, "gpu_transport", None)
    comm.gpu_transport = _horovod(comm)
    return comm


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
def test_round_trip(carried, fact):
    fact(carried, CPU)


def test_a_rank_that_fails_lets_all_raise_and_all_go_on(carried):
    comm, keys = carried, np.arange(9)
    if comm.size == 1:
        pytest.skip("one rank raises what it raises")
    for _ in range(2):
        error = KeyError if comm.rank == 1 else CommunicatorError
        with pytest.raises(error, match="lost"):
            with shared_failure(comm):
                if comm.rank == 1:
                    raise KeyError("lost")
            send(CPU, comm, [keys], ["int64"])
        send(CPU, comm, [keys], ["int64"])


def test_whether_horovod_carries_arrays_of_gpus_is_known(comm):
    pytest.importorskip("horovod.tensorflow")
    from sok_lite.bridge.horovod_transport import horovod_unable

    reason = horovod_unable(comm)
    if os.environ.get("HOROVOD_SIZE"):
        assert reason is None or "without HOROVOD_GPU_OPERATIONS=NCCL" in reason
    else:
        assert reason is not None

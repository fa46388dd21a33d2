"""Transports of GPUs: control goes by the host, and no rank is left waiting in what carries."""

import copy

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.comm import CommunicatorError
from sok_lite.engine.exchange import send_keys
from tests.support.exchange_facts import FACTS, rule_of
from tests.support.meeting_transport import run_ranks_by_transport
from tests.support.shortage import Shortage

SIZE = 3


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

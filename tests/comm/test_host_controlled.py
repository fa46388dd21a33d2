"""Transports whose control goes by the host: no rank is left waiting in what carries."""

import copy
import threading

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.comm import CommunicatorError, run_ranks
from sok_lite.comm.host_controlled import HostControlledTransport
from sok_lite.comm.rows import split_offsets
from sok_lite.engine.exchange import send_keys
from tests.support.exchange_facts import FACTS, rule_of
from tests.support.shortage import Shortage

SIZE = 3


class Meeting(HostControlledTransport):
    """Threads hand messages to each other where all meet; it knows nothing of calls, as MPI."""

    name, what = "meeting", "threads that meet"
    all_came = threading.Barrier(SIZE)
    messages = [None] * SIZE

    def _carried(self, message, send_splits, recv_splits):
        rank = self._comm.rank
        self.messages[rank] = message, split_offsets(send_splits)
        self.all_came.wait(20)
        pieces = [sent[at[rank] : at[rank + 1]] for sent, at in self.messages]
        self.all_came.wait(20)
        return np.concatenate(pieces)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
def test_round_trip(fact):
    def program(comm):
        comm.gpu_transport = Meeting(comm, get_backend("cpu"))
        fact(comm, get_backend("cpu"))

    run_ranks(SIZE, program)


def test_a_rank_without_memory_for_keys_lets_no_other_wait():
    def program(comm):
        backend = copy.copy(get_backend("cpu"))
        comm.gpu_transport = Meeting(comm, backend)
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

    run_ranks(SIZE, program)

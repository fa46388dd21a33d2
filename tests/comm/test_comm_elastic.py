"""A communicator whose ranks are connected anew."""

import numpy as np
import pytest

from sok_lite.comm import CommunicatorError, ElasticCommunicator, SingleCommunicator, run_ranks
from sok_lite.engine.agreement import agree_on


def test_it_is_that_of_the_ranks_that_are_connected():
    going_on = {}

    def first(comm):
        elastic = ElasticCommunicator(lambda: comm)
        assert (elastic.rank, elastic.size, elastic.is_alone) == (comm.rank, 3, False)
        assert elastic.allreduce(comm.rank) == 3
        assert elastic.alltoallv(np.arange(3), [1, 1, 1]).rows.tolist() == [comm.rank] * 3
        agree_on(elastic, {"a": 1}, "This")
        assert elastic.turn == comm.turn > 0
        going_on[comm.rank] = elastic

    run_ranks(3, first)

    def second(comm):
        def connect():
            comm.barrier()  # ranks that look for shared memory and find none
            return comm

        elastic = going_on[2] if comm.rank == 0 else ElasticCommunicator(connect)
        elastic._connect = connect
        if comm.rank == 0:
            elastic.disconnect()
            for call in (elastic.barrier, lambda: elastic.allgatherv(np.zeros(2))):
                with pytest.raises(CommunicatorError, match="to be connected anew"):
                    call()
            elastic.reconnect()
        assert (elastic.rank, elastic.size, elastic.turn) == (comm.rank, 2, comm.turn)
        # What was agreed on before is asked again: the other rank knows nothing of it.
        agree_on(elastic, {"a": 1}, "This")
        assert elastic.allgatherv(np.full(comm.rank, 7)).rows.tolist() == [7]

    run_ranks(2, second)


def test_one_rank_that_is_left_may_be_joined():
    elastic = ElasticCommunicator(SingleCommunicator)
    assert elastic.size == 1 and not elastic.is_alone
    assert elastic.allreduce(5) == 5
    elastic.disconnect()
    with pytest.raises(CommunicatorError, match="to be connected anew"):
        elastic.barrier()

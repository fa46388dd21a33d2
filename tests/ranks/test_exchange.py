"""The facts of the exchange over real transports."""

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.comm import CommunicatorError
from sok_lite.comm.local import LocalCommunicator, MultiHostCommunicator, connect_local
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.exchange import send_grads
from tests.support.exchange_facts import FACTS, send


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
def test_round_trip(comm, fact):
    fact(comm)


def test_descriptions_are_compared(comm):
    check_equal_on_all_ranks(comm, {"dim": 4}, "table 'user'")
    if comm.size > 1:
        dim = 8 if comm.rank == comm.size - 1 else 4
        with pytest.raises(ValueError, match=rf"dim is 4 on rank 0 and 8 on rank {comm.size - 1}"):
            check_equal_on_all_ranks(comm, {"dim": dim}, "table 'user'")


def test_gradients_of_two_lookups_in_another_order_raise_on_all_ranks(comm):
    """Equal tables and counts: nothing but the lookup's number tells the two trips apart."""
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    if isinstance(comm, (MultiHostCommunicator, LocalCommunicator)):
        comm = connect_local(comm._base)  # ranks that have disagreed do not go on with it
    backend, keys = get_backend("cpu"), np.arange(comm.size, dtype=np.int64)
    _, first = send(backend, comm, [keys], ["int64"])
    _, second = send(backend, comm, [keys], ["int64"])
    mine = [second, first] if comm.rank == 1 else [first, second]
    with pytest.raises(CommunicatorError, match="different calls.*send_grads of lookup"):
        send_grads(mine[0], [np.zeros((comm.size, 1), np.float32)])

"""The facts of the exchange over real transports."""

import pytest

from sok_lite.engine.exchange import check_equal_on_all_ranks
from tests.exchange_facts import FACTS


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
def test_round_trip(comm, fact):
    fact(comm)


def test_descriptions_are_compared(comm):
    check_equal_on_all_ranks(comm, {"dim": 4}, "table 'user'")
    if comm.size > 1:
        dim = 8 if comm.rank == comm.size - 1 else 4
        with pytest.raises(ValueError, match=rf"dim is 4 on rank 0 and 8 on rank {comm.size - 1}"):
            check_equal_on_all_ranks(comm, {"dim": dim}, "table 'user'")

"""sok.report over real ranks: numbers of all, and errors that all raise."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok


def test_all_ranks_get_the_numbers_of_all(comm):
    table = sok.DynamicVariable(2, initializer="ones", name="v")
    tf.nn.embedding_lookup(table, np.arange(10 * (comm.rank + 1)))
    found = sok.report(table)["v"]
    of_ranks = tuple(10 * (rank + 1) for rank in range(comm.size))
    assert found.keys_of_ranks == of_ranks and found.keys == sum(of_ranks)
    assert found.norms.shown() == [("1.25 to 1.6", sum(of_ranks))]
    assert found.counts["missed"] == sum(of_ranks)
    assert sum(found.bytes_of_ranks) == found.num_bytes
    if comm.size > 1:
        assert found.balance == max(of_ranks) / np.mean(of_ranks)


def test_a_wrong_argument_of_one_rank_is_an_error_on_all(comm):
    table = sok.DynamicVariable(2, name="v")
    last = comm.size - 1
    with pytest.raises(TypeError, match="Expected tables"):
        sok.report(3 if comm.rank == last else table)
    assert sok.report(table)["v"].keys == 0  # the ranks still go together


def test_other_tables_on_one_rank_are_an_error_on_all(comm):
    if comm.size == 1:
        pytest.skip("one rank has nobody to differ from")
    table = sok.DynamicVariable(2, name="v" if comm.rank else "w")
    with pytest.raises(ValueError, match="What a report is of must be the same on all ranks"):
        sok.report(table)

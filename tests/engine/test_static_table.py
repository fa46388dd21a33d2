"""Static tables of the engine: whose rows are where, and how ranks ask each other for them."""

from functools import partial

import numpy as np
import pytest

from sok_lite.comm import CommunicatorError, run_ranks
from sok_lite.engine.exchange import return_rows, send_grads
from sok_lite.engine.owner import MOD, OneRank
from sok_lite.engine.static_lookup import ask
from sok_lite.engine.static_table import StaticTable
from tests.support.call_counts import can_count, counts_of, counts_of_ranks
from tests.support.helpers import on
from tests.support.meeting_transport import run_ranks_by_transport
from tests.support.parts import Part, batch_of
from tests.support.simt.backend import is_simulated


def batch_for(backend, tables, keys):
    """Returns a batch with keys for each table, one to a row."""
    parts = [
        Part(table, *on(backend, its, np.arange(len(its) + 1)), None, "sum")
        for table, its in zip(tables, keys, strict=True)
    ]
    return batch_of(backend, parts)


@pytest.mark.parametrize("by_transport", [False, True], ids=["host", "transport"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_come_from_their_owners_and_gradients_go_there(backend, size, by_transport):
    rng = np.random.default_rng(size)
    # Fewer rows than ranks, all rows on one rank, and a rank that asks for nothing.
    kinds = [(17, 4, MOD), (1, 3, MOD), (40, 33, OneRank(size - 1)), (1000, 5, OneRank(0))]
    rows = [rng.normal(size=kind[:2]).astype(np.float32) for kind in kinds]
    asked = [[rng.integers(0, kind[0], n) for kind in kinds] for n in [13, 2, 0][:size]]

    def run(comm):
        tables = [StaticTable(backend, n, dim, owner=owner) for n, dim, owner in kinds]
        mine = [
            its[list(table.row_numbers(comm.rank, comm.size))]
            for its, table in zip(rows, tables, strict=True)
        ]
        found = ask(backend, comm, batch_for(backend, tables, asked[comm.rank]), 5)
        places = [backend.to_host(each) for each in found.places]
        read = [its[at] for its, at in zip(mine, places, strict=True)]
        returned = return_rows(found.plan, on(backend, *read))
        for its, answer, number, keys in zip(
            rows, returned, found.numbers, asked[comm.rank], strict=True
        ):
            answer, number = backend.to_host(answer), backend.to_host(number)
            np.testing.assert_array_equal(answer[number], its[keys])
            assert len(answer) == len(np.unique(keys)) or comm.size == 1
        ones = on(backend, *(np.ones(each.shape, np.float32) for each in returned))
        received = send_grads(found.plan, ones)
        return places, [backend.to_host(each)[:, 0] for each in received]

    if by_transport:
        results = run_ranks_by_transport(size, run, backend=backend)
    else:
        results = run_ranks(size, run)
    for i, (num_rows, _, owner) in enumerate(kinds):
        for rank, (places, received) in enumerate(results):
            table = StaticTable(backend, num_rows, 1, owner=owner)
            numbers = np.array(table.row_numbers(rank, size), np.int64)[places[i]]
            total = np.bincount(numbers, received[i], num_rows)
            wanted = sum(np.isin(np.arange(num_rows), keys[i]) for keys in asked)
            is_here = owner.owners(np.arange(num_rows), size) == rank
            np.testing.assert_array_equal(total, wanted * is_here)


def test_rows_are_spread_as_their_owner_rule_says(backend):
    for num_rows in (1, 2, 7, 8):
        table = StaticTable(backend, num_rows, 2)
        for size in (1, 2, 3, 8):
            rows = np.arange(num_rows)
            owners = table.owner.owners(rows, size)
            for rank in range(size):
                mine = rows[owners == rank]
                assert table.num_rows_of(rank, size) == len(mine)
                assert (mine // table.stride(size)).tolist() == list(range(len(mine)))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("row", [5, -1, 2**62, -(2**63)])
def test_a_row_that_there_is_not_is_refused_on_all_ranks(backend, row, size):
    """The last rank asks for it."""

    def run(comm):
        tables = [StaticTable(backend, 9, 2, name="nine"), StaticTable(backend, 5, 2, name="five")]
        asked = row if comm.rank == size - 1 else 4
        batch = batch_for(backend, tables, [np.array([8]), np.array([0, asked, 0])])
        text = f"row numbers of table 'five' must be from 0 to 4: it has 5 rows. Received: {row}."
        with pytest.raises((ValueError, CommunicatorError), match=text):
            ask(backend, comm, batch, 1)

    run_ranks(size, run)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint64])
def test_rows_are_numbers_of_any_type(backend, dtype):
    table = StaticTable(backend, 5, 2)
    keys = table.engine_keys(*on(backend, np.array([4, 0, 4], dtype)))
    assert keys.dtype == np.int64 and backend.to_host(keys).tolist() == [4, 0, 4]
    with pytest.raises(TypeError, match="must be integers"):
        table.engine_keys(np.array([1.0]))
    with pytest.raises(ValueError, match="row numbers of table 'table' must fit int64"):
        table.engine_keys(np.array([2**63], np.uint64))


def test_row_splits_of_a_static_table_are_checked(backend):
    table = StaticTable(backend, 5, 2)
    keys, splits = on(backend, np.array([1, 2]), np.array([0, 3, 2]))
    batch = batch_of(backend, [Part(table, keys, splits, None, "sum")])
    with pytest.raises(ValueError, match="must rise from 0 to the number of its keys, 2"):
        run_ranks(1, lambda comm: ask(backend, comm, batch, 1))


def test_what_is_asked_of_the_device_does_not_depend_on_the_number_of_tables(backend):
    if not can_count(backend):
        pytest.skip("nobody counts what is asked of this GPU")

    def counts(num_tables, comm):
        tables = [StaticTable(backend, 9, 3 + i % 2, name=f"t{i}") for i in range(num_tables)]
        batch = batch_for(backend, tables, [np.array([8, 2, 8])] * num_tables)
        ask(backend, comm, batch, 1)
        return counts_of(backend, lambda: ask(backend, comm, batch, 1))[:3]

    ((few, many),) = run_ranks(1, lambda comm: (counts(2, comm), counts(40, comm)))
    assert few == many


def test_a_call_by_a_transport_copies_as_much_for_few_keys_as_for_many(backend):
    if not is_simulated(backend):
        pytest.skip("nobody counts what is copied on a CPU, or on this GPU")

    def call_of(num_keys, comm):
        tables = [StaticTable(backend, 50, 4), StaticTable(backend, 40, 3, owner=OneRank(1))]
        batch = batch_for(backend, tables, [np.arange(num_keys)] * 2)

        def call():
            ask(backend, comm, batch, 5)

        call()
        return call

    run = partial(run_ranks_by_transport, backend=backend)
    few, many = (counts_of_ranks(backend, 2, partial(call_of, n), run)[0] for n in (8, 40))
    assert (few.to_device, few.to_host) == (many.to_device, many.to_host)

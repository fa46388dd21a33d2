"""Static tables beside a dictionary's place: a growing table that holds the same rows."""

import numpy as np
import pytest

from sok_lite.comm import CommunicatorError, run_ranks
from sok_lite.engine import lookup
from sok_lite.engine.batch import Part, batch_of
from sok_lite.engine.owner import HASH, MOD, OneRank
from sok_lite.engine.static_lookup import locate
from sok_lite.engine.static_table import GivenRows, StaticTable
from tests.support.call_counts import can_count, counts_of
from tests.support.helpers import new_table, on
from tests.support.step_oracle import flat, random_ragged

DTYPES = {"float32": np.float32, "float16": np.float16}


class Pair:
    """A static table's rows of all ranks, and of a rank both tables that hold them."""

    def __init__(self, number, num_rows, dim, owner, dtype="float32"):
        self.number, self.num_rows, self.dim = number, num_rows, dim
        self.owner, self.dtype = owner, dtype
        rows = np.random.default_rng(number).normal(size=(num_rows, dim))
        self.rows = rows.astype(DTYPES[dtype])

    def static(self, backend):
        options = {"dtype": self.dtype, "name": f"static {self.number}", "owner": self.owner}
        return StaticTable(backend, self.num_rows, self.dim, **options)

    def growing(self, backend, comm):
        options = {"dtype": self.dtype, "name": f"growing {self.number}", "owner": self.owner}
        table = new_table(backend, self.dim, **options)
        keys = np.arange(self.num_rows)
        mine = keys[self.owner.owners(keys, comm.size) == comm.rank]
        table.insert_or_assign(*on(backend, mine, self.rows[mine]))
        return table

    def here(self, table, comm):
        """The rows of this rank."""
        if self.owner == MOD:
            mine = self.rows[comm.rank :: comm.size]
        else:
            mine = self.rows if comm.rank == self.owner.only_rank else self.rows[:0]
        assert len(mine) == table.num_rows_of(comm.rank, comm.size)
        return mine


def a_call(backend, comm, pairs, statics, ragged, weights, combiners):
    """A lookup and its gradient; `statics`: which of the pairs come as static tables."""
    tables = [
        pair.static(backend) if is_static else pair.growing(backend, comm)
        for pair, is_static in zip(pairs, statics, strict=True)
    ]
    parts = []
    for i, table in enumerate(tables):
        keys, splits = flat(ragged[comm.rank][i], np.int64)
        w = weights[comm.rank][i]
        parts.append(Part(table, *on(backend, keys, splits, w), combiners[i]))
    batch = batch_of(backend, parts)
    all_asked, sent = locate(backend, comm, batch, 5)
    asked = iter(all_asked)
    given = [None] * len(tables)
    for i, table in enumerate(tables):
        if table.is_static:
            each = next(asked)
            rows = pairs[i].here(table, comm)[backend.to_host(each.places)]
            given[i] = GivenRows(*on(backend, rows), each.number)
    outputs, trail = lookup.forward_batch(backend, comm, batch._replace(given=given), 5, None, sent)
    outputs = [np.array(backend.to_host(each)) for each in outputs]
    grads = [backend.from_host(np.cos(out)) for out in outputs]
    ways = [(part.table, part.weights, part.combiner) for part in parts]
    results, places_read = [], iter([each.places for each in all_asked])
    for i, g in enumerate(lookup.backward(backend, ways, grads, trail)):
        by_weights = None if g.weight_grads is None else backend.to_host(g.weight_grads).tolist()
        keys = backend.to_host(g.keys)
        if tables[i].is_static:
            # In the order of the rows that were read.
            places = backend.to_host(next(places_read))
            assert np.array_equal(keys // tables[i].stride(comm.size), places)
        results.append((keys.tolist(), backend.to_host(g.row_grads).tolist(), by_weights))
    return [out.tolist() for out in outputs], results


@pytest.mark.parametrize("statics", [(1, 1, 1, 1), (1, 0, 1, 0), (0, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_static_table_gives_what_a_growing_one_does(backend, size, statics):
    rng = np.random.default_rng([size, *statics])
    pairs = [
        Pair(0, 17, 4, MOD),
        Pair(1, 1, 3, MOD),  # fewer rows than ranks
        Pair(2, 40, 33, OneRank(size - 1)),
        Pair(3, 1000, 5, OneRank(0), "float16"),
    ]
    combiners = ["sum", "mean", "sqrtn", "mean"]
    # The last of several ranks asks for nothing.
    batches = [13, 2, 0][:size]
    ragged = [
        [random_ragged(rng, batch, 5, 0, pair.num_rows) for pair in pairs] for batch in batches
    ]
    weights = [
        [
            rng.uniform(0.5, 2, sum(map(len, rows))).astype(np.float32) if i % 2 else None
            for i, rows in enumerate(of_rank)
        ]
        for of_rank in ragged
    ]

    def run(statics):
        call = (pairs, statics, ragged, weights, combiners)
        return run_ranks(size, lambda comm: a_call(backend, comm, *call))

    assert run(statics) == run((0, 0, 0, 0))


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
        keys, splits = on(backend, np.array([0, asked, 0]), np.array([0, 3]))
        parts = [Part(tables[0], *on(backend, np.array([8]), np.array([0, 1])), None, "sum")]
        parts.append(Part(tables[1], keys, splits, None, "sum"))
        text = f"row numbers of table 'five' must be from 0 to 4: it has 5 rows. Received: {row}."
        with pytest.raises((ValueError, CommunicatorError), match=text):
            locate(backend, comm, batch_of(backend, parts), 1)

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


def test_other_rules_of_owners_are_refused(backend):
    with pytest.raises(ValueError, match="row mod ranks, or all on one rank. Received: hash"):
        StaticTable(backend, 5, 2, owner=HASH)


def test_row_splits_of_a_static_table_are_checked(backend):
    table = StaticTable(backend, 5, 2)
    keys, splits = on(backend, np.array([1, 2]), np.array([0, 3, 2]))
    batch = batch_of(backend, [Part(table, keys, splits, None, "sum")])
    with pytest.raises(ValueError, match="must rise from 0 to the number of its keys, 2"):
        run_ranks(1, lambda comm: locate(backend, comm, batch, 1))


def test_what_is_asked_of_the_device_does_not_depend_on_the_number_of_tables(backend):
    if not can_count(backend):
        pytest.skip("nobody counts what is asked of this GPU")

    def counts(num_tables, comm):
        tables = [StaticTable(backend, 9, 3 + i % 2, name=f"t{i}") for i in range(num_tables)]
        keys, splits, weights = on(
            *(backend, np.array([8, 2, 8]), np.array([0, 1, 3]), np.ones(3, np.float32))
        )
        batch = batch_of(backend, [Part(table, keys, splits, weights, "mean") for table in tables])
        rows = [backend.from_host(np.ones((2, table.dim), np.float32)) for table in tables]
        grads = [backend.from_host(np.ones((2, table.dim), np.float32)) for table in tables]
        results = []

        def first():
            results[:] = locate(backend, comm, batch, 1)

        def second():
            asked, sent = results[:2]
            given = [GivenRows(each, a.number) for each, a in zip(rows, asked, strict=True)]
            of_call = (comm, batch._replace(given=given), 1, None, sent)
            results.append(lookup.forward_batch(backend, *of_call)[1])

        def back():
            ways = [(table, weights, "mean") for table in tables]
            lookup.backward(backend, ways, grads, results.pop())

        for call in (first, second, back):
            call()
        return [counts_of(backend, call)[:3] for call in (first, second, back)]

    ((few, many),) = run_ranks(1, lambda comm: (counts(2, comm), counts(40, comm)))
    assert few == many

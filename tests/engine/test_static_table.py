"""Static tables beside a dictionary's place: a growing table that holds the same rows."""

from functools import partial

import numpy as np
import pytest

from sok_lite.backend.ragged import split
from sok_lite.comm import CommunicatorError, run_ranks
from sok_lite.engine import lookup, static_lookup
from sok_lite.engine.owner import MOD, OneRank
from sok_lite.engine.static_table import StaticTable
from tests.support.call_counts import can_count, counts_of, counts_of_ranks
from tests.support.helpers import new_table, on
from tests.support.meeting_transport import run_ranks_by_transport
from tests.support.parts import Part, batch_of, by_part, forward_parts
from tests.support.simt.backend import is_simulated
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


def parts_of(backend, tables, ragged, weights):
    parts = []
    for table, rows, w, combiner in zip(tables, ragged, weights, COMBINERS, strict=True):
        keys, splits = flat(rows, np.int64)
        parts.append(Part(table, *on(backend, keys, splits, w), combiner))
    return parts


def results_of(backend, outputs, gradients):
    """Everything as lists; gradients by row number."""
    results = []
    for out, (keys, row_grads, by_weights) in zip(outputs, gradients, strict=True):
        out, row_grads = (backend.to_host(each).tolist() for each in (out, row_grads))
        by_weights = None if by_weights is None else backend.to_host(by_weights).tolist()
        results.append((out, dict(zip(keys, row_grads, strict=True)), by_weights))
    return results


def of_growing(backend, comm, pairs, ragged, weights):
    """A lookup and its gradient in growing tables."""
    tables = [pair.growing(backend, comm) for pair in pairs]
    parts = parts_of(backend, tables, ragged[comm.rank], weights[comm.rank])
    outputs, context = forward_parts(backend, comm, parts, 5)
    ways = [(part.table, part.weights, part.combiner) for part in parts]
    found = lookup.backward(backend, ways, cosines(backend, outputs), context)
    gradients = [(backend.to_host(g.keys).tolist(), *g[1:]) for g in by_part(found)]
    return results_of(backend, outputs, gradients)


def sent_of(backend, comm, batch, located):
    """What an operation makes of what another one told, in arrays that are too long by a bit."""
    others = [backend.xp.concatenate([each, each[:1]]) for each in located.others()]
    return static_lookup.Sent.of(backend, comm, batch, located.numbers(), others)


def of_static(backend, comm, pairs, ragged, weights):
    """The same in static tables."""
    tables = [pair.static(backend) for pair in pairs]
    parts = parts_of(backend, tables, ragged[comm.rank], weights[comm.rank])
    batch = batch_of(backend, parts)
    located = static_lookup.locate(backend, comm, batch, 5)
    sent = sent_of(backend, comm, batch, located)
    places = split(backend.to_host(located.places), located.num_places)
    rows = [
        pair.here(table, comm)[its_places]
        for pair, table, its_places in zip(pairs, tables, places, strict=True)
    ]
    rows = on(backend, *rows)
    outputs, context = static_lookup.forward(backend, comm, batch, sent, rows)
    context = sent.context(batch, context.pooling.sources)
    ways = [(part.table, part.weights, part.combiner) for part in parts]
    grads, by_weights = static_lookup.backward(backend, ways, cosines(backend, outputs), context)
    gradients = []
    for table, its_places, *its_grads in zip(tables, places, grads, by_weights, strict=True):
        rank = comm.rank if table.owner == MOD else 0
        gradients.append(((its_places * table.stride(comm.size) + rank).tolist(), *its_grads))
    return results_of(backend, outputs, gradients)


def cosines(backend, outputs):
    return [backend.from_host(np.cos(backend.to_host(each))) for each in outputs]


COMBINERS = ["sum", "mean", "sqrtn", "mean"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_static_table_gives_what_a_growing_one_does(backend, size):
    rng = np.random.default_rng(size)
    pairs = [
        Pair(0, 17, 4, MOD),
        Pair(1, 1, 3, MOD),  # fewer rows than ranks
        Pair(2, 40, 33, OneRank(size - 1)),
        Pair(3, 1000, 5, OneRank(0), "float16"),
    ]
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
    call = (pairs, ragged, weights)
    expected = run_ranks(size, lambda comm: of_growing(backend, comm, *call))
    assert run_ranks(size, lambda comm: of_static(backend, comm, *call)) == expected


def two_located(backend, comm):
    """Two lookups whose keys have been sent, one after the other; see `of_static`."""
    table = StaticTable(backend, 9, 2)
    keys, splits = on(backend, np.arange(5), np.array([0, 2, 5]))
    batch = batch_of(backend, [Part(table, keys, splits, None, "sum")])
    located = [static_lookup.locate(backend, comm, batch, 3) for _ in range(2)]
    rows = on(backend, np.zeros((int(located[0].num_places[0]), 2), np.float32))
    return table, batch, [(sent_of(backend, comm, batch, each), rows) for each in located]


def test_two_lookups_whose_keys_were_sent_before_either_are_told_apart(backend):
    def run(comm):
        table, batch, both = two_located(backend, comm)
        contexts = [static_lookup.forward(backend, comm, batch, *each)[1] for each in both]
        grads = [backend.xp.ones((2, 2), np.float32)]
        # Rank 1 goes back in the other order: a gradient of one lookup is none of the other.
        with pytest.raises(CommunicatorError, match="send_grads of lookup"):
            static_lookup.backward(backend, [(table, None, "sum")], grads, contexts[comm.rank])

    run_ranks(2, run)


def test_ranks_that_look_up_different_keys_that_were_sent_raise(backend):
    def run(comm):
        _, batch, both = two_located(backend, comm)
        with pytest.raises(CommunicatorError, match="return_rows of lookup"):
            static_lookup.forward(backend, comm, batch, *both[comm.rank])

    run_ranks(2, run)


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
            static_lookup.locate(backend, comm, batch_of(backend, parts), 1)

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
        run_ranks(1, lambda comm: static_lookup.locate(backend, comm, batch, 1))


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
            results[:] = [static_lookup.locate(backend, comm, batch, 1)]

        def second():
            (located,) = results
            sent = static_lookup.Sent.of(backend, comm, batch, located.numbers(), located.others())
            results.append(static_lookup.forward(backend, comm, batch, sent, rows)[1])

        def back():
            ways = [(table, weights, "mean") for table in tables]
            static_lookup.backward(backend, ways, grads, results.pop())

        for call in (first, second, back):
            call()
        return [counts_of(backend, call)[:3] for call in (first, second, back)]

    ((few, many),) = run_ranks(1, lambda comm: (counts(2, comm), counts(40, comm)))
    assert few == many


def test_a_call_by_a_transport_copies_as_much_for_few_keys_as_for_many(backend):
    """Of several tables; the rows that are read stay on the device."""
    if not is_simulated(backend):
        pytest.skip("nobody counts what is copied on a CPU, or on this GPU")
    xp, pairs = backend.xp, [Pair(0, 50, 4, MOD), Pair(1, 40, 3, OneRank(1))]

    def call_of(num_keys, comm):
        tables = [pair.static(backend) for pair in pairs]
        mine = [pair.here(each, comm) for pair, each in zip(pairs, tables, strict=True)]
        here = on(backend, *mine)
        keys, splits = on(backend, np.arange(num_keys), np.array([0, 1, num_keys]))
        parts = [Part(table, keys, splits, None, "sum") for table in tables]
        batch, ways = batch_of(backend, parts), [(table, None, "sum") for table in tables]

        def call():
            located = static_lookup.locate(backend, comm, batch, 5)
            places = split(located.places, located.num_places)
            rows = [
                xp.take(each, its_places, axis=0)
                for each, its_places in zip(here, places, strict=True)
            ]
            sent = static_lookup.Sent.of(backend, comm, batch, located.numbers(), located.others())
            out, context = static_lookup.forward(backend, comm, batch, sent, rows)
            static_lookup.backward(backend, ways, list(out), context)

        call()
        return call

    run = partial(run_ranks_by_transport, backend=backend)
    few, many = (counts_of_ranks(backend, 2, partial(call_of, n), run)[0] for n in (8, 40))
    assert (few.to_device, few.to_host) == (many.to_device, many.to_host)

"""Gradients that travel as bfloat16 with feedback, against float64 of NumPy; and what travels."""

import contextlib
import copy
import itertools
import threading
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sok_lite.backend import get_backend
from sok_lite.comm import CommunicatorError, run_ranks
from sok_lite.comm.protocol import split_offsets
from sok_lite.comm.threads import ThreadsCommunicator
from sok_lite.engine import lookup, trips
from sok_lite.engine.agreement import agree
from sok_lite.engine.batch import Part, batch_of
from sok_lite.engine.sent_keys import pack_sent, send, unpack_sent
from sok_lite.engine.table import snapshot
from sok_lite.engine.trail import pack, unpack
from tests.support.helpers import new_table, on, sized
from tests.support.shortage import Shortage
from tests.support.step_oracle import flat, key_gradients, random_ragged

HYBRID = {"init_capacity": 64, "max_capacity": 1 << 12}


def rounded(x):
    """float64 numbers to the 8 bits that a bfloat16 has, to nearest even."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8)


class Feedback:
    """What all ranks send of one table, and what is left of it, by rank and key: the oracle."""

    def __init__(self):
        self.left = {}
        self.sent = {}  # of the last call

    def send(self, rank, gradients):
        for key, gradient in gradients.items():
            total = gradient + self.left.get((rank, key), 0.0)
            self.left[rank, key] = total - rounded(total)
            self.sent[key] = self.sent.get(key, 0.0) + rounded(total)


class PartCase(NamedTuple):
    """One part of a call: its table, and whether it has weights."""

    table: int
    combiner: str = "sum"
    is_weighted: bool = False


TABLES = [
    {"dim": 5, "rounds_gradients": True},
    {"dim": 8},
    {"dim": 1, "rounds_gradients": True, "var_type": "hybrid", **HYBRID},
    {"dim": 33, "rounds_gradients": True, "dtype": "bfloat16", "key_type": "uint64"},
    {"dim": 4, "var_type": "hybrid", "dtype": "float16", **HYBRID},
]
# The first table comes three times, the third twice.
PARTS = [
    *(PartCase(0), PartCase(1, "mean"), PartCase(2), PartCase(0, "sum", True), PartCase(3)),
    *(PartCase(4), PartCase(2, "sum", True), PartCase(0)),
]


def whole_gradients(rng, batch, dim):
    """Of 13 bits: their sums are exact in float32, and more than bfloat16 has."""
    return (rng.integers(-4000, 4000, (batch, dim)) / 256).astype(np.float32)


def batches(size, step, parts, most_keys):
    """Of each rank and part: ragged keys, weights or None, and the gradient of the output."""
    rng = np.random.default_rng([size, step])
    result = []
    for rank in range(size):
        batch = 0 if (rank, step) == (1, 1) else 7
        of_rank = []
        for part in parts:
            ragged = random_ragged(rng, batch, 5, 0, most_keys)
            if part.combiner == "mean":
                ragged = [keys[:2] for keys in ragged]  # divides exactly
            weights = None
            if part.is_weighted:
                weights = [[float(rng.choice([0.5, 1, 2])) for _ in keys] for keys in ragged]
            dim = TABLES[part.table]["dim"]
            of_rank.append((ragged, weights, whole_gradients(rng, batch, dim)))
        result.append(of_rank)
    return result


def call(backend, comm, tables, parts, batch, through=lambda trail: trail):
    """A lookup and its gradient; gives of each part {key: row gradient}."""
    asked, ways = [], []
    for part, (ragged, weights, _) in zip(parts, batch, strict=True):
        table = tables[part.table]
        keys, splits = flat(ragged, table.key_dtype.name)
        weights = None if weights is None else flat(weights, np.float32)[0]
        asked.append(Part(table, *on(backend, keys, splits, weights), part.combiner))
        ways.append((table, asked[-1].weights, part.combiner))
    _, trail = lookup.forward(backend, comm, asked)
    gradients = lookup.backward(backend, ways, on(backend, *(g for *_, g in batch)), through(trail))
    return [
        dict(zip(*(backend.to_host(each).tolist() for each in gradient[:2]), strict=True))
        for gradient in gradients
    ]


def new_tables(backend, options):
    return [new_table(backend, **each, name=f"t{i}") for i, each in enumerate(options)]


@pytest.mark.parametrize("size", [2, 3])
def test_what_arrives_is_what_feedback_makes_of_the_gradients(backend, size):
    """Tables with and without, of both kinds, some several times in a call, one rank idle."""
    num_steps = sized(backend, 4, 2)
    steps = [batches(size, step, PARTS, 40) for step in range(num_steps)]

    def program(comm):
        tables = new_tables(backend, TABLES)

        def packed(trail):
            return unpack(backend, comm, pack(backend, trail), len(PARTS))

        through = [lambda trail: trail, packed]
        return [
            call(backend, comm, tables, PARTS, steps[step][comm.rank], through[step % 2])
            for step in range(num_steps)
        ], [None if t.residuals is None else t.residuals.size for t in tables]

    results = run_ranks(size, program)
    feedback = [Feedback() for _ in TABLES]
    for step in range(num_steps):
        for i, part in enumerate(PARTS):
            oracle, expected = feedback[part.table], {}
            oracle.sent = {}
            for rank in range(size):
                ragged, weights, out_grads = steps[step][rank][i]
                gradients = key_gradients(ragged, out_grads, part.combiner, weights)
                if TABLES[part.table].get("rounds_gradients"):
                    oracle.send(rank, gradients)
                    expected = oracle.sent
                else:
                    for key, gradient in gradients.items():
                        expected[key] = expected.get(key, 0.0) + gradient
            found = {}
            for told, _ in results:
                found |= told[step][i]
            assert found.keys() == expected.keys()
            for key, gradient in expected.items():
                np.testing.assert_array_equal(found[key], gradient)
    for rank, (_, sizes) in enumerate(results):
        kept = [sum(r == rank for r, _ in oracle.left) for oracle in feedback]
        assert sizes == [
            n if options.get("rounds_gradients") else None
            for n, options in zip(kept, TABLES, strict=True)
        ]
    assert any(np.any(left) for left in feedback[0].left.values()), "nothing was rounded"


def one_key(grads, rank):
    """A batch of one key: rank 0 sends a gradient (dim,) to its owner."""
    return [([[1]], None, grads[None])] if rank == 0 else [([], None, grads[None][:0])]


def arrived(sequence, dim, between=lambda table, step: None):
    """What key 1, whose owner is rank 1, is sent of a sequence of gradients; what is left."""
    backend = get_backend("cpu")

    def program(comm):
        table = new_table(backend, dim, rounds_gradients=True)
        told = []
        for step, grads in enumerate(sequence):
            told += call(backend, comm, [table], [PartCase(0)], one_key(grads, comm.rank))
            between(table, step)
        left = None if comm.rank else table.residuals.lookup([1]).values[0]
        return [each[1] for each in told if each], left

    (_, left), (sums, _) = run_ranks(2, program)
    return np.array(sums, np.float64), left


@given(
    st.lists(
        st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=3, max_size=3),
        min_size=1,
        max_size=12,
    )
)
def test_the_sum_of_what_was_sent_is_the_sum_of_all_but_for_one_rounding(sequence):
    sequence = np.array(sequence, np.float32)
    sums, left = arrived(sequence, 3)
    exact = sequence.astype(np.float64)
    # What is added up in float32: each sum may be off by half of its last place.
    noise = len(sequence) * 2.0**-24 * (abs(exact).max(0) + abs(sums).max(0)) + 2.0**-149
    off = abs(sums.sum(0) + left.astype(np.float64) - exact.sum(0))
    assert (off <= noise).all()
    # A tiny bfloat16 has no more places than a tiny float32.
    assert (abs(left) <= np.maximum(2.0**-8 * abs(sums[-1]), 2.0**-134)).all()


def test_small_gradients_arrive_in_time():
    """Rounded alone, 1/1024 beside 1 would never arrive."""
    sequence = np.full((64, 1), 1 + 2.0**-10, np.float32)
    sums, left = arrived(sequence, 1)
    assert set(sums[:, 0]) == {1.0, 1 + 2.0**-7}
    assert sums.sum() + left[0] == 64 + 64 / 1024


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
def test_what_is_not_finite_is_sent_and_not_kept(bad):
    """The largest float32 is an infinity as bfloat16."""
    small = np.float32(1 + 2.0**-10)
    sums, left = arrived(np.array([[small, small], [bad, small], [small, small]], np.float32), 2)
    np.testing.assert_array_equal(sums[1], [np.inf if np.isfinite(bad) else bad, 1])
    np.testing.assert_array_equal(sums[2], [1, 1])
    # Of the element that was not finite the other two gradients count.
    np.testing.assert_array_equal(left, [2 * 2.0**-10, 3 * 2.0**-10])


@pytest.mark.parametrize("how", ["clear", "restore"])
def test_what_is_left_goes_with_what_the_table_held(how):
    taken = []

    def between(table, step):
        if how == "clear" and step == 1:
            table.clear()
        elif how == "restore":
            taken.append(snapshot.take(table))
            if step == 1:
                snapshot.restore(table, taken[-1])

    sequence = np.full((3, 1), 1 + 2.0**-9, np.float32)
    sums, left = arrived(sequence, 1)
    assert (sums[:, 0].tolist(), left[0]) == ([1, 1, 1 + 2.0**-7], -(2.0**-9))
    sums, left = arrived(sequence, 1, between)
    assert (sums[:, 0].tolist(), left[0]) == ([1, 1, 1], 2.0**-9)


def test_one_rank_rounds_nothing(backend):
    def program(comm):
        (table,) = new_tables(backend, TABLES[:1])
        grads = np.full((1, 5), 1 + 2.0**-10, np.float32)
        told = call(backend, comm, [table], [PartCase(0)], [([[1]], None, grads)])
        assert table.residuals is None and table.statistics().residual_bytes == 0
        return told

    assert run_ranks(1, program) == [[{1: [1 + 2.0**-10] * 5}]]


def test_a_call_that_another_rank_does_not_make_leaves_what_was_left(backend):
    def program(comm):
        table = new_table(backend, 2, rounds_gradients=True)
        batch = [([[1], [2], [3]], None, np.full((3, 2), 1 + 2.0**-10, np.float32))]
        call(backend, comm, [table], [PartCase(0)], batch)

        def other_call(trail):
            comm.barrier()

        with pytest.raises(CommunicatorError, match="different calls"):
            through = other_call if comm.rank == 1 else lambda trail: trail
            call(backend, comm, [table], [PartCase(0)], batch, through)
        assert (backend.to_host(table.residuals.lookup([1, 2, 3]).values) == 2.0**-10).all()

    run_ranks(2, program)


def test_memory_that_runs_out_anywhere_leaves_what_was_left_before_or_after():
    """On one of two ranks, in a call with keys that are new to it and keys that are not."""
    grads = np.full((3, 2), 1 + 2.0**-10, np.float32)
    before = {1: 2.0**-10, 2: 2.0**-10, 4: 0.0, 6: 0.0}
    after = {1: 2 * 2.0**-10, 2: 2.0**-10, 4: 2.0**-10, 6: 2.0**-10}
    seen = set()

    def program(comm, at, tables):
        backend = tables[comm.rank].backend
        call(backend, comm, tables[comm.rank :], [PartCase(0)], [([[1], [2]], None, grads[:2])])
        with contextlib.ExitStack() as stack:

            def begin(trail):
                if comm.rank == 0:
                    stack.enter_context(Shortage(backend, at, for_good=False))
                return trail

            batch = [([[1], [4], [6]], None, grads)]
            call(backend, comm, tables[comm.rank :], [PartCase(0)], batch, begin)

    for at in itertools.count(1):
        backends = [copy.copy(get_backend("cpu")) for _ in range(2)]
        tables = [new_table(each, 2, rounds_gradients=True) for each in backends]
        failed = False
        try:
            run_ranks(2, lambda comm, at=at, tables=tables: program(comm, at, tables))
        except MemoryError:
            failed = True
        found = dict(zip(after, tables[0].residuals.lookup([*after]).values[:, 0], strict=True))
        assert found in (before, after)
        seen.add((failed, found == after))
        if not failed:
            break
    assert seen == {(True, False), (True, True), (False, True)}


def test_launches_and_collectives_do_not_depend_on_the_number_of_tables(backend, monkeypatch):
    """Each way once: rounding, reading and writing what is left, widening."""
    counts = Counter()
    joined, alltoallv = backend.joined, ThreadsCommunicator._alltoallv

    def counting_joined(kernel, parts):
        counts[threading.get_ident(), kernel] += bool(parts)
        return joined(kernel, parts)

    def counting_alltoallv(comm, *args):
        counts[threading.get_ident(), "collectives"] += 1
        return alltoallv(comm, *args)

    monkeypatch.setattr(backend, "joined", counting_joined)
    monkeypatch.setattr(ThreadsCommunicator, "_alltoallv", counting_alltoallv)

    def program(comm, num_tables):
        tables = [new_table(backend, 3, rounds_gradients=True) for _ in range(num_tables)]
        parts = [PartCase(i) for i in range(num_tables)]
        batch = [([[1], [2]], None, np.ones((2, 3), np.float32))] * num_tables
        told = []
        for _ in range(2):  # new keys, then known ones
            call(backend, comm, tables, parts, batch)
            mine = {what: n for (who, what), n in counts.items() if who == threading.get_ident()}
            told.append(mine)
        return {what: told[1][what] - told[0][what] for what in told[1]}

    for one, many in zip(
        *(run_ranks(2, lambda c, n=n: program(c, n)) for n in (1, 9)), strict=True
    ):
        assert one == many
        assert one["collectives"] == 3
        assert one["sent_gradients_round"] == one["sent_gradients_widen"] == 1


def test_a_hybrid_table_keeps_as_many_residuals_as_it_may_have_keys(backend):
    options = {"init_capacity": 16, "max_capacity": 64, "on_refused": "error"}

    def program(comm):
        table = new_table(backend, 3, "hybrid", rounds_gradients=True, **options)
        rng = np.random.default_rng(comm.rank)
        for step in range(6):
            keys = np.arange(20) * 2 + comm.rank + 40 * step
            grads = whole_gradients(rng, len(keys), 3)
            call(backend, comm, [table], [PartCase(0)], [([[k] for k in keys], None, grads)])
        assert 40 < table.residuals.size <= 64
        held = table.statistics()
        assert held.residual_bytes >= table.residuals.size * (12 + 16)

    run_ranks(2, program)


def test_ranks_that_do_not_agree_are_told():
    backend = get_backend("cpu")

    def program(comm):
        table = new_table(backend, 2, rounds_gradients=comm.rank == 1)
        with pytest.raises(ValueError, match="gradients sent as bfloat16 of table 0 is False on"):
            agree(comm, 1, [table], ["sum"])
        # Had nobody compared: none takes the bytes of the one for the other's.
        with pytest.raises(CommunicatorError, match="formats"):
            call(backend, comm, [table], [PartCase(0)], [([[1]], None, np.ones((1, 2), "f4"))])

    run_ranks(2, program)


def test_second_derivatives_travel_as_they_are(backend):
    def program(comm):
        table = new_table(backend, 2, rounds_gradients=True)
        keys, splits = np.arange(2), np.arange(3)
        part = Part(table, *on(backend, keys, splits), None, "sum")
        _, trail = lookup.forward(backend, comm, [part])
        rows = np.full((2, 2), 1 + 2.0**-20, np.float32)
        (summed,) = trips.collect(backend, trail, on(backend, rows))
        (back,) = trips.spread(backend, trail, [summed])
        assert (backend.to_host(summed) == 2 + 2.0**-19).all()
        assert (backend.to_host(back) == 2 + 2.0**-19).all()
        assert table.residuals is None

    run_ranks(2, program)


# ---- how many bytes leave a rank -----------------------------------------------------------------


@pytest.fixture
def bytes_sent(monkeypatch):
    """Of each all-to-all: what it was for, and the bytes that rank 0 sends to rank 1."""
    told = []
    alltoallv = ThreadsCommunicator._alltoallv

    def counting(comm, call, rows, send_splits):
        if comm.rank == 0:
            start, end = split_offsets(send_splits)[1:3]
            told.append((call.split()[0], int(rows[start:end].nbytes)))
        return alltoallv(comm, call, rows, send_splits)

    monkeypatch.setattr(ThreadsCommunicator, "_alltoallv", counting)
    return told


def sent_by_rank_0(told, backend, keys, parts=1, ahead=False, **options):
    """Returns the bytes of a lookup and its gradient where rank 0 asks for keys of rank 1."""

    def program(comm):
        table = new_table(backend, 6, **options)
        mine = keys if comm.rank == 0 else keys[:0]
        part = Part(table, *on(backend, mine, np.array([0, len(mine)])), None, "sum")
        batch, sent = batch_of(backend, [part] * parts), None
        if ahead:
            sent = send(backend, comm, batch, 3)
            sent = unpack_sent(backend, comm, pack_sent(backend, sent))
        _, trail = lookup.forward_batch(backend, comm, batch, sent=sent)
        grads = [backend.xp.ones((1, 6), np.float32)] * parts
        lookup.backward(backend, [(table, None, "sum")] * parts, grads, trail)

    told.clear()
    run_ranks(2, program)
    return dict(told)


def lines(num_rows, row_bytes):
    """Rows of a table travel in pieces of 16 bytes."""
    return -(-num_rows * row_bytes // 16) * 16


@pytest.mark.parametrize("repeats", [1, 50])
def test_a_key_travels_once_however_often_it_is_asked_for(backend, bytes_sent, repeats):
    """Beside them: a tag, the number of tables, and of the keys of each."""
    keys = np.tile(np.arange(1, 15, 2), repeats)
    sent = sent_by_rank_0(bytes_sent, backend, keys)
    assert sent["send_keys"] == 8 * (2 + 1 + 7)
    assert sent["send_grads"] == lines(7, 24)
    # Of a table that comes twice, once for each time.
    sent = sent_by_rank_0(bytes_sent, backend, keys, parts=2)
    assert sent["send_keys"] == 8 * (2 + 2 + 14)
    assert sent["send_grads"] == 2 * lines(7, 24)


@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "prefetched"])
def test_gradients_travel_as_16_bits_where_a_table_says_so(backend, bytes_sent, ahead):
    keys = np.arange(1, 15, 2)
    sent = sent_by_rank_0(bytes_sent, backend, keys, ahead=ahead, rounds_gradients=True)
    assert sent["send_grads"] == lines(7, 12)
    assert sent["send_keys"] == 8 * (2 + 1 + 7)


@pytest.mark.parametrize(
    ("dtype", "row_bytes"), [("float32", 24), ("float16", 12), ("bfloat16", 12), ("float64", 48)]
)
def test_rows_travel_in_the_format_of_their_table(backend, bytes_sent, dtype, row_bytes):
    def program(comm):
        table = new_table(backend, 6, dtype=dtype)
        keys = np.arange(0, 14, 2) if comm.rank == 1 else np.arange(0)
        part = Part(table, *on(backend, keys, np.array([0, len(keys)])), None, "sum")
        lookup.forward(backend, comm, [part])

    run_ranks(2, program)
    assert dict(bytes_sent)["return_rows"] == lines(7, row_bytes)

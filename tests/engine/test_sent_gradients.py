"""Gradients that travel as bfloat16, against float64 of NumPy; and how many bytes travel."""

from typing import NamedTuple

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.backend.ragged import split_offsets
from sok_lite.comm import CommunicatorError, run_ranks
from sok_lite.comm.threads import ThreadsCommunicator
from sok_lite.engine import lookup
from tests.support.helpers import new_table, on, sized
from tests.support.parts import Part, by_part, carried, forward_parts
from tests.support.step_oracle import flat, key_gradients, random_ragged

HYBRID = {"init_capacity": 64, "max_capacity": 1 << 12}


def rounded(x):
    """float64 numbers to the 8 bits that a bfloat16 has, to nearest even."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8)


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


def call(backend, comm, tables, parts, batch, is_carried=False):
    """A lookup and its gradient; gives of each part {key: row gradient}."""
    asked = []
    for part, (ragged, weights, _) in zip(parts, batch, strict=True):
        table = tables[part.table]
        keys, splits = flat(ragged, table.key_dtype.name)
        weights = None if weights is None else flat(weights, np.float32)[0]
        asked.append(Part(table, *on(backend, keys, splits, weights), part.combiner))
    _, context = forward_parts(backend, comm, asked)
    if is_carried:
        context = carried(backend, comm, asked, context)
    gradients = lookup.backward(backend, on(backend, *(g for *_, g in batch)), context)
    return [
        dict(zip(*(backend.to_host(each).tolist() for each in gradient[:2]), strict=True))
        for gradient in by_part(gradients)
    ]


def new_tables(backend, options):
    return [new_table(backend, **each, name=f"t{i}") for i, each in enumerate(options)]


@pytest.mark.parametrize("size", [2, 3])
def test_what_arrives_is_the_sum_of_what_each_rank_has_rounded(backend, size):
    """Tables with and without, of both kinds, some several times in a call, one rank idle."""
    num_steps = sized(backend, 4, 2)
    steps = [batches(size, step, PARTS, 40) for step in range(num_steps)]

    def program(comm):
        tables = new_tables(backend, TABLES)
        return [
            call(backend, comm, tables, PARTS, steps[step][comm.rank], step % 2 == 1)
            for step in range(num_steps)
        ]

    results = run_ranks(size, program)
    num_rounded = 0
    for step in range(num_steps):
        for i, part in enumerate(PARTS):
            rounds, expected = TABLES[part.table].get("rounds_gradients"), {}
            for rank in range(size):
                ragged, weights, out_grads = steps[step][rank][i]
                gradients = key_gradients(ragged, out_grads, part.combiner, weights)
                for key, gradient in gradients.items():
                    sent = rounded(gradient) if rounds else gradient
                    num_rounded += np.count_nonzero(sent != gradient)
                    expected[key] = expected.get(key, 0.0) + sent
            found = {}
            for told in results:
                found |= told[step][i]
            assert found.keys() == expected.keys()
            for key, gradient in expected.items():
                np.testing.assert_array_equal(found[key], gradient)
    assert num_rounded > 100


def one_key(grads, rank):
    """A batch of one key: rank 0 sends a gradient (dim,) to its owner."""
    return [([[1]], None, grads[None])] if rank == 0 else [([], None, grads[None][:0])]


@pytest.mark.cases("bad")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
def test_what_is_not_finite_arrives(backend, bad):
    """The largest float32 is an infinity as bfloat16."""
    grads = np.array([bad, 1 + 2.0**-10], np.float32)

    def program(comm):
        table = new_table(backend, 2, rounds_gradients=True)
        return call(backend, comm, [table], [PartCase(0)], one_key(grads, comm.rank))

    _, [arrived] = run_ranks(2, program)
    np.testing.assert_array_equal(arrived[1], [np.inf if np.isfinite(bad) else bad, 1])
    ((alone,),) = run_ranks(1, program)  # by itself it rounds nothing
    np.testing.assert_array_equal(alone[1], grads)


def test_nobody_takes_bytes_of_one_format_for_those_of_the_other():
    def program(comm):
        backend = get_backend("cpu")
        table = new_table(backend, 2, rounds_gradients=comm.rank == 1)
        with pytest.raises(CommunicatorError, match="formats"):
            call(backend, comm, [table], [PartCase(0)], [([[1]], None, np.ones((1, 2), "f4"))])

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


def lines(num_rows, row_bytes):
    """Rows of a table travel in pieces of 16 bytes."""
    return -(-num_rows * row_bytes // 16) * 16


@pytest.mark.parametrize(
    ("options", "row_bytes", "grad_bytes"),
    [
        ({}, 24, 24),
        ({"dtype": "float16"}, 12, 24),
        ({"dtype": "bfloat16", "rounds_gradients": True}, 12, 12),
        ({"dtype": "float64", "rounds_gradients": True}, 48, 12),
    ],
)
@pytest.mark.parametrize("repeats", [1, 50])
@pytest.mark.parametrize("parts", [1, 2])
def test_bytes_that_leave_a_rank(
    backend, bytes_sent, options, row_bytes, grad_bytes, repeats, parts
):
    """A key travels once for each time that its table comes, however often it is asked for, beside
    a tag, the number of tables, and of the keys of each; rows in the format of their table."""

    def program(comm, asking):
        table = new_table(backend, 6, **options)
        keys = np.tile(np.arange(1 - asking, 15 - asking, 2), repeats if comm.rank == asking else 0)
        part = Part(table, *on(backend, keys, np.array([0, len(keys)])), None, "sum")
        _, context = forward_parts(backend, comm, [part] * parts)
        lookup.backward(backend, [backend.xp.ones((1, 6), np.float32)] * parts, context)

    run_ranks(2, lambda comm: program(comm, 0))
    sent = dict(bytes_sent)
    assert sent["send_keys"] == 8 * (2 + parts + 7 * parts)
    assert sent["send_grads"] == parts * lines(7, grad_bytes)
    bytes_sent.clear()
    run_ranks(2, lambda comm: program(comm, 1))
    assert dict(bytes_sent)["return_rows"] == parts * lines(7, row_bytes)

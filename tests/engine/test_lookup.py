"""A whole lookup and its gradient: what neither the fleet nor test_lookup_ranks.py draws.

Outputs and gradients of one rank: the fleet of test_all_tables.py, against plain Python.
"""

import itertools

import numpy as np
import pytest

from sok_lite.comm import CommunicatorError, SingleCommunicator, run_ranks
from sok_lite.engine import exchange, lookup
from sok_lite.engine.batch import row_splits_of
from sok_lite.engine.dtypes import bfloat16_to_float32
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.message import keys_without_headers
from sok_lite.engine.owner import FunctionOfKeys
from sok_lite.engine.table import make_table
from tests.support.helpers import new_table, on
from tests.support.parts import Part, by_part, carried, forward_parts
from tests.support.step_oracle import flat, key_gradients


def test_the_context_of_one_rank_is_refused_by_two(backend):
    parts = [Part(new_table(backend), *on(backend, np.arange(3), np.arange(4)), None, "sum")]
    context = forward_parts(backend, SingleCommunicator(), parts)[1]

    def program(comm):
        with pytest.raises(
            ValueError, match="need the same ranks, of which there are 2 now.*what 1 ranks"
        ):
            carried(backend, comm, parts, context)

    run_ranks(2, program)


@pytest.mark.parametrize("size", [1, 2])
def test_a_call_of_no_tables_has_a_context(backend, size):
    def program(comm):
        outputs, context = forward_parts(backend, comm, [])
        assert len(outputs) == 0
        context = carried(backend, comm, [], context)
        assert by_part(lookup.backward(backend, [], context)) == []

    run_ranks(size, program)


KEY_TYPES = {"int64": np.int64, "int32": np.int32, "uint64": np.uint64}


@pytest.mark.parametrize("kinds", [["int64", "uint64"], ["int32", "int64", "int32"], ["int32"]])
def test_gradients_and_keys_are_written_where_they_are_wanted(backend, kinds):
    tables = [new_table(backend, dim=3 + i, key_type=kind) for i, kind in enumerate(kinds)]
    rng, ragged = np.random.default_rng(0), [[5, 5, 9], [], [2**31 - 1, 0]]
    grads = [rng.normal(size=(3, t.dim)).astype(np.float32) for t in tables]
    parts = [
        Part(table, *on(backend, *flat(ragged, KEY_TYPES[kind])), None, "mean")
        for table, kind in zip(tables, kinds, strict=True)
    ]
    comm, xp = SingleCommunicator(), backend.xp
    _, context = forward_parts(backend, comm, parts)
    given = []

    def allocate(sizes):
        given.append(
            [xp.full((n, t.dim), 7, np.float32) for n, t in zip(sizes, tables, strict=True)]
        )
        given.append([xp.full(n, 7, KEY_TYPES[kind]) for n, kind in zip(sizes, kinds, strict=True)])
        return given

    found = lookup.backward(backend, on(backend, *grads), context, allocate)
    for i, (rows, keys) in enumerate(zip(*given, strict=True)):
        assert found.row_grads[i] is rows
        np.testing.assert_array_equal(backend.to_host(keys), backend.to_host(found.keys[i]))
        expected, told = key_gradients(ragged, grads[i], "mean"), backend.to_host(keys).tolist()
        assert sorted(told) == sorted(expected)
        wanted = [expected[key] for key in told]
        np.testing.assert_allclose(backend.to_host(rows), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["hbm", "hybrid"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("dim", [3, 16, 64, 130])
@pytest.mark.parametrize("most", [1, 70])
def test_rows_of_known_and_missing_keys_around_a_block_are_pooled(backend, kind, dtype, dim, most):
    """Keys are looked for in blocks of 32, ahead of the sums; long rows are asked for apart."""
    table = make_table(
        kind, backend, dim, initializer=make_initializer("uniform", dim), dtype=dtype
    )
    keys = np.random.default_rng(dim).integers(0, 2**62, 60)
    stored = table.lookup(backend.from_host(keys)).values
    if dtype == "bfloat16":
        stored = bfloat16_to_float32(backend.xp, stored)
    given = backend.to_host(stored)
    for batch in (1, 2, 31, 33, 64, 65, 130) if backend.name == "cpu" else (33,):
        rng = np.random.default_rng([batch, most])
        sizes = rng.integers(0, most + 1, batch) if most > 1 else np.ones(batch, np.int64)
        splits = np.concatenate([[0], np.cumsum(sizes)])
        which = rng.integers(-4, 60, splits[-1])  # those below 0 are in no table
        asked = np.where(which < 0, which, keys[which])
        rows = np.where(which[:, None] < 0, np.float32(0), given[which])
        wanted = np.array([rows[a:b].sum(axis=0) for a, b in itertools.pairwise(splits)])
        arrays = backend.from_host(asked), backend.from_host(splits)
        part = Part(table, *arrays, None, "sum", insert=False, missing="zeros")
        [out], _ = forward_parts(backend, SingleCommunicator(), [part])
        np.testing.assert_allclose(backend.to_host(out), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "grads", [np.ones((3, 4), np.float32), np.ones((2, 3), np.float32), np.ones((2, 4))]
)
def test_gradients_of_other_outputs_are_refused(backend, grads):
    table = new_table(backend, dim=4)
    keys, splits = backend.from_host(np.array([5, 6, 5])), backend.from_host(np.array([0, 2, 3]))
    part = Part(table, keys, splits, None, "sum")
    _, context = forward_parts(backend, SingleCommunicator(), [part])
    with pytest.raises(ValueError, match=r"must be float32 of shape \(2, 4\). Received"):
        lookup.backward(backend, [backend.from_host(grads)], context)


def test_gradients_with_gaps_are_taken(backend):
    table, xp = new_table(backend, dim=4), backend.xp
    keys, splits = on(backend, np.array([5, 6, 5]), np.array([0, 2, 3]))
    weights = backend.from_host(np.array([1, 2, 3], np.float32))
    grads = xp.ones((2, 8), np.float32)[:, ::2]
    part = Part(table, keys, splits, weights, "sum")
    outputs, context = forward_parts(backend, SingleCommunicator(), [part])
    np.testing.assert_array_equal(backend.to_host(outputs[0])[:, 0], [5 + 12, 15])
    gradients = lookup.backward(backend, [grads], context)
    (gradient,) = by_part(gradients)
    np.testing.assert_array_equal(backend.to_host(gradient.row_grads)[:, 0], [4, 2])


def test_a_context_knows_when_its_tables_gave_the_row_numbers(backend):
    """Another caller who gets at the table right behind the lookup is not taken for it."""
    table = new_table(backend, dim=4)
    keys, splits = backend.from_host(np.array([5, 6])), backend.from_host(np.array([0, 1, 2]))
    weights = backend.xp.ones(2, np.float32)
    part = Part(table, keys, splits, weights, "sum")

    class Lock:
        """The table's lock, with somebody who waits for it."""

        depth = 0

        def __enter__(self):
            self.depth += 1

        def __exit__(self, *_):
            self.depth -= 1
            if self.depth == 0 and table.size == 2:
                self.depth = 99
                table.erase(backend.from_host(np.array([5])))
                table.lookup(backend.from_host(np.array([77])))
                self.depth = 0

    table.lock = Lock()
    _, context = forward_parts(backend, SingleCommunicator(), [part])
    assert int(context.found[0, 0]) != table.row_version
    np.testing.assert_array_equal(backend.to_host(context.sources[0])[:, 0], [5, 6])


def test_row_splits_of_row_numbers(backend):
    for numbers, batch, expected in (
        ([0, 0, 2, 2, 2, 5], 7, [0, 2, 2, 5, 5, 5, 6, 6]),
        ([], 2, [0] * 3),
    ):
        given = backend.from_host(np.array(numbers, np.int64))
        assert backend.to_host(row_splits_of(backend, given, batch)).tolist() == expected
    for numbers, text in (([1, 0], "row-major"), ([0, 3], r"\[0, 3\)"), ([-1, 0], r"\[0, 3\)")):
        with pytest.raises(ValueError, match=text):
            row_splits_of(backend, backend.from_host(np.array(numbers, np.int64)), 3)


# ---- a failure of one rank


def fail_by_a_key(patch, table, is_culprit):
    return np.array([2**40 if is_culprit else 7] * 6)


def fail_in_owners(patch, table, is_culprit):
    def owners(keys, size):
        raise KeyError("no such rank")

    if is_culprit:
        table.owner = FunctionOfKeys("failing", owners)


def fail_on_arrival(patch, table, is_culprit):
    def arrive(comm, *arguments):
        if comm.rank == 1:
            raise MemoryError("no memory for keys")
        return keys_without_headers(comm, *arguments)

    patch.setattr(exchange, "keys_without_headers", arrive)


def fail_to_insert(patch, table, is_culprit):
    """The keys are sent: all others wait for rows of the rank that has no memory for them."""

    def no_memory(*_, **__):
        raise MemoryError("no rows left")

    if is_culprit:
        patch.setattr(table, "new_insertion", no_memory, raising=False)


@pytest.mark.cases("text")
@pytest.mark.parametrize(
    ("fail", "kind", "text", "told"),
    [
        (
            fail_by_a_key,
            ValueError,
            "must fit int32.*Received: 1099511627776",
            "Rank 1 could not make this lookup. ValueError",
        ),
        (fail_in_owners, KeyError, "no such rank", "Rank 1"),
        (fail_on_arrival, MemoryError, "no memory for keys", "no memory for keys"),
        (fail_to_insert, MemoryError, "no rows left", "no call, after MemoryError: no rows left"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
@pytest.mark.parametrize("size", [2, 3])
def test_a_failure_of_one_rank_is_known_to_all(backend, monkeypatch, size, fail, kind, text, told):
    def program(comm):
        table, is_culprit = new_table(backend, key_type="int32"), comm.rank == 1
        keys = fail(monkeypatch, table, is_culprit)
        keys = np.arange(6) if keys is None else keys
        part = Part(table, *on(backend, keys, np.array([0, 6])), None, "sum")
        with pytest.raises(kind if is_culprit else CommunicatorError, match=text) as caught:
            forward_parts(backend, comm, [part])
        assert is_culprit or told in str(caught.value)
        if fail is fail_by_a_key:  # the ranks are still in step
            assert table.size == 0
            (out,), _ = forward_parts(
                backend, comm, [part._replace(keys=backend.from_host(np.arange(6)))]
            )
            np.testing.assert_array_equal(backend.to_host(out), [[15] * 4])

    run_ranks(size, program)

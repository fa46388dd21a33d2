"""Calls of many tables over several ranks: launches and collectives, and that ranks do not show."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sok_lite.backend import get_backend
from sok_lite.comm import CommunicatorError, run_ranks
from sok_lite.engine import lookup
from sok_lite.engine.agreement import agree
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.optimizers import Adam
from sok_lite.engine.owner import HASH, MOD, FunctionOfKeys, OneRank
from sok_lite.engine.table import make_table
from sok_lite.engine.update_rows import Update
from tests.support.exchange_facts import BY_TENS, OWNERS, python_owner, rule_of
from tests.support.helpers import new_table, on, sized
from tests.support.parts import Part, by_part, forward_parts
from tests.support.step_oracle import flat
from tests.support.steps import apply_updates

KINDS = {"hbm": {}, "hybrid": {"init_capacity": 64, "max_capacity": 1 << 16}}
DTYPES = ["float32", "float16", "bfloat16", "float64"]
POOLS = {
    "int64": [-(2**63), 2**63 - 1, -2, -1, *range(8)],
    "uint64": [2**64 - 1, 2**63, 2**63 - 1, *range(8)],
    "int32": [-(2**31), 2**31 - 1, -1, *range(8)],
}
COMBINERS = ["sum", "mean", "sqrtn"]


class TableCase(NamedTuple):
    """A table, what is looked up in it by all ranks together, and the gradient of its output."""

    kind: str
    dim: int
    dtype: str
    key_type: str
    combiner: str
    ragged: list
    weights: list | None
    scale: int
    owner: str

    def table(self, backend, number, size):
        options = {"dtype": self.dtype, "key_type": self.key_type, "name": f"table {number}"}
        options["owner"] = rule_of(self.owner, size)
        return new_table(backend, self.dim, self.kind, **options, **KINDS[self.kind])

    def part(self, backend, table, rows):
        keys, splits = flat(self.ragged[rows], self.key_type)
        weights = None if self.weights is None else flat(self.weights[rows], np.float32)[0]
        return Part(table, *on(backend, keys, splits, weights), self.combiner)

    def out_grads(self, rows, step):
        """Whole numbers: their sums are exact, in whatever order."""
        count = np.arange(len(self.ragged) * self.dim).reshape(len(self.ragged), self.dim)
        return ((count * self.scale + step) % 17 - 8).astype(np.float32)[rows]


def steps(backend, comm, cases, cuts, tables=None):
    """Two training steps; gives outputs and gradients by weights of each, and all rows at last."""
    tables = tables or [case.table(backend, i, comm.size) for i, case in enumerate(cases)]
    shares = [
        slice(*(len(case.ragged) * cut // 8 for cut in cuts[comm.rank : comm.rank + 2]))
        for case in cases
    ]
    told = []
    parts = [
        case.part(backend, table, rows)
        for case, table, rows in zip(cases, tables, shares, strict=True)
    ]
    for step in (1, 2):
        outputs, context = forward_parts(backend, comm, parts)
        grads = [
            backend.from_host(case.out_grads(rows, step))
            for case, rows in zip(cases, shares, strict=True)
        ]
        gradients = by_part(lookup.backward(backend, grads, context))
        updates = [
            Update(table, Adam(), table.key_dtype.from_int64(backend.xp, g.keys), g.row_grads)
            for table, g in zip(tables, gradients, strict=True)
        ]
        apply_updates(updates, 0.1, step)
        told += [*outputs, *(g.weight_grads for g in gradients if g.weight_grads is not None)]
    entries = [[backend.to_host(each) for each in table.export()] for table in tables]
    for case, (keys, _) in zip(cases, entries, strict=True):
        for key in keys.tolist():
            assert python_owner(key, comm.size, case.key_type, case.owner) == comm.rank
    return [backend.to_host(each) for each in told], entries


def together(results):
    """What all ranks have, as one rank would have it."""
    told = [np.concatenate(each) for each in zip(*(told for told, _ in results), strict=True)]
    entries = []
    for of_ranks in zip(*(entries for _, entries in results), strict=True):
        keys, rows = (np.concatenate(each) for each in zip(*of_ranks, strict=True))
        order = np.argsort(keys)
        entries += [keys[order], rows[order]]
    return told + entries


@st.composite
def table_cases(draw):
    """Sums and divisors are exact: whole numbers, and powers of two to divide by."""
    combiner, key_type = draw(st.sampled_from(COMBINERS)), draw(st.sampled_from(list(POOLS)))
    lengths = {"sum": [0, 1, 3, 40], "mean": [0, 1, 2, 4, 64], "sqrtn": [0, 1, 4, 64]}[combiner]
    batch = draw(st.lists(st.sampled_from(lengths), max_size=9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pool = POOLS[key_type]
    ragged = [[pool[i] for i in rng.integers(0, len(pool), length)] for length in batch]
    weights = None
    if draw(st.booleans()):
        many = (0.5, 1, 2, -1)
        if combiner == "sum":
            weights = [[many[i] for i in rng.integers(0, 4, length)] for length in batch]
        else:
            weights = [
                [many[i]] * n for i, n in zip(rng.integers(0, 3, len(batch)), batch, strict=True)
            ]
    return TableCase(
        draw(st.sampled_from(list(KINDS))),
        draw(st.integers(1, 33)),
        draw(st.sampled_from(DTYPES)),
        key_type,
        combiner,
        ragged,
        weights,
        draw(st.integers(1, 16)),
        draw(st.sampled_from(OWNERS)),
    )


@given(
    cases=st.lists(table_cases(), min_size=1, max_size=7),
    # Eighths of the batch: ranks between equal ones are idle.
    inner=st.lists(st.integers(0, 8), min_size=3, max_size=3).map(sorted),
)
def test_results_do_not_depend_on_the_number_of_ranks(cases, inner):
    backend = get_backend("cpu")
    expected = together(run_ranks(1, lambda comm: steps(backend, comm, cases, [0, 8])))
    for cuts in ([0, inner[1], 8], [0, *inner[:2], 8], [0, *inner, 8]):
        size = len(cuts) - 1
        found = together(run_ranks(size, lambda comm, c=cuts: steps(backend, comm, cases, c)))
        for want, got in zip(expected, found, strict=True):
            assert (want.dtype, want.shape) == (got.dtype, got.shape)
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def mixed_cases(number):
    """Tables of all kinds, formats, key types, combiners and owners, of 12 rows each."""
    rng = np.random.default_rng(number)
    cases = []
    for i in range(number):
        pool = POOLS[list(POOLS)[i % 3]]
        ragged = [[pool[k] for k in rng.integers(0, len(pool), 4)] for _ in range(12)]
        weights = [[0.5] * 4 for _ in range(12)] if i % 4 < 3 else None
        kind, dim = list(KINDS)[i % 2], (4, 3, 8, 1, 33)[i % 5]
        formats = (kind, dim, DTYPES[i // 2 % 4], list(POOLS)[i % 3], COMBINERS[i % 3])
        cases.append(TableCase(*formats, ragged, weights, 3, OWNERS[i // 2 % 5]))
    return cases


def test_the_ranks_do_not_show_on_any_backend(backend, ranks):
    cases = mixed_cases(11)
    expected = together(run_ranks(1, lambda comm: steps(backend, comm, cases, [0, 8])))
    for cuts in ([0, 8, 8], [0, 3, 3, 5, 8]):  # one rank, and one of four, is idle
        size = len(cuts) - 1
        found = together(ranks(size, lambda comm, c=cuts: steps(backend, comm, cases, c), backend))
        for want, got in zip(expected, found, strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.cases("text")
@pytest.mark.parametrize(
    ("splits", "text"),
    [
        ([0, 2, 1, 3], "with a fall"),
        ([0, 1, 2], "Received: 0 to 2"),
        ([1, 3], "Received: 1 to 3"),
        ([0], "Received: 0 to 0"),
        ([-1, 3], "Received: -1 to 3"),
        ([0, 1 << 62, 3], "with a fall"),
        ([2, 300, -5, 1, 3], "Received: 2 to 3"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_wrong_splits_of_one_rank_fail_the_lookup_on_all_ranks(backend, ranks, size, splits, text):
    """They are found by a kernel and known before a key is sent or a row is read: no table has
    changed."""

    def program(comm):
        tables = [new_table(backend, 2 + i, name=f"t{i}") for i in range(3)]
        parts = [
            Part(table, *on(backend, np.arange(n), np.array([0, n])), None, "sum")
            for table, n in zip(tables, (3, 0, 3), strict=True)
        ]
        forward_parts(backend, comm, [parts[1]] * 3)  # nothing is right
        held = 0
        for number in (0, 2):  # new keys, and then known ones
            wrong = list(parts)
            error = CommunicatorError
            if comm.rank == size - 1:
                given = backend.from_host(np.array(splits))
                wrong[number] = parts[number]._replace(row_splits=given)
                error = ValueError
            message = f"table 't{number}' must rise from 0 to the number of its keys, 3. .*{text}"
            with pytest.raises(error, match=message):
                forward_parts(backend, comm, wrong)
            assert sum(table.size for table in tables) == held
            forward_parts(backend, comm, parts)  # the ranks are still in step
            held = 6 if size == 1 else 4 - 2 * comm.rank
            assert sum(table.size for table in tables) == held

    ranks(size, program, backend)


RULES = [MOD, HASH, OneRank(0), OneRank(1), FunctionOfKeys("f", max), BY_TENS]
# What differs: what the error says, and the options of most ranks and of the last.
DIFFERENCES = [
    *[
        (
            f"owner of keys of table 1 is {one.name!r} on rank 0 and {other.name!r} on rank 2.",
            {"owner": one},
            {"owner": other},
        )
        for one, other in zip(RULES, RULES[2:] + RULES[:2], strict=True)
    ],
    *[
        (f"{name} of table 1 is", {"owner": rule}, {"owner": rule, name: other})
        for rule in (MOD, HASH, BY_TENS)
        for name, other in (("seed", 4), ("initializer", "uniform"))
    ],
    ("dimension of table 1 is 4 on rank 0 and 5 on rank 2.", {}, {"dim": 5}),
    ("key_type of table 1 is", {}, {"key_type": "int32"}),
    ("dtype of table 1 is", {}, {"dtype": "float16"}),
    (
        "gradients sent as bfloat16 of table 1 is False on rank 0 and True on",
        {},
        {"rounds_gradients": True},
    ),
    (
        "filter_ratio of table 1 is 1.0 on rank 0 and 0.5",
        {"kind": "hybrid", "max_capacity": 1 << 10},
        {"kind": "hybrid", "max_capacity": 1 << 10, "filter_ratio": 0.5},
    ),
]


def table_of(kind="hbm", dim=4, initializer="ones", seed=3, **options):
    first = make_initializer(initializer, dim)
    return make_table(kind, get_backend("cpu"), dim, initializer=first, seed=seed, **options)


def test_tables_that_differ_raise_on_all_ranks():
    def program(comm):
        for i, (text, most, last) in enumerate(DIFFERENCES):
            tables = [table_of(), table_of(**(last if comm.rank == 2 else most))]
            with pytest.raises(ValueError) as caught:
                agree(comm, i, tables, ["sum", "sum"])
            said = str(caught.value).splitlines()[0]
            assert said.startswith("A lookup must be the same on all ranks. Received: ")
            assert text in said
        # Functions cannot be compared: equal labels are taken at their word. And what rows begin
        # with is nobody's concern where one rank draws them all.
        tables = [table_of(owner=OneRank(rank), seed=comm.rank) for rank in (0, 1)]
        tables.append(table_of(owner=FunctionOfKeys("f", min if comm.rank else max)))
        agree(comm, 99, tables, ["sum"] * 3)
        if comm.rank == 0:  # no collective where they have agreed: a rank may come alone
            agree(comm, 99, tables, ["sum"] * 3)

    run_ranks(3, program)


def test_each_rank_begins_with_slots_of_its_own_number(backend, ranks):
    """Its part grows as it needs to, so all find the rows of all."""
    keys, ones = np.arange(sized(backend, 500, 50)), make_initializer("ones", 4)

    def program(comm):
        options = {"initializer": ones, "max_capacity": 1 << 16}
        slots = 16 << (4 * comm.rank)
        table = make_table("hybrid", backend, 4, init_capacity=slots, **options)
        agree(comm, 7, [table], ["sum"])
        assert table.capacity == slots
        mine = keys[keys % comm.size == comm.rank]
        table.insert_or_assign(mine, np.repeat(mine[:, None], 4, 1).astype(np.float32))
        part = Part(table, *on(backend, keys, np.arange(keys.size + 1)), None, "sum")
        (out,), _ = forward_parts(backend, comm, [part])
        np.testing.assert_array_equal(backend.to_host(out)[:, 0], keys)
        assert table.size == mine.size

    ranks(2, program, backend)


@pytest.mark.parametrize("owner", OWNERS)
def test_a_table_that_comes_twice_is_asked_at_its_owner(backend, ranks, owner):
    """Each part has its own keys; those that both have are one row, and their gradients two."""
    keys = np.array([-(2**63), -11, -1, 0, 7, 19, 2**63 - 1])

    def program(comm):
        options = {"evict_strategy": "kLfu", "owner": rule_of(owner, comm.size)}
        table = new_table(backend, 4, "hybrid", **options)
        n = 0 if comm.rank == 1 else len(keys)
        parts = [
            Part(table, *on(backend, some, np.arange(n + 1)), None, "sum")
            for some in (keys[:n], keys[:n][::-1].copy())
        ]
        outs, context = forward_parts(backend, comm, parts)
        for out, part in zip(outs, parts, strict=True):
            expected = (backend.to_host(part.keys) % 1000).astype(np.float32)
            np.testing.assert_array_equal(backend.to_host(out)[:, 0], expected)
        grads = [backend.xp.ones((n, 4), np.float32)] * 2
        found = lookup.backward(backend, grads, context)
        mine = {k for k in keys.tolist() if python_owner(k, comm.size, "int64", owner) == comm.rank}
        for each in by_part(found):
            sums = backend.to_host(each.row_grads)[:, 0].tolist()
            assert dict(
                zip(backend.to_host(each.keys).tolist(), sums, strict=True)
            ) == dict.fromkeys(mine, comm.size - 1)
        assert (table.size, table.num_lookups) == (len(mine), 1)
        scores = backend.to_host(table.scores(table.export()[0])).tolist()
        assert scores == [1] * len(mine), "a key has counted for each part"

    ranks(3, program, backend)


TIERS = {"max_hbm_for_vectors": 60 * 8 / 2**30}


@pytest.mark.parametrize("options", [{}, KINDS["hybrid"], KINDS["hybrid"] | TIERS])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_repeats_count_on_one_rank_and_once_for_each_of_several(options, size):
    """What an operator sees of `found_total` who moves a table to other memory, or more ranks."""
    rng = np.random.default_rng(0)
    calls = [np.array_split(rng.zipf(1.5, 300) % 200, size) for _ in range(4)]

    def program(comm):
        kind = "hybrid" if options else "hbm"
        table = new_table(get_backend("cpu"), 2, kind, **options)
        for keys in calls:
            mine = keys[comm.rank]
            splits = np.arange(mine.size + 1)
            forward_parts(table.backend, comm, [Part(table, mine, splits, None, "sum")])
        counts = table.totals()
        return [counts[f"{name}_total"] for name in ("found", "missed", "inserted")]

    held, expected = set(), [0, 0, 0]
    for call in calls:
        for mine in call:
            keys = mine.tolist() if size == 1 else set(mine.tolist())
            found = sum(key in held for key in keys)
            expected[0], expected[1] = expected[0] + found, expected[1] + len(keys) - found
        held.update(*(mine.tolist() for mine in call))
    expected[2] = len(held)
    assert np.sum(run_ranks(size, program), axis=0).tolist() == expected

"""Owners, and the trips of keys, rows and gradients, for ranks that are threads."""

import itertools
import warnings

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.comm import CommunicatorError, SingleCommunicator, run_ranks
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.exchange import AllToAllPlan, return_rows, send_grads, send_keys
from sok_lite.engine.owner import HASH, MOD, FunctionOfKeys, OneRank, owners
from tests.support.exchange_facts import (
    EDGE_KEYS,
    FACTS,
    OWNERS,
    python_owner,
    rule_of,
    send,
)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_round_trip(fact, size, backend):
    run_ranks(size, lambda comm: fact(comm, backend))


# ---- owners -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result, message",
    [
        (lambda keys, size: keys % size + 1, "0 to 1. Received: 1 to 2"),
        (lambda keys, size: keys % size - 1, "0 to 1. Received: -1 to 0"),
        (lambda keys, size: keys[:1], r"shape \(3,\). Received: int64 of shape \(1,\)"),
        (lambda keys, size: keys / 7.0, "one integer per key.*float64"),
    ],
)
def test_a_bad_function_is_named(result, message):
    with pytest.raises(ValueError, match=f"function 'halves' must return .*{message}"):
        FunctionOfKeys("halves", result).owners(np.arange(3), 2)


@pytest.mark.cases("names")
@pytest.mark.parametrize("names", [["mod"], ["hash"], ["by tens"], OWNERS, OWNERS[2:4]])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 1000])
def test_owners_of_several_tables_are_those_of_each(backend, size, names):
    rng = np.random.default_rng(size)
    kinds = ["int64", "uint64", "int32", "uint64", "int64"] * 3
    sizes = np.array([33, 200, 40, 0, 1, 5, 0, 7] * 2)[:15]
    names, rules = (names * 15)[:15], [rule_of(name, size) for name in (names * 15)[:15]]
    tables = [
        rng.integers(-(2**31) if kind == "int32" else -(2**63), 2**31, n)
        for kind, n in zip(kinds, sizes, strict=True)
    ]
    tables[0][: len(EDGE_KEYS)] = tables[1][: len(EDGE_KEYS)] = EDGE_KEYS
    keys = backend.from_host(np.concatenate(tables))
    for types in (kinds, ["uint64"] * 15):
        found = backend.to_host(owners(backend, keys, sizes, size, types, rules))
        expected = [
            [python_owner(int(key), size, key_type, name) for key in table]
            for table, key_type, name in zip(tables, types, names, strict=True)
        ]
        assert found.dtype == np.int32 and found.tolist() == [*itertools.chain(*expected)]
        for table, key_type, rule, its in zip(tables, types, rules, expected, strict=True):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                alone = rule.owners(backend.from_host(table), size, key_type, backend.xp)
            alone = backend.to_host(alone)
            assert alone.dtype == np.int32 and alone.tolist() == its


def test_a_function_is_asked_once_for_all_tables_of_a_key_type():
    asked = []

    def zero(keys, size):
        asked.append((keys.dtype.name, keys.tolist()))
        return keys * 0

    rule = FunctionOfKeys("zero", zero)
    kinds, rules = ["int64", "uint64", "int64", "int64"], [rule, rule, OneRank(1), rule]
    found = owners(get_backend("cpu"), np.arange(8), np.array([2, 2, 2, 2]), 2, kinds, rules)
    assert found.tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert asked == [("int64", [0, 1, 6, 7]), ("uint64", [2, 3])]


@pytest.mark.parametrize("kind", ["int64", "uint64"])
def test_a_function_that_works_in_place_changes_no_key(kind):
    def in_place(keys, size):
        keys //= 10
        keys %= size
        return keys

    keys = np.array([5, 17, 23, 39])
    found = owners(
        get_backend("cpu"), keys, np.array([4]), 2, [kind], [FunctionOfKeys("f", in_place)]
    )
    assert found.tolist() == [0, 1, 0, 1]
    assert keys.tolist() == [5, 17, 23, 39]


def test_rules_are_values():
    assert OneRank(2) == OneRank(2) != OneRank(1)
    assert len({HASH, MOD, OneRank(0), OneRank(1), OneRank(1)}) == 4
    with pytest.raises(AttributeError):
        OneRank(2).rank = 1
    assert [rule.name for rule in (MOD, HASH, OneRank(2), FunctionOfKeys("f", max))] == [
        *("key mod ranks", "hash of key", "rank 2", "function 'f'")
    ]
    for rank in (-1, 1.0, None):
        with pytest.raises(ValueError, match=f"integer from 0 on. Received: rank={rank}"):
            OneRank(rank)
    with pytest.raises(TypeError, match="a function .*Received: 'range'"):
        FunctionOfKeys("range", "range")


# ---- trips --------------------------------------------------------------------------------------


def test_one_rank_copies_nothing_and_sends_nothing(monkeypatch):
    comm, backend = SingleCommunicator(), get_backend("cpu")
    monkeypatch.setattr(comm, "alltoallv", None)
    keys, rows = np.arange(3), np.zeros((3, 2), np.float32)
    recv_keys, plan = send_keys(backend, comm, keys, [3], ["int64"], [MOD])
    assert recv_keys is keys
    assert return_rows(plan, [rows])[0] is rows
    assert send_grads(plan, [rows])[0] is rows
    again = AllToAllPlan.restore(backend, comm, plan.numbers, plan.order, plan.num_sent)
    assert again.send_counts.tolist() == [[3]]


def test_ranks_with_other_tables_raise_on_all_ranks(ranks):
    errors = []

    def program(comm):
        keys = [np.arange(5, dtype=np.int64)] * (2 if comm.rank else 3)
        try:
            send(get_backend("cpu"), comm, keys, ["int64"] * len(keys))
        except CommunicatorError as error:
            errors.append(str(error))

    ranks(2, program)
    assert sorted(errors)[0].startswith("Rank 0 looks up 3 tables with tag 0, rank 1 sent [tag, t")
    assert sorted(errors)[1].startswith("Rank 1 looks up 2 tables with tag 0, rank 0 sent [tag, t")


def test_ranks_in_other_lookups_raise_on_all_ranks(ranks):
    def program(comm):
        with pytest.raises(CommunicatorError, match="same lookups in the same order"):
            send(get_backend("cpu"), comm, [np.arange(5)], ["int64"], tag=comm.rank)

    ranks(2, program)


@pytest.mark.parametrize("trip", [return_rows, send_grads])
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ([(2, "float32"), (2, "float32")], None),
        ([(3, "float32"), (2, "float32")], [(2, "float32"), (3, "float32")]),
        ([(2, "float16"), (2, "uint16")], [(2, "uint16"), (2, "uint16")]),
    ],
)
def test_trips_that_differ_raise_on_all_ranks(ranks, trip, mine, theirs):
    """Rows of other formats, though they are equally long in bytes; and those of another lookup
    (None), where nothing but its number tells the two apart."""

    def program(comm):
        backend, keys = get_backend("cpu"), [np.arange(2)] * 2
        _, first = send(backend, comm, keys, ["int64"] * 2)
        _, second = send(backend, comm, keys, ["int64"] * 2)
        first = AllToAllPlan.restore(backend, comm, first.numbers, first.order, first.num_sent)
        is_other = comm.rank == 1
        rows = [
            np.zeros((2, dim), dtype) for dim, dtype in (theirs if is_other and theirs else mine)
        ]
        with pytest.raises(CommunicatorError, match=f"different calls.*{trip.__name__} of lookup"):
            trip(second if is_other and theirs is None else first, rows)

    ranks(2, program)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (
            lambda rank: FunctionOfKeys("f", lambda keys, size: keys % size + rank * 5),
            "return ranks",
        ),
        (lambda rank: OneRank(rank + 1), "one of 2, 0 to 1. Received: 2"),
    ],
)
def test_an_owner_that_there_is_not_is_refused_on_all_ranks(ranks, rule, text):
    """Of rank 1."""

    def program(comm):
        error = ValueError if comm.rank else CommunicatorError
        with pytest.raises(error, match=text):
            rules = [MOD, rule(comm.rank)]
            send(get_backend("cpu"), comm, [np.arange(4)] * 2, ["int64"] * 2, rules)
        send(get_backend("cpu"), comm, [np.arange(4)], ["int64"])

    ranks(2, program)


# ---- routes as numbers and an array -------------------------------------------------------------


def test_numbers_of_a_route():
    """[ranks, lookup, send_counts, recv_counts], pinned; and what they do not fit."""

    def program(comm):
        keys, backend = np.array([5, 2, 3] if comm.rank == 0 else [4], np.int64), get_backend("cpu")
        plan = send(backend, comm, [keys], ["int64"])[1]
        with pytest.raises(ValueError, match=f"route of {len(keys)} keys was expected. .* the ord"):
            AllToAllPlan.restore(backend, comm, plan.numbers, plan.order[1:], plan.num_sent)
        return plan.numbers.tolist(), plan.order.tolist()

    assert run_ranks(2, program) == [([2, 1, 1, 2, 1, 1], [1, 0, 2]), ([2, 1, 1, 0, 2, 0], [0])]


# ---- agreement ----------------------------------------------------------------------------------


@pytest.mark.parametrize("field, there", [("dim", "8"), ("seed", "missing"), ("extra", "1")])
def test_a_different_rank_is_named_on_every_rank(field, there):
    def program(comm):
        description = {"dim": 4, "seed": 0}
        if comm.rank == 2:
            changes = {"dim": {"dim": 8, "seed": 0}, "seed": {"dim": 4}}
            description = changes.get(field, {**description, "extra": 1})
        with pytest.raises(ValueError) as caught:
            check_equal_on_all_ranks(comm, description, "table 'user'")
        return str(caught.value)

    here = {"dim": "4", "seed": "0", "extra": "missing"}[field]
    assert set(run_ranks(4, program)) == {
        "table 'user' must be the same on all ranks. "
        f"Received: {field} is {here} on rank 0 and {there} on rank 2."
    }

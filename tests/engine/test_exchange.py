"""Owners, and the trips of keys, rows and gradients, for ranks that are threads."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sok_lite.backend import get_backend
from sok_lite.comm import CommunicatorError, SingleCommunicator, run_ranks
from sok_lite.comm.threads import ThreadsCommunicator
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.exchange import AllToAllPlan, return_rows, send_grads, send_keys
from sok_lite.engine.owner import HASH, MOD, FunctionOfKeys, OneRank, owners
from tests.support.exchange_facts import (
    EDGE_KEYS,
    FACTS,
    OWNERS,
    python_hash,
    python_owner,
    rule_of,
    send,
)

INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_round_trip(fact, size, backend):
    run_ranks(size, lambda comm: fact(comm, backend))


# ---- owners -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key_type", ["int64", "uint64"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 1000])
def test_owner_is_the_floor_mod(backend, size, key_type):
    rng = np.random.default_rng(size)
    keys = np.array([*EDGE_KEYS, *rng.integers(-(2**63), 2**63 - 1, 1000)], np.int64)
    owners = backend.to_host(MOD.owners(backend.from_host(keys), size, key_type, backend.xp))
    assert owners.dtype == np.int32
    assert owners.tolist() == [python_owner(int(key), size, key_type) for key in keys]


def test_owner_of_no_keys(backend):
    for name in OWNERS:
        none = rule_of(name, 3).owners(backend.xp.zeros(0, np.int64), 3, "int64", backend.xp)
        assert none.shape == (0,)
        assert none.dtype == np.int32


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_hash_owner_scales_the_high_half_of_the_hash(backend, size):
    rng = np.random.default_rng(size)
    keys = np.array([*EDGE_KEYS, *rng.integers(-(2**63), 2**63 - 1, 1000)], np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        owners = backend.to_host(HASH.owners(backend.from_host(keys), size))
    assert owners.tolist() == [(python_hash(int(key)) >> 32) * size >> 32 for key in keys]


def test_hash_spreads_keys_that_mod_would_crowd(backend):
    keys = backend.from_host(np.arange(0, 4 * 10_000, 4, dtype=np.int64))
    assert not backend.to_host(MOD.owners(keys, 4)).any()
    counts = np.bincount(backend.to_host(HASH.owners(keys, 4)), minlength=4)
    assert (np.abs(counts - 2500) < 250).all()  # 5 standard deviations of a fair choice


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


@pytest.mark.parametrize("names", [["mod"], ["hash"], ["by tens"], OWNERS, OWNERS[2:4]])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_owners_of_several_tables_are_those_of_each(backend, size, names):
    rng = np.random.default_rng(size)
    kinds = ["int64", "uint64", "int32", "uint64", "int64"] * 3
    sizes = np.array([33, 200, 40, 0, 1, 5, 0, 7] * 2)[:15]
    names = (names * 15)[:15]
    tables = [
        rng.integers(-(2**31) if kind == "int32" else -(2**63), 2**31, n)
        for kind, n in zip(kinds, sizes, strict=True)
    ]
    keys = backend.from_host(np.concatenate(tables))
    rules = [rule_of(name, size) for name in names]
    for kind in (kinds, ["uint64"] * 15):
        found = backend.to_host(owners(backend, keys, sizes, size, kind, rules))
        assert found.dtype == np.int32
        assert found.tolist() == [
            python_owner(int(key), size, key_type, name)
            for table, key_type, name in zip(tables, kind, names, strict=True)
            for key in table
        ]


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


@given(
    size=st.integers(1, 4),
    keys=st.lists(
        st.lists(st.lists(INT64 | st.integers(-5, 5), unique=True), min_size=2, max_size=2),
        min_size=4,
        max_size=4,
    ),
    key_type=st.sampled_from(["int64", "uint64"]),
    names=st.lists(st.sampled_from(OWNERS), min_size=2, max_size=2),
)
def test_every_rank_gets_the_row_of_each_of_its_keys(size, keys, key_type, names):
    """keys[rank][table] are any int64; a row is its key's bits, so a wrong row cannot hide."""
    backend = get_backend("cpu")

    def program(comm):
        mine = [np.array(table, np.int64) for table in keys[comm.rank]]
        rules = [rule_of(name, size) for name in names]
        received, plan = send(backend, comm, mine, [key_type] * 2, rules)
        plan = AllToAllPlan.restore(backend, comm, plan.numbers, plan.order, plan.num_sent)
        rows = return_rows(plan, [k.reshape(-1, 1).view(np.float32) for k in received])
        for got, wanted in zip(rows, mine, strict=True):
            np.testing.assert_array_equal(
                got.view(np.uint32), wanted.reshape(-1, 1).view(np.uint32)
            )
        return [k.tolist() for k in received]

    received = run_ranks(size, program)
    for table in range(2):
        sent = [key for rank in range(size) for key in keys[rank][table]]
        assert sorted(sent) == sorted(key for rank in range(size) for key in received[rank][table])


def count_collectives(monkeypatch, size, program):
    calls = []
    for name in ("_alltoallv", "_allgatherv"):
        original = getattr(ThreadsCommunicator, name)

        def counted(self, *args, original=original, name=name):
            if self.rank == 0:
                calls.append(name)
            return original(self, *args)

        monkeypatch.setattr(ThreadsCommunicator, name, counted)
    run_ranks(size, program)
    return calls


def test_number_of_collectives(monkeypatch):
    """One for the keys of all tables, one for their rows, one for gradients, of whatever format."""
    backend = get_backend("cpu")
    dims = [4, 8, 4]

    def program(comm):
        keys = [np.arange(10, dtype=np.int64)] * 3
        recv_keys, plan = send(backend, comm, keys, ["int64", "uint64", "int32"])
        return_rows(
            plan, [np.zeros((len(k), d), np.float32) for k, d in zip(recv_keys, dims, strict=True)]
        )
        send_grads(plan, [np.zeros((10, d), np.float32) for d in dims])

    assert count_collectives(monkeypatch, 2, program) == ["_alltoallv"] * 3


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


def test_a_run_repeats_bit_for_bit():
    backend = get_backend("cpu")
    keys = np.random.default_rng(0).permutation(5000).astype(np.int64)

    def program(comm):
        received, plan = send(backend, comm, [keys, keys[:77]], ["int64"] * 2)
        told = (plan.numbers.tolist(), plan.order.tolist())
        return [k.tolist() for k in received], told

    assert run_ranks(3, program) == run_ranks(3, program)


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
def test_trips_of_two_lookups_in_another_order_raise_on_all_ranks(ranks, trip):
    """Equal tables and counts: nothing but the lookup's number tells the two trips apart."""

    def program(comm):
        backend, keys = get_backend("cpu"), np.arange(2, dtype=np.int64)
        _, first = send(backend, comm, [keys], ["int64"])
        _, second = send(backend, comm, [keys], ["int64"])
        first = AllToAllPlan.restore(backend, comm, first.numbers, first.order, first.num_sent)
        with pytest.raises(CommunicatorError, match=f"different calls.*{trip.__name__} of lookup"):
            trip(second if comm.rank == 1 else first, [np.zeros((2, 1), np.float32)])

    ranks(2, program)


@pytest.mark.parametrize("trip", [return_rows, send_grads])
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ([(3, "float32"), (2, "float32")], [(2, "float32"), (3, "float32")]),
        ([(2, "float16"), (2, "uint16")], [(2, "uint16"), (2, "uint16")]),
    ],
)
def test_ranks_with_rows_of_other_formats_raise_on_all_ranks(ranks, trip, mine, theirs):
    """Though they are equally long in bytes: what travels is bytes."""

    def program(comm):
        _, plan = send(get_backend("cpu"), comm, [np.arange(2), np.arange(2)], ["int64"] * 2)
        rows = [np.zeros((2, dim), dtype) for dim, dtype in (theirs if comm.rank else mine)]
        with pytest.raises(CommunicatorError, match=f"different calls.*{trip.__name__} of lookup"):
            trip(plan, rows)

    ranks(2, program)


def test_a_function_that_fails_on_one_rank_fails_on_all(ranks):
    def program(comm):
        def shifted(keys, size):
            return keys % size + comm.rank * 5

        error, text = (ValueError, "return ranks") if comm.rank else (CommunicatorError, "Rank 1")
        with pytest.raises(error, match=text):
            rule = FunctionOfKeys("shifted", shifted)
            send(get_backend("cpu"), comm, [np.arange(4)], ["int64"], [rule])
        send(get_backend("cpu"), comm, [np.arange(4)], ["int64"])

    ranks(2, program)


def test_a_table_on_a_rank_that_there_is_not_is_refused_on_all_ranks(ranks):
    def program(comm):
        rule = OneRank(comm.rank + 1)  # there is no rank 2
        error = ValueError if comm.rank else CommunicatorError
        with pytest.raises(error, match="one of 2, 0 to 1. Received: 2"):
            send(get_backend("cpu"), comm, [np.arange(4)] * 2, ["int64"] * 2, [MOD, rule])
        send(get_backend("cpu"), comm, [np.arange(4)], ["int64"])

    ranks(2, program)


# ---- routes as numbers and an array -------------------------------------------------------------


def test_a_route_of_another_number_of_keys_is_refused():
    def program(comm):
        backend = get_backend("cpu")
        _, plan = send(backend, comm, [np.arange(3)], ["int64"])
        with pytest.raises(ValueError, match="route of 3 keys was expected. .* the order of 2"):
            AllToAllPlan.restore(backend, comm, plan.numbers, plan.order[1:], plan.num_sent)

    run_ranks(2, program)


def test_numbers_of_a_route():
    """[ranks, lookup, send_counts, recv_counts], pinned."""

    def program(comm):
        keys = np.array([5, 2, 3] if comm.rank == 0 else [4], np.int64)
        plan = send(get_backend("cpu"), comm, [keys], ["int64"])[1]
        return plan.numbers.tolist(), plan.order.tolist()

    assert run_ranks(2, program) == [([2, 1, 1, 2, 1, 1], [1, 0, 2]), ([2, 1, 1, 0, 2, 0], [0])]


# ---- agreement ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_equal_descriptions_pass(size):
    description = {"dim": np.int64(4), "combiner": "sum", "seed": 0, "dims": (1, 2)}
    run_ranks(size, lambda comm: check_equal_on_all_ranks(comm, description, "table 'user'"))


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

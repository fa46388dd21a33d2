"""Hot keys: a program over several ranks does the same with them as without, bit for bit."""

import contextlib
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sok_lite.backend import get_backend
from sok_lite.comm import CommunicatorError, run_ranks
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine import lookup, trips
from sok_lite.engine.agreement import agree
from sok_lite.engine.batch import Part, batch_of
from sok_lite.engine.failure import failure_known_to_all
from sok_lite.engine.optimizers import Adam
from sok_lite.engine.sent_keys import send
from sok_lite.engine.table import hot_keys, make_table
from sok_lite.engine.update import Update, apply_updates
from tests.support.exchange_facts import OWNERS, rule_of
from tests.support.helpers import KeyInitializer, new_table, on, sized
from tests.support.nccl_stand_in import run_ranks_by_nccl

POOL = {
    "int64": [-(2**63), 2**63 - 1, -1, *range(57)],
    "uint64": [2**64 - 1, 2**63, *range(58)],
    "int32": [-(2**31), 2**31 - 1, *range(58)],
}


class Case(NamedTuple):
    """Tables and how they are looked up."""

    size: int
    seed: int
    dtype: str = "float32"
    key_type: str = "int64"
    owner: str = "mod"
    limit: int = 6
    dim: int = 3
    rounds: bool = False


STEPS = (
    *("train", "train", "train", "train", "read", "read", "zeros", "twice", "ahead", "sum"),
    *("assign", "erase", "clear", "expire", "shrink", "spread", "scores", "wrong"),
)


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    monkeypatch.setattr(hot_keys, "WINDOW", 3)
    monkeypatch.setattr(hot_keys, "COUNTED", 1)


def program(backend, comm, case, steps, limit):
    """Does the steps; returns all that can be seen of them, as a list of arrays."""
    rule = rule_of(case.owner, comm.size)
    options = {"dtype": case.dtype, "key_type": case.key_type, "owner": rule}
    options["rounds_gradients"] = case.rounds
    tables = [
        new_table(backend, case.dim, name="a", hot_keys=limit, **options),
        new_table(backend, case.dim + 2, name="b", owner=rule, hot_keys=2 * limit),
    ]
    seen, rng = [], np.random.default_rng([case.seed, comm.rank])
    for number, step in enumerate(steps, start=1):
        if step in ("train", "sum", "read", "zeros", "twice", "ahead", "spread", "wrong"):
            seen += looked_up(backend, comm, case, tables, step, rng, number)
        else:
            seen += changed(backend, comm, case, tables[0], step, rng)
    for table in tables:
        keys, rows = table.export()
        # A table looks at the keys of all ranks in the order in which they are hot or not.
        seen += [keys, rows, table.scores(keys)]
        seen += [table.read_state(name, keys) for name in table.store.state_names]
        counted = table.statistics()
        lookups = counted.found_total, counted.missed_total
        seen.append(np.array([*lookups, counted.inserted_total, counted.size]))
    return [backend.to_host(each) for each in seen], tables[0].statistics()


def drawn(case, rng, count):
    """Keys, of which few are most."""
    pool = np.array(POOL[case.key_type], case.key_type)
    return pool[np.minimum(rng.zipf(1.3, count) - 1, len(pool) - 1)]


def part_of(backend, case, table, rng, step):
    lengths = rng.integers(0, 5, rng.integers(0, 9))
    keys, splits = drawn(case, rng, lengths.sum()), np.append(0, np.cumsum(lengths))
    weights = rng.normal(size=len(keys)).astype(np.float32) if step != "sum" else None
    if table.name == "b":
        keys = keys.astype(np.int64)
    how = {"read": (False, "initial"), "zeros": (False, "zeros")}.get(step, (True, "initial"))
    combiner = "sum" if step == "sum" else "mean"
    return Part(table, *on(backend, keys, splits, weights), combiner, *how)


def looked_up(backend, comm, case, tables, step, rng, number):
    order = [tables[0], tables[1], tables[0]] if step == "twice" else tables
    batch = batch_of(backend, [part_of(backend, case, table, rng, step) for table in order])
    grads = [backend.from_host(rng.normal(size=s).astype(np.float32)) for s in batch.layout.shapes]
    if step == "wrong":
        fails(backend, comm, batch)
    sent = None
    if step == "ahead":
        sent = send(backend, comm, batch, 3)
        changed(backend, comm, case, tables[0], "assign", rng)
    outputs, trail = lookup.forward_batch(backend, comm, batch, sent=sent)
    seen = list(outputs)
    ways = list(zip(batch.tables, batch.weights, batch.combiners, strict=True))
    gradients = lookup.backward(backend, ways, grads, trail)
    for part in gradients:
        order = backend.xp.argsort(part.keys)
        seen += [part.keys[order], part.row_grads[order]]
        seen += [] if part.weight_grads is None else [part.weight_grads]
    if step == "spread":
        rows = [part.row_grads for part in gradients]
        items = trips.items(backend, trail)
        spread = trips.spread(backend, trail, rows)
        seen += [each[numbers] for each, (numbers, _) in zip(spread, items, strict=True)]
        collected = trips.collect(backend, trail, spread)
        for part, each in zip(gradients, collected, strict=True):
            seen.append(each[backend.xp.argsort(part.keys)])
    if step != "zeros":
        updates = [
            Update(table, Adam(), table.key_dtype.from_int64(backend.xp, part.keys), part.row_grads)
            for table, part in zip(batch.tables, gradients, strict=True)
        ]
        apply_updates(updates, 0.1, number)
    return seen


def fails(backend, comm, batch):
    """A lookup that one rank cannot make."""
    splits = batch.row_splits.copy()
    if comm.rank == 1:
        splits[0] += 1
    with pytest.raises((ValueError, CommunicatorError)):
        lookup.forward_batch(backend, comm, batch._replace(row_splits=splits))


def changed(backend, comm, case, table, step, rng):
    """Changes a table by itself, keys of this rank and others."""
    keys = np.unique(drawn(case, rng, 6))
    if step == "assign":
        rows = rng.integers(-9, 9, (len(keys), case.dim))
        mine = table.owner.owners(keys.astype(np.int64), comm.size, case.key_type) == comm.rank
        table.insert_or_assign(*on(backend, keys[mine], rows[mine].astype(np.float32)))
    elif step == "erase":
        table.erase(backend.from_host(keys))
    elif step == "clear":
        table.clear()
    elif step == "shrink":
        table.erase_below(1.0)
    elif step == "expire":
        table.expire(num_lookups=2)
    else:
        return [table.scores(backend.from_host(keys))]
    return []


def compared(backend, case, steps):
    """Runs a program with and without hot keys, and returns the statistics with them."""
    runs = [
        run_ranks(case.size, lambda comm, n=n: program(backend, comm, case, steps, n))
        for n in (0, case.limit)
    ]
    for (expected, _), (found, _) in zip(*runs, strict=True):
        for want, got in zip(expected, found, strict=True):
            assert (want.dtype, want.shape) == (got.dtype, got.shape)
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    return [statistics for _, statistics in runs[1]]


@st.composite
def cases(draw):
    return Case(
        draw(st.integers(2, 4)),
        draw(st.integers(0, 2**32 - 1)),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        key_type=draw(st.sampled_from(list(POOL))),
        owner=draw(st.sampled_from(OWNERS)),
        limit=draw(st.sampled_from([1, 6, 1000])),
        rounds=draw(st.booleans()),
    )


@given(steps=st.lists(st.sampled_from(STEPS), max_size=12), case=cases())
def test_a_program_does_the_same_with_hot_keys(steps, case):
    compared(get_backend("cpu"), case, steps)


@pytest.mark.full_only("400 long programs")
@settings(max_examples=400)
@given(steps=st.lists(st.sampled_from(STEPS), max_size=40), case=cases())
def test_long_programs_do_the_same_with_hot_keys(steps, case):
    compared(get_backend("cpu"), case, steps)


def test_every_backend_does_the_same(backend):
    steps = ["train", "train", "read", "train", "twice", "assign", "read", "erase", "ahead", "sum"]
    steps = steps[: sized(backend, len(steps), 6)]
    for statistics in compared(backend, Case(2, 1, owner="hash"), steps):
        assert statistics.hot_asked_total > statistics.hot_refreshed_total > 0


# ---- which keys ----------------------------------------------------------------------------------


def asking(backend, comm, table, keys, insert=True, missing="initial"):
    """Looks keys up, each a row of its own; returns the rows and how many came for hot keys."""
    before = table.statistics().hot_refreshed_total
    items = on(backend, np.array(keys), np.arange(len(keys) + 1))
    outputs, _ = lookup.forward(backend, comm, [Part(table, *items, None, "sum", insert, missing)])
    return backend.to_host(outputs[0])[
        :, 0
    ].tolist(), table.statistics().hot_refreshed_total - before


def hot_of(table):
    return set(table.hot.hot.keys.tolist())


def test_the_keys_that_ranks_ask_most_are_hot():
    backend = get_backend("cpu")

    def program(comm):
        table = new_table(backend, hot_keys=3)
        own = 100 + comm.rank
        for _ in range(3):  # 1 and 3 are asked by all, 100 to 102 by one rank; 2 and 4 by two
            asking(backend, comm, table, [1, 3, own, 2 * min(comm.rank, 1) + 2])
        assert hot_of(table) == {1, 3, 4}
        for _ in range(3):
            asking(backend, comm, table, [1, 3, 9, 8, 7])
        assert hot_of(table) == {1, 3, 7}  # 7, 8 and 9 are asked as often: the lowest
        for _ in range(3):
            asking(backend, comm, table, [9, 8, 7])
        assert hot_of(table) == {7, 8, 9}  # what was asked before counts half
        for _ in range(12):
            asking(backend, comm, table, [])
        assert hot_of(table) == set()
        return table.statistics()

    for statistics in run_ranks(3, program):
        assert (statistics.hot_keys, statistics.hot_bytes) == (0, 0)


def test_rows_travel_once_until_they_change():
    backend = get_backend("cpu")

    def program(comm):
        table = new_table(backend, hot_keys=8)
        keys = [0, 1, 2, 3]
        for _ in range(3):
            asking(backend, comm, table, keys)
        # Each rank's own rows are at hand, those of the other come.
        assert asking(backend, comm, table, keys[:3]) == ([0, 1, 2], 1 + (comm.rank == 1))
        assert asking(backend, comm, table, keys, insert=False) == ([0, 1, 2, 3], comm.rank == 0)
        assert asking(backend, comm, table, keys) == ([0, 1, 2, 3], 0)
        if comm.rank == 0:
            table.insert_or_assign(*on(backend, np.array([2]), np.full((1, 4), 9, np.float32)))
        assert asking(backend, comm, table, keys) == ([0, 1, 9, 3], comm.rank)
        if comm.rank == 0:  # a key without a row is asked for each time
            table.erase(backend.from_host(np.array([0])))
        for _ in range(2):
            told = asking(backend, comm, table, keys, insert=False)
            assert told == ([0, 1, 9, 3], 1)
        found = table.statistics().found_total
        asking(backend, comm, table, [1, 3], insert=False)
        assert table.statistics().found_total == found + 4 * comm.rank

    run_ranks(2, program)


def test_a_row_that_comes_back_replaces_what_a_lookup_gave_for_none():
    backend = get_backend("cpu")

    def program(comm):
        table = new_table(backend, hot_keys=8)
        own, others = 2 - comm.rank, 1 + comm.rank
        for _ in range(4):
            asking(backend, comm, table, [1, 2])
        mine = backend.from_host(np.array([own]))
        row = table.lookup(mine).values
        table.erase(mine)
        assert asking(backend, comm, table, [others], False, "zeros")[0] == [0]
        table.insert_or_assign(mine, row)
        assert asking(backend, comm, table, [others], False, "zeros")[0] == [others]

    run_ranks(2, program)


def test_a_row_that_changed_before_the_keys_did_comes():
    backend = get_backend("cpu")

    def program(comm):
        table = new_table(backend, hot_keys=3)
        for _ in range(7):
            asking(backend, comm, table, [1, 2])
        assert hot_of(table) == {1, 2}
        mine = np.array([2 - comm.rank])
        table.insert_or_assign(*on(backend, mine, np.full((1, 4), 7, np.float32)))
        for _ in range(2):
            asking(backend, comm, table, [3])
        assert hot_of(table) == {1, 2, 3}
        assert asking(backend, comm, table, [1, 2, 3])[0] == [7, 7, 3]

    run_ranks(2, program)


def test_ranks_with_other_hot_keys_forget_them():
    """As after a failure of one rank alone, in the middle of a lookup."""
    backend = get_backend("cpu")

    def program(comm):
        table = new_table(backend, hot_keys=2)
        for _ in range(4):
            asking(backend, comm, table, [5, 6])
        assert hot_of(table) == {5, 6}
        if comm.rank == 1:
            table.hot.forget(comm.size)
        assert asking(backend, comm, table, [5, 6, 7])[0] == [5, 6, 7]
        assert hot_of(table) == set()
        for _ in range(3):
            asking(backend, comm, table, [6, 7])
        assert hot_of(table) == {6, 7}

    run_ranks(3, program)


def test_lookups_that_fail_count_once():
    backend = get_backend("cpu")

    def program(comm):
        table = new_table(backend, hot_keys=2)
        for turn in range(4):
            for attempt in range(5):
                keys = np.full(3, 10 * turn + attempt) if attempt < 4 else np.array([1, 2, 1])
                part = Part(table, *on(backend, keys, np.array([0, 2, 3])), None, "sum")
                batch = batch_of(backend, [part])
                if attempt < 4:
                    fails(backend, comm, batch)
                else:
                    lookup.forward_batch(backend, comm, batch)
            # Of the choice of the third lookup nothing is lost by those that failed before it.
            assert hot_of(table) == (set() if turn < 2 else {1, 2})
        return table.hot

    for hot in run_ranks(2, program):
        assert [keys.tolist() for keys in hot._counted.values()] == [[1, 2]]


def test_ranks_that_change_places_forget_hot_keys():
    """The owner of a key does not know which copies are old that another rank has kept."""
    backend = get_backend("cpu")
    tables = [new_table(backend, hot_keys=3) for _ in range(3)]

    def before(comm):
        table = tables[comm.rank]
        for _ in range(4):
            asking(backend, comm, table, [0, 1, 2])
        if comm.rank == 0:
            table.insert_or_assign(*on(backend, np.array([0]), np.full((1, 4), 7, np.float32)))
        keys = [0] if comm.rank == 1 else []
        assert asking(backend, comm, table, keys)[0] == [7] * len(keys)

    def after(comm):
        table = tables[(1, 0, 2)[comm.rank]]
        assert asking(backend, comm, table, [0, 1, 2])[0] == [7, 1, 2]

    run_ranks(3, before)
    contents = [table.export() for table in tables[:2]]
    for table, (keys, rows) in zip(tables, reversed(contents), strict=False):
        table.clear()
        table.insert_or_assign(keys, rows)
    run_ranks(3, after)


class Stumbling(KeyInitializer):
    """Fails for the key 666."""

    def filling(self, backend, store, rows, keys, table_seed):
        if 666 in backend.to_host(keys):
            raise MemoryError("no room for key 666")
        return super().filling(backend, store, rows, keys, table_seed)


def test_a_rank_that_fails_between_the_trips_leaves_no_copy_behind():
    backend = get_backend("cpu")
    tables = [
        make_table("hbm", backend, 4, initializer=Stumbling(), hot_keys=4, name="table")
        for _ in range(2)
    ]

    def failing(comm):
        table = tables[comm.rank]
        for _ in range(4):
            asking(backend, comm, table, [0, 1])
        mine = np.array([comm.rank])
        table.insert_or_assign(*on(backend, mine, np.full((1, 4), 7, np.float32)))
        with pytest.raises(MemoryError if comm.rank == 0 else CommunicatorError, match="666"):
            asking(backend, comm, table, [0, 1, 666])

    def going_on(comm):
        table = tables[comm.rank]
        assert hot_of(table) == {0, 1}
        for _ in range(5):
            assert asking(backend, comm, table, [0, 1])[0] == [7, 7]

    run_ranks(2, failing)
    run_ranks(2, going_on)


def test_words_that_were_lost_say_nothing():
    """By NCCL, when a rank fails: zeros are read in place of what was on its way."""
    backend = get_backend("cpu")

    def program(comm):
        table, carrier = new_table(backend, hot_keys=4), comm.carrier
        for _ in range(4):
            asking(backend, comm, table, [0, 1, 2])
        keys = carrier.keys

        def lost(message, send_splits, recv_splits):
            if comm.rank == 1:
                raise MemoryError("no room for keys")
            assert carrier._alarm.wait(30)
            carrier._pending.add(comm.turn)
            sent, came = split_offsets(send_splits), split_offsets(recv_splits)
            received = np.zeros((came[-1], message.shape[1]), np.int64)
            own = slice(*came[comm.rank : comm.rank + 2])
            received[own] = message[sent[comm.rank] : sent[comm.rank + 1]]
            return received

        carrier.keys = lost
        with pytest.raises((MemoryError, CommunicatorError), match="no room for keys"):
            with failure_known_to_all(comm) if comm.rank == 1 else contextlib.nullcontext():
                asking(backend, comm, table, [0, 1, 2, 3])
        carrier.keys = keys
        assert hot_of(table) == {0, 1, 2}
        for _ in range(2):
            assert asking(backend, comm, table, [0, 1, 2])[0] == [0, 1, 2]
        assert hot_of(table) == {0, 1, 2}

    run_ranks_by_nccl(3, program)


def test_other_communicators_begin_anew():
    backend = get_backend("cpu")
    tables = [new_table(backend, hot_keys=2) for _ in range(3)]

    def program(comm):
        for _ in range(4):
            rows, _ = asking(backend, comm, tables[comm.rank], [5, 6])
            assert rows == [5, 6]
        return hot_of(tables[comm.rank])

    for size in (2, 3, 1, 2):
        assert run_ranks(size, program)[0] == {5, 6}


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "error"),
    [(-1, ValueError), (1 << 30, ValueError), (2.5, TypeError), ("3", TypeError)],
)
def test_how_many_keys_can_be_hot(backend, limit, error):
    with pytest.raises(error, match=f"hot_keys={limit!r}"):
        new_table(backend, hot_keys=limit)


def test_a_table_that_evicts_has_none(backend):
    """Which of too many new keys it takes depends on their order, which hot keys change."""
    with pytest.raises(TypeError, match="hot_keys"):
        new_table(backend, 4, "hybrid", hot_keys=3)


def test_ranks_agree_how_many(backend):
    def program(comm):
        table = new_table(backend, hot_keys=comm.rank)
        with pytest.raises(ValueError, match="hot_keys of table 0 is 0 on rank 0 and 1 on rank 1"):
            agree(comm, 1, [table], ["sum"])

    run_ranks(2, program)

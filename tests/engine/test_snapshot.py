"""A table that was saved and put back holds the same and goes on the same way."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from sok_lite.engine.optimizer_states import State
from sok_lite.engine.table import clock
from sok_lite.engine.table import content as content_module
from sok_lite.engine.table.content import take
from sok_lite.engine.table.hkv_options import STRATEGIES
from sok_lite.engine.table.restore import restore
from tests.support.helpers import first_row, new_table
from tests.support.table_audit import audit

INT64 = np.iinfo(np.int64)
OPTIONS = {"var_type": "hybrid", "init_capacity": 16, "max_capacity": 64, "on_refused": "ignore"}
KINDS = {"hbm": {"var_type": "hbm"}} | {
    name: OPTIONS | {"evict_strategy": name} for name in STRATEGIES
}


def moved(source, target):
    """Puts what `source` holds into `target`, as a checkpoint does."""
    with source.lock, target.lock:
        restore(target, take(source))


def content(table):
    """Keys, rows and scores, by key."""
    keys, values = (table.backend.to_host(array) for array in table.export())
    scores = table.backend.to_host(table.scores(keys))
    return {int(k): (v.tolist(), int(s)) for k, v, s in zip(keys, values, scores, strict=True)}


def full_table(backend, options, seed=0):
    """A table of 64 slots, none of them free, beside the two keys that mark free slots."""
    table = new_table(backend, name="full", **options)
    rng = np.random.default_rng(seed)
    table.find_or_insert([INT64.max, INT64.min])
    while table.size < 66:
        table.find_or_insert(rng.integers(-1000, 1000, 5))
        if rng.random() < 0.3 and hasattr(table, "epoch"):
            table.epoch += 1
    return table


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_a_completely_full_table_comes_back_piece_by_piece_and_evicts_the_same(
    backend, monkeypatch, kind, rows
):
    monkeypatch.setattr(content_module, "_CHUNK_BYTES", rows * 16)
    table = full_table(backend, KINDS[kind])
    other = new_table(backend, name="full", **KINDS[kind])
    moved(table, other)
    assert other.size == 66
    for name in ("slots", "stamps"):
        np.testing.assert_array_equal(*(take(each).columns[name] for each in (table, other)))
    assert content(other) == content(table)
    rng = np.random.default_rng(3)
    for _ in range(20):
        # One key at a time: which of several takes which slot may differ from run to run.
        key = rng.integers(-1000, 1000, 1)
        gone = [t.lookup_and_evict(key)[1] for t in (table, other)]
        np.testing.assert_array_equal(*(backend.to_host(g.keys) for g in gone))
        np.testing.assert_array_equal(*(backend.to_host(g.values) for g in gone))
        np.testing.assert_array_equal(*(backend.to_host(g.scores) for g in gone))
        assert table.epoch == other.epoch
    assert content(other) == content(table)


@pytest.mark.parametrize(
    "change",
    [
        {"init_capacity": 64},
        {"init_capacity": 128, "max_capacity": 256},
        {"max_bucket_size": 4, "max_capacity": 256},
        {"max_bucket_size": 8, "init_capacity": 8, "max_capacity": 512},
    ],
    ids=str,
)
def test_other_options_with_room_and_the_other_kind_take_all(backend, change):
    table, hbm = full_table(backend, OPTIONS), new_table(backend)
    moved(table, hbm)
    assert content(hbm) == content(table)
    # One of 64 slots has room for 66 keys only in the slots that they had.
    for source in (table, hbm) if "max_capacity" in change else (table,):
        other = new_table(backend, name="full", **(OPTIONS | change))
        moved(source, other)
        assert content(other) == content(table)
        assert other.capacity >= change.get("init_capacity", 64)
        first = backend.to_host(other.lookup([5000]).values)[0]
        np.testing.assert_array_equal(first, first_row(4)(5000))


@pytest.mark.parametrize("change", [{"max_capacity": 32}, {"max_bucket_size": 4}], ids=str)
def test_what_has_no_room_raises_and_changes_nothing(backend, change):
    table = full_table(backend, OPTIONS)
    other = new_table(backend, name="full", **(OPTIONS | change))
    other.find_or_insert([1, 2, 3])
    before = content(other)
    with pytest.raises(ValueError, match="66 keys that were saved: max_capacity is"):
        moved(table, other)
    assert content(other) == before
    assert other.num_lookups == 1


@pytest.mark.parametrize(
    ("kind", "score"),
    [
        ("kLru", lambda seen: seen),
        ("kLfu", lambda seen: 1),
        ("kEpochLru", lambda seen: (7 << 32) + seen),
        ("kEpochLfu", lambda seen: (7 << 32) + 1),
        ("kCustomized", lambda seen: 0),
    ],
)
def test_scores_of_another_strategy_begin_as_those_of_new_keys(backend, kind, score):
    from_kind = "kLfu" if kind != "kLfu" else "kLru"
    table = new_table(backend, **KINDS[from_kind])
    table.epoch = 5
    for key in (10, 11, 10):
        table.find_or_insert([key])
    other = new_table(backend, **KINDS[kind])
    other.epoch = 7
    moved(table, other)
    assert other.epoch == 7
    seen = {10: 3, 11: 2}
    assert {k: s for k, (_, s) in content(other).items()} == {k: score(n) for k, n in seen.items()}


def test_an_hbm_table_keeps_its_first_capacity(backend):
    table = new_table(backend, var_type="hbm")
    table.find_or_insert(np.arange(10_000))
    other = new_table(backend, var_type="hbm", init_capacity=50)
    capacity = other.capacity
    moved(table, other)
    assert content(other) == content(table)
    other.clear()
    assert other.capacity == capacity


@pytest.mark.parametrize("options", [{}, OPTIONS | {"enter_threshold": 2}], ids=["hbm", "hybrid"])
def test_a_lookup_that_is_said_to_come_yet_counts_as_the_last_one(backend, options):
    table, other = (new_table(backend, **options) for _ in range(2))
    for _ in range(2):
        table.find_or_insert([1, 2])
    saved = take(table)
    ahead = np.full(2, 4_000_000_000, np.uint32)
    restore(other, saved._replace(columns={**saved.columns, "stamps": ahead}))
    for _ in range(3):
        other.find_or_insert([9])
    assert other.expire(num_lookups=2) == 2
    assert not backend.to_host(other.contains([1, 2])).any()


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kind", ["hbm", "kLru", "kLfu"])
def test_expiry_goes_on(backend, monkeypatch, kind, old):
    """By lookups and by time, also in a table of the other kind; old ones had no times."""
    now = [5000.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(time=lambda: now[0]))
    options = KINDS[kind] | ({} if kind == "hbm" else {"enter_threshold": 2})
    table = new_table(backend, **options)
    for key in (1, 2, 3):
        table.find_or_insert([key])
        table.insert_or_assign([key], np.full((1, 4), key, np.float32))
        now[0] += 100
    table.find_or_insert([4])
    now[0] += 100
    saved = take(table)
    facts = json.loads(json.dumps(saved.facts))
    if old:
        del facts["spans"]
        stamps = np.zeros_like(saved.pending["sighting_stamps"])
        saved = saved._replace(pending={**saved.pending, "sighting_stamps": stamps})
    saved = saved._replace(facts=facts)
    for target in (options, {"var_type": "hbm"}, OPTIONS | {"enter_threshold": 2}):
        other = new_table(backend, **target)
        other.find_or_insert([9])
        restore(other, saved)
        # Without a row, key 4 is known to tables that have pending counts.
        is_pending = kind != "hbm" and "enter_threshold" in target
        times = [5000.0, 5100.0, 5200.0, 5300.0] if not old else [now[0]] * 4
        times[3] *= kind == "hbm" or is_pending
        assert backend.to_host(other.times([1, 2, 3, 4])).tolist() == times
        if not old:
            assert other.expire(seconds=350) == 1
        now[0] += 50
        other.find_or_insert([2])
        assert backend.to_host(other.times([2, 9])).tolist() == [now[0], 0]
        now[0] += 10
        assert other.expire(seconds=20) == (1 if not old else 2) + (kind == "hbm")
        assert set(content(other)) == {2}
        assert backend.to_host(other.times([4])).tolist() == [0]
        now[0] -= 60


@pytest.mark.parametrize("capacity", [0, 16, 32, 48, 128, 1 << 26, 1 << 62])
def test_a_capacity_that_the_slots_contradict_is_not_believed(backend, capacity):
    options = OPTIONS | {"max_capacity": 1 << 26}
    table, other = (new_table(backend, **options) for _ in range(2))
    table.find_or_insert(np.arange(40))
    saved, own = take(table), table.capacity
    saved.facts.update(capacity=capacity, num_slots=capacity if capacity == 1 << 26 else 64)
    restore(other, saved)
    audit(other)
    assert content(other) == content(table)
    assert other.capacity == own
    other.find_or_insert(np.arange(100))
    audit(other)


@pytest.mark.parametrize(("capacity", "num_slots"), [(4, 4), (8, 8), (64, 80), (64, 96)])
def test_sizes_that_no_index_has_are_not_believed(backend, capacity, num_slots):
    """Fewer slots than a bucket, or buckets whose number does not double: growth would leave keys
    behind, though each is where it may be among so many slots."""
    options = OPTIONS | {"max_capacity": 256, "max_bucket_size": 16}
    table, other = (new_table(backend, **options) for _ in range(2))
    table.find_or_insert(np.arange(min(num_slots, 40)))
    index = table.index.empty_copy(num_slots, table.index.seed)
    saved = take(table)
    if capacity < index.bucket:
        slots = np.arange(saved.keys.size)
    else:
        assert index.insert_all(backend.from_host(saved.keys), num_slots) == 0
        held = index.entries()
        slots = backend.to_host(held.slots[backend.xp.argsort(held.keys)])
    saved.columns["slots"][:] = slots
    saved.facts.update(capacity=capacity, num_slots=num_slots)
    restore(other, saved)
    audit(other)
    assert content(other) == content(table)
    assert other.index.num_slots - 2 in (16, 32, 64)


@pytest.mark.cases("name")
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        *(("hash_seed", seed, ".* is no seed of a hash") for seed in (1, 33, -32, 1 << 63, "0")),
        *(("hash_seed", seed, ".* is no seed of a hash") for seed in (32.0, True)),
        *(("num_lookups", number, "") for number in (None, 2**32, -1, 1.0)),
        *(("epoch", epoch, "") for epoch in (None, 2**32, -1)),
        *(("strategy", [], ""), ("bucket", 0, "")),
        *(("capacity", float("inf"), ""), ("num_slots", [], "")),
        ("spans", {"numbers": [1], "times": [5.0, 6.0], "ends": [5.0]}, "the times of its lookups"),
    ],
    ids=str,
)
def test_facts_that_no_table_has_are_refused(backend, name, value, text):
    """Each would be in the way of a lookup or a dump later."""
    table, other = (new_table(backend, **OPTIONS) for _ in range(2))
    table.find_or_insert(np.arange(40))
    other.find_or_insert([4])
    saved = take(table)
    saved.facts[name] = value
    with pytest.raises(ValueError, match=f"What was saved of table 'table' is corrupt: {text}"):
        restore(other, saved)
    assert set(content(other)) == {4} and other.num_lookups == 1
    other.find_or_insert([4])
    audit(other)


@pytest.mark.parametrize("count", [0, 2**30 + 2, 2**32 - 1])
def test_a_count_that_no_key_has_is_refused(backend, count):
    """That of a key without a row stands where an index has row numbers: 2**32 - 1 is none."""
    options = OPTIONS | {"enter_threshold": 3}
    table, other = (new_table(backend, **options) for _ in range(2))
    table.find_or_insert([1, 2])
    other.find_or_insert([4])
    saved = take(table)
    saved.pending["sightings"][1] = count
    with pytest.raises(
        ValueError, match="corrupt: 1 of its keys without a row were seen 0 times, "
    ):
        restore(other, saved)
    assert backend.to_host(other.pending.entries().keys).tolist() == [4]
    saved.pending["sightings"][1] = 2**30 + 1
    restore(other, saved)
    audit(other)
    other.find_or_insert([2])
    assert backend.to_host(other.contains([1, 2])).tolist() == [False, True]


def test_no_score_comes_back_from_a_lookup_to_come(backend):
    """It would keep its key from being evicted until then, as `last_seen` would."""
    options = OPTIONS | {"evict_strategy": "kEpochLru"}
    table, other = (new_table(backend, **options) for _ in range(2))
    table.epoch = 3
    table.find_or_insert([1, 2])
    saved = take(table)
    saved.columns["scores"][:] = 3 << 32 | 2**32 - 1, 2 << 32
    restore(other, saved)
    audit(other)
    assert backend.to_host(other.scores([1, 2])).tolist() == [3 << 32 | 1, 2 << 32]


def test_an_empty_snapshot_brings_no_seed(backend):
    table, other = (new_table(backend, **OPTIONS) for _ in range(2))
    saved, own = take(table), other.index.seed
    saved.facts["hash_seed"] = own + 32
    restore(other, saved)
    assert other.index.seed == own


@pytest.mark.parametrize("rows", [2, 100])
def test_a_corrupt_snapshot_changes_nothing(backend, monkeypatch, rows):
    monkeypatch.setattr(content_module, "_CHUNK_BYTES", rows * 16)
    table = full_table(backend, OPTIONS)
    saved = take(table)
    own = saved.columns["slots"]
    slots = own.copy()
    slots[0] = slots[1]
    # Each of the two may be there: a slot of a bucket that both of them have.
    repeated, buckets = own.copy(), own // table.index.bucket
    one, other = np.flatnonzero(buckets == 0)[[0, -1]].tolist()  # of two pieces
    repeated[one] = own[other]

    def of(**columns):
        return saved._replace(columns={**saved.columns, **columns})

    n, dim = saved.values.shape
    state = State("m", dim, 0.0, np.zeros((n, dim), np.float32))
    for corrupt, text in (
        (of(slots=slots), "keys and slots contradict"),
        (of(slots=repeated), "keys and slots contradict"),
        (of(slots=(own + 16) % 64), "keys and slots contradict"),
        (of(slots=own + 64), "keys and slots contradict"),
        (of(stamps=saved.columns["stamps"][:5]), "corrupt: 5 stamps for 66 keys"),
        (saved._replace(keys=np.zeros_like(saved.keys)), "its keys repeat"),
        (saved._replace(values=saved.values[:2]), "corrupt: 2 values for 66 keys"),
        (saved._replace(values=saved.values[:, :2]), rf"must have shape \({n}, {dim}\).*\({n}, 2"),
        (saved._replace(states=[state._replace(rows=state.rows[:5])]), "5 rows of state 'm' for"),
        (saved._replace(states=[state, state._replace(dim=7)]), rf"state 'm' must.*\({n}, 7\)"),
    ):
        other = new_table(backend, name="full", **OPTIONS)
        other.find_or_insert([4])
        with pytest.raises(ValueError, match=text):
            restore(other, corrupt)
        assert set(content(other)) == {4}
        assert other.store.state_names == []


@pytest.mark.parametrize("kind", ["hbm", "kLru"])
def test_without_memory_a_restore_says_to_clear_the_table(backend, monkeypatch, kind):
    """That it is as it was: test_out_of_memory.py."""
    table, other = (new_table(backend, **KINDS[kind]) for _ in range(2))
    table.find_or_insert([1, 2, 3])
    other.find_or_insert([3, 4])

    def fails(*arguments):
        raise MemoryError("none left")

    monkeypatch.setattr("sok_lite.engine.rows.store.RowStore.allocate", fails)
    text = "as it was. Clear it first: it holds 2 keys.*none left"
    with pytest.raises(MemoryError, match=text):
        moved(table, other)
    assert set(content(other)) == {3, 4}

"""What only the "hybrid" table does: whom it evicts, whom it refuses, and scores.

The state machine of test_tables.py looks at each eviction by tests/support/eviction_facts.py.
"""

import tracemalloc
import warnings

import numpy as np
import pytest

from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend.cpu import CpuBackend
from sok_lite.backend.launches import launch_all
from sok_lite.engine.table import insert
from sok_lite.engine.table.hkv import RefusedError
from sok_lite.engine.table.hkv_options import STRATEGIES
from tests.support.eviction_facts import Watched
from tests.support.helpers import first_row, new_table, sized
from tests.support.table_audit import audit, audit_segments

I64 = np.iinfo(np.int64)


def full_table(backend, strategy="kLru", slots=16, **options):
    """A table that may not grow; of one bucket, so that every key is a candidate."""
    sizes = {"init_capacity": slots, "max_capacity": slots, "max_bucket_size": 16}
    options = {"on_refused": "ignore", "evict_strategy": strategy, **sizes, **options}
    return new_table(backend, options.pop("dim", 2), "hybrid", **options)


def watched(backend, *args, **options):
    table = full_table(backend, *args, **options)
    return Watched(table, first_row(table.dim))


def zeros(keys, dim=2):
    return np.zeros((len(keys), dim), np.float32)


def fill(watch, first=0):
    """Looks new keys up, one at a time, until all slots are used; returns those held, oldest first.

    The keys that were evicted on the way are forgotten.
    """
    key = first
    while watch.table.size < watch.table.capacity:
        watch.lookup([key])
        key += 1
    return sorted(watch.oracle.scores, key=watch.oracle.scores.get)


# -------------------------------------------------------------------- eviction


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("slots", "bucket"), [(4, 4), (64, 4), (64, 16), (128, 128)])
def test_a_new_key_gets_in_at_load_1(backend, strategy, slots, bucket):
    watch = watched(backend, strategy, slots, max_bucket_size=bucket)
    fill(watch)
    assert watch.table.load_factor == 1.0
    for key in range(100_000, 100_000 + sized(backend, 9, 3)):
        watch.lookup([key])
        assert backend.to_host(watch.table.contains([key])).all()
        assert watch.table.size == slots
    watch.check()
    assert watch.table.statistics().refused_total == 0


@pytest.mark.parametrize("strategy", ["kLru", "kEpochLru"])
def test_lru_evicts_what_was_looked_up_longest_ago_also_at_the_end_of_the_clock(backend, strategy):
    """Reading refreshes nothing, and what is written counts as seen by the last lookup."""
    table, last = full_table(backend, strategy), 2**32 - 1
    table.clock.now = last - 16
    for key in range(16):
        table.find_or_insert([key])
        table.find_or_insert([])  # halved, two numbers in a row may become one
    # Half of the keys came before the stamps were halved.
    assert table.num_lookups < last // 2 + 20
    scores = backend.to_host(table.scores(np.arange(16)))
    assert (np.diff(scores.astype(np.int64)) > 0).all()
    assert scores[-1] % 2**32 == table.num_lookups - 1
    table.find_or_insert([3])
    for read in (table.find, table.contains, lambda keys: table.lookup(keys, insert=False)):
        read([0])
    oldest_first = [0, 1, 2, 4, 5, 6, 7, 8]
    if strategy == "kLru":
        table.assign([1], zeros([1]))
        table.accumulate([4], zeros([4]))
        oldest_first = [0, 2, 5, 6, 7, 8]
    for new, victim in enumerate(oldest_first, 1000):
        values, evicted = table.lookup_and_evict([new])
        assert backend.to_host(evicted.keys).tolist() == [victim]
        assert backend.to_host(values).tolist() == [[new % 1000] * 2]


def test_lfu_evicts_what_was_looked_up_least_often(backend):
    """A batch counts once, however often it has a key."""
    watch = watched(backend, "kLfu")
    keys = fill(watch)
    rng = np.random.default_rng(0)
    for _ in range(60):
        watch.lookup(rng.choice(keys[1:], 5).tolist())
    watch.check()
    for new in range(1000, 1040):
        watch.lookup([new])
    watch.check()
    assert watch.evicted >= 40


@pytest.mark.parametrize("strategy", ["kEpochLru", "kEpochLfu"])
def test_an_epoch_outranks_every_earlier_one(backend, strategy):
    watch = watched(backend, strategy)
    keys = fill(watch)
    for _ in range(50):
        watch.lookup(keys[:8])
    watch.set_epoch(1)
    watch.lookup(keys[8:])  # once, but in a later epoch
    for new in range(1000, 1008):
        _, evicted = watch.table.lookup_and_evict([new])
        assert backend.to_host(evicted.keys)[0] in keys[:8]
    assert backend.to_host(watch.table.contains(keys[8:])).all()
    scores = backend.to_host(watch.table.scores(keys[8:]))
    assert (scores >> np.uint64(32) == 1).all()


def test_an_epoch_has_32_bits(backend):
    table = full_table(backend, "kEpochLfu")
    table.epoch = 2**32 - 1
    table.find_or_insert([1])
    assert backend.to_host(table.scores([1])).tolist() == [(2**32 - 1) * 2**32 + 1]
    for wrong in (-1, 2**32):
        with pytest.raises(ValueError, match=rf"\[0, 2\*\*32\). Received: {wrong}"):
            table.epoch = wrong


def test_custom_scores_are_the_callers(backend):
    watch = watched(backend, "kCustomized")
    watch.find_or_insert(list(range(16)), given=list(range(100, 116)))
    watch.lookup(list(range(16)))  # a lookup that says nothing about scores leaves them
    watch.check()
    watch.find_or_insert([3], given=[500])
    # Below all candidates: refused, and counted.
    watch.find_or_insert([1000], given=[99])
    assert (watch.refused, watch.evicted) == (1, 0)
    values = backend.to_host(watch.table.lookup([1000], insert=False).values)
    assert values.tolist() == [[0, 0]]  # 1000 % 1000: its initial value, without a row
    # As high as the lowest, which goes.
    watch.find_or_insert([1001], given=[100])
    assert watch.evicted == 1
    assert not backend.to_host(watch.table.contains([0])).any()
    # Without a score a new key has 0: below all candidates too.
    watch.lookup([1002])
    watch.insert([1003], zeros([0]))
    watch.check()
    assert (watch.refused, watch.evicted) == (3, 1)
    watch.assign_scores([5], [0])
    watch.lookup([1004])  # as high as the lowest
    watch.check()
    assert watch.evicted == 2
    assert not backend.to_host(watch.table.contains([5])).any()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_given_scores_are_kept_and_decide_who_gets_in(backend, strategy):
    """As when a checkpoint is loaded: the scores are those of another table."""
    watch = watched(backend, strategy)
    watch.set_epoch(2)
    keys = list(range(16))
    for _ in range(20):  # kLru: numbers of lookups that were
        watch.lookup(list(range(500, 530)))
    watch.clear()
    watch.insert(keys, zeros(keys), [2 + key for key in keys])
    watch.check()
    watch.insert([100], zeros([0]), [1])
    assert watch.refused == 1
    watch.insert([100], zeros([0]), [2])
    assert watch.evicted == 1
    watch.check()


@pytest.mark.parametrize("strategy", ["kLfu", "kEpochLfu"])
def test_an_increment_refuses_nobody_and_a_count_does_not_wrap(backend, strategy):
    watch = watched(backend, strategy)
    watch.find_or_insert(list(range(16)), given=[5] * 16)
    watch.find_or_insert([100], given=[2])
    assert backend.to_host(watch.table.scores([100])).tolist() == [2]
    most = 2**64 - 1 if strategy == "kLfu" else 2**32 - 1
    for given in (most - 7, 4, most - 1, 1):
        watch.find_or_insert([100], given=[given])
        watch.check()
    assert backend.to_host(watch.table.scores([100])).tolist() == [most]
    table = full_table(backend, "kEpochLfu")
    for given in (5, 2**64 - 3):  # not even by what one epoch has no room for
        table.find_or_insert([1], scores=[given])
    assert backend.to_host(table.scores([1])).tolist() == [2**32 - 1]


@pytest.mark.parametrize("factor", [0, 0.3, 0.5, 1])
@pytest.mark.parametrize("strategy", ["kLfu", "kEpochLfu"])
def test_counts_decay_and_nothing_else_does(backend, strategy, factor):
    table = full_table(backend, strategy, 64)
    keys = np.array([*range(30), -5, I64.min, I64.max, I64.min + 1, 2**40])  # reserved ones too
    counts = np.random.default_rng(1).integers(0, 2**31, keys.size).astype(np.uint64)
    counts[:3] = 0, 1, 2**31
    epochs = (np.arange(keys.size) % 3).astype(np.uint64) << np.uint64(32)
    scores = counts + epochs  # of kLfu all of it is a count
    table.insert_or_assign(keys, zeros(keys) + 7, scores)
    last_seen, rows = table.index.last_seen(backend.from_host(keys)), table.export()[1]
    last_seen, rows = map(backend.to_host, (last_seen, rows))
    table.decay_scores(factor)
    fading = counts if strategy == "kEpochLfu" else scores
    left = [int(int(count) * float(np.float32(factor))) for count in fading]
    kept = epochs if strategy == "kEpochLfu" else np.zeros_like(epochs)
    found = backend.to_host(table.scores(keys))
    assert found.tolist() == [x + int(y) for x, y in zip(left, kept, strict=True)]
    now = backend.to_host(table.index.last_seen(backend.from_host(keys)))
    np.testing.assert_array_equal(now, last_seen)
    np.testing.assert_array_equal(backend.to_host(table.export()[1]), rows)
    audit_segments(table.index)


def test_what_cannot_decay_is_refused(backend):
    table = full_table(backend, "kLfu")
    for factor in (True, "0.5", None):
        with pytest.raises(TypeError, match="`factor` must be a number"):
            table.decay_scores(factor)
    for factor in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="`factor` must be from 0 to 1. Received: factor="):
            table.decay_scores(factor)
    with pytest.raises(ValueError, match="which evicts by kLru. Make it with"):
        full_table(backend).decay_scores(0.5)
    with pytest.raises(ValueError, match="which evicts nothing. Make it with"):
        new_table(backend, 2).decay_scores(0.5)


def test_counts_and_custom_scores_do_not_age(backend):
    for strategy in ("kLfu", "kEpochLfu", "kCustomized"):
        table = full_table(backend, strategy)
        table.find_or_insert([1, 2], scores=[5, 9])
        table.clock.now = 2**32 - 1
        table.find([1])
        table.find_or_insert([3], scores=[1])
        assert table.num_lookups == 2**31
        assert backend.to_host(table.scores([1, 2, 3])).tolist() == [5, 9, 1]


def test_the_last_score_of_a_repeated_key_counts(backend):
    table = full_table(backend, "kCustomized")
    table.find_or_insert([5, 6, 5, 5], scores=[4, 3, 9, 2])
    assert backend.to_host(table.scores([5, 6])).tolist() == [2, 3]
    table.find_or_insert([5, 5, 6], scores=[1, 8, 7])
    assert backend.to_host(table.scores([5, 6])).tolist() == [8, 7]
    table.insert_or_assign([5, 5, 9, 9], zeros([0] * 4), [1, 2, 3, 4])
    assert backend.to_host(table.scores([5, 9])).tolist() == [2, 4]


def test_scores_must_fit_the_keys(backend):
    table = full_table(backend, "kCustomized")
    with pytest.raises(ValueError, match=r"shape \(2,\).*shape \(1,\)"):
        table.find_or_insert([1, 2], scores=[1])
    with pytest.raises(ValueError, match="not be negative"):
        table.insert_or_assign([1], zeros([0]), [-1])
    assert table.size == 0


def test_evicted_rows_change_the_row_version(backend):
    table = full_table(backend)
    table.find_or_insert(np.arange(16))
    row_version = table.row_version
    table.lookup([3])
    assert table.row_version == row_version
    assert table.lookup_and_evict([1000])[1].keys.size == 1
    assert table.row_version != row_version


@pytest.mark.parametrize("load", [0.25, 0.5, 1.0])
def test_it_doubles_at_the_load_factor_and_evicts_nobody_before_it_is_full_size(backend, load):
    sizes = {"init_capacity": 256, "max_capacity": 512}
    table = new_table(backend, 1, "hybrid", max_load_factor=load, **sizes)
    while table.capacity == 256 and table.size < 200:
        table.find_or_insert([table.size])
    if load < 0.75:  # above it a crowded bucket may come first
        assert table.size == 256 * load + 1
    # Buckets of 4 fill long before the table does: it grows instead.
    sizes = {"init_capacity": 4, "max_capacity": 1 << 15, "max_bucket_size": 4}
    table, keys = new_table(backend, 1, "hybrid", max_load_factor=load, **sizes), np.arange(6000)
    for part in np.array_split(keys, 37):
        assert backend.to_host(table.lookup_and_evict(part)[1].keys).size == 0
    assert backend.to_host(table.export()[0]).tolist() == keys.tolist()
    held = table.statistics()
    assert (held.evicted_total, held.refused_total) == (0, 0)
    assert 1 < held.rehashes_total <= int(np.log2(table.capacity / 4))


# -------------------------------------------------------------------- refusal


def test_the_surplus_of_a_batch_is_refused_and_gets_its_first_value(backend):
    watch = watched(backend)
    watch.lookup(list(range(100, 110)))
    keys = list(range(40)) * 2
    watch.lookup(keys)
    assert (watch.refused, watch.evicted, watch.table.size) == (24, 10, 16)
    watch.check()
    found = watch.table.lookup(keys, insert=False, missing="zeros")
    assert found.num_without_row == 48
    # The next lookup of the same keys finds 16 of them and may not evict them for the others.
    held = backend.to_host(watch.table.export()[0]).tolist()
    watch.lookup(keys)
    assert backend.to_host(watch.table.export()[0]).tolist() == held


def test_refusal_may_be_ignored_or_warns_once_a_table(backend):
    for on_refused, text in (("ignore", None), ("warn", "'users' had no room for 14 of 30 new")):
        table = full_table(backend, on_refused=on_refused, name="users")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for first in (0, 40):
                table.find_or_insert(np.arange(first, first + 30))
        assert table.statistics().refused_total == 28
        assert [each.category for each in warned] == [RuntimeWarning] * (text is not None)
        assert all(text in str(each.message) for each in warned)


@pytest.mark.parametrize("operation", ["lookup", "insert", "accum"])
def test_refusal_may_be_an_error_after_the_rest_is_done(backend, operation):
    table = full_table(backend, on_refused="error")
    table.insert_or_assign(np.arange(100, 116), np.full((16, 2), 7, np.float32))
    keys, fives = np.arange(30), np.full((30, 2), 5, np.float32)
    work = {
        "lookup": lambda: table.lookup_and_evict(keys),
        "insert": lambda: table.insert_and_evict(keys, fives),
        "accum": lambda: table.accum_or_assign(keys, fives, np.zeros(30, bool)),
    }[operation]
    with pytest.raises(RefusedError, match="no room for 14 of 30 new keys") as raised:
        work()
    evicted = raised.value.evicted
    if operation == "accum":
        assert evicted is None
    else:
        assert sorted(backend.to_host(evicted.keys).tolist()) == list(range(100, 116))
        assert (backend.to_host(evicted.values) == 7).all()
    held, rows = (backend.to_host(part) for part in table.export())
    assert held.size == 16 and set(held.tolist()) <= set(keys.tolist())
    expected = held % 1000 if operation == "lookup" else np.full(16, 5)
    np.testing.assert_array_equal(rows[:, 0], expected)
    table.lookup(held)  # nothing new: no error, and none left over
    table.erase(held[:3])
    table.lookup([1000, 1001])


# -------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "where", ["output", "claim", "reserve", "new_placement", "assign_launches"]
)
def test_whatever_fails_before_an_eviction_leaves_the_table_as_it_was(backend, monkeypatch, where):
    """No key is evicted, the new ones are not there, and no row is lost."""
    table = full_table(backend, max_hbm_for_vectors=8 * 4 / 2**30)
    ensure_state(table.store, "m", 0.5)
    table.find_or_insert(np.arange(16))
    before = [backend.to_host(part).tolist() for part in table.export()]
    owner = {"new_placement": table.index, "reserve": table.tiers, "assign_launches": table.tiers}

    def no_memory(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(owner.get(where, table.store), where, no_memory)
        with pytest.raises(MemoryError):
            table.lookup_and_evict(np.arange(100, 104))
    assert [backend.to_host(part).tolist() for part in table.export()] == before
    audit(table)
    values, evicted = table.lookup_and_evict(np.arange(100, 104))
    assert backend.to_host(values)[:, 0].tolist() == [100, 101, 102, 103]
    assert evicted.keys.size + table.size + 4 >= 16
    audit(table)


def test_to_return_what_was_evicted_needs_no_memory_beyond_that_of_the_change(monkeypatch):
    """The change is made by then: without memory for them, the evicted rows would be lost."""
    table = full_table(CpuBackend(), slots=1024, dim=64)
    table.find_or_insert(np.arange(1024))
    before = 0

    def measured(*launches):
        nonlocal before
        launch_all(*launches)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()

    monkeypatch.setattr(insert, "launch_all", measured)
    tracemalloc.start()
    try:
        _, evicted = table.lookup_and_evict(np.arange(10_000, 10_900))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert evicted.values.nbytes > 200_000
    assert peak < before + 20_000

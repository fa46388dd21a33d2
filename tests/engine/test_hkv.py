"""What only the hybrid table does, and its state machine against a dict.

What every table does is in test_tables.py, what must be true of an eviction in
tests/support/eviction_facts.py.
"""

import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend.cpu import CpuBackend
from sok_lite.backend.launches import launch_all
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table import insert
from sok_lite.engine.table.hkv import RefusedError
from sok_lite.engine.table.hkv_options import STRATEGIES
from tests.conftest import QUICK
from tests.support.eviction_facts import Watched
from tests.support.helpers import KeyInitializer, first_row, new_table, sized, with_segments
from tests.support.simt import backend as simt
from tests.support.table_audit import audit_segments

I64 = np.iinfo(np.int64)


def full_table(backend, strategy="kLru", slots=64, **options):
    """A table that may not grow."""
    sizes = {"init_capacity": slots, "max_capacity": slots}
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
@pytest.mark.parametrize(("slots", "bucket"), [(4, 4), (64, 4), (64, 16), (128, 64), (128, 128)])
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


def test_lru_evicts_what_was_looked_up_longest_ago(backend):
    watch = watched(backend, "kLru", 16, max_bucket_size=16)  # one bucket: every key a candidate
    oldest_first = fill(watch)
    again = oldest_first[::3]
    for key in again:
        watch.lookup([key])
    expected = [key for key in oldest_first if key not in again] + again
    for new, victim in enumerate(expected, 1000):
        values, evicted = watch.table.lookup_and_evict([new])
        assert backend.to_host(evicted.keys).tolist() == [victim]
        assert backend.to_host(values).tolist() == [[new % 1000] * 2]


def test_reading_does_not_refresh_lru(backend):
    watch = watched(backend, "kLru", 16, max_bucket_size=16)
    oldest = fill(watch)[0]
    table = watch.table
    table.find([oldest])
    table.contains([oldest])
    table.lookup([oldest], insert=False)
    table.export()
    assert backend.to_host(table.lookup_and_evict([500])[1].keys).tolist() == [oldest]


def test_what_is_written_counts_as_seen_by_the_last_lookup(backend):
    watch = watched(backend, "kLru", 16, max_bucket_size=16)
    keys = fill(watch)
    table = watch.table
    for write, key in zip((table.assign, table.accumulate), keys, strict=False):
        write([key], zeros([0]))
        assert backend.to_host(table.scores([key])).tolist() == [table.num_lookups]
    assert backend.to_host(table.lookup_and_evict([500])[1].keys).tolist() == [keys[2]]


def test_lfu_evicts_what_was_looked_up_least_often(backend):
    watch = watched(backend, "kLfu", 16, max_bucket_size=16)
    keys = fill(watch)
    rng = np.random.default_rng(0)
    for _ in range(60):
        # A batch counts once, however often it has a key.
        watch.lookup(rng.choice(keys[1:], 5).tolist())
    watch.check()
    for new in range(1000, 1100):
        least = min(watch.oracle.scores.values())
        _, evicted = watch.table.lookup_and_evict([new])
        watch.oracle.now += 1
        victim, score = backend.to_host(evicted.keys)[0], backend.to_host(evicted.scores)[0]
        assert score == least == watch.oracle.scores[victim]
        watch.oracle.drop([victim])
        watch.oracle.rows[new], watch.oracle.scores[new] = first_row(2)(new), 1


@pytest.mark.parametrize("strategy", ["kEpochLru", "kEpochLfu"])
def test_an_epoch_outranks_every_earlier_one(backend, strategy):
    watch = watched(backend, strategy, 16, max_bucket_size=16)
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
    watch = watched(backend, "kCustomized", 16, max_bucket_size=16)
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
    last_seen, rows = (
        backend.to_host(table.index.last_seen(backend.from_host(keys))),
        table.export()[1],
    )
    table.decay_scores(factor)
    fading = counts if strategy == "kEpochLfu" else scores
    left = [int(int(count) * float(np.float32(factor))) for count in fading]
    kept = epochs if strategy == "kEpochLfu" else np.zeros_like(epochs)
    found = backend.to_host(table.scores(keys))
    assert found.tolist() == [x + int(y) for x, y in zip(left, kept, strict=True)]
    np.testing.assert_array_equal(
        backend.to_host(table.index.last_seen(backend.from_host(keys))), last_seen
    )
    np.testing.assert_array_equal(*map(backend.to_host, (table.export()[1], rows)))
    audit_segments(table.index)


def test_a_key_that_was_popular_once_goes(backend):
    watch = watched(backend, "kLfu", 16, max_bucket_size=16)
    for _ in range(9):
        watch.lookup(list(range(16)))
    watch.table.decay_scores(0.1)
    for _ in range(2):
        watch.lookup(list(range(15)))
    table = watch.table
    table.lookup(np.array([100]))
    assert backend.to_host(table.contains([15, 100])).tolist() == [False, True]


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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_given_scores_are_kept_and_decide_who_gets_in(backend, strategy):
    """As when a checkpoint is loaded: the scores are those of another table."""
    watch = watched(backend, strategy, 16, max_bucket_size=16)
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
def test_an_increment_refuses_nobody(backend, strategy):
    watch = watched(backend, strategy, 16, max_bucket_size=16)
    watch.find_or_insert(list(range(16)), given=[5] * 16)
    watch.find_or_insert([100], given=[2])
    assert backend.to_host(watch.table.scores([100])).tolist() == [2]
    # A count does not wrap.
    most = 2**64 - 1 if strategy == "kLfu" else 2**32 - 1
    for given in (most - 7, 4, most - 1, 1):
        watch.find_or_insert([100], given=[given])
        watch.check()
    assert backend.to_host(watch.table.scores([100])).tolist() == [most]


def test_evicted_rows_start_anew_with_their_states(backend):
    table = full_table(backend, slots=64)
    ensure_state(table.store, "m", 0.5)
    rows = table.find_or_insert(np.arange(200))
    rows = rows[rows != np.uint32(NO_ROW)]
    table.store.write(rows, backend.xp.full((rows.size, 2), 9, np.float32), column="m")
    row_version = table.row_version
    keys = np.arange(1000, 1010)
    found, evicted = table.lookup_and_evict(keys)
    assert table.row_version != row_version
    assert backend.to_host(evicted.keys).size > 0
    np.testing.assert_array_equal(backend.to_host(found)[:, 0], keys % 1000)
    states = backend.to_host(table.store.read(table.find(keys), "m"))
    assert (states == 0.5).all()


def test_reserved_keys_are_never_evicted(backend):
    watch = watched(backend, "kLru", 16, max_bucket_size=4)
    reserved = [I64.max, I64.min]
    watch.lookup(reserved)
    for first in range(0, 1000, 50):
        watch.lookup(list(range(first, first + 50)))
    watch.check()
    assert backend.to_host(watch.table.contains(reserved)).all()
    assert watch.table.erase(reserved) == len(reserved)


def test_nobody_is_evicted_before_the_table_is_full_size(backend):
    """Buckets of 4 fill long before the table does: it grows instead."""
    sizes = {"init_capacity": 4, "max_capacity": 1 << 15, "max_bucket_size": 4}
    table = new_table(backend, 1, "hybrid", max_load_factor=1.0, **sizes)
    keys = np.arange(6000)
    for part in np.array_split(keys, 37):
        assert backend.to_host(table.lookup_and_evict(part)[1].keys).size == 0
    assert backend.to_host(table.export()[0]).tolist() == keys.tolist()
    held = table.statistics()
    assert (held.evicted_total, held.refused_total) == (0, 0)
    assert 1 < held.rehashes_total <= int(np.log2(table.capacity / 4))


@pytest.mark.parametrize("load", [0.25, 0.5, 1.0])
def test_the_load_factor_says_when_it_doubles(backend, load):
    sizes = {"init_capacity": 256, "max_capacity": 512}
    table = new_table(backend, 1, "hybrid", max_load_factor=load, **sizes)
    while table.capacity == 256 and table.size < 200:
        table.find_or_insert([table.size])
    if load < 0.75:  # above it a crowded bucket may come first
        assert table.size == 256 * load + 1


# -------------------------------------------------------------------- refusal


def test_the_surplus_of_a_batch_is_refused_and_gets_its_first_value(backend):
    watch = watched(backend, "kLru", 16, max_bucket_size=16)
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


def test_a_batch_never_evicts_what_it_uses(backend):
    watch = watched(backend, "kLru", 64, max_bucket_size=4)
    fill(watch)
    rng = np.random.default_rng(0)
    for first in range(1000, 5000, 100):
        old = rng.choice(list(watch.oracle.rows), 30, replace=False).tolist()
        watch.lookup(old + list(range(first, first + 40)))
        assert backend.to_host(watch.table.contains(old)).all()
    watch.check()
    assert watch.refused and watch.evicted


def test_accum_or_assign_never_evicts_what_it_adds_to(backend):
    watch = watched(backend, "kLru", 16, max_bucket_size=16)
    keys = fill(watch)
    # The oldest are added to, so that the others have to go.
    watch.accum_or_assign(keys[:8] + list(range(100, 120)), np.ones((28, 2)), [1] * 8 + [0] * 20)
    watch.check()
    assert backend.to_host(watch.table.contains(keys[:8])).all()
    assert (watch.evicted, watch.refused) == (8, 12)


def overfull(backend, on_refused, **options):
    return full_table(backend, slots=16, max_bucket_size=16, on_refused=on_refused, **options)


def test_refusal_may_be_ignored(backend):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = overfull(backend, "ignore")
        table.find_or_insert(np.arange(30))
    assert table.statistics().refused_total == 14


def test_refusal_warns_once_a_table(backend):
    table = overfull(backend, "warn", name="users")
    with pytest.warns(RuntimeWarning, match="'users' had no room for 14 of 30 new keys"):
        table.find_or_insert(np.arange(30))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table.find_or_insert(np.arange(40, 70))
    assert table.statistics().refused_total == 28


@pytest.mark.parametrize("operation", ["lookup", "insert", "accum"])
def test_refusal_may_be_an_error_after_the_rest_is_done(backend, operation):
    table = overfull(backend, "error")
    table.insert_or_assign(np.arange(100, 116), np.full((16, 2), 7, np.float32))
    keys = np.arange(30)
    with pytest.raises(RefusedError, match="no room for 14 of 30 new keys") as raised:
        if operation == "lookup":
            table.lookup_and_evict(keys)
        elif operation == "insert":
            table.insert_and_evict(keys, np.full((30, 2), 5, np.float32))
        else:
            table.accum_or_assign(keys, np.full((30, 2), 5, np.float32), np.zeros(30, bool))
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


def test_an_initializer_that_raises_gives_the_new_rows_back(backend):
    class Fails(KeyInitializer):
        def fill_launch(self, *args):
            if failing:
                raise ZeroDivisionError
            return super().fill_launch(*args)

    table = full_table(backend, slots=16)
    table.initializer = Fails()
    failing = False
    table.find_or_insert(np.arange(16))
    held = table.size
    failing = True
    with pytest.raises(ZeroDivisionError):
        table.find_or_insert(np.arange(100, 110))
    failing = False
    assert not backend.to_host(table.contains(np.arange(100, 110))).any()
    assert table.store.allocator.num_free == held - table.size
    table.find_or_insert(np.arange(100, 110))
    rows = backend.to_host(table.export_rows()[1])
    assert len(set(rows.tolist())) == table.size
    assert table.store.num_rows <= 16


@pytest.mark.parametrize("where", ["output", "claim", "reserve", "new_placement", "assign_launches"])
def test_whatever_fails_before_an_eviction_leaves_the_table_as_it_was(backend, monkeypatch, where):
    """No key is evicted, the new ones are not there, and no row is lost."""
    table = full_table(backend, slots=16, max_hbm_for_vectors=8 * 4 / 2**30)
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
    assert table.store.num_rows == table.size + table.store.allocator.num_free
    values, evicted = table.lookup_and_evict(np.arange(100, 104))
    assert backend.to_host(values)[:, 0].tolist() == [100, 101, 102, 103]
    assert evicted.keys.size + table.size + 4 >= 16
    assert len(set(backend.to_host(table.export_rows()[1]).tolist())) == table.size


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


def test_a_full_count_of_an_epoch_stays_full(backend):
    table = full_table(backend, "kEpochLfu")
    table.find_or_insert([1], scores=[5])
    table.find_or_insert([1], scores=[2**64 - 3])
    assert backend.to_host(table.scores([1])).tolist() == [2**32 - 1]


# -------------------------------------------------------------------- the clock at its end


@pytest.mark.parametrize("strategy", ["kLru", "kEpochLru"])
def test_order_survives_the_end_of_the_clock(backend, strategy):
    table = full_table(backend, strategy, slots=16, max_bucket_size=16)
    last = 2**32 - 1
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
    for new, victim in enumerate([0, 1, 2, 4, 5, 6, 7, 8], 1000):
        evicted = table.lookup_and_evict([new])[1]
        assert backend.to_host(evicted.keys).tolist() == [victim]


def test_counts_and_custom_scores_do_not_age(backend):
    for strategy in ("kLfu", "kEpochLfu", "kCustomized"):
        table = full_table(backend, strategy)
        table.find_or_insert([1, 2], scores=[5, 9])
        table.clock.now = 2**32 - 1
        table.find([1])
        table.find_or_insert([3], scores=[1])
        assert table.num_lookups == 2**31
        assert backend.to_host(table.scores([1, 2, 3])).tolist() == [5, 9, 1]


# -------------------------------------------------------------------- what the caller may not give


def test_scores_must_fit_the_keys(backend):
    table = full_table(backend, "kCustomized")
    with pytest.raises(ValueError, match=r"shape \(2,\).*shape \(1,\)"):
        table.find_or_insert([1, 2], scores=[1])
    with pytest.raises(ValueError, match="not be negative"):
        table.insert_or_assign([1], zeros([0]), [-1])
    assert table.size == 0


def test_the_last_score_of_a_repeated_key_counts(backend):
    table = full_table(backend, "kCustomized")
    table.find_or_insert([5, 6, 5, 5], scores=[4, 3, 9, 2])
    assert backend.to_host(table.scores([5, 6])).tolist() == [2, 3]
    table.find_or_insert([5, 5, 6], scores=[1, 8, 7])
    assert backend.to_host(table.scores([5, 6])).tolist() == [8, 7]
    table.insert_or_assign([5, 5, 9, 9], zeros([0] * 4), [1, 2, 3, 4])
    assert backend.to_host(table.scores([5, 9])).tolist() == [2, 4]


# -------------------------------------------------------------------- the machine

KEYS = st.lists(
    st.integers(-60, 60) | st.sampled_from([I64.max, I64.min, I64.max - 1]), max_size=40
)
MANY = st.tuples(st.integers(-1000, 1000), st.integers(0, 120)).map(
    lambda span: list(range(span[0], span[0] + span[1]))
)
BATCH = KEYS | MANY


class HkvAgainstDict(RuleBasedStateMachine):
    """Drives a small table through any sequence of calls: it evicts and refuses all the time."""

    backend = CpuBackend(num_threads=4)
    backend.grain = 1
    backend.segment_slots = 16

    @initialize(
        strategy=st.sampled_from(STRATEGIES),
        sizes=st.sampled_from([(16, 16), (64, 64), (4, 32), (16, 128), (64, 256), (8, 1024)]),
        bucket=st.sampled_from([4, 8, 16, 64]),
        load=st.sampled_from([0.5, 0.75, 1.0]),
        near_rows=st.sampled_from([None, 0, 8]),
    )
    def start(self, strategy, sizes, bucket, load, near_rows):
        options = {"init_capacity": sizes[0], "max_capacity": sizes[1], "max_bucket_size": bucket}
        if near_rows is not None:
            options["max_hbm_for_vectors"] = near_rows * 8 / 2**30
        self.watch = Watched(
            full_table(self.backend, strategy, max_load_factor=load, **options), first_row(2)
        )
        self.strategy = strategy

    def values(self, keys):
        rng = np.random.default_rng(len(keys))
        return rng.integers(-99, 99, (len(keys), 2)).astype(np.float32)

    def scores(self, keys, draw):
        """One for each key; those of kLru are numbers of lookups that were."""
        most = self.watch.oracle.now + 1 if self.strategy == "kLru" else 40
        return [(draw * (7 * i + 1) + key) % most for i, key in enumerate(keys)]

    @rule(keys=BATCH, report=st.booleans(), is_distinct=st.booleans())
    def lookup(self, keys, report, is_distinct):
        keys = list(dict.fromkeys(keys)) if is_distinct else keys
        self.watch.lookup(keys, report=report, unique_keys=is_distinct)

    @rule(keys=BATCH, draw=st.integers(0, 30))
    def lookup_with_scores(self, keys, draw):
        self.watch.find_or_insert(keys, self.scores(keys, draw))

    @rule(keys=BATCH, draw=st.none() | st.integers(0, 30), report=st.booleans())
    def insert(self, keys, draw, report):
        scores = None if draw is None else self.scores(keys, draw)
        self.watch.insert(keys, self.values(keys), scores, report=report)

    @rule(keys=BATCH, flip=st.booleans())
    def accum_or_assign(self, keys, flip):
        flags = self.watch.oracle.contains(keys) ^ (flip & (np.arange(len(keys)) % 3 == 0))
        self.watch.accum_or_assign(keys, self.values(keys), flags)

    @rule(keys=KEYS, name=st.sampled_from(["assign", "accumulate"]))
    def write(self, keys, name):
        self.watch.write(name, keys, self.values(keys))

    @rule(keys=BATCH)
    def erase(self, keys):
        self.watch.erase(keys)

    @rule(divisor=st.integers(2, 5), score=st.integers(0, 40))
    def erase_if(self, divisor, score):
        self.watch.erase_if(
            lambda held: (held.keys % divisor == 0) & (held.scores < score),
            lambda key, held: key % divisor == 0 and held < score,
        )

    @rule(num_lookups=st.integers(0, 12))
    def expire(self, num_lookups):
        self.watch.expire(num_lookups)

    @rule(keys=KEYS, draw=st.integers(0, 30))
    def assign_scores(self, keys, draw):
        self.watch.assign_scores(keys, self.scores(keys, draw))

    @rule()
    def next_epoch(self):
        self.watch.set_epoch(self.watch.oracle.epoch + 1)

    @rule(keys=KEYS)
    def read_only(self, keys):
        found = self.watch.table.lookup(np.array(keys, np.int64), insert=False)
        expected = np.array([self.watch.row_of(key) for key in keys]).reshape(len(keys), 2)
        np.testing.assert_array_equal(self.backend.to_host(found.values), expected)

    @rule(n=st.integers(0, 300))
    def reserve(self, n):
        self.watch.table.reserve(n)

    @rule()
    def clear(self):
        self.watch.clear()

    @invariant()
    def same(self):
        if hasattr(self, "watch"):
            self.watch.check()
            audit_segments(self.watch.table.index)


TestHkvAgainstDict = HkvAgainstDict.TestCase
TestHkvAgainstDict.settings = settings(max_examples=25 if QUICK else 120, stateful_step_count=25)


class SimtHkvAgainstDict(HkvAgainstDict):
    backend = property(lambda self: with_segments(simt.simt_backend(), 16))


TestSimtHkvAgainstDict = pytest.mark.skipif(
    simt.unavailable() is not None, reason=f"no simulated GPU: {simt.unavailable()}"
)(SimtHkvAgainstDict.TestCase)
TestSimtHkvAgainstDict.settings = settings(max_examples=4 if QUICK else 10, stateful_step_count=20)

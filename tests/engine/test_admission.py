"""Which new keys get a row: counting and drawing against plain Python."""

from collections import Counter

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.backend.launches import launch_all
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.admission import PendingCounts, draw_launch
from tests.support import reference
from tests.support.helpers import new_table, sized

I64 = np.iinfo(np.int64)


def counting(backend, threshold, **options):
    return new_table(backend, 2, "hybrid", enter_threshold=threshold, **options)


def drawn(backend, keys, ratio, seed, lookup):
    """Which keys are drawn, (n,) bool; the count must say how many."""
    xp = backend.xp
    chosen, count = xp.full(keys.size, 7, np.uint8), xp.zeros(1, np.int64)
    draw_launch(backend, keys, ratio, seed, lookup, chosen, count)()
    assert int(count[0]) == int(chosen.sum())
    return backend.to_host(chosen.view(bool))


# -------------------------------------------------------------------- counting


@pytest.mark.parametrize("threshold", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_a_key_gets_a_row_at_its_kth_lookup(backend, threshold, n):
    table = counting(backend, threshold)
    seen = Counter()
    rng = np.random.default_rng(n)
    reserved = [I64.max, I64.min, I64.max - 1]
    not_admitted = 0
    for _ in range(9):
        # Repeated within a batch: that counts once.
        keys = [*rng.integers(0, n // 2 + 1, n).tolist(), *(reserved if n else [])]
        values, rows, num_without_row = table.lookup(np.array(keys, np.int64))
        held = {key for key, count in seen.items() if count >= threshold}
        seen.update(set(keys))
        enters = {key for key in set(keys) if seen[key] >= threshold}
        not_admitted += len(set(keys) - enters)
        expected = np.array([key in enters for key in keys], bool)
        np.testing.assert_array_equal(backend.to_host(rows) != NO_ROW, expected)
        assert num_without_row == (~expected).sum()
        np.testing.assert_array_equal(  # with a row or without: its initial value
            backend.to_host(values), np.array([[key % 1000] * 2 for key in keys]).reshape(-1, 2)
        )
        assert set(backend.to_host(table.export()[0]).tolist()) == held | enters
    counts = table.statistics()
    assert counts.inserted_total == table.size
    assert counts.not_admitted_total == not_admitted


def test_no_row_is_taken_by_a_key_that_only_counts(backend):
    n = sized(backend, 100_000, 10_000)
    table = counting(backend, 3)
    table.find_or_insert(np.arange(n))
    table.find_or_insert(np.arange(n))
    assert table.size == 0
    assert table.store.num_rows == 0 and table.store.num_bytes == 0
    assert table.statistics().near_bytes == 0
    assert table.pending.size == n
    # A counter has 16 bytes, in an index that is at most twice as large as it must be.
    assert table.pending.num_bytes <= 2 * 16 * n / 0.7 + 100
    table.find_or_insert(np.arange(n // 2))
    assert table.size == n // 2 == table.store.num_rows
    assert table.pending.size == n // 2


def test_reading_and_writing_do_not_count(backend):
    table = counting(backend, 2)
    table.find_or_insert([1])
    for _ in range(3):
        table.find([1])
        table.contains([1])
        table.lookup([1], insert=False)
        table.assign([1], np.zeros((1, 2), np.float32))
        table.accumulate([1], np.zeros((1, 2), np.float32))
    assert table.size == 0
    table.find_or_insert([1])
    assert table.size == 1


def test_what_is_assigned_enters_at_once(backend):
    table = counting(backend, 100)
    table.insert_or_assign([1, 2], np.ones((2, 2), np.float32))
    assert table.size == 2
    assert table.pending.size == 0


def test_what_was_assigned_is_no_longer_counted(backend):
    table = counting(backend, 3)
    table.find_or_insert([1, 2])
    table.find_or_insert([1, 2])
    table.insert_or_assign([1], np.ones((1, 2), np.float32))
    assert backend.to_host(table.pending.entries().keys).tolist() == [2]
    table.erase([1])
    table.find_or_insert([1])
    assert table.size == 0


def test_a_refused_key_keeps_its_count(backend):
    sizes = {"init_capacity": 16, "max_capacity": 16, "on_refused": "ignore"}
    table = counting(backend, 3, **sizes)
    keys = np.arange(40)
    for _ in range(3):
        table.find_or_insert(keys)
    held = backend.to_host(table.export()[0])
    assert held.size == 16
    assert table.pending.size == 24
    refused = np.setdiff1d(keys, held)[:5]
    table.find_or_insert(refused)  # by itself it has room, at once
    assert backend.to_host(table.contains(refused)).all()


def test_a_key_that_found_no_memory_keeps_its_count(backend, monkeypatch):
    table = counting(backend, 2, init_capacity=64)
    keys = np.arange(2000)
    table.find_or_insert(keys)

    def none_left(num_bytes):
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "zeros_chunk", none_left)
        with pytest.raises(MemoryError):
            table.find_or_insert(keys)
    assert table.size == 0
    table.find_or_insert(keys)
    assert table.size == 2000 and table.pending.size == 0


def test_an_erased_key_has_to_come_again(backend):
    table = counting(backend, 3)
    for sighting in range(3):
        assert table.size == 0, sighting
        table.find_or_insert([5])
    assert table.erase([5]) == 1
    table.find_or_insert([5])
    table.find_or_insert([5])
    assert table.size == 0
    table.find_or_insert([5])
    assert table.size == 1


def test_clear_forgets_the_counts(backend):
    table = counting(backend, 2)
    table.find_or_insert([1, 2])
    table.clear()
    assert table.pending.size == 0
    table.find_or_insert([1, 2])
    assert table.size == 0


def count(counter, keys, lookup):
    """Counts distinct keys (n,) int64 once more."""
    xp = counter.backend.xp
    admitted, counts = xp.ones(int(keys.size), np.uint8), xp.zeros(2, np.int64)
    counted, launches = counter.count_launches(keys, lookup, admitted, counts)
    launch_all(launches)
    launch_all(counter.store_launches(counted, int(counts[1])))
    counter.record.size += int(counts[1])


def test_a_count_stays_below_what_marks_a_missing_row(backend):
    # No table has such a threshold; the counter must not depend on that.
    counter = PendingCounts(backend, counting(backend, 2).key_dtype, "t", 2**31)
    key = backend.from_host(np.array([5], np.int64))
    counter.restore(key, *(backend.from_host(np.uint32([n])) for n in ((1 << 30) - 1, 0)))
    for lookup in range(5):
        count(counter, key, lookup)
    assert backend.to_host(counter.entries().rows).tolist() == [(1 << 30) + 1]


def test_erasing_a_key_forgets_its_sightings(backend):
    table = counting(backend, 3)
    table.find_or_insert([1, 2])
    table.find_or_insert([1, 2])
    assert table.erase([1]) == 0
    table.find_or_insert([1, 2])
    assert backend.to_host(table.contains([1, 2])).tolist() == [False, True]


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_counts_can_be_moved_to_another_counter(backend, n):
    dtype = counting(backend, 2).key_dtype
    one, other = (PendingCounts(backend, dtype, "t", 10) for _ in range(2))
    expected = Counter()
    rng = np.random.default_rng(n)
    for _ in range(4):
        keys = np.unique(rng.integers(-n, n + 1, n))
        count(one, backend.from_host(keys), 1)
        expected.update(keys.tolist())
    count(other, backend.from_host(np.array([10**9])), 1)
    saved = one.entries()[:3]
    for piece in (slice(0, n // 3), slice(n // 3, None)):
        other.restore(*(part[piece] for part in saved))
    for counter, more in ((one, {}), (other, {10**9: 1})):
        keys, counts, _ = (backend.to_host(part).tolist() for part in counter.entries()[:3])
        assert dict(zip(keys, counts, strict=True)) == expected | more


def test_no_memory_for_counters_leaves_them_whole(backend, monkeypatch):
    table = counting(backend, 3)
    table.find_or_insert(np.arange(40))
    before = sorted(zip(*map(list, map(backend.to_host, table.pending.entries()[:3])), strict=True))

    def none_left(num_bytes):
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "zeros_chunk", none_left)
        with pytest.raises(MemoryError):
            table.find_or_insert(np.arange(100_000))
    after = sorted(zip(*map(list, map(backend.to_host, table.pending.entries()[:3])), strict=True))
    assert before == after


# -------------------------------------------------------------------- drawing


def test_a_draw_is_the_same_on_every_backend_and_machine(backend):
    keys = np.arange(20, dtype=np.int64) * 2**40 - 7
    got = drawn(backend, backend.from_host(keys), 0.5, -(2**62), 3).tolist()
    assert got == drawn(get_backend("cpu"), keys, 0.5, -(2**62), 3).tolist()
    assert got == DRAWN


@pytest.mark.parametrize("ratio", [0.0, 2.0**-53, 0.3, 0.5, 1 - 2.0**-53])
def test_a_draw_is_a_hash_of_table_lookup_and_key(backend, ratio):
    keys = np.concatenate([[-(2**63), 2**63 - 1, 0, -1], np.arange(300) * 7919 - 5])
    for seed, lookup in ((0, 1), (-5, 2**32 - 1), (2**63 - 1, 77)):
        got = drawn(backend, backend.from_host(keys), ratio, seed, lookup)
        np.testing.assert_array_equal(got, reference.drawn(keys, ratio, seed, lookup))


# Written down once: a changed draw would let other keys into tables that go on from a checkpoint.
DRAWN = [bool(int(bit)) for bit in "10000110111011100110"]


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_share_that_is_drawn_is_the_chance(backend, ratio):
    n = 200_000
    for seed, lookup in ((0, 1), (-5, 1), (0, 2**32 - 1)):
        keys = backend.from_host(np.arange(n))
        share = float(drawn(backend, keys, ratio, seed, lookup).mean())
        # Five standard deviations of a binomial.
        assert abs(share - ratio) <= 5 * (ratio * (1 - ratio) / n) ** 0.5


def test_draws_of_lookups_tables_and_neighbours_are_independent(backend):
    n = 200_000
    keys = backend.from_host(np.arange(n))
    draw = {
        (seed, lookup): drawn(backend, keys, 0.5, seed, lookup)
        for seed in (0, 1, -(2**63), 2**63 - 1)
        for lookup in (1, 2, 3)
    }
    names = list(draw)
    for i, one in enumerate(names):
        assert abs(np.corrcoef(draw[one][1:], draw[one][:-1])[0, 1]) < 0.015
        for other in names[i + 1 :]:
            assert abs(np.corrcoef(draw[one], draw[other])[0, 1]) < 0.015


def test_a_filtered_key_gets_in_at_one_lookup_or_another(backend):
    table = new_table(backend, 2, "hybrid")
    keys = np.arange(20_000)
    waiting = 20_000
    for _ in range(5):
        values, rows, num_without_row = table.lookup(keys, filter_ratio=0.25)
        np.testing.assert_array_equal(backend.to_host(values)[:, 0], keys % 1000)
        assert num_without_row == 20_000 - table.size == (backend.to_host(rows) == NO_ROW).sum()
        spread = 5 * (waiting * 0.25 * 0.75) ** 0.5
        assert abs(num_without_row - 0.75 * waiting) < spread
        waiting = num_without_row
    held = table.statistics()
    assert held.inserted_total == table.size
    table.lookup(keys)  # without the filter all get in
    assert table.size == 20_000


def test_the_filter_is_for_new_keys_only(backend):
    table = new_table(backend, 2, "hybrid")
    table.find_or_insert(np.arange(100))
    rows = table.find_or_insert(np.arange(200), filter_ratio=0.0)
    rows = backend.to_host(rows) != NO_ROW
    assert rows[:100].all() and not rows[100:].any()
    assert table.statistics().not_admitted_total == 100


@pytest.mark.parametrize("seed", [0, 7])
def test_equal_tables_admit_equal_keys(backend, seed):
    def admitted(name, seed):
        table = new_table(backend, 2, "hybrid", name=name, seed=seed)
        for first in range(0, 900, 300):
            table.find_or_insert(np.arange(first, first + 600), filter_ratio=0.5)
        return backend.to_host(table.export()[0]).tolist()

    assert admitted("a", seed) == admitted("a", seed)
    assert admitted("a", seed) != admitted("b", seed)
    assert admitted("a", seed) != admitted("a", seed + 1)


def test_a_filtered_sighting_does_not_count(backend):
    table = counting(backend, 2)
    keys = np.arange(1000)
    for _ in range(3):
        table.find_or_insert(keys, filter_ratio=0.0)
    assert table.pending.size == 0
    table.find_or_insert(keys, filter_ratio=0.5)
    once = table.pending.size
    assert 400 < once < 600
    table.find_or_insert(keys)
    assert table.size == once


def test_expiry_forgets_sightings_too(backend):
    table = counting(backend, 3)
    table.find_or_insert([1, 2])
    for _ in range(4):
        table.find_or_insert([2_000])
    table.find_or_insert([2])
    table.expire(num_lookups=5)
    assert backend.to_host(table.pending.entries().keys).tolist() == [2]
    table.find_or_insert([1, 2])
    assert backend.to_host(table.contains([1, 2])).tolist() == [False, True]
    table.clock.now = 2**32 - 1
    table.find_or_insert([3])
    assert table.expire(num_lookups=1) == 2  # keys 2 and 2000
    assert backend.to_host(table.pending.entries().keys).tolist() == [3]

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
from tests.support.table_audit import audit

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
    """Reads and writes do not count; what is assigned enters at once, and what is erased has to
    come again."""
    table, seen, held = counting(backend, threshold), Counter(), set()
    rng, host = np.random.default_rng(n), backend.to_host
    reserved = [I64.max, I64.min, I64.max - 1]
    not_admitted = 0
    for turn in range(9):
        # Repeated within a batch: that counts once.
        keys = [*rng.integers(0, n // 2 + 1, n).tolist(), *(reserved if n else [])]
        values, rows, num_without_row = table.lookup(np.array(keys, np.int64))
        new = set(keys) - held
        seen.update(new)
        enters = {key for key in new if seen[key] >= threshold}
        not_admitted += len(new - enters)
        held |= enters
        expected = np.array([key in held for key in keys], bool)
        np.testing.assert_array_equal(host(rows) != NO_ROW, expected)
        assert num_without_row == (~expected).sum()
        np.testing.assert_array_equal(  # with a row or without: its initial value
            host(values), np.array([[key % 1000] * 2 for key in keys]).reshape(-1, 2)
        )
        some = np.array(keys[: n // 3], np.int64)
        rows = np.repeat((some % 1000).astype(np.float32)[:, None], 2, axis=1)
        table.find(some)
        table.lookup(some, insert=False)
        table.assign(some, rows)
        table.accumulate(some, np.zeros((some.size, 2), np.float32))
        if turn % 3 == 1:
            table.insert_or_assign(some[:5], rows[:5])
            held |= set(some[:5].tolist())
            erased = set(some[3:9].tolist())
            assert table.erase(some[3:9]) == len(held & erased)
            held -= erased
            for key in (*erased, *held):
                del seen[key]
        assert set(host(table.export()[0]).tolist()) == held
        audit(table)
        if threshold > 1:
            pending, counts = (host(part).tolist() for part in table.pending.entries()[:2])
            pending = dict(zip(pending, counts, strict=True))
            assert pending == {key: count for key, count in seen.items() if key not in held}
    assert table.statistics().not_admitted_total == not_admitted
    table.clear()
    assert not table.pending_keys().size


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


def test_a_refused_key_keeps_its_count(backend):
    table = counting(backend, 3, init_capacity=16, max_capacity=16, on_refused="ignore")
    keys = np.arange(40)
    for _ in range(3):
        table.find_or_insert(keys)
    held = backend.to_host(table.export()[0])
    assert held.size == 16
    assert table.pending.size == 24
    refused = np.setdiff1d(keys, held)[:5]
    table.find_or_insert(refused)  # by itself it has room, at once
    assert backend.to_host(table.contains(refused)).all()


def test_a_count_stays_below_what_marks_a_missing_row(backend):
    # No table has such a threshold; the counter must not depend on that.
    counter = PendingCounts(backend, counting(backend, 2).key_dtype, "t", 2**31)
    key, xp = backend.from_host(np.array([5], np.int64)), backend.xp
    counter.restore(key, *(backend.from_host(np.uint32([n])) for n in ((1 << 30) - 1, 0)))
    for lookup in range(5):
        admitted, counts = xp.ones(1, np.uint8), xp.zeros(2, np.int64)
        counted, launches = counter.count_launches(key, lookup, admitted, counts)
        launch_all(launches)
        launch_all(counter.store_launches(counted, int(counts[1])))
    assert backend.to_host(counter.entries().rows).tolist() == [(1 << 30) + 1]


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


# -------------------------------------------------------------------- drawing


# Written down once: a changed draw would let other keys into tables that go on from a checkpoint.
DRAWN = [bool(int(bit)) for bit in "10000110111011100110"]


@pytest.mark.parametrize("ratio", [0.0, 2.0**-53, 0.3, 0.5, 1 - 2.0**-53, 1.0])
def test_a_draw_is_a_hash_of_table_lookup_and_key(backend, ratio):
    keys = np.concatenate([[-(2**63), 2**63 - 1, 0, -1], np.arange(300) * 7919 - 5])
    for seed, lookup in ((0, 1), (-5, 2**32 - 1), (2**63 - 1, 77)):
        got = drawn(backend, backend.from_host(keys), ratio, seed, lookup)
        np.testing.assert_array_equal(got, reference.drawn(keys, ratio, seed, lookup))
    keys = backend.from_host(np.arange(20, dtype=np.int64) * 2**40 - 7)
    assert drawn(backend, keys, 0.5, -(2**62), 3).tolist() == DRAWN


def test_draws_have_the_chance_and_are_independent():
    """Of lookups, tables and neighbours, by five standard deviations of a binomial."""
    n, cpu = 200_000, get_backend("cpu")
    keys, draws = np.arange(n), []
    for ratio in (0.1, 0.5, 0.9):
        for seed, lookup in ((0, 1), (-(2**63), 1), (2**63 - 1, 2), (0, 2**32 - 1)):
            draw = drawn(cpu, keys, ratio, seed, lookup)
            assert abs(draw.mean() - ratio) <= 5 * (ratio * (1 - ratio) / n) ** 0.5
            if ratio == 0.5:
                draws += [draw[1:], draw[:-1]]
    for i, one in enumerate(draws):
        for other in draws[i + 1 :]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.015


def test_a_filtered_key_gets_in_at_one_lookup_or_another(backend):
    """The filter is for new keys alone."""
    table = new_table(backend, 2, "hybrid")
    keys = np.arange(20_000)
    waiting = 20_000
    for _ in range(5):
        held = backend.to_host(table.contains(keys))
        values, rows, num_without_row = table.lookup(keys, filter_ratio=0.25)
        np.testing.assert_array_equal(backend.to_host(values)[:, 0], keys % 1000)
        has_row = backend.to_host(rows) != NO_ROW
        assert num_without_row == 20_000 - table.size == (~has_row).sum() and has_row[held].all()
        spread = 5 * (waiting * 0.25 * 0.75) ** 0.5
        assert abs(num_without_row - 0.75 * waiting) < spread
        waiting = num_without_row
    table.find_or_insert(keys, filter_ratio=0.0)
    assert table.statistics().inserted_total == table.size == 20_000 - waiting
    table.lookup(keys)  # without the filter all get in
    assert table.size == 20_000


def test_equal_tables_admit_equal_keys(backend):
    def admitted(name, seed):
        table = new_table(backend, 2, "hybrid", name=name, seed=seed)
        for first in range(0, 900, 300):
            table.find_or_insert(np.arange(first, first + 600), filter_ratio=0.5)
        return backend.to_host(table.export()[0]).tolist()

    assert admitted("a", 7) == admitted("a", 7)
    assert admitted("a", 7) not in (admitted("b", 7), admitted("a", 8))


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

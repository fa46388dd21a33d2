"""What a table knows of the past of its keys, against dicts."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from sok_lite.comm import SingleCommunicator, run_ranks
from sok_lite.engine import lookup
from sok_lite.engine.rows.store import ABSENT
from sok_lite.engine.table import clock, snapshot
from tests.engine.helpers import new_table, sized

I64 = np.iinfo(np.int64)
RESERVED = [I64.max, I64.min, I64.max - 1]


def counting(backend, threshold=0, **options):
    """A table that counts how often keys come."""
    options = {"evict_strategy": "kLfu", "count_repeats": True} | options
    return new_table(backend, 2, "hybrid", enter_threshold=threshold, **options)


def assert_counts(table, expected):
    """All keys that were ever seen, and one that was not, are counted as in a dict."""
    keys = np.array([*expected, 10**12], np.int64)
    got = table.counts(keys)
    assert got.dtype == np.int64
    assert table.backend.to_host(got).tolist() == [*expected.values(), 0]


# -------------------------------------------------------------------- how often


@pytest.mark.parametrize("threshold", [0, 1, 2, 5])
@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_every_occurrence_counts(backend, threshold, n):
    table, seen = counting(backend, threshold), Counter()
    rng = np.random.default_rng(n)
    for _ in range(6):
        # Few keys come most often.
        keys = np.minimum(rng.geometric(0.1, n), n) - n // 3
        keys = np.array([*keys.tolist(), *RESERVED[: n % 3], *RESERVED[: n % 2]], np.int64)
        keys = rng.permutation(keys)
        values, rows, num_absent = table.lookup(keys)
        seen.update(keys.tolist())
        enters = np.array([seen[key] >= threshold for key in keys.tolist()], bool)
        np.testing.assert_array_equal(backend.to_host(rows) != ABSENT, enters)
        assert num_absent == (~enters).sum()
        first = np.array([[key % 1000] * 2 for key in keys.tolist()]).reshape(-1, 2)
        np.testing.assert_array_equal(backend.to_host(values), first)
        assert_counts(table, seen)
    held = {key for key, count in seen.items() if count >= threshold}
    assert set(backend.to_host(table.export()[0]).tolist()) == held
    if threshold > 1:
        assert table.sightings.size == len(seen) - len(held)


@pytest.mark.parametrize("unique_keys", [False, True])
@pytest.mark.parametrize("threshold", [0, 1000])
@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_given_counts_add_up(backend, threshold, n, unique_keys):
    table, seen = counting(backend, threshold), Counter()
    rng = np.random.default_rng(n)
    for _ in range(4):
        keys = rng.permutation(3 * n)[:n] if unique_keys else rng.integers(0, n // 2 + 1, n)
        counts = rng.choice([1, 2, 77, 2**32 - 1], n, p=[0.5, 0.3, 0.19, 0.01])
        table.lookup(keys, counts=counts, unique_keys=unique_keys)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            seen[key] += count
        assert_counts(table, seen)
        held = {key for key, count in seen.items() if count >= threshold}
        assert set(backend.to_host(table.export()[0]).tolist()) == held


def test_counts_are_as_large_as_64_bits(backend):
    table = counting(backend)
    table.lookup([1], counts=[2**32 - 1])
    table.find_or_insert([1, 1])
    table.assign_scores([2], [3])
    table.lookup([2])
    table.assign_scores([2], np.array([2**64 - 2], np.uint64))
    assert backend.to_host(table.counts([1, 2])).tolist() == [2**32 + 1, 2**63 - 1]
    table.lookup(np.full(5, 2))
    assert backend.to_host(table.scores([2])).tolist() == [2**64 - 1]


def test_reading_counts_nothing_and_a_write_counts_its_keys_once(backend):
    table, seen = counting(backend, 2), Counter()
    table.find_or_insert([1, 1, 2])
    seen.update([1, 1, 2])
    for _ in range(3):
        table.find([1, 2])
        table.lookup([1, 1, 2, 2], insert=False)
        table.lookup([1, 2, 3], insert=False, counts=[5, 5, 5])
        table.assign([1, 1, 2], np.zeros((3, 2), np.float32))
        table.accumulate([1, 1, 2], np.zeros((3, 2), np.float32))
    assert_counts(table, seen)
    table.insert_or_assign([1, 1, 4], np.ones((3, 2), np.float32))
    seen.update([1, 4])
    assert_counts(table, seen)


def test_no_count_falls_when_a_key_gets_its_row_by_a_write(backend):
    table = counting(backend, 10)
    table.lookup([1, 1, 1, 2, 2, 3])
    table.insert_or_assign([1], np.ones((1, 2), np.float32))
    assert_counts(table, {1: 4, 2: 2, 3: 1})
    table.accum_or_assign([2], np.ones((1, 2), np.float32), np.array([False]))
    assert_counts(table, {1: 4, 2: 3, 3: 1})
    table.find_or_insert([3], scores=np.array([2**64 - 1], np.uint64))
    table.insert_or_assign([5], np.ones((1, 2), np.float32), np.array([3], np.uint64))
    assert_counts(table, {1: 4, 2: 3, 3: 2**63 - 1, 5: 3})


def test_a_filtered_key_is_not_counted(backend):
    table = counting(backend, 3)
    table.lookup([1, 1, 1, 1], filter_ratio=0.0)
    assert_counts(table, {1: 0})
    table.lookup([1, 1])
    assert_counts(table, {1: 2})


def test_counts_come_back_with_a_table(backend):
    table, other = counting(backend, 4), counting(backend, 4)
    table.lookup([1] * 7 + [2] * 3)
    snapshot.restore(other, snapshot.take(table))
    assert_counts(other, {1: 7, 2: 3})
    other.lookup([2])
    assert_counts(other, {1: 7, 2: 4})
    assert other.size == 2


def test_an_evicting_table_keeps_what_came_most_often(backend):
    options = {"init_capacity": 16, "max_capacity": 16, "on_refused": "ignore"}
    table = counting(backend, **options)
    table.lookup(np.repeat(np.arange(16), 3))
    table.lookup(np.arange(100, 116))
    table.lookup(np.repeat(np.arange(200, 203), 2))
    held = backend.to_host(table.export()[0])
    assert_counts(table, {200: 2, 201: 2, 202: 2})
    # Each took the place of one of those that came once.
    assert len(held) == 16 and (held >= 200).sum() == 3


def test_tables_of_one_call_count_their_own_keys(backend):
    first, second = counting(backend, 2), counting(backend)
    plain = new_table(backend, 2, "hybrid", evict_strategy="kLfu")
    hbm = new_table(backend, 2)
    batches = [[5, 5, 6], [5, 7, 7, 7], [5, 5], [5, 5], [6, 5]]
    parts = []
    for table, keys in zip((first, second, plain, hbm, first), batches, strict=True):
        keys = backend.from_host(np.array(keys))
        splits = backend.from_host(np.array([0, 1, keys.size]))
        parts.append(lookup.Part(table, keys, splits, None, "sum"))
    for times in (1, 2):  # the keys are new, and then known
        outs, _ = lookup.forward(backend, SingleCommunicator(), parts)
        for keys, out in zip(batches, outs[:], strict=True):
            np.testing.assert_array_equal(backend.to_host(out)[:, 0], [keys[0], sum(keys[1:])])
        assert_counts(first, {5: 3 * times, 6: 2 * times})
        assert_counts(second, {5: times, 7: 3 * times})
        assert backend.to_host(plain.scores([5])).tolist() == [times]
    assert first.size == 2 and hbm.size == 1


def test_a_key_counts_once_for_each_rank_that_asks(backend):
    def work(comm):
        table = counting(backend, name="t")
        keys = backend.from_host(np.array([4, 4, 4, 2 + comm.rank]))
        part = lookup.Part(table, keys, backend.from_host(np.array([0, 4])), None, "sum")
        lookup.forward(backend, comm, [part])
        return backend.to_host(table.counts([4, 2, 3])).tolist()

    assert run_ranks(2, work) == [[2, 1, 0], [0, 0, 1]]


def test_a_batch_of_millions_is_counted(backend):
    n = sized(backend, 3_000_000, 3_000)
    table = counting(backend)
    table.lookup(np.zeros(n, np.int64), out=None)
    table.lookup(np.repeat(np.arange(3), [n // 2, 1, n // 2]))
    assert_counts(table, {0: n + n // 2, 1: 1, 2: n // 2})


# -------------------------------------------------------------------- when


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
@pytest.mark.parametrize(
    "options",
    [{}, {"var_type": "hybrid"}, {"var_type": "hybrid", "evict_strategy": "kLfu"}]
    + [{"var_type": "hybrid", "enter_threshold": 3}],
    ids=["hbm", "kLru", "kLfu", "sighting"],
)
def test_a_table_tells_when_keys_were_seen(backend, monkeypatch, options, n):
    now = [7e8]
    monkeypatch.setattr(clock, "time", SimpleNamespace(time=lambda: now[0]))
    table, seen = new_table(backend, 2, **options), {}
    rng = np.random.default_rng(n)
    for _ in range(8):
        now[0] += float(rng.integers(2, 1000))
        keys = np.array([*rng.integers(0, n + 1, n // 3 + 1).tolist(), *RESERVED[: n % 3]])
        table.lookup(keys)
        seen |= dict.fromkeys(keys.tolist(), now[0])
        now[0] += 100
        table.lookup(np.arange(n + 1), insert=False)
        table.find(np.arange(n + 1))
    some = list(seen)[::3]
    table.erase(some)
    seen |= dict.fromkeys([*some, 10**9], 0.0)
    got = table.times(np.array(list(seen)))
    assert got.dtype == np.float64
    assert backend.to_host(got).tolist() == list(seen.values())


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([1], r"integers of shape \(2,\).*int64 of shape \(1,\)"),
        ([1.0, 2.0], "integers of shape.*float64"),
        ([1, 0], "from 1 to 4294967295. Received: from 0 to 1"),
        ([1, 2**32], "Received: from 1 to 4294967296"),
    ],
    ids=str,
)
def test_wrong_counts_are_refused(backend, counts, text):
    table = counting(backend)
    with pytest.raises(ValueError, match=text):
        table.lookup([1, 2], counts=np.array(counts))
    assert table.size == 0 == table.num_lookups


@pytest.mark.parametrize("options", [{}, {"var_type": "hybrid", "evict_strategy": "kLfu"}], ids=str)
def test_a_table_that_does_not_count_says_so(backend, options):
    table = new_table(backend, **options)
    with pytest.raises(ValueError, match="'table' does not.*count_repeats=True"):
        table.counts([1])
    with pytest.raises(ValueError, match="does not.*count_repeats=True"):
        table.lookup([1], counts=[1])

"""What only the det table does, and its state machine against a dict.

What every table does is in test_tables.py.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sok_lite.backend.cpu import CpuBackend
from tests.conftest import QUICK
from tests.support.call_counts import on_launch
from tests.support.helpers import first_row, new_table, sized, with_segments
from tests.support.reference import DictTable, ScoredTable
from tests.support.simt import backend as simt
from tests.support.table_audit import audit, audit_segments, marks_of

I64 = np.iinfo(np.int64)


def assert_same(backend, table, oracle):
    keys, rows = table.export()
    expected_keys, expected_rows = oracle.export()
    np.testing.assert_array_equal(backend.to_host(keys), expected_keys)
    np.testing.assert_array_equal(backend.to_host(rows), expected_rows)
    assert table.size == len(expected_keys)


def test_the_index_follows_what_is_new_not_the_batch(backend):
    table = new_table(backend, dim=1)
    table.find_or_insert(np.arange(40))
    capacity = table.capacity
    table.find_or_insert(np.arange(100_000 if QUICK else 1_000_000) % 40)
    assert table.capacity == capacity


def test_erased_rows_are_used_again_and_the_index_stays_small(backend):
    table = new_table(backend, dim=1)
    rng = np.random.default_rng(0)
    for _ in range(20 if QUICK else sized(backend, 200, 50)):
        keys = rng.integers(I64.min, I64.max, 1000)
        table.find_or_insert(keys)
        assert table.erase(keys) == 1000
    assert table.size == 0
    assert table.capacity <= 4096
    assert backend.to_host(table.find_or_insert(np.arange(1000))).max() < 1000


def test_a_full_index_is_not_rebuilt_for_every_erased_key(backend):
    table = new_table(backend, dim=1)
    full = int(0.7 * 4096)
    table.find_or_insert(np.arange(full))
    before = table.statistics().rehashes_total
    num_erased = 100 if QUICK else 500
    for i in range(num_erased):
        assert table.erase([i]) == 1
        table.find_or_insert([full + i])
    assert table.statistics().rehashes_total <= before + 3
    assert table.capacity == 4096
    exported = backend.to_host(table.export()[0])
    np.testing.assert_array_equal(exported, np.arange(num_erased, full + num_erased))


def test_many_erased_slots_are_cleaned_at_once(backend):
    """A search for a missing key would else walk over all of them."""
    table = new_table(backend, dim=1)
    table.find_or_insert(np.arange(2800))
    capacity, rehashes = table.capacity, table.statistics().rehashes_total
    assert table.erase(np.arange(800)) == 800
    assert table.capacity == capacity
    assert table.statistics().rehashes_total == rehashes + 1
    assert marks_of(table.index).reclaimed == 0
    assert backend.to_host(table.export()[0]).tolist() == list(range(800, 2800))


@pytest.mark.parametrize("block_size", [0, 32])
def test_keys_that_come_many_times_at_once_get_one_row(backend, block_size, monkeypatch):
    """With room for all items the index tells them apart itself, in whatever order threads come."""
    backend = backend.for_table(block_size=block_size)
    table, oracle = new_table(backend, 3), DictTable(3, first_row(3))
    table.reserve(4000)
    gone = np.arange(1000, 1200)
    for each in (table, oracle):
        each.find_or_insert(gone)
        each.erase(gone[::2])
    launched, rng = [], np.random.default_rng(block_size)
    on_launch(backend, monkeypatch, launched.append)
    for n in (1, 31, 33, 500):
        among = np.array([I64.min, I64.max, *range(990 - n, 990 + n)])
        keys = rng.choice(among, 3 * n)
        rows = backend.to_host(table.find_or_insert(keys))
        oracle.find_or_insert(keys)
        assert_same(backend, table, oracle)
        row_of = dict(zip(keys.tolist(), rows.tolist(), strict=True))
        assert [row_of[key] for key in keys.tolist()] == rows.tolist()
        assert len(set(row_of.values())) == len(row_of)
        np.testing.assert_array_equal(backend.to_host(table.find(keys)), rows)
        gone = rng.choice(among, n)
        assert table.erase(gone) == oracle.erase(gone)
    assert launched.count("det_insert_items") == 4
    audit(table)


def test_erase_needs_no_memory(backend, monkeypatch):
    table, oracle = new_table(backend), DictTable(4, first_row(4))
    for each in (table, oracle):
        each.find_or_insert(np.arange(40))

    def no_memory(*shapes):
        raise MemoryError("none left")

    monkeypatch.setattr(table.index, "_new_segments", no_memory)
    for first in range(0, 400, 40):
        assert table.erase(np.arange(first, first + 40)) == oracle.erase(range(first, first + 40))
        for each in (table, oracle):
            each.find_or_insert(np.arange(first + 40, first + 80))
        assert_same(backend, table, oracle)


# Few distinct keys, so that they meet again, and both marks of the index among them.
KEYS = st.lists(
    st.integers(-20, 20) | st.sampled_from([I64.max, I64.min, I64.max - 1]), max_size=60
)


# A long range of keys, for an index of many segments of 256 slots.
MANY = 1500


def four_threads():
    """A backend whose every launch uses four threads, however few the items."""
    backend = CpuBackend(num_threads=4)
    backend.grain = 1
    backend.segment_slots = 256
    return backend


class TableAgainstDict(RuleBasedStateMachine):
    """Drives a table and the oracle together through any sequence of calls."""

    backend = four_threads()

    @initialize(capacity=st.sampled_from([0, 100]))
    def start(self, capacity):
        self.table = new_table(self.backend, dim=2, init_capacity=capacity)
        self.oracle = ScoredTable(2, first_row(2), "kLru")
        self.inserted = self.erased = 0

    def values(self, keys):
        rng = np.random.default_rng(len(keys))
        return rng.integers(-99, 99, (len(keys), 2)).astype(np.float32)

    def saw(self, keys):
        """Keys were looked up, all at once."""
        self.oracle.now += 1
        self.inserted += len(set(keys) - set(self.oracle.scores))
        self.oracle.scores.update((key, self.oracle.now) for key in keys)

    def wrote(self, keys):
        """Keys that have a row count as seen by the last lookup."""
        held = set(keys) & set(self.oracle.rows)
        self.oracle.scores.update(dict.fromkeys(held, self.oracle.now))

    def erase_both(self, erase, keys):
        keys = set(keys) & set(self.oracle.rows)
        assert erase() == len(keys)
        self.oracle.drop(keys)
        self.erased += len(keys)

    @rule(keys=KEYS)
    def lookup(self, keys):
        self.saw(keys)
        expected = self.oracle.find_or_insert(keys)
        values = self.table.lookup(np.array(keys, np.int64)).values
        np.testing.assert_array_equal(self.backend.to_host(values), expected)

    @rule(start=st.integers(-1000, 1000), n=st.integers(0, 300))
    def lookup_many(self, start, n):
        self.lookup(list(range(start, start + n)))

    @rule(part=st.integers(0, 2))
    def lookup_thousands(self, part):
        self.lookup(list(range(part * MANY, (part + 1) * MANY)))

    @rule(part=st.integers(0, 2))
    def erase_thousands(self, part):
        self.erase(list(range(part * MANY, (part + 1) * MANY)))

    @rule(keys=KEYS)
    def insert_or_assign(self, keys):
        self.saw(keys)
        for each in (self.table, self.oracle):
            each.insert_or_assign(np.array(keys, np.int64), self.values(keys))

    @rule(keys=KEYS, flip=st.booleans())
    def accum_or_assign(self, keys, flip):
        flags = self.oracle.contains(keys) ^ (flip & (np.arange(len(keys)) % 3 == 0))
        put = [key for key, flag in zip(keys, flags, strict=True) if not flag]
        self.saw([key for key in keys if key in self.oracle.rows or key in put])
        for each in (self.table, self.oracle):
            each.accum_or_assign(np.array(keys, np.int64), self.values(keys), flags)

    @rule(keys=KEYS)
    def assign(self, keys):
        for each in (self.table, self.oracle):
            each.assign(np.array(keys, np.int64), self.values(keys))
        self.wrote(keys)

    @rule(keys=KEYS)
    def accumulate(self, keys):
        for each in (self.table, self.oracle):
            each.accumulate(np.array(keys, np.int64), self.values(keys), -1.0)
        self.wrote(keys)

    @rule(keys=KEYS)
    def erase(self, keys):
        self.erase_both(lambda: self.table.erase(np.array(keys, np.int64)), keys)

    @rule(start=st.integers(-1000, 1000), n=st.integers(0, 300))
    def erase_many(self, start, n):
        self.erase(list(range(start, start + n)))

    @rule(divisor=st.integers(2, 5), older=st.integers(0, 6))
    def erase_if(self, divisor, older):
        limit = max(0, self.oracle.now - older)
        self.erase_both(
            lambda: self.table.erase_if(
                lambda held: (held.keys % divisor == 0) & (held.scores < limit)
            ),
            [key for key, n in self.oracle.scores.items() if key % divisor == 0 and n < limit],
        )

    @rule(num_lookups=st.integers(0, 12))
    def expire(self, num_lookups):
        limit = self.oracle.now - num_lookups
        self.erase_both(
            lambda: self.table.expire(num_lookups=num_lookups),
            [key for key, number in self.oracle.scores.items() if number <= limit],
        )

    @rule(keys=KEYS, score=st.integers(0, 20))
    def assign_scores(self, keys, score):
        score = min(score, self.oracle.now)
        self.table.assign_scores(np.array(keys, np.int64), np.full(len(keys), score))
        held = set(keys) & set(self.oracle.rows)
        self.oracle.scores.update(dict.fromkeys(held, score))

    @rule(keys=KEYS)
    def contains(self, keys):
        found = self.table.contains(np.array(keys, np.int64))
        np.testing.assert_array_equal(self.backend.to_host(found), self.oracle.contains(keys))

    @rule(keys=KEYS)
    def read_only(self, keys):
        values = self.table.lookup(np.array(keys, np.int64), insert=False, missing="zeros").values
        expected = [self.oracle.rows.get(key, np.zeros(2)) for key in keys]
        np.testing.assert_array_equal(
            self.backend.to_host(values), np.array(expected).reshape(-1, 2)
        )

    @rule()
    def clear(self):
        self.table.clear()
        self.oracle.drop(list(self.oracle.rows))
        self.inserted = self.erased = 0

    @rule(n=st.integers(0, 500))
    def reserve(self, n):
        self.table.reserve(n)

    @invariant()
    def same(self):
        if hasattr(self, "table"):
            assert_same(self.backend, self.table, self.oracle)
            assert self.table.load_factor <= 0.7
            audit_segments(self.table.index)
            held = self.table.export_chunk(0, self.table.num_slots)
            assert dict(zip(held.keys.tolist(), held.scores.tolist(), strict=True)) == (
                self.oracle.scores
            )
            assert len(set(held.rows.tolist())) == held.rows.size
            keys = np.array(list(self.oracle.scores), np.int64)
            assert self.table.scores(keys).tolist() == list(self.oracle.scores.values())
            counts = self.table.statistics()
            assert (counts.inserted_total, counts.erased_total) == (self.inserted, self.erased)
            assert (counts.evicted_total, counts.refused_total) == (0, 0)
            # Searches stay short, erased slots and all.
            assert counts.longest_probe <= max(1, self.table.capacity // 4)
            assert counts.mean_probe < 4


TestTableAgainstDict = TableAgainstDict.TestCase
TestTableAgainstDict.settings = settings(max_examples=30 if QUICK else 120, stateful_step_count=25)


class SimtTableAgainstDict(TableAgainstDict):
    backend = property(lambda self: with_segments(simt.simt_backend(), 256))


TestSimtTableAgainstDict = pytest.mark.skipif(
    simt.unavailable() is not None, reason=f"no simulated GPU: {simt.unavailable()}"
)(SimtTableAgainstDict.TestCase)
TestSimtTableAgainstDict.settings = settings(
    max_examples=5 if QUICK else 20, stateful_step_count=20
)

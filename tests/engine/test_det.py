"""What only the "hbm" table does. What every table does is in test_tables.py."""

import numpy as np
import pytest

from tests.conftest import QUICK
from tests.support.call_counts import on_launch
from tests.support.helpers import first_row, new_table
from tests.support.reference import DictTable
from tests.support.table_audit import audit, marks_of

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

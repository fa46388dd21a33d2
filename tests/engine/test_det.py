"""What only the "hbm" table does. What every table does is in test_tables.py."""

import numpy as np

from tests.support.helpers import new_table, sized
from tests.support.table_audit import marks_of


def test_the_index_follows_what_is_new_not_the_batch(backend):
    table = new_table(backend, dim=1)
    table.find_or_insert(np.arange(40))
    capacity = table.capacity
    table.find_or_insert(np.arange(sized(backend, 200_000, 5_000)) % 40)
    assert table.capacity == capacity


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

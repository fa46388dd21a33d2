"""Which new keys get a row: counting and drawing against plain Python."""

import numpy as np
import pytest

from sok_lite.engine.table.admission import draw_launch
from tests.support import reference
from tests.support.helpers import new_table, sized


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


def test_sightings_expire_also_at_the_end_of_the_clock(backend):
    table = counting(backend, 3)
    table.find_or_insert([1, 2])
    table.clock.now = 2**32 - 1
    table.find_or_insert([2, 3])
    assert table.expire(num_lookups=1) == 0
    assert backend.to_host(table.pending.entries().keys).tolist() == [2, 3]
    table.find_or_insert([1, 2])
    assert backend.to_host(table.contains([1, 2])).tolist() == [False, True]


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

"""What of a "hybrid" table the state machine of test_tables.py does not draw.

It looks at each eviction and refusal by tests/support/eviction_facts.py.
"""

import tracemalloc
import warnings

import numpy as np
import pytest

from sok_lite.backend.cpu import CpuBackend
from sok_lite.backend.launches import packed_launches
from sok_lite.engine.table import insert
from sok_lite.engine.table.hkv import RefusedError
from tests.support.eviction_facts import Watched
from tests.support.helpers import first_row, new_table

I64 = np.iinfo(np.int64)


def full_table(backend, strategy="kLru", slots=16, **options):
    """A table that may not grow; of one bucket, so that every key is a candidate."""
    sizes = {"init_capacity": slots, "max_capacity": slots, "max_bucket_size": 16}
    options = {"on_refused": "ignore", "evict_strategy": strategy, **sizes, **options}
    return new_table(backend, options.pop("dim", 2), "hybrid", **options)


def zeros(keys, dim=2):
    return np.zeros((len(keys), dim), np.float32)


# -------------------------------------------------------------------- eviction


def test_an_epoch_has_32_bits(backend):
    table = full_table(backend, "kEpochLfu")
    table.epoch = 2**32 - 1
    table.find_or_insert([1])
    assert backend.to_host(table.scores([1])).tolist() == [(2**32 - 1) * 2**32 + 1]
    for wrong in (-1, 2**32):
        with pytest.raises(ValueError, match=rf"\[0, 2\*\*32\). Received: {wrong}"):
            table.epoch = wrong


@pytest.mark.parametrize("strategy", ["kLfu", "kEpochLfu"])
def test_a_count_does_not_wrap(backend, strategy):
    watch = Watched(full_table(backend, strategy), first_row(2))
    most = 2**64 - 1 if strategy == "kLfu" else 2**32 - 1
    for given in (most - 7, 4, most - 1, 1):
        watch.find_or_insert([100], given=[given])
        watch.check()
    assert backend.to_host(watch.table.scores([100])).tolist() == [most]
    table = full_table(backend, "kEpochLfu")
    for given in (5, 2**64 - 3):  # not even by what one epoch has no room for
        table.find_or_insert([1], scores=[given])
    assert backend.to_host(table.scores([1])).tolist() == [2**32 - 1]


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


@pytest.mark.parametrize("load", [0.25, 0.5])
def test_it_doubles_at_the_load_factor(backend, load):
    """That nobody is evicted before it has its full size: eviction_facts.py."""
    sizes = {"init_capacity": 256, "max_capacity": 512}
    table = new_table(backend, 1, "hybrid", max_load_factor=load, **sizes)
    while table.capacity == 256 and table.size < 200:
        table.find_or_insert([table.size])
    assert table.size == 256 * load + 1


# -------------------------------------------------------------------- refusal


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


def test_to_return_what_was_evicted_needs_no_memory_beyond_that_of_the_change(monkeypatch):
    """The change is made by then: without memory for them, the evicted rows would be lost."""
    table = full_table(CpuBackend(), slots=1024, dim=64)
    table.find_or_insert(np.arange(1024))
    before = 0

    def measure():
        nonlocal before
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()

    def packed(*launches):
        return [*packed_launches(*launches), measure]

    monkeypatch.setattr(insert, "packed_launches", packed)
    tracemalloc.start()
    try:
        _, evicted = table.lookup_and_evict(np.arange(10_000, 10_900))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert evicted.values.nbytes > 200_000
    assert peak < before + 20_000

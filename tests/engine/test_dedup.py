"""The distinct keys of one table and of many, against plain Python."""

import numpy as np
import pytest

from sok_lite.engine import dedup as dedup_module
from sok_lite.engine import sort as sort_module
from sok_lite.engine.dedup import Missing, dedup, dedup_and_group, last_of_each, unique
from sok_lite.engine.rows.store import NO_ROW
from tests.support import reference
from tests.support.distinct_keys import TABLES, assert_distinct, distinct_of, some_keys
from tests.support.helpers import on

SIZES = [0, 1, 31, 33, 1000, 100_003]


def random_keys(n, distinct, seed=0):
    return np.random.default_rng(seed).integers(-distinct, distinct, n)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("distinct", [1, 7, 50_000])
def test_unique_keeps_the_order_of_first_occurrence(backend, n, distinct):
    keys = random_keys(n, distinct)
    distinct, inverse = unique(backend, backend.from_host(keys))
    expected_keys, expected_inverse = reference.unique(keys)
    np.testing.assert_array_equal(backend.to_host(distinct), expected_keys)
    np.testing.assert_array_equal(backend.to_host(inverse), expected_inverse)


@pytest.mark.parametrize("n", [0, 1, 33, 5000])
def test_last_of_each_is_the_last_item(backend, n):
    inverse = np.array(reference.unique(random_keys(n, 100))[1], np.int32)
    num_unique = int(inverse.max(initial=-1)) + 1
    last = last_of_each(backend, backend.from_host(inverse), num_unique)
    expected = [max(np.flatnonzero(inverse == u)) for u in range(num_unique)]
    np.testing.assert_array_equal(backend.to_host(last), expected)


# ---- many tables


@pytest.mark.parametrize("distinct", [1, 10, 10_000])
@pytest.mark.parametrize("sizes", TABLES.values(), ids=TABLES)
def test_equal_keys_of_different_tables_are_different(backend, sizes, distinct):
    keys, begin = some_keys(sizes, distinct)
    result = dedup(backend, backend.from_host(keys), begin)
    assert_distinct(backend, result, distinct_of(keys, begin), keys)


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("part", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("sizes", TABLES.values(), ids=TABLES)
def test_items_that_have_a_row_are_left_out(backend, sizes, part, repeat):
    """Keys that do not repeat are numbered as they come."""
    rng = np.random.default_rng(1)
    keys, begin = some_keys(sizes, 20)
    if not repeat:
        keys = np.concatenate([rng.permutation(n) - n // 2 for n in sizes]).astype(np.int64)
    takes_part = rng.random(keys.size) < part
    rows = np.where(takes_part, np.uint32(NO_ROW), np.uint32(7))
    counts = [int(some.sum()) for some in np.split(takes_part, begin[1:-1])]
    missing = Missing(*on(backend, rows), counts)
    result = dedup(backend, *on(backend, keys), begin, missing, repeat=repeat)
    assert_distinct(backend, result, distinct_of(keys, begin, takes_part), keys)


@pytest.mark.parametrize("n", [127, 128, 129, 1023, 1024, 1025, 7000])
@pytest.mark.parametrize("most", [1, 3, 4096])
def test_first_occurrences_are_numbered_from_block_to_block(backend, monkeypatch, n, most):
    monkeypatch.setattr(dedup_module, "_MOST_BLOCKS", most)
    monkeypatch.setattr(sort_module, "_TILES", most)  # of a GPU
    monkeypatch.setattr(sort_module, "_LEAST_TILE_ITEMS", 128)
    keys, begin = some_keys([n // 3, n - n // 3], 2000)
    assert_distinct(
        backend, dedup(backend, backend.from_host(keys), begin), distinct_of(keys, begin), keys
    )


@pytest.mark.parametrize("sizes", TABLES.values(), ids=TABLES)
def test_keys_take_their_rows_along_and_items_are_grouped_by_them(backend, monkeypatch, sizes):
    monkeypatch.setattr(sort_module, "_LEAST_TILE_ITEMS", 64)
    keys, begin = some_keys(sizes, 20)
    rows = np.arange(keys.size, dtype=np.uint32)[::-1].copy()
    result, groups = dedup_and_group(backend, *on(backend, keys), begin, *on(backend, rows))
    inverse, first, starts = distinct_of(keys, begin)
    assert_distinct(backend, result, (inverse, first, starts), keys)
    np.testing.assert_array_equal(backend.to_host(result.rows), rows[first])
    expected = np.argsort(inverse, kind="stable")
    np.testing.assert_array_equal(backend.to_host(groups.order), expected)
    ends = np.cumsum(np.bincount(inverse, minlength=len(first)))
    np.testing.assert_array_equal(backend.to_host(groups.offsets), [0, *ends])
    assert groups.labels is result.inverse
    assert (groups.begin.tolist(), groups.starts.tolist()) == (begin.tolist(), starts)


def test_a_batch_that_item_numbers_cannot_address_is_refused(backend):
    keys = np.broadcast_to(np.int64(0), (2**30 + 1,))
    with pytest.raises(ValueError, match=r"at most 2\*\*30 keys. Received: 1073741825. Split it."):
        dedup(backend, keys, (0, keys.size))

"""The index of keys that do not change, against a dict."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from sok_lite.engine import hashing
from sok_lite.engine.files.key_index import make_index, make_index_of_rows
from sok_lite.engine.hashing import hash_keys
from tests.support import chosen_keys

RANDOM = np.random.default_rng(3)


def check(keys, more):
    """Every key has its first place, and no other key has one."""
    index = make_index(keys)
    first = {}
    for place, key in enumerate(keys.tolist()):
        first.setdefault(key, place)
    asked = RANDOM.permutation(np.concatenate([keys, more]))
    found, places = index.find(asked, lambda at: keys[at])
    expected = {i: first[key] for i, key in enumerate(asked.tolist()) if key in first}
    assert dict(zip(found.tolist(), places.tolist(), strict=True)) == expected
    assert index.starts.nbytes + index.places.nbytes <= 8 * keys.size + 16


def integers(n):
    return RANDOM.integers(-(2**63), 2**63 - 1, n)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 31, 32, 33, 1000, 4097])
def test_keys_of_every_number(n):
    check(integers(n), np.array([0, -1, 2**63 - 1, -(2**63)]))
    check(np.arange(n), np.arange(-n, 2 * n))
    check(integers(n), np.empty(0, np.int64))


def test_of_a_key_that_is_there_twice_the_first_counts():
    check(np.array([7, 3, 7, 7, 3, 9, 7]), np.array([4]))


KEYS = st.one_of(st.integers(-5, 40), st.integers(-(2**63), 2**63 - 1))
FILES = st.lists(st.lists(KEYS, max_size=30, unique=True), min_size=1, max_size=4)


def array(keys):
    return np.array(keys, np.int64)


@given(st.lists(st.tuples(FILES, st.sets(st.integers(0, 119))), min_size=1, max_size=3))
def test_the_newest_rows_of_keys_are_found_and_no_others(drawn):
    """Parts of increments, from each of which some keys were removed."""
    parts, first, asked, place = [], {}, set(), 0
    for files, removed in drawn:
        there = list(dict.fromkeys(key for file in files for key in file))
        asked.update(there)
        keys = [key for i, key in enumerate(there) if i not in removed]
        parts.append((array(keys), [array(file) for file in files]))
        newest = {}
        for key in (key for file in files for key in file):
            newest.setdefault(key, place)
            place += 1
        for key in keys:
            first.setdefault(key, newest[key])
    rows = np.concatenate([piece for _, pieces in parts for piece in pieces])
    index = make_index_of_rows(parts, lambda at: rows[at])
    asked = array(sorted(asked) + [99, 77])
    found, places = index.find(asked, lambda at: rows[at])
    expected = {key: first[key] for key in asked.tolist() if key in first}
    assert dict(zip(asked[found].tolist(), places.tolist(), strict=True)) == expected


@pytest.mark.parametrize("removed", [0, 3])
@pytest.mark.parametrize("n", [40, 4000])
def test_a_part_with_a_key_that_has_no_row_is_told(n, removed):
    """As many rows as keys, and one of another key, are no index of these."""
    keys = integers(2 * n)
    rows, more = keys[:n], keys[n:]
    whole = (rows[removed:], [rows[:3], rows])
    for lacking in (np.append(rows[removed:-1], more[0]), np.append(rows[removed:], more[0])):
        parts = [whole, (lacking, [more[1:3], rows])]
        every = np.concatenate([piece for _, pieces in parts for piece in pieces])
        assert make_index_of_rows(parts, every.__getitem__) == 1


def test_keys_of_one_bucket():
    keys = integers(400_000)
    keys = keys[hash_keys(keys, hashing.new_seed()) < np.uint64(2**64 // 1024)]
    assert keys.size > 300
    check(keys, integers(100))


def test_keys_that_are_chosen_against_another_seed_lie_as_any_others():
    keys = chosen_keys.keys_of(np.arange(1000, dtype=np.uint64))  # one bucket, by their first bits
    hashing.fix_seed(12345)
    try:
        index = make_index(keys)
    finally:
        hashing.fix_seed(None)
    assert np.diff(index.starts.astype(np.int64)).max() < 12
    found, places = index.find(keys, lambda at: keys[at])
    assert found.tolist() == places.tolist() == list(range(1000))

"""The index of keys that do not change, against a dict."""

import numpy as np
import pytest

from sok_lite.engine import hashing
from sok_lite.engine.files.key_index import make_index
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

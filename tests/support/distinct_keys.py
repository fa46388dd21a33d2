"""Keys of several tables, most of which repeat, and the oracle of finding the distinct ones."""

import numpy as np


def some_keys(sizes, distinct, seed=0):
    """Keys of tables of these sizes, half of each table's of one key, and where each begins."""
    rng = np.random.default_rng(seed)
    begin = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    keys = rng.integers(0, distinct, begin[-1])
    keys[rng.random(keys.size) < 0.5] = distinct // 2
    return keys, begin


def distinct_of(keys, begin, takes_part=None):
    """The oracle of dedup: inverse, first, starts."""
    inverse, first, starts = np.full(len(keys), -1), [], [0]
    for table in range(len(begin) - 1):
        number = {}
        for item in range(begin[table], begin[table + 1]):
            if takes_part is None or takes_part[item]:
                if keys[item] not in number:
                    number[keys[item]] = len(first)
                    first.append(item)
                inverse[item] = number[keys[item]]
        starts.append(len(first))
    return inverse, first, starts


def assert_distinct(backend, result, expected, keys):
    inverse, first, starts = expected
    np.testing.assert_array_equal(backend.to_host(result.keys), np.asarray(keys, np.int64)[first])
    assert result.inverse.dtype == result.first.dtype == np.int32
    np.testing.assert_array_equal(backend.to_host(result.inverse), inverse)
    np.testing.assert_array_equal(backend.to_host(result.first), first)
    assert isinstance(result.starts, np.ndarray) and result.starts.tolist() == starts


TABLES = {
    "one": [33],
    "none has items": [0, 0],
    "empty ones": [0, 31, 0, 0, 1, 32, 0],
    "one item each": [1] * 40,
    "large beside small": [3, 1500, 2],
    "forty": [7 * t % 65 for t in range(40)],
}

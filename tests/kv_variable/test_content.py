"""What is known of keys, cut and joined on the host."""

import numpy as np

from sok_lite.engine.table.snapshot import State
from sok_lite.kv_variable.content import Content, changed, joined


def content(keys, states=(), sighted=()):
    keys, sighted = np.array(keys, np.int64), np.array(sighted, np.int64)
    return Content(
        keys,
        np.stack([keys, keys * 2], 1).astype(np.float32),
        [
            State(name, dim, initial, np.full((keys.size, dim), value, np.float32), group)
            for name, dim, initial, value, group in states
        ],
        keys + 100,
        keys + 0.5,
        sighted,
        sighted + 7,
        sighted + 0.25,
    )


def test_joined_keys_are_ascending_with_all_that_belongs_to_them():
    whole = joined([content([-3, 9], sighted=[8]), content([]), content([2], sighted=[-1, 4])])
    np.testing.assert_array_equal(whole.keys, [-3, 2, 9])
    np.testing.assert_array_equal(whole.values, [[-3, -6], [2, 4], [9, 18]])
    np.testing.assert_array_equal(whole.counts, [97, 102, 109])
    np.testing.assert_array_equal(whole.times, [-2.5, 2.5, 9.5])
    np.testing.assert_array_equal(whole.sighted_keys, [-1, 4, 8])
    np.testing.assert_array_equal(whole.sightings, [6, 11, 15])
    np.testing.assert_array_equal(whole.sighted_times, [-0.75, 4.25, 8.25])


def test_a_state_that_one_part_lacks_is_what_it_begins_with():
    first = content([1, 4], [("m", 2, 0.0, 5.0, 1)])
    second = content([2], [("m", 2, 0.0, 6.0, 1), ("v", 1, 0.5, 7.0, 1), ("m", 2, 0.0, 8.0, 2)])
    states = joined([first, second]).states
    assert [(s.name, s.dim, s.initial, s.group) for s in states] == [
        ("m", 2, 0.0, 1),
        ("v", 1, 0.5, 1),
        ("m", 2, 0.0, 2),
    ]
    expected = [[[5, 5], [6, 6], [5, 5]], [[0.5], [7], [0.5]], [[0, 0], [8, 8], [0, 0]]]
    for state, rows in zip(states, expected, strict=True):
        np.testing.assert_array_equal(state.rows, rows)


def test_a_change_replaces_keys_removes_keys_and_knows_all_sightings():
    before = content([1, 2, 3, 4], sighted=[10, 11])
    delta = content([3, 7], sighted=[11])
    after = changed(before, delta._replace(counts=np.array([1, 2])), np.array([2, 99]))
    np.testing.assert_array_equal(after.keys, [1, 3, 4, 7])
    np.testing.assert_array_equal(after.counts, [101, 1, 104, 2])
    np.testing.assert_array_equal(after.sighted_keys, [11])

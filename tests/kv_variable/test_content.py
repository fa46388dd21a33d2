"""What is known of the keys of a KvVariable, after a change."""

import numpy as np

from sok_lite.engine.table.content import Content
from sok_lite.kv_variable.content import changed


def content(keys, sighted=()):
    keys, sighted = np.array(keys, np.int64), np.array(sighted, np.int64)
    columns, of_sighted = ({"counts": each + 100, "times": each + 0.5} for each in (keys, sighted))
    values = np.stack([keys, keys * 2], 1).astype(np.float32)
    return Content(keys, values, [], columns, sighted, of_sighted, {})


def test_a_change_replaces_keys_removes_keys_and_knows_all_sightings():
    before = content([1, 2, 3, 4], sighted=[10, 11])
    delta = content([3, 7], sighted=[11])
    delta.columns["counts"][:] = [1, 2]
    after = changed(before, delta, np.array([2, 99]), "a table")
    np.testing.assert_array_equal(after.keys, [1, 3, 4, 7])
    np.testing.assert_array_equal(after.columns["counts"], [101, 1, 104, 2])
    np.testing.assert_array_equal(after.sighted_keys, [11])

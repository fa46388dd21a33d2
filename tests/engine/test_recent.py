"""Row numbers of a gradient serve the update after it, and never another one."""

import numpy as np
import pytest

from sok_lite.comm import SingleCommunicator
from sok_lite.engine import lookup
from sok_lite.engine.optimizers import SGD
from sok_lite.engine.recent import recall, remember
from sok_lite.engine.update import Update, apply_updates
from tests.engine.helpers import new_table


def looked_up(backend, keys):
    table = new_table(backend, dim=2)
    keys = backend.from_host(np.array(keys))
    splits = backend.from_host(np.array([0, len(keys)]))
    part = lookup.Part(table, keys, splits, None, "sum")
    _, trail = lookup.forward(backend, SingleCommunicator(), [part])
    grads = backend.xp.ones((1, 2), np.float32)
    lookup.backward(backend, [(table, None, "sum")], [grads], trail)
    return table


def test_the_distinct_keys_of_a_lookup_are_recalled(backend):
    table = looked_up(backend, [5, 6, 5])
    keys = backend.from_host(np.array([5, 6]))
    rows = backend.to_host(recall(table, keys))
    np.testing.assert_array_equal(rows, backend.to_host(table.find(keys)))


@pytest.mark.parametrize("keys", [[6, 5], [5], [5, 7], [5, 6, 5], []])
def test_other_keys_are_not(backend, keys):
    table = looked_up(backend, [5, 6])
    assert recall(table, backend.from_host(np.array(keys, np.int64))) is None


def test_rows_of_an_older_table_are_not(backend):
    table = looked_up(backend, [5, 6])
    table.erase(backend.from_host(np.array([6])))
    assert recall(table, backend.from_host(np.array([5, 6]))) is None
    assert recall(new_table(backend), backend.from_host(np.array([5]))) is None


@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
def test_a_key_that_came_after_the_lookup_gets_its_gradient(backend, var_type):
    table = new_table(backend, 2, var_type)
    keys = backend.from_host(np.array([7]))
    splits = backend.from_host(np.array([0, 1]))
    part = lookup.Part(table, keys, splits, None, "sum", insert=False)
    _, trail = lookup.forward(backend, SingleCommunicator(), [part])
    grads = backend.xp.ones((1, 2), np.float32)
    (gradient,) = lookup.backward(backend, [(table, None, "sum")], [grads], trail)
    table.find_or_insert(keys)
    apply_updates([Update(table, SGD(), gradient.keys, gradient.row_grads)], 0.5, 1)
    np.testing.assert_array_equal(backend.to_host(table.export()[1]), [[6.5, 6.5]])


def test_a_table_is_not_kept_alive(backend):
    from sok_lite.engine import recent

    table = looked_up(backend, [5])
    before = len(recent._last)
    del table
    assert len(recent._last) == before - 1


def test_an_update_gives_the_same_rows_with_and_without(backend):
    grads = backend.from_host(np.array([[1, 2], [3, 4]], np.float32))
    keys = backend.from_host(np.array([5, 6]))
    known, unknown = looked_up(backend, [5, 6]), looked_up(backend, [5, 6])
    remember(unknown, keys[:1], unknown.find(keys[:1]), unknown.generation)
    for table in (known, unknown):
        apply_updates([Update(table, SGD(), keys, grads)], 0.5, 1)
    for a, b in zip(known.export(), unknown.export(), strict=True):
        np.testing.assert_array_equal(backend.to_host(a), backend.to_host(b))
    np.testing.assert_array_equal(backend.to_host(known.export()[1]), [[4.5, 4.0], [4.5, 4.0]])

"""One optimizer step over several tables, against a dict of rows."""

import numpy as np
import pytest

from sok_lite.engine.apply import NonFiniteGradientError, Update, apply_updates
from sok_lite.engine.update_rules import SGD, Adagrad, Momentum
from tests.engine.helpers import new_table


def rows_of(table):
    keys, values = table.export()
    host = table.backend.to_host
    return dict(zip(host(keys).tolist(), host(values), strict=True))


def update(table, rule, keys, grads):
    backend = table.backend
    return Update(
        table,
        rule,
        backend.from_host(np.array(keys)),
        backend.from_host(np.array(grads, np.float32).reshape(-1, table.dim)),
    )


@pytest.mark.parametrize("n", [0, 1, 33, 1000])
def test_repeated_keys_are_summed(backend, n):
    table = new_table(backend, dim=4)
    rng = np.random.default_rng(n)
    keys = rng.integers(-10, 10, n)
    grads = rng.normal(size=(n, 4)).astype(np.float32)
    table.find_or_insert(backend.from_host(keys))
    expected = rows_of(table)
    for key, grad in zip(keys.tolist(), grads, strict=True):
        expected[key] = expected[key] - 0.5 * grad.astype(np.float64)
    apply_updates([update(table, SGD(), keys, grads)], 0.5, 1)
    for key, row in rows_of(table).items():
        np.testing.assert_allclose(row, expected[key], rtol=1e-5, atol=1e-5)


def test_a_table_that_comes_twice_is_updated_once(backend):
    once, twice = new_table(backend, dim=2), new_table(backend, dim=2)
    for table in (once, twice):
        table.find_or_insert(backend.from_host(np.array([1, 2])))
    rule = Momentum(momentum=0.5)
    apply_updates([update(once, rule, [1, 2, 1], [[1, 1], [2, 2], [3, 3]])], 0.1, 1)
    parts = [update(twice, rule, [1], [[1, 1]]), update(twice, rule, [2, 1], [[2, 2], [3, 3]])]
    apply_updates(parts, 0.1, 1)
    np.testing.assert_array_equal(rows_of(twice)[1], rows_of(once)[1])
    np.testing.assert_array_equal(rows_of(twice)[2], rows_of(once)[2])


def test_keys_without_a_row_are_skipped(backend):
    table = new_table(backend, dim=2)
    table.find_or_insert(backend.from_host(np.array([1])))
    apply_updates([update(table, SGD(), [1, 5], [[1, 1], [1, 1]])], 1.0, 1)
    assert list(rows_of(table)) == [1]


def test_nonfinite_gradients_are_counted(backend):
    table = new_table(backend, dim=2)
    table.find_or_insert(backend.from_host(np.array([1, 2, 3])))
    grads = [[np.nan, 0], [1, 1], [np.inf, np.nan]]
    assert apply_updates([update(table, SGD(), [1, 2, 3], grads)], 1.0, 1) == 2
    assert np.isnan(rows_of(table)[1][0])


def test_nonfinite_gradients_can_be_an_error_before_anything_changes(backend):
    tables = [new_table(backend, dim=2), new_table(backend, dim=2)]
    for table in tables:
        table.find_or_insert(backend.from_host(np.array([1, 2])))
    before = [rows_of(table) for table in tables]
    updates = [
        update(tables[0], Momentum(), [1], [[1, 1]]),
        update(tables[1], Momentum(), [2], [[1, np.inf]]),
    ]
    with pytest.raises(NonFiniteGradientError, match="1 of 1 gradient rows") as caught:
        apply_updates(updates, 1.0, 1, on_nonfinite="error")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, FloatingPointError)
    for table, rows in zip(tables, before, strict=True):
        for key, row in rows_of(table).items():
            np.testing.assert_array_equal(row, rows[key])


def test_states_of_another_optimizer_raise_before_anything_changes(backend):
    tables = [new_table(backend, dim=2), new_table(backend, dim=2)]
    for table in tables:
        table.find_or_insert(backend.from_host(np.array([1])))
    tables[1].store.ensure_state("accumulator", 0.5)
    before = rows_of(tables[0])[1]
    updates = [update(table, Adagrad(), [1], [[1, 1]]) for table in tables]
    with pytest.raises(ValueError, match="one optimizer per table"):
        apply_updates(updates, 1.0, 1)
    np.testing.assert_array_equal(rows_of(tables[0])[1], before)


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (4,)])
def test_gradients_of_a_wrong_shape_are_refused(backend, shape):
    table = new_table(backend, dim=2)
    keys = backend.from_host(np.array([1, 2]))
    grads = backend.from_host(np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match="one row of dimension 2"):
        apply_updates([Update(table, SGD(), keys, grads)], 1.0, 1)


def test_gradients_of_a_wrong_dtype_raise_before_anything_changes(backend):
    tables = [new_table(backend, dim=2), new_table(backend, dim=2)]
    for table in tables:
        table.find_or_insert(backend.from_host(np.array([1])))
    good = update(tables[0], SGD(), [1], [[1, 1]])
    bad = update(tables[1], SGD(), [1], [[1, 1]])
    with pytest.raises(TypeError, match="must be float32. Received: float64"):
        apply_updates([good, bad._replace(grads=bad.grads.astype(np.float64))], 1.0, 1)
    np.testing.assert_array_equal(rows_of(tables[0])[1], [1, 1])


def test_two_rules_for_one_table_are_refused(backend):
    table = new_table(backend, dim=2)
    table.find_or_insert(backend.from_host(np.array([1])))
    updates = [update(table, rule, [1], [[1, 1]]) for rule in (SGD(), Momentum())]
    with pytest.raises(ValueError, match="two update rules in one step"):
        apply_updates(updates, 1.0, 1)
    np.testing.assert_array_equal(rows_of(table)[1], [1, 1])


def test_an_unknown_answer_to_nonfinite_gradients_is_refused(backend):
    with pytest.raises(ValueError, match="'allow' or 'error'. Received: 'raise'"):
        apply_updates([], 1.0, 1, on_nonfinite="raise")

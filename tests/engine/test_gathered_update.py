"""Steps by a function of gathered rows: against the same in NumPy, and what a failure leaves."""

from functools import partial

import numpy as np
import pytest

from sok_lite.engine.dtypes import bfloat16_to_float32
from sok_lite.engine.gathered_update import GatheredStep, Stepped
from sok_lite.engine.table.hkv import RefusedError
from sok_lite.engine.update import NonFiniteGradientError, StepOptions
from tests.engine.test_update_new_keys import KINDS, grads_for, rows_by_key, rows_of
from tests.support.helpers import new_table, update_of
from tests.support.steps import apply_gathered


def kinds(table):
    return {"sum": (table.dim, 0.5), "count": (1, 0.0)}


def momentum(parts):
    """A state as wide as a row, and one number for each row."""
    stepped = []
    for _, _, rows, grads, states in parts:
        total, count = states["sum"] + grads, states["count"] + 1
        stepped.append(Stepped(rows - total / count, {"sum": total, "count": count}))
    return stepped, None


class Twin:
    """The same in NumPy float64, key by key."""

    def __init__(self, dim):
        self.rows, self.sum, self.count, self.dim = {}, {}, {}, dim

    def step(self, keys, grads):
        by_key = {}
        for key, grad in zip(keys.tolist(), grads.astype(np.float64), strict=True):
            by_key[key] = by_key.get(key, 0) + grad
        for key, grad in by_key.items():
            self.count[key] = self.count.get(key, 0) + 1
            self.sum[key] = self.sum.get(key, np.full(self.dim, 0.5)) + grad
            first = np.full(self.dim, float(key % 1000))
            self.rows[key] = self.rows.get(key, first) - self.sum[key] / self.count[key]


def step(tables, function=momentum, optimizer=None, **options):
    updates = [update_of(t, None, keys, grads, optimizer=optimizer) for t, keys, grads in tables]
    apply_gathered(updates, kinds, function, **options)


def compare(table, twin):
    for name, expected in {"value": twin.rows, "sum": twin.sum, "count": twin.count}.items():
        found = rows_of(table) if name == "value" else rows_by_key(table, name)
        assert found.keys() == expected.keys()
        for key, row in expected.items():
            np.testing.assert_allclose(found[key], row, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_states_follow_the_function(backend, kind):
    var_type, options = KINDS[kind]
    tables = [new_table(backend, dim, var_type, **options) for dim in (1, 3, 33)]
    twins = [Twin(table.dim) for table in tables]
    rng = np.random.default_rng(0)
    for number in range(4):
        updates = []
        for table, twin in zip(tables, twins, strict=True):
            keys = rng.integers(-50, 50, 33)  # which repeat, and of which some have no row yet
            grads = grads_for(keys, table.dim, number)
            updates.append((table, keys, grads))
            twin.step(keys, grads)
        step(updates)
    for table, twin in zip(tables, twins, strict=True):
        compare(table, twin)


@pytest.mark.parametrize("dtype, tolerance", [("float16", 0.05), ("bfloat16", 0.5)])
def test_rows_of_16_bits_come_and_go_as_float32(backend, dtype, tolerance):
    table, twin = new_table(backend, 5, dtype=dtype), Twin(5)
    keys = np.arange(40)
    for number in range(3):
        grads = grads_for(keys, 5, number)
        step([(table, keys, grads)])
        twin.step(keys, grads)
    assert table.export("sum")[1].dtype == np.float32
    keys, rows = (table.backend.to_host(part) for part in table.export())
    rows = bfloat16_to_float32(np, rows) if dtype == "bfloat16" else rows
    for key, row in zip(keys.tolist(), rows, strict=True):
        np.testing.assert_allclose(row, twin.rows[key], atol=tolerance)


def test_a_table_that_comes_twice_is_updated_once(backend):
    table, twin = new_table(backend, 3), Twin(3)
    one, other = np.array([1, 2, 3]), np.array([3, 4])
    grads = grads_for([1] * 5, 3)
    step([(table, one, grads[:3]), (table, other, grads[3:])])
    twin.step(np.concatenate([one, other]), grads)
    compare(table, twin)


def test_a_table_may_have_no_row_in_a_step(backend):
    tables, shapes = [new_table(backend, 3), new_table(backend, 4)], []

    def function(parts):
        shapes.append([(part.rows.shape, part.states["count"].shape) for part in parts])
        return momentum(parts)

    nothing = np.empty(0, np.int64), np.empty((0, 3))
    step([(tables[0], *nothing), (tables[1], np.array([7]), np.ones((1, 4)))], function)
    assert shapes == [[((0, 3), (0, 1)), ((1, 4), (1, 1))]]
    assert [table.size for table in tables] == [0, 1]


def test_keys_that_a_table_turns_away_are_counted(backend):
    options = {"max_capacity": 4096, "enter_threshold": 2}
    table = new_table(backend, 3, "hybrid", **options)
    for _ in range(2):
        table.lookup(np.array([1, 2]))
    keys, seen = np.array([1, 7, 2, 8]), []

    def function(parts):
        seen.extend(len(part) for part in parts[0][2:4])
        return momentum(parts)

    step([(table, keys, np.ones((4, 3)))], function)
    assert seen == [2, 2]
    assert sorted(rows_of(table)) == [1, 2]
    np.testing.assert_allclose(rows_of(table)[1], 1 - 1.5)
    assert table.statistics().not_updated_total == 2


def test_what_the_function_raises_leaves_rows_and_states(backend):
    table = new_table(backend, 3)
    step([(table, np.array([1, 2]), np.ones((2, 3)))])
    rows, sums = rows_of(table), rows_by_key(table, "sum")

    def fail(parts):
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        step([(table, np.array([1, 2]), np.ones((2, 3)))], fail)
    for before, after in [(rows, rows_of(table)), (sums, rows_by_key(table, "sum"))]:
        assert before.keys() == after.keys()
        assert all((before[key] == after[key]).all() for key in before)


def test_a_prepared_step_has_called_the_function_and_changed_nothing(backend):
    table = new_table(backend, 3)
    table.lookup(np.array([1, 2]))
    rows, calls, done = rows_of(table), [], []

    def counted(parts):
        calls.append([len(part.rows) for part in parts])
        stepped, _ = momentum(parts)
        return stepped, partial(done.append, "taken")

    updates = [update_of(table, None, np.array([2, 1]), np.ones((2, 3)))]
    prepared = GatheredStep(updates, kinds, counted, StepOptions(0.0, 1))
    prepared.prepare()
    assert calls == [[2]] and done == []
    assert all((rows[key] == after).all() for key, after in rows_of(table).items())
    prepared.commit()
    assert calls == [[2]] and done == ["taken"]
    assert all((rows[key] - 1.5 == after).all() for key, after in rows_of(table).items())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gradients_that_are_not_finite_are_counted_or_refused(backend, value):
    table = new_table(backend, 3)
    keys, grads = np.array([1, 2, 3]), np.ones((3, 3), np.float32)
    grads[1, 2] = value
    with pytest.raises(NonFiniteGradientError, match="1 of 3"):
        step([(table, keys, grads)], on_nonfinite="error")
    assert table.size == 0
    count = backend.xp.zeros(1, np.int64)
    step([(table, keys, grads)], num_nonfinite=count)
    assert int(count[0]) == 1


def test_states_of_two_optimizers_and_of_a_rule_keep_apart(backend):
    class Optimizer:
        pass

    one, other = Optimizer(), Optimizer()
    table, twin = new_table(backend, 3), Twin(3)
    keys = np.array([5, 6])
    step([(table, keys, np.ones((2, 3)))], optimizer=one)
    twin.step(keys, np.ones((2, 3)))
    states = dict(twin.sum)
    step([(table, keys, np.zeros((2, 3)))], lambda parts: momentum(parts), optimizer=other)
    groups = table.store.state_groups
    assert len([owner for owner in groups if owner is not None]) == 2
    own = next(g for owner, g in groups.items() if owner is not None and owner.optimizer is one)
    for key, row in rows_by_key(table, own["sum"].name).items():
        np.testing.assert_allclose(row, states[key])


def test_only_two_words_are_taken_for_on_nonfinite(backend):
    table = new_table(backend, 3)
    with pytest.raises(ValueError, match="'allow' or 'error'"):
        step([(table, np.array([1]), np.ones((1, 3)))], on_nonfinite="maybe")


@pytest.mark.parametrize("is_prepared", [False, True])
def test_keys_without_room_are_reported_when_the_step_is_taken(backend, is_prepared):
    options = {"init_capacity": 16, "max_capacity": 16, "max_bucket_size": 4}
    table = new_table(backend, 3, "hybrid", on_refused="error", **options)
    keys = np.arange(200)
    updates = [update_of(table, None, keys, np.ones((200, 3)))]
    step = GatheredStep(updates, kinds, momentum, StepOptions(0.0, 1))
    if is_prepared:
        step.prepare()
    with pytest.raises(RefusedError, match="had no room for"):
        step.commit()
    assert 0 < table.size <= 18
    found = rows_of(table)
    assert all((row == key % 1000 - 1.5).all() for key, row in found.items())

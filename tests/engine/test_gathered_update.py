"""Steps by a function of gathered rows: against the same in NumPy, and what a failure leaves."""

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


def compare(table, twin, tolerance=1e-4):
    for name, expected in {"value": twin.rows, "sum": twin.sum, "count": twin.count}.items():
        keys, found = (table.backend.to_host(part) for part in table.export(name))
        if found.dtype == np.uint16:
            found = bfloat16_to_float32(np, found)
        else:
            assert found.dtype == np.float32 or name == "value"
        assert keys.tolist() == sorted(expected)
        for key, row in zip(keys.tolist(), found, strict=True):
            within = tolerance if name == "value" else 1e-4
            np.testing.assert_allclose(row, expected[key], rtol=1e-5, atol=within)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_states_follow_the_function(backend, kind):
    var_type, options = KINDS[kind]
    tolerances = {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.8}
    tables = [
        new_table(backend, dim, var_type, dtype=dtype, **options)
        for dim, dtype in zip(
            (1, 3, 33, 5, 6), [*["float32"] * 3, "float16", "bfloat16"], strict=True
        )
    ]
    twins = [Twin(table.dim) for table in tables]
    rng = np.random.default_rng(0)
    for number in range(4):
        updates = []
        for i, (table, twin) in enumerate(zip(tables, twins, strict=True)):
            # They repeat, some have no row yet, and in a step a table may have none at all.
            keys = rng.integers(-50, 50, 0 if number == i else 33) % 60
            grads = grads_for(keys, table.dim, number)
            twin.step(keys, grads)
            for half in np.array_split(np.arange(len(keys)), 2):  # a table may come twice
                updates.append((table, keys[half], grads[half]))
        step(updates)
    for table, twin in zip(tables, twins, strict=True):
        compare(table, twin, tolerances[table.row_dtype.name])


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
    table, twin, grads = new_table(backend, 3), Twin(3), np.ones((2, 3))
    step([(table, np.array([1, 2]), grads)])
    twin.step(np.array([1, 2]), grads)

    def fail(parts):
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        step([(table, np.array([1, 2]), grads)], fail)
    with pytest.raises(ValueError, match="'allow' or 'error'"):
        step([(table, np.array([1]), grads[:1])], on_nonfinite="maybe")
    compare(table, twin)


@pytest.mark.cases("value")
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

"""Steps in two halves: what happens to tables between them, and which half does what."""

import threading
from functools import partial

import numpy as np
import pytest

from sok_lite.engine.gathered_update import GatheredStep, Stepped
from sok_lite.engine.optimizers import SGD, Adam
from sok_lite.engine.update import StepOptions, UpdateStep
from tests.engine.test_update_new_keys import KINDS, rows_of
from tests.support.helpers import new_table, update_of

DIM = 3
KEYS = np.array([1, 2, 3, 2, 50])  # 50 has no row


def by_rule(updates, calls):
    return UpdateStep(updates, StepOptions(0.5, 1))


def by_function(updates, calls):
    def function(parts):
        calls.append(len(parts))
        return [Stepped(part.rows - 0.5 * part.grads, {}) for part in parts], None

    return GatheredStep(updates, lambda table: {}, function, StepOptions(0.5, 1))


WAYS = pytest.mark.parametrize("step_of", [by_rule, by_function])


def look_up(table):
    table.lookup(np.arange(100, 164))


def erase(table):
    table.erase(np.array([1]))


def assign(table):
    table.insert_or_assign(np.array([2, 60]), np.full((2, DIM), 7.0, np.float32))


def clear(table):
    table.clear()


def nothing(table):
    pass


def trained(table):
    table.find_or_insert(np.array([1, 2, 3, 4]))
    return [update_of(table, SGD(), KEYS, np.arange(5 * DIM).reshape(5, DIM))]


@WAYS
@pytest.mark.cases("change")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [nothing, look_up, erase, assign, clear])
def test_a_step_is_of_the_rows_at_its_commit(backend, kind, step_of, change):
    """It is the same as one that is taken at once after what happened between the halves."""
    var_type, options = KINDS[kind]
    tables = [new_table(backend, DIM, var_type, **options) for _ in range(2)]
    calls, done = [], []
    halves, whole = (step_of(trained(table), calls) for table in tables)
    before = rows_of(tables[0])
    halves.prepare()
    if step_of is by_function:  # the rows of its keys are there by then
        assert len(calls) == 1
        tables[1].find_or_insert(np.array([50]))
        before[50] = np.full(DIM, 50.0)
    after = rows_of(tables[0])
    assert after.keys() == before.keys()
    assert all((row == before[key]).all() for key, row in after.items())
    # Another thread can change it: tables are free between the halves.
    other = threading.Thread(target=change, args=[tables[0]], daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive()
    change(tables[1])
    halves.commit(partial(done.append, "taken"))
    assert len(calls) == (0 if step_of is by_rule else 1 if change is nothing else 2)
    assert done == ["taken"]
    whole.commit()
    found, expected = map(rows_of, tables)
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        np.testing.assert_array_equal(found[key], row)


def test_a_prepared_step_has_looked_for_its_rows_once(backend, monkeypatch):
    """What it has found stays good as long as nobody changes the table."""
    from sok_lite.engine import update

    calls, resolve = [], update.resolve_rows

    def noted(updates, marks):
        calls.append(marks)
        return resolve(updates, marks)

    monkeypatch.setattr(update, "resolve_rows", noted)
    for change, count in ((nothing, 1), (look_up, 2), (erase, 2)):
        table = new_table(backend, DIM)
        calls.clear()
        step = by_rule(trained(table), [])
        step.prepare()
        table.contains(KEYS)  # reading is no change
        change(table)
        step.commit()
        assert len(calls) == count


def test_a_step_of_no_tables_is_noted(backend):
    done = []
    for step_of in (by_rule, by_function):
        for is_prepared in (False, True):
            step = step_of([], [])
            if is_prepared:
                step.prepare()
            step.commit(partial(done.append, 1))
    assert len(done) == 4
    with pytest.raises(ValueError, match="`on_nonfinite` must be 'allow' or 'error'"):
        UpdateStep([], StepOptions(1.0, 1, "raise"))
    with pytest.raises(ValueError, match="`step` must be >= 1"):
        UpdateStep([], StepOptions(1.0, 0)).prepare()


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_a_prepared_step_count_as_seen_once_it_is_taken(backend, kind):
    """As those of a step that is taken at once: an increment has their rows."""
    var_type, options = KINDS[kind]
    stamps = []
    for is_prepared in (False, True):
        table = new_table(backend, DIM, var_type, **options)
        table.find_or_insert(np.array([1, 2, 3]))
        table.lookup(np.array([1, 9]))
        update = update_of(table, Adam(), np.array([3, 2]), np.ones((2, DIM)))
        step = UpdateStep([update], StepOptions(0.5, 1))
        if is_prepared:
            step.prepare()
        step.commit()
        keys = backend.to_host(table.export()[0])
        entries = table.index.entries()
        order = np.argsort(backend.to_host(entries.keys))
        stamps.append((keys.tolist(), backend.to_host(entries.last_seen)[order].tolist()))
    assert stamps[0] == stamps[1]

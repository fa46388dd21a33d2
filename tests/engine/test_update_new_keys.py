"""Updates of keys that have no row: they get one as by a lookup, and are updated, as one change."""

import numpy as np
import pytest

from sok_lite.engine.optimizers import SGD, Adagrad, Adam
from sok_lite.engine.table.hkv import RefusedError
from sok_lite.engine.update import NonFiniteGradientError
from tests.engine.test_update import gradients_of, mixed_tables, rows_of, updates_of
from tests.support import reference_updates
from tests.support.helpers import new_table, update_of
from tests.support.steps import apply_updates, prepared_updates

SMALL = {"init_capacity": 64, "max_capacity": 64, "on_refused": "ignore"}
KINDS = {
    "hbm": ("hbm", {}),
    "hybrid": ("hybrid", {"max_capacity": 4096}),
    "growing": ("hybrid", {"init_capacity": 16, "max_bucket_size": 4, "max_capacity": 4096}),
    "two tiers": ("hybrid", {"max_capacity": 4096, "max_hbm_for_vectors": 1 / 2**22}),
}


def grads_for(keys, dim, seed=0):
    return np.random.default_rng(seed).normal(size=(len(keys), dim)).astype(np.float32)


def states_of(table):
    return {name: rows_by_key(table, name) for name in table.store.state_names}


def rows_by_key(table, name):
    keys, values = (table.backend.to_host(part) for part in table.export(name))
    return dict(zip(keys.tolist(), values, strict=True))


@pytest.mark.cases("rule")
@pytest.mark.parametrize("n", [1, 129])
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_without_a_row_begins_anew(backend, kind, rule, n):
    """Its states too, whatever its row number was used for before."""
    make = {"sgd": SGD, "adagrad": Adagrad, "adam": Adam}[rule]
    var_type, options = KINDS[kind]
    table = new_table(backend, 3, var_type, **options)
    keys = np.arange(-n, n)
    for step in (1, 2):
        apply_updates([update_of(table, make(), keys, grads_for(keys, 3))], 0.5, step)
    assert table.size == 2 * n
    table.erase(keys[::2])
    before, states = rows_of(table), states_of(table)
    grads = grads_for(keys, 3, 1)
    counts, taken = table.statistics(), []
    halves = [update_of(table, make(), keys, half) for half in (0.25 * grads, 0.75 * grads)]
    prepared_updates(halves, 0.5, 3).commit(lambda: taken.append(table.size))
    assert taken == [2 * n]  # it is noted with the insertion
    now = table.statistics()  # an update is no lookup, but what it inserts is counted, once
    assert (now.found_total, now.missed_total) == (counts.found_total, counts.missed_total)
    assert (now.inserted_total, now.not_updated_total) == (counts.inserted_total + n, 0)
    first = np.repeat((keys % 1000)[:, None], 3, 1).astype(np.float64)
    w = np.array([before.get(key, row) for key, row in zip(keys.tolist(), first, strict=True)])
    begin = {"accumulator": 0.1, "m": 0.0, "v": 0.0}
    reference = {
        name: np.array([held.get(key, np.full(3, begin[name])) for key in keys.tolist()], float)
        for name, held in states.items()
    }
    w = w.astype(np.float64)
    getattr(reference_updates, rule)(w, reference, grads.astype(np.float64), 0.5, 3)
    after = rows_of(table)
    assert sorted(after) == keys.tolist()
    np.testing.assert_allclose([after[key] for key in keys.tolist()], w, rtol=2e-4, atol=2e-4)
    for name, held in states_of(table).items():
        got = [held[key] for key in keys.tolist()]
        np.testing.assert_allclose(got, reference[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("repeated", [False, True])
def test_many_tables_do_what_a_lookup_before_the_update_does(backend, repeated):
    """Tables of many kinds and formats; of every third all keys are there, of some none is."""
    here, there = (mixed_tables(backend, 12) for _ in range(2))
    updates = []
    for tables in (here, there):
        rng = np.random.default_rng(1)
        of_tables = []
        for i, table in enumerate(tables):
            keys = rng.permutation(100)[: 7 * i].astype(table.key_dtype.name)
            table.find_or_insert(backend.from_host(keys[i:] if i % 3 else keys))
            if repeated:
                keys = np.concatenate([keys, keys[::2]])
            of_tables.append(update_of(table, Adam(), keys, grads_for(keys, table.dim, i)))
        updates.append(of_tables)
    for update in updates[1]:
        update.table.find_or_insert(update.keys)
    for each in updates:
        apply_updates(each, 0.1, 1, stochastic_rounding=True)
    for one, other in zip(here, there, strict=True):
        assert one.store.state_names == other.store.state_names
        for name in ("value", *one.store.state_names):
            held, its = rows_by_key(one, name), rows_by_key(other, name)
            assert held.keys() == its.keys()
            for key, row in held.items():
                np.testing.assert_array_equal(row, its[key])
        assert one.statistics().inserted_total == other.statistics().inserted_total
        assert one.statistics().not_updated_total == 0


@pytest.mark.parametrize("on_refused", ["ignore", "warn", "error"])
def test_what_is_refused_is_left_out_and_said(backend, on_refused):
    options = SMALL | {"on_refused": on_refused}
    other, table = new_table(backend, 3), new_table(backend, 2, "hybrid", **options)
    keys = np.arange(300)
    updates = [update_of(each, SGD(), keys, np.ones((300, each.dim))) for each in (other, table)]
    if on_refused == "error":
        with pytest.raises(RefusedError, match="no room for .* of 300 new keys"):
            apply_updates(updates, 1.0, 1)
    elif on_refused == "warn":
        with pytest.warns(RuntimeWarning, match="no room for .* of 300 new keys"):
            apply_updates(updates, 1.0, 1)
    else:
        apply_updates(updates, 1.0, 1)
    now = table.statistics()
    assert 0 < now.size <= 64
    assert now.not_updated_total == now.refused_total == 300 - now.size
    for each in (other, table):
        for key, row in rows_of(each).items():
            np.testing.assert_array_equal(row, np.float32(key) - 1)
    assert other.size == 300


@pytest.mark.parametrize("options", [{"enter_threshold": 2}, {"filter_ratio": 0.5}], ids=str)
@pytest.mark.parametrize("of_gradient", [True, False], ids=["of_gradient", "doubtful"])
def test_a_table_that_turns_keys_away_gets_none_by_an_update(backend, options, of_gradient):
    """The gradient of its lookups has them too: an update would let every key in."""
    turning, other = new_table(backend, 2, "hybrid", **options), new_table(backend, 3)
    for table in (turning, other):
        for _ in range(2):
            table.find_or_insert(backend.from_host(np.array([1, 2])))
    gradients = gradients_of(backend, [turning, other], [1, 8, 2, 9], insert=False)
    apply_updates(updates_of([turning, other], SGD(), gradients, of_gradient), 1.0, 1)
    assert {key: row[0] for key, row in rows_of(turning).items()} == {1: 1 - 1, 2: 2 - 3}
    assert sorted(rows_of(other)) == [1, 2, 8, 9]
    assert turning.statistics().not_updated_total == 2
    assert turning.statistics().not_admitted_total == (2 if "enter_threshold" in options else 0)
    assert other.statistics().not_updated_total == 0


def test_gradients_that_are_not_finite_insert_nothing(backend):
    tables = [new_table(backend, 2, name="one"), new_table(backend, 2, "hybrid", name="two")]
    for table in tables:
        table.find_or_insert(backend.from_host(np.array([1])))
    grads = np.array([[1, 1], [1, np.nan], [1, 1]])
    updates = [
        update_of(tables[0], Adam(), [1, 5, 6], np.ones((3, 2))),
        update_of(tables[1], Adam(), [1, 5, 6], grads),
    ]
    for take in (prepared_updates, apply_updates):
        with pytest.raises(NonFiniteGradientError, match="1 of 3 gradient rows of table 'two'"):
            take(updates, 1.0, 1, "error")
    assert [rows_of(table).keys() for table in tables] == [{1}, {1}]
    apply_updates(updates[:1], 1.0, 1, "error")
    assert sorted(rows_of(tables[0])) == [1, 5, 6]
    count = backend.xp.ones(1, np.int64)
    apply_updates(updates[1:], 1.0, 1, num_nonfinite=count)
    assert int(count[0]) == 1 + 1
    assert np.isnan(rows_of(tables[1])[5][1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_step_has_inserted_nothing_but_made_room(backend, kind):
    var_type, options = KINDS[kind]
    table = new_table(backend, 2, var_type, **options)
    table.find_or_insert(backend.from_host(np.array([1])))
    update = update_of(table, SGD(), np.arange(500), np.ones((500, 2)))
    step = prepared_updates([update], 1.0, 1)
    assert rows_of(table).keys() == {1}
    assert table.statistics().not_updated_total == 0
    sizes = table.statistics().near_reserved_bytes, table.statistics().far_reserved_bytes
    step.commit()
    assert sorted(rows_of(table)) == list(range(500))
    now = table.statistics()
    assert (now.near_reserved_bytes, now.far_reserved_bytes) == sizes, "rows found no room"

"""One optimizer step over several tables, against a dict of rows."""

import numpy as np
import pytest

from sok_lite.comm import SingleCommunicator
from sok_lite.engine import lookup
from sok_lite.engine.dtypes import bfloat16_to_float32
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.optimizers import SGD, Momentum
from sok_lite.engine.table import make_table
from sok_lite.engine.table.row_cache import cache_rows
from sok_lite.engine.update import NonFiniteGradientError
from sok_lite.engine.update_rows import Update
from tests.support.helpers import new_table, update_of
from tests.support.parts import Part, by_part, forward_parts
from tests.support.steps import apply_gathered, apply_updates


def rows_of(table):
    keys, values = table.export()
    host = table.backend.to_host
    return dict(zip(host(keys).tolist(), host(values), strict=True))


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
    apply_updates([update_of(table, SGD(), keys, grads)], 0.5, 1)
    for key, row in rows_of(table).items():
        np.testing.assert_allclose(row, expected[key], rtol=1e-5, atol=1e-5)


def test_gradients_need_not_be_contiguous(backend):
    table, other = new_table(backend, dim=6), new_table(backend, dim=6)
    keys = backend.from_host(np.arange(9))
    wide = backend.from_host(np.random.default_rng(0).normal(size=(9, 18)).astype(np.float32))
    apply_updates([Update(table, SGD(), keys, wide[:, 6:12])], 1.0, 1)
    apply_updates([Update(other, SGD(), keys, backend.xp.ascontiguousarray(wide[:, 6:12]))], 1.0, 1)
    for key, row in rows_of(table).items():
        np.testing.assert_array_equal(row, rows_of(other)[key])


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
def test_an_update_is_a_lookup_where_the_table_wants_it(backend, sees, var_type):
    table = make_table(var_type, backend, 2, initializer=make_initializer(0.0, 2))
    table.sees_updates = sees
    table.find_or_insert(backend.from_host(np.array([1, 2, 3])))
    apply_updates([update_of(table, SGD(), [2], [[1, 1]])], 1.0, 1)
    scores = table.backend.to_host(table.scores(backend.from_host(np.array([1, 2, 3]))))
    assert scores.tolist() == ([1, 2, 1] if sees else [1, 1, 1])
    # One that inserts is a lookup of all its keys, and one only.
    apply_updates([update_of(table, SGD(), [3, 4], [[1, 1], [1, 1]])], 1.0, 2)
    scores = table.backend.to_host(table.scores(backend.from_host(np.array([1, 2, 3, 4]))))
    assert scores.tolist() == ([1, 2, 3, 3] if sees else [1, 1, 2, 2])
    np.testing.assert_array_equal(rows_of(table)[2], [-1, -1])


def test_what_does_not_fit_is_an_error_before_anything_changes(backend):
    tables = [new_table(backend, dim=2), new_table(backend, dim=2)]
    table = tables[1]
    for each in tables:
        each.find_or_insert(backend.from_host(np.array([1, 2])))
    good, update = (update_of(each, SGD(), [1], [[1, 1]]) for each in tables)
    keys, ones = backend.from_host(np.array([1, 2])), backend.xp.ones((2, 2), np.float32)
    owners = [type("Optimizer", (), {})() for _ in range(2)]
    of_shapes = [backend.xp.zeros(shape, np.float32) for shape in ((2, 3), (3, 2), (4,))]
    double, infinite = ones[:1].astype(np.float64), ones[:1] * np.inf
    no_key = r"each of its keys \(n,\). Received: keys \((1,)?\)"
    for error, text, updates in (
        (NonFiniteGradientError, "1 of 1 gradient rows", [update._replace(grads=infinite)]),
        (TypeError, "must be float32. Received: float64", [update._replace(grads=double)]),
        (ValueError, no_key, [Update(table, SGD(), keys[0].reshape(()), ones[0])]),
        (ValueError, "two update rules in one", [update, update._replace(rule=Momentum())]),
        (ValueError, "of two optimizers", [update._replace(optimizer=each) for each in owners]),
        *((ValueError, "of dimension 2", [Update(table, SGD(), keys, each)]) for each in of_shapes),
    ):
        with pytest.raises(error, match=text):
            apply_updates([good, *updates], 1.0, 1, on_nonfinite="error")
        for each in tables:
            assert {k: row.tolist() for k, row in rows_of(each).items()} == {1: [1, 1], 2: [2, 2]}
    with pytest.raises(ValueError, match="'allow' or 'error'. Received: 'raise'"):
        apply_updates([], 1.0, 1, on_nonfinite="raise")
    assert issubclass(NonFiniteGradientError, ValueError)
    assert issubclass(NonFiniteGradientError, FloatingPointError)


@pytest.mark.parametrize("dtype", ["int32", "int64", "int8"])
def test_integers_are_refused_before_anything_changes(backend, dtype):
    tables = [
        make_table("hbm", backend, 2, initializer=make_initializer(1, 2), dtype=each)
        for each in ("float32", dtype)
    ]
    for table in tables:
        table.find_or_insert(backend.from_host(np.array([1])))
    updates = [update_of(table, Momentum(), [1, 2], [[1, 1], [2, 2]]) for table in tables]

    def never(parts):
        raise AssertionError("a step was taken")

    with pytest.raises(TypeError, match=f"Rows of {dtype} cannot be trained. Received: table"):
        apply_updates(updates, 1.0, 1)
    with pytest.raises(TypeError, match=f"Rows of {dtype} cannot be trained. Received: table"):
        apply_gathered(updates, lambda table: {}, never)
    for table in tables:
        assert {key: row.tolist() for key, row in rows_of(table).items()} == {1: [1, 1]}
        assert table.store.state_names == []


# ---- keys of a gradient, and others ------------------------------------------------------------

CHANGES = {
    "nothing": lambda table, keys: None,
    "new keys": lambda table, keys: table.find_or_insert(keys + 100),
    "grown": lambda table, keys: table.find_or_insert(table.backend.from_host(np.arange(200, 900))),
    "some erased": lambda table, keys: table.erase(keys[::2]),
    "erased and back": lambda table, keys: (
        table.erase(keys[:5]),
        table.find_or_insert(table.backend.from_host(np.arange(300, 340))),
        table.find_or_insert(keys[:5]),
    ),
    "cleared": lambda table, keys: table.clear(),
    "cleared and back": lambda table, keys: (
        table.clear(),
        table.find_or_insert(keys[::-1].copy()),
    ),
}


def gradients_of(backend, tables, keys, insert=True):
    """Returns the gradients of a lookup of some keys in each table: of every key, its number."""
    keys = backend.from_host(np.array(keys, np.int64))
    splits = backend.from_host(np.arange(len(keys) + 1))
    parts = [Part(table, keys, splits, None, "sum", insert) for table in tables]
    _, context = forward_parts(backend, SingleCommunicator(), parts)
    grads = [
        backend.from_host(
            np.repeat(np.arange(1, len(keys) + 1, dtype=np.float32)[:, None], table.dim, 1)
        )
        for table in tables
    ]
    return by_part(lookup.backward(backend, grads, context))


def mixed_tables(backend, count, dtypes=("float32", "float16", "bfloat16")):
    """Tables of many dimensions, row formats, key types and both kinds."""
    kinds = [("hbm", {}), ("hybrid", {"max_capacity": 2048})]
    tables = []
    for i in range(count):
        kind, options = kinds[i % 2]
        key_type = ("int64", "int32", "uint64")[i % 3]
        dtype = dtypes[i // 2 % len(dtypes)]
        options = {"name": f"t{i}", "dtype": dtype, "key_type": key_type, **options}
        tables.append(new_table(backend, 1 + 5 * i % 36, kind, **options))
    return tables


def updates_of(tables, rule, gradients, of_gradient=True):
    return [
        Update(
            *(table, rule),
            table.key_dtype.from_int64(table.backend.xp, gradient.keys)
            if not of_gradient
            else gradient.keys,
            gradient.row_grads,
            of_gradient=of_gradient,
        )
        for table, gradient in zip(tables, gradients, strict=True)
    ]


@pytest.mark.cases("change")
@pytest.mark.parametrize("of_gradient", [True, False], ids=["of_gradient", "doubtful"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["hbm", "hybrid"])
def test_rows_are_those_that_keys_have_at_the_update(backend, kind, change, of_gradient):
    """Whatever happened to the table since the gradient was made."""
    options = {"max_capacity": 4096} if kind == "hybrid" else {}
    tables = [new_table(backend, dim, kind, **options) for dim in (3, 8)]
    gradients = gradients_of(backend, tables, np.arange(33))
    CHANGES[change](tables[1], gradients[1].keys)
    before = [rows_of(table) for table in tables]
    apply_updates(updates_of(tables, SGD(), gradients, of_gradient), 1.0, 1)
    for table, rows in zip(tables, before, strict=True):
        after = rows_of(table)
        assert set(after) == set(rows) | set(range(33))
        for key, row in after.items():
            step = key + 1 if key < 33 else 0
            np.testing.assert_array_equal(row, rows.get(key, np.float32(key)) - step)


@pytest.mark.parametrize("of_gradient", [True, False], ids=["of_gradient", "doubtful"])
def test_gradients_that_were_changed_or_are_not_the_last_are_as_good(backend, of_gradient):
    """Steps may overlap: a table keeps the keys of one gradient only. A program may clip them."""
    tables = [new_table(backend, 2), new_table(backend, 3, "hybrid")]
    earlier = gradients_of(backend, tables, [5, 6, 7, 9], insert=False)
    tables[1].find_or_insert(backend.from_host(np.array([9])))  # after its lookup
    later = gradients_of(backend, tables, [7, 6, 8, 6])
    halved = [each._replace(row_grads=each.row_grads * np.float32(0.5)) for each in later]
    for gradients in (earlier, halved):
        apply_updates(updates_of(tables, SGD(), gradients, of_gradient), 1.0, 1)
    for table in tables:
        rows = {key: row[0] for key, row in rows_of(table).items()}
        assert rows == {5: 5 - 1, 6: 6 - 2 - 3, 7: 7 - 3 - 0.5, 8: 8 - 1.5, 9: 9 - 4}


# ---- stochastic rounding: it depends on keys, steps and tables alone


def float32_rows(table):
    values = table.backend.to_host(table.export()[1])
    if table.row_dtype.name == "bfloat16":
        values = bfloat16_to_float32(np, values)
    return values.astype(np.float32)


def rounded_table(backend, keys, grads, *, name="t", steps=(1, 2, 3), kind="hbm", **options):
    """A table of these keys after some steps with stochastic rounding."""
    table = new_table(backend, grads.shape[1], kind, name=name, dtype="bfloat16", **options)
    table.find_or_insert(backend.from_host(keys))
    for step in steps:
        part = update_of(table, SGD(), keys, grads)
        apply_updates([part], 0.01, step, stochastic_rounding=True)
    return table


def test_stochastic_rounding_of_a_key_is_the_same_in_any_company(backend):
    rng = np.random.default_rng(0)
    keys = rng.permutation(10_000)[:1000]
    grads = rng.normal(size=(1000, 5)).astype(np.float32)
    whole = rounded_table(backend, keys, grads)
    held = dict(zip(whole.export()[0].tolist(), float32_rows(whole), strict=True))
    # As two ranks would hold them, and in another order of rows.
    parts = [np.flatnonzero(keys % 2 == 0), np.flatnonzero(keys % 2), rng.permutation(1000)]
    tables = [rounded_table(backend, keys[part], grads[part]) for part in parts]
    # Of other types of keys and kinds of tables, and where keys come twice.
    for key_type in ("int32", "uint64"):
        tables.append(rounded_table(backend, keys.astype(key_type), grads, key_type=key_type))
    hybrid = {"kind": "hybrid", "max_capacity": 4096}
    tables.append(rounded_table(backend, np.tile(keys, 2), np.tile(grads / 2, (2, 1)), **hybrid))
    for table in tables:
        for key, row in zip(table.export()[0].tolist(), float32_rows(table), strict=True):
            np.testing.assert_array_equal(row, held[key])


def test_stochastic_rounding_after_a_remembered_lookup_is_the_same(backend):
    rng = np.random.default_rng(0)
    keys = rng.permutation(1000)[:100]
    grads = rng.normal(size=(100, 5)).astype(np.float32)
    found = rounded_table(backend, keys, grads, steps=[1])
    remembered = new_table(backend, dim=5, name="t", dtype="bfloat16")
    device_keys = backend.from_host(keys.astype(np.int64))
    rows = remembered.find_or_insert(device_keys)
    told = np.array([[remembered.row_version], [0], [1]])
    cache_rows(backend, [remembered], [device_keys], [rows], told)
    part = update_of(remembered, SGD(), keys, grads)
    apply_updates([part], 0.01, 1, stochastic_rounding=True)
    np.testing.assert_array_equal(float32_rows(remembered), float32_rows(found))


def test_tables_steps_and_seeds_have_random_bits_of_their_own(backend):
    keys = np.arange(1000) * 1000 + 1
    grads = np.full((1000, 8), 2.0**-9 / 0.01, np.float32)  # half an ulp of numbers below 1
    one = float32_rows(rounded_table(backend, keys, grads, steps=[1]))
    for options in ({"name": "u"}, {"seed": 1}, {"steps": [2]}):
        other = float32_rows(rounded_table(backend, keys, grads, **{"steps": [1], **options}))
        assert (other != one).mean() > 0.2
    again = float32_rows(rounded_table(backend, keys, grads, steps=[1]))
    np.testing.assert_array_equal(again, one)

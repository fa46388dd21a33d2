"""One optimizer step over several tables, against a dict of rows."""

import numpy as np
import pytest

from sok_lite.comm import SingleCommunicator
from sok_lite.engine import lookup
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.optimizers import SGD, Adam, Momentum
from sok_lite.engine.table import make_table
from sok_lite.engine.update import NonFiniteGradientError
from sok_lite.engine.update_rows import Update
from tests.support.call_counts import on_launch
from tests.support.helpers import new_table, update_of
from tests.support.parts import Part, by_part, forward_parts
from tests.support.simt import device
from tests.support.simt.backend import is_simulated
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


def test_nonfinite_gradients_are_counted(backend):
    table = new_table(backend, dim=2)
    table.find_or_insert(backend.from_host(np.array([1, 2, 3])))
    grads = [[np.nan, 0], [1, 1], [np.inf, np.nan]]
    count = backend.xp.ones(1, np.int64)
    for each in (count, None):
        apply_updates([update_of(table, SGD(), [1, 2, 3], grads)], 1.0, 1, num_nonfinite=each)
    assert int(count[0]) == 1 + 2
    assert np.isnan(rows_of(table)[1][0])


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


class Counts:
    """What is asked of a backend: the kernels that are launched, and how often one waits."""

    def __init__(self, backend, monkeypatch):
        self.kernels, self.waits = [], 0
        to_host = backend.to_host

        def waited(array):
            self.waits += 1
            return to_host(array)

        on_launch(backend, monkeypatch, self.kernels.append)
        monkeypatch.setattr(backend, "to_host", waited)


@pytest.mark.parametrize("num_tables", [1, 26, 40])
@pytest.mark.parametrize(
    ("dtypes", "kernels"),
    [
        (["float32"], {"update_adam_f32"}),
        (
            ["float32", "float16", "bfloat16"],
            {"update_adam_f32", "update_adam_f16", "update_adam_bf16"},
        ),
    ],
    ids=["float32", "mixed"],
)
def test_an_update_of_a_gradient_waits_for_nothing_and_takes_two_launches(
    backend, monkeypatch, num_tables, dtypes, kernels
):
    """Where rows have several formats, one more for each."""
    tables = mixed_tables(backend, num_tables, dtypes)
    rule = Adam()
    for number in (1, 2):  # the first makes the states
        gradients = gradients_of(backend, tables, [3, 1, 4, 1, 5, 9])
        updates = updates_of(tables, rule, gradients)
        with monkeypatch.context() as patch, device.counted() as counts:
            counted = Counts(backend, patch)
            apply_updates(updates, 0.1, number)
    expected = ["find_with_hint", *(["update_adam_f32"] if num_tables == 1 else sorted(kernels))]
    assert sorted(counted.kernels) == expected
    assert counted.waits == 0
    if is_simulated(backend):
        assert (counts["kernels"], counts["waits"]) == (len(expected), 0)


@pytest.mark.parametrize("num_tables", [1, 26])
@pytest.mark.parametrize(
    ("change", "waits", "num_launches", "of_gpu"),
    # One more wait of a GPU for whether some have no row, where it does not come with another; and
    # a launch that notes which keys change, where they are not known to be those of the lookup. It
    # numbers distinct keys in a launch less, and groups them in two more.
    [
        ("nothing", 1, 2, 0),
        ("repeated", 1 + 1 + 1, 2 + 4 + 3 + 2, 2 - 1),
        ("filtered", 1 + 1, 4 + 3, -1),
    ],
)
def test_launches_of_other_keys_do_not_depend_on_the_number_of_tables(
    backend, monkeypatch, num_tables, change, waits, num_launches, of_gpu
):
    tables = mixed_tables(backend, num_tables, ["float32"])
    # At most 512 distinct ones of all tables: a GPU sorts by 9 bits of their numbers at a time.
    gradients = gradients_of(backend, tables, np.arange(36))
    updates = updates_of(tables, SGD(), gradients, of_gradient=False)
    xp = backend.xp
    index = {
        "nothing": np.arange(36),
        "repeated": np.arange(36) // 2,
        "filtered": np.arange(0, 36, 3),
    }[change]
    at = backend.from_host(index)
    updates = [
        update._replace(keys=xp.take(update.keys, at), grads=xp.take(update.grads, at, axis=0))
        for update in updates
    ]
    with monkeypatch.context() as patch:
        counted = Counts(backend, patch)
        apply_updates(updates, 1.0, 1)
    if backend.name == "cuda":
        num_launches += of_gpu
    assert len(counted.kernels) == num_launches
    if backend.name == "cpu":
        waits = int(change != "nothing")  # for how many keys are distinct: counts are there
    assert counted.waits == waits
    for table in tables:
        expected = {k: np.full(table.dim, k, np.float64) for k in range(40)}
        for i in index.tolist():
            expected[i] = expected[i] - (i + 1)
        for key, row in rows_of(table).items():
            np.testing.assert_array_equal(row, expected[key])


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
def test_keys_that_were_evicted_come_back_and_no_other_row_is_touched(backend, of_gradient):
    """Their places belong to other keys by now."""
    table = new_table(backend, 4, "hybrid", max_capacity=64, on_refused="ignore")
    gradients = gradients_of(backend, [table], np.arange(40))
    for first in range(1000, 1400, 40):
        table.lookup(backend.from_host(np.arange(first, first + 40)))
    before = rows_of(table)
    assert not set(range(40)) <= set(before)
    apply_updates(updates_of([table], SGD(), gradients, of_gradient), 1.0, 1)
    after = rows_of(table)
    refused = set(range(40)) - set(after)
    assert len(refused) < 10
    assert table.statistics().not_updated_total == len(refused)
    for key, row in after.items():
        first = before.get(key, np.float32(key))
        np.testing.assert_array_equal(row, first - (key + 1 if key < 40 else 0))


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


def test_a_table_that_comes_twice_with_the_same_gradient_sums_it(backend):
    table, other = new_table(backend, 2), new_table(backend, 3)
    gradients = gradients_of(backend, [table, other], [5, 6])
    updates = updates_of([table, other], Momentum(), gradients)
    # Two steps one after the other would end elsewhere.
    apply_updates([updates[0], updates[1], updates[0]], 1.0, 1)
    assert {key: row[0] for key, row in rows_of(table).items()} == {5: 5 - 2, 6: 6 - 4}
    assert {key: row[0] for key, row in rows_of(other).items()} == {5: 5 - 1, 6: 6 - 2}


def test_many_mixed_tables_are_updated_as_one_by_one(backend):
    """Some with keys of a gradient, some with fewer, some with keys that repeat, some with none."""
    rng = np.random.default_rng(0)
    together, apart = (mixed_tables(backend, 12) for _ in range(2))
    updates = []
    for tables in (together, apart):
        gradients = gradients_of(backend, tables, np.arange(50) * 3)
        updates.append(updates_of(tables, Adam(), gradients))
    for i in range(12):
        if i % 3:
            some = rng.permutation(50)[: 10 + i], rng.integers(0, 50, 60), np.zeros(0, int)
            at = backend.from_host(some[i % 5 % 3])
            for each in updates:
                key_dtype = each[i].table.key_dtype
                keys, grads = key_dtype.from_int64(backend.xp, each[i].keys[at]), each[i].grads[at]
                each[i] = each[i]._replace(keys=keys, grads=grads, of_gradient=False)
    apply_updates(updates[0], 0.1, 1, stochastic_rounding=True)
    for update in updates[1]:
        apply_updates([update], 0.1, 1, stochastic_rounding=True)
    for one, other in zip(together, apart, strict=True):
        rows = rows_of(other)
        for key, row in rows_of(one).items():
            np.testing.assert_array_equal(row, rows[key])


def test_nonfinite_rows_of_many_tables_are_an_error_after_one_wait(backend, monkeypatch):
    tables = mixed_tables(backend, 8)
    gradients = gradients_of(backend, tables, np.arange(5))
    gradients[6].row_grads[3, 0] = np.nan
    before = [rows_of(table) for table in tables]
    with monkeypatch.context() as patch:
        counted = Counts(backend, patch)
        with pytest.raises(NonFiniteGradientError, match="1 of 5 gradient rows of table 't6'"):
            apply_updates(updates_of(tables, SGD(), gradients), 1.0, 1, on_nonfinite="error")
    assert (counted.kernels, counted.waits) == (["find_with_hint", "count_nonfinite"], 1)
    for table, rows in zip(tables, before, strict=True):
        for key, row in rows_of(table).items():
            np.testing.assert_array_equal(row, rows[key])

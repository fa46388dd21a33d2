"""Which keys an optimizer has set to zero: by their rows and states now, and by nothing kept."""

from functools import partial

import numpy as np
import pytest

from scripts.bench.common.row_steps import ensure_state
from sok_lite.engine.optimizers import SGD, Adagrad, GroupAdam, SparseGroupFtrl
from sok_lite.engine.table import export
from sok_lite.engine.table.content import take
from sok_lite.engine.table.restore import restore
from tests.support.helpers import new_table, update_of
from tests.support.steps import apply_updates

DIM = 3
INT64 = np.iinfo(np.int64)
KINDS = {"hbm": {}, "kLfu": {"var_type": "hybrid", "evict_strategy": "kLfu"}}


def shrunk(table):
    keys = table.shrunk_keys()
    assert keys.dtype == table.key_dtype.dtype
    return table.backend.to_host(keys).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_zero_rows_with_a_changed_state_are_shrunk(backend, monkeypatch, kind, n, dtype):
    table = new_table(backend, DIM, dtype=dtype, **KINDS[kind])
    # So that there are several.
    monkeypatch.setattr(export, "chunks", partial(export.chunks, num_slots=64))
    ensure_state(table.store, "m", 0.0)
    ensure_state(table.store, "total", 0.25, 1)
    rng = np.random.default_rng(n)
    keys = np.array([*rng.permutation(4 * n)[:n].tolist(), *[INT64.max, INT64.min][: n % 3]])
    keys = keys.astype(np.int64)
    # One element of some rows and states is other than it began, the last one among them.
    rows, m = np.zeros((2, keys.size, DIM), np.float32)
    total = np.full((keys.size, 1), 0.25, np.float32)
    is_zero, has_m, has_total = rng.random((3, keys.size)) < [[0.7], [0.3], [0.3]]
    where = rng.integers(0, DIM, keys.size)
    rows[~is_zero, where[~is_zero]] = -1e-30
    rows[is_zero, where[is_zero]] = -0.0
    m[has_m, where[has_m]] = 1e-30
    total[has_total] = 0.0
    table.insert_or_assign(keys, backend.from_host(rows))
    table.assign_state("m", keys, m)
    table.assign_state("total", keys, total)
    expected = sorted(keys[is_zero & (has_m | has_total)].tolist())
    assert shrunk(table) == expected
    other = new_table(backend, DIM, dtype=dtype)
    restore(other, take(table))
    assert shrunk(other) == expected
    # Nothing is kept: another row, another answer.
    table.accumulate(expected[::2], np.ones((len(expected[::2]), DIM), np.float32))
    assert shrunk(table) == expected[1::2]
    table.erase(expected)
    assert shrunk(table) == []


def test_without_states_nothing_is_shrunk(backend):
    table = new_table(backend, DIM)
    table.lookup([0, 1000, 5])  # the first two begin with zeros
    assert shrunk(table) == []
    apply_updates([update_of(table, SGD(), [5], np.full((1, DIM), 5.0))], 1.0, 1)
    assert table.num_zero_rows() == 3
    assert shrunk(table) == []


@pytest.mark.parametrize("rule", [GroupAdam, SparseGroupFtrl])
def test_group_lasso_shrinks_and_a_gradient_revives(backend, rule):
    table = new_table(backend, DIM)
    table.lookup([1, 2, 1000])
    weak, strong = np.full((1, DIM), 1e-3), np.full((1, DIM), -50.0)
    for key, grads in ((1, weak), (2, strong)):
        apply_updates([update_of(table, rule(l21=0.5), [key], grads)], 0.1, 1)
    assert shrunk(table) == [1]  # 1000 begins with zeros, and has never been trained
    apply_updates([update_of(table, rule(l21=0.5), [1], strong)], 0.1, 2)
    assert shrunk(table) == []


def test_keys_come_in_the_tables_type_and_order(backend):
    table = new_table(backend, DIM, key_type="uint64")
    keys = np.array([2**64 - 1, 3, 2**63, 0], np.uint64)
    table.insert_or_assign(keys, np.zeros((4, DIM), np.float32))
    apply_updates([update_of(table, Adagrad(), keys, np.ones((4, DIM)))], 0.0, 1)
    assert shrunk(table) == sorted(keys.tolist())

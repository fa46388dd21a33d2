"""Stochastic rounding of steps over tables: it depends on keys, steps and tables alone."""

import numpy as np

from sok_lite.engine.dtypes import bfloat16_to_float32
from sok_lite.engine.optimizers import SGD
from sok_lite.engine.table.row_cache import cache_rows
from tests.support.helpers import new_table, update_of
from tests.support.steps import apply_updates


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

"""Stochastic rounding of steps over tables: it depends on keys, steps and tables alone."""

import numpy as np
import pytest

from sok_lite.engine.dtypes import bfloat16_to_float32
from sok_lite.engine.optimizers import SGD, Momentum
from sok_lite.engine.table.row_cache import cache_rows
from tests.support.helpers import new_table, update_of
from tests.support.steps import apply_updates


def float32_rows(table):
    values = table.backend.to_host(table.export()[1])
    if table.row_dtype.name == "bfloat16":
        values = bfloat16_to_float32(np, values)
    return values.astype(np.float32)


def rounded_table(backend, keys, grads, *, name="t", dtype="bfloat16", steps=(1, 2, 3), **options):
    """A table of these keys after some steps with stochastic rounding."""
    table = new_table(backend, dim=grads.shape[1], name=name, dtype=dtype, **options)
    table.find_or_insert(backend.from_host(keys))
    for step in steps:
        part = update_of(table, SGD(), keys, grads)
        apply_updates([part], 0.01, step, stochastic_rounding=True)
    return table


@pytest.mark.full_only("120 steps on 1,000 rows; test_stochastic... is the smoke")
@pytest.mark.parametrize("dtype, ulp", [("bfloat16", 2.0**-7), ("float16", 2.0**-10)])
def test_steps_below_half_an_ulp_count_on_average_if_rounding_is_stochastic(backend, dtype, ulp):
    n, dim, num_steps, share = 1000, 5, 60, 1 / 32
    keys = np.arange(n) * 1000 + 1  # the first row of each is 1
    grads = np.full((n, dim), -1.0)
    nearest, stochastic = (new_table(backend, dim=dim, dtype=dtype) for _ in range(2))
    for table in (nearest, stochastic):
        table.find_or_insert(backend.from_host(keys))
    for step in range(1, num_steps + 1):
        apply_updates([update_of(nearest, SGD(), keys, grads)], share * ulp, step)
        part = update_of(stochastic, SGD(), keys, grads)
        apply_updates([part], share * ulp, step, stochastic_rounding=True)
    np.testing.assert_array_equal(float32_rows(nearest), 1)
    moved = (float32_rows(stochastic).astype(np.float64) - 1) / ulp
    # Each step goes up by one ulp with chance 1/32. Five standard errors of the mean.
    error = np.sqrt(num_steps * share * (1 - share) / (n * dim))
    np.testing.assert_allclose(moved.mean(), num_steps * share, rtol=0, atol=5 * error)
    np.testing.assert_allclose(moved.var(), num_steps * share * (1 - share), rtol=0.1)


def test_stochastic_rounding_of_a_key_is_the_same_in_any_company(backend):
    rng = np.random.default_rng(0)
    keys = rng.integers(-(2**62), 2**62, 1000)
    grads = rng.normal(size=(1000, 5)).astype(np.float32)
    whole = rounded_table(backend, keys, grads)
    held = dict(zip(whole.export()[0].tolist(), float32_rows(whole), strict=True))
    # As two ranks would hold them, and in another order of rows.
    for part in (np.flatnonzero(keys % 2 == 0), np.flatnonzero(keys % 2), rng.permutation(1000)):
        table = rounded_table(backend, keys[part], grads[part])
        for key, row in zip(table.export()[0].tolist(), float32_rows(table), strict=True):
            np.testing.assert_array_equal(row, held[key])


def test_stochastic_rounding_sums_repeated_keys_first(backend):
    rng = np.random.default_rng(0)
    keys = rng.permutation(33)
    halves = np.repeat(rng.normal(size=(33, 5)).astype(np.float32), 2, axis=0) / 2
    once = rounded_table(backend, keys, 2 * halves[::2])
    twice = rounded_table(backend, np.repeat(keys, 2), halves)
    np.testing.assert_array_equal(float32_rows(twice), float32_rows(once))


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


@pytest.mark.parametrize("key_type", ["int32", "uint64"])
def test_stochastic_rounding_takes_every_key_type(backend, key_type):
    keys = np.arange(100)
    grads = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
    table = rounded_table(backend, keys.astype(key_type), grads, key_type=key_type)
    same = rounded_table(backend, keys, grads)
    np.testing.assert_array_equal(float32_rows(table), float32_rows(same))


def test_stochastic_rounding_leaves_float32_tables_alone(backend):
    keys = np.arange(33)
    grads = np.random.default_rng(0).normal(size=(33, 3)).astype(np.float32)
    table = rounded_table(backend, keys, grads, dtype="float32", steps=[1])
    expected = (keys[:, None] - grads * np.float32(0.01)).astype(np.float32)
    np.testing.assert_array_equal(float32_rows(table), expected)


def test_stochastic_rounding_is_the_same_in_both_kinds_of_table(backend):
    rng = np.random.default_rng(0)
    keys = rng.permutation(10_000)[:1000]
    grads = rng.normal(size=(1000, 5)).astype(np.float32)
    rows = []
    for kind, options in [("hbm", {}), ("hybrid", {"max_capacity": 4096})]:
        table = new_table(backend, 5, kind, dtype="bfloat16", name="t", **options)
        table.find_or_insert(backend.from_host(keys))
        for step in (1, 2, 3):
            part = update_of(table, Momentum(), keys, grads)
            apply_updates([part], 0.01, step, stochastic_rounding=True)
        rows.append(float32_rows(table))
    np.testing.assert_array_equal(rows[1], rows[0])

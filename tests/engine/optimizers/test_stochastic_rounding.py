"""Stochastic rounding against its plain NumPy twin in tests/support/reference_rounding.py."""

import numpy as np
import pytest

from scripts.bench.common.row_steps import apply_rule
from sok_lite.backend.cpu import CpuBackend
from sok_lite.engine.dtypes import bfloat16_to_float32
from sok_lite.engine.optimizers import SGD
from sok_lite.engine.rows.store import NO_ROW
from tests.engine.optimizers.helpers import VARIANTS, new_table, read
from tests.support import reference_rounding

HALF = ["float16", "bfloat16"]


def some_keys(n, seed=0):
    return np.random.default_rng(seed).integers(-(2**63), 2**63, n, dtype=np.int64)


def rounded_by_the_kernel(backend, x, keys, dtype, seed=5, step=1):
    """Rounds x (n, dim) float32: rows of 0 take a step of exactly x."""
    table, rows = new_table(backend, np.zeros(x.shape, np.float32), dtype)
    rounding = (backend.from_host(keys), seed)
    grads = backend.from_host(x)
    apply_rule(table, SGD(), backend.from_host(rows), grads, -1.0, step, rounding=rounding)
    return read(table, rows)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("n, dim", [(0, 3), (1, 1), (31, 3), (33, 31), (1000, 64), (40, 1025)])
def test_stochastic_rounding_follows_the_twin(backend, dtype, n, dim):
    rng = np.random.default_rng(n)
    # Every float32 there is: normal, subnormal, too large, infinite, NaN.
    x = rng.integers(0, 2**32, (n, dim), dtype=np.uint32).view(np.float32)
    # And those where float16 is subnormal, or close to its largest value.
    x[::3] = rng.uniform(-(2.0**-13), 2.0**-13, x[::3].shape)
    x[::7] = rng.uniform(60000, 66000, x[::7].shape)
    # And values of the format, which stay as they are.
    exact = rng.integers(0, 2**16, x[::5].shape, dtype=np.uint16)
    exact = exact.view(np.float16) if dtype == "float16" else bfloat16_to_float32(np, exact)
    x[::5] = exact.astype(np.float32)
    # And those about the largest: to nearest from there on, so that half an ulp more is infinite.
    largest, ulp = (65504.0, 32.0) if dtype == "float16" else (255 * 2.0**120, 2.0**120)
    last = np.float32(largest)
    edges = np.array([last, last + np.float32(0.49 * ulp), last + np.float32(0.5 * ulp)])
    x[::11] = rng.choice([*edges, *-edges], x[::11].shape)
    keys = some_keys(n)
    for seed, step in [(0, 1), (-7, 2), (2**63 - 1, 2**32 + 3)]:
        words = reference_rounding.words(keys, dim, seed, step)
        expected = reference_rounding.rounded(x, words, dtype)
        actual = rounded_by_the_kernel(backend, x, keys, dtype, seed, step)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rule", VARIANTS, ids=repr)
def test_stochastic_rounding_is_of_the_float32_step(backend, rule, dtype):
    n, dim = 40, 33
    rng = np.random.default_rng(2)
    keys = some_keys(n)
    half, rows = new_table(backend, rng.normal(size=(n, dim)).astype(np.float32), dtype)
    exact, _ = new_table(backend, read(half, rows))
    numbers = backend.from_host(rows)
    absent = backend.from_host(np.where(np.arange(n) == 7, np.uint32(NO_ROW), rows))
    for step in (1, 2, 3):
        grads = backend.from_host(rng.normal(size=(n, dim)).astype(np.float32))
        before = read(half, rows)
        apply_rule(exact, rule, absent, grads, 0.1, step)
        rounding = (backend.from_host(keys), 9)
        apply_rule(half, rule, absent, grads, 0.1, step, rounding=rounding)
        words = reference_rounding.words(keys, dim, 9, step)
        expected = reference_rounding.rounded(read(exact, rows), words, dtype)
        np.testing.assert_array_equal(read(half, rows), expected)
        np.testing.assert_array_equal(expected[7], before[7])
        for name in rule.states:
            np.testing.assert_array_equal(read(half, rows, name), read(exact, rows, name))
        exact.store.write(numbers, backend.from_host(expected))


def test_random_bits_do_not_depend_on_the_row_or_the_number_of_threads():
    x = np.random.default_rng(0).normal(size=(1000, 33)).astype(np.float32)
    order, keys, results = np.random.default_rng(1).permutation(1000), some_keys(1000), []
    for num_threads in (1, 2, 5):
        threaded = CpuBackend(num_threads=num_threads)
        threaded.grain = 1
        results.append(rounded_by_the_kernel(threaded, x, keys, "bfloat16"))
        for part in (order, order[:33]):
            again = rounded_by_the_kernel(threaded, x[part], keys[part], "bfloat16")
            np.testing.assert_array_equal(again, results[0][part])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])

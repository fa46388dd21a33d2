"""Rows read and written by number."""

import numpy as np
import pytest

from scripts.bench.common.row_steps import ensure_state
from sok_lite.engine.dtypes import bfloat16_to_float32, float32_to_bfloat16
from sok_lite.engine.rows.store import NO_ROW
from tests.engine.rows.helpers import new_store


@pytest.mark.parametrize("near_rows", [None, 0, 1, 33, 1000])
@pytest.mark.parametrize("dim", [1, 3, 4096])
def test_rows_of_both_tiers_read_back_what_was_written_across_chunks(backend, near_rows, dim):
    """Those of a state that comes late begin with its initial value."""
    store, n = new_store(backend, dim, near_rows=near_rows), 1400 if dim < 100 else 40
    ensure_state(store, "m", 0.5)
    rows = store.allocate(n // 2)
    ensure_state(store, "v", 0.25, dim=1)
    rows = backend.xp.concatenate([rows, store.allocate(n // 2)])
    rng = np.random.default_rng(dim)
    for name in ("value", "m", "v"):
        column = store.column(name)
        held = backend.to_host(store.read(rows, column=name))
        np.testing.assert_array_equal(held, np.full(held.shape, column.initial, np.float32))
        values = rng.random((n, column.dim), np.float32)
        store.write(rows, backend.from_host(values), column=name)
        order = rng.permutation(n)
        read = store.read(backend.from_host(backend.to_host(rows)[order]), column=name)
        np.testing.assert_array_equal(backend.to_host(read), values[order])


def test_memory_that_does_not_fit_is_not_read_into(backend):
    store = new_store(backend)
    rows = store.allocate(5)
    for out in (np.zeros((4, 3), np.float32), np.zeros((5, 3), np.int32), np.zeros((5, 3)).T):
        with pytest.raises(ValueError, match=r"C-contiguous float32 array of shape \(5, 3\)"):
            store.read(rows, out=backend.from_host(out))


def test_an_absent_row_reads_zeros_and_is_not_written(backend):
    store = new_store(backend)
    rows = backend.to_host(store.allocate(2))
    some = backend.from_host(np.array([rows[0], NO_ROW, rows[1]], np.uint32))
    store.write(some, backend.from_host(np.full((3, 3), 7, np.float32)))
    store.add_launch(some, backend.from_host(np.ones((3, 3), np.float32)), scale=2.0)()
    expected = [[9, 9, 9], [0, 0, 0], [9, 9, 9]]
    np.testing.assert_array_equal(backend.to_host(store.read(some)), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_add_rounds_once_from_float32(backend, dtype):
    store = new_store(backend, 5, dtype)
    rng = np.random.default_rng(5)
    start = rng.normal(size=(40, 5)).astype(np.float32)
    deltas = rng.normal(size=(40, 5)).astype(np.float32)
    rows = store.allocate(40)
    stored = store.to_storage(backend.from_host(start))
    store.write(rows, stored)
    store.add_launch(rows, backend.from_host(deltas), scale=-0.5)()

    def widen(array):
        array = backend.to_host(array)
        return bfloat16_to_float32(np, array) if dtype == "bfloat16" else array.astype(np.float32)

    expected = widen(stored) + np.float32(-0.5) * deltas
    read = widen(store.read(rows))
    if dtype == "bfloat16":
        expected = bfloat16_to_float32(np, float32_to_bfloat16(np, expected))
    elif dtype == "float16":
        expected = expected.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(read, expected)

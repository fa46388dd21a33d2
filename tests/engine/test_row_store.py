"""The row store: chunks, columns, row numbers."""

import numpy as np
import pytest

from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.row_store import (
    ABSENT,
    RowStore,
    bfloat16_to_float32,
    float32_to_bfloat16,
)


def new_store(backend, dim=3, dtype="float32"):
    return RowStore(backend, dim, row_dtype(dtype))


@pytest.mark.parametrize("dim", [1, 3, 64, 4096])
@pytest.mark.parametrize("n", [0, 1, 33, 3000])
def test_rows_read_back_what_was_written_across_chunks(backend, dim, n):
    store = new_store(backend, dim)
    rows = store.allocate(n)
    values = np.random.default_rng(0).random((n, dim), np.float32)
    store.write(rows, backend.from_host(values))
    shuffled = np.random.default_rng(1).permutation(n)
    read = store.read(backend.from_host(backend.to_host(rows)[shuffled]))
    np.testing.assert_array_equal(backend.to_host(read), values[shuffled])


def test_rows_do_not_move_when_the_store_grows(backend):
    store = new_store(backend, 4096)
    first = store.allocate(10)
    values = np.arange(10 * 4096, dtype=np.float32).reshape(10, 4096)
    store.write(first, backend.from_host(values))
    address = backend.to_host(store.column().pointers)[0]
    store.allocate(3 << store.chunk_shift)
    assert store.column().num_chunks >= 3
    assert backend.to_host(store.column().pointers)[0] == address
    np.testing.assert_array_equal(backend.to_host(store.read(first)), values)


def test_memory_that_does_not_fit_is_not_read_into(backend):
    store = new_store(backend)
    rows = store.allocate(5)
    for out in (np.zeros((4, 3), np.float32), np.zeros((5, 3), np.int32), np.zeros((5, 3)).T):
        with pytest.raises(ValueError, match=r"C-contiguous float32 array of shape \(5, 3\)"):
            store.read(rows, out=backend.from_host(out))


def test_a_store_of_many_chunks_knows_them_all(backend):
    store = new_store(backend, 4096)
    expected = []
    for number in range(37):
        rows = store.allocate(1 << store.chunk_shift)
        store.write(rows[:1], backend.from_host(np.full((1, 4096), number, np.float32)))
        expected.append(int(rows[0]))
    assert store.column().num_chunks == 37
    firsts = store.read(backend.from_host(np.array(expected, np.uint32)))
    np.testing.assert_array_equal(backend.to_host(firsts)[:, 0], np.arange(37))


def test_used_memory_counts_rows_and_states(backend):
    store = new_store(backend)
    store.ensure_state("m", 0.0)
    store.ensure_state("v", 0.0, dim=1)
    assert store.used_bytes == 0
    store.allocate(10)
    assert store.used_bytes == 10 * (3 + 3 + 1) * 4
    assert store.num_bytes >= store.used_bytes


def test_an_absent_row_reads_zeros_and_is_not_written(backend):
    store = new_store(backend)
    rows = backend.to_host(store.allocate(2))
    some = backend.from_host(np.array([rows[0], ABSENT, rows[1]], np.uint32))
    store.write(some, backend.from_host(np.full((3, 3), 7, np.float32)))
    store.add(some, backend.from_host(np.ones((3, 3), np.float32)), scale=2.0)
    expected = [[9, 9, 9], [0, 0, 0], [9, 9, 9]]
    np.testing.assert_array_equal(backend.to_host(store.read(some)), expected)


def test_freed_rows_are_handed_out_again_with_fresh_state(backend):
    store = new_store(backend)
    store.ensure_state("accumulator", 0.1)
    rows = store.allocate(5)
    store.write(rows, backend.from_host(np.ones((5, 3), np.float32)), column="accumulator")
    store.release(rows[1:3])
    again = store.allocate(3)
    assert set(backend.to_host(again).tolist()) == {1, 2, 5}
    np.testing.assert_allclose(
        backend.to_host(store.read(again, column="accumulator")), np.float32(0.1)
    )


def test_a_state_made_late_covers_the_rows_that_are_there(backend):
    store = new_store(backend)
    rows = store.allocate(1 + (1 << 10))
    store.ensure_state("m", 0.5, dim=1)
    assert backend.to_host(store.read(rows, column="m")).tolist() == [[0.5]] * int(rows.size)
    with pytest.raises(ValueError, match="exists with dim 1 and initial value 0.5"):
        store.ensure_state("m", 0.0)


def test_running_out_of_memory_leaves_the_store_as_it_was(backend, monkeypatch):
    store = new_store(backend)
    store.ensure_state("m", 0.0)
    store.allocate(7)
    real, calls = backend.zeros_chunk, []

    def fails_on_second_column(num_bytes):
        calls.append(num_bytes)
        if len(calls) > 1:
            raise MemoryError("no more")
        return real(num_bytes)

    monkeypatch.setattr(backend, "zeros_chunk", fails_on_second_column)
    with pytest.raises(MemoryError):
        store.allocate(1 << store.chunk_shift)
    monkeypatch.undo()
    assert {store.column(name).num_chunks for name in ("value", "m")} == {1}
    assert backend.to_host(store.allocate(1)).tolist() == [7]


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(4)
    values = rng.integers(0, 2**32, 100_003, dtype=np.uint32).view(np.float32)
    bits = float32_to_bfloat16(np, values)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    nan = np.isnan(values)
    np.testing.assert_array_equal(bits[~nan], expected.view(np.uint16)[~nan])
    assert np.isnan(bfloat16_to_float32(np, bits[nan])).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_add_rounds_once_from_float32(backend, dtype):
    store = new_store(backend, 5, dtype)
    rng = np.random.default_rng(5)
    start = rng.normal(size=(40, 5)).astype(np.float32)
    deltas = rng.normal(size=(40, 5)).astype(np.float32)
    rows = store.allocate(40)
    stored = store.to_storage(backend.from_host(start))
    store.write(rows, stored)
    store.add(rows, backend.from_host(deltas), scale=-0.5)

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


def test_values_of_another_kind_are_refused(backend):
    store = new_store(backend)
    with pytest.raises(TypeError, match=r"must be float32.*int64"):
        store.to_storage(backend.from_host(np.ones((1, 3), np.int64)))

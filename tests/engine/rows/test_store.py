"""The memory of rows in chunks and tiers, and their numbers."""

import gc
import weakref

import numpy as np
import pytest

from scripts.bench.common.row_steps import ensure_state
from tests.engine.rows.helpers import new_store


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


def test_a_store_of_many_chunks_knows_them_all(backend):
    store = new_store(backend, 4096)
    expected = []
    for number in range(37):
        rows = store.allocate(1 << store.chunk_shift)
        store.write(rows[:1], backend.from_host(np.full((1, 4096), number, np.float32)))
        expected.append(int(rows[0]))
    assert store.column().num_chunks >= 37
    firsts = store.read(backend.from_host(np.array(expected, np.uint32)))
    np.testing.assert_array_equal(backend.to_host(firsts)[:, 0], np.arange(37))


def test_used_memory_counts_rows_and_states(backend):
    store = new_store(backend)
    ensure_state(store, "m", 0.0)
    ensure_state(store, "v", 0.0, dim=1)
    assert store.used_bytes == 0
    store.allocate(10)
    assert store.used_bytes == 10 * (3 + 3 + 1) * 4
    assert store.num_bytes >= store.used_bytes


def test_freed_rows_are_handed_out_again_with_fresh_state(backend):
    store = new_store(backend)
    ensure_state(store, "accumulator", 0.1)
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
    ensure_state(store, "m", 0.5, dim=1)
    assert backend.to_host(store.read(rows, column="m")).tolist() == [[0.5]] * int(rows.size)


def test_running_out_of_memory_leaves_the_store_as_it_was(backend, monkeypatch):
    store = new_store(backend)
    ensure_state(store, "m", 0.0)
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


# ---------------------------------------------------------------- two tiers


@pytest.mark.parametrize("near_rows", [1, 31, 63, 64, 100, 1000, 123_456, 10**8])
def test_the_near_part_is_close_to_what_was_asked_for(backend, near_rows):
    store = new_store(backend, near_rows=near_rows)
    assert store.near_rows <= near_rows
    assert store.near_rows > near_rows * 31 / 32 or store.near_rows == near_rows
    assert store.near_rows == near_rows or near_rows >= 64


def test_near_rows_are_handed_out_first_and_freed_ones_before_new_ones(backend):
    store = new_store(backend, near_rows=4)
    assert backend.to_host(store.allocate(2)).tolist() == [0, 1]
    assert store.num_far_rows == 0
    assert backend.to_host(store.allocate(5)).tolist() == [2, 3, 4, 5, 6]
    assert store.num_far_rows == 3
    store.release(backend.from_host(np.array([5, 1, 4, 2], np.uint32)))
    assert sorted(backend.to_host(store.allocate(1)).tolist())[0] in (1, 2)
    assert set(backend.to_host(store.allocate(4)).tolist()) <= {1, 2, 4, 5, 7}
    assert store.num_rows == 8


def test_memory_is_told_by_tier(backend):
    store = new_store(backend, near_rows=64)
    ensure_state(store, "v", 0.0, dim=1)
    assert store.tier_bytes() == (0, 0, 0, 0)
    store.allocate(100)
    near_used, far_used, near, far = store.tier_bytes()
    assert (near_used, far_used, near) == (64 * 16, 36 * 16, 64 * 16)
    assert far >= far_used
    assert store.used_bytes == near_used + far_used
    assert store.num_bytes == near + far
    everything = new_store(backend)
    everything.allocate(100)
    assert everything.tier_bytes()[:2] == (1200, 0)
    assert everything.tier_bytes().far == 0


class SmallDevice:
    """Near memory that ends: what is asked for counts until nobody uses it any more.

    Attributes:
      room: bytes there are; None: all that are asked for.
      sizes: of the allocations so far.
    """

    def __init__(self, backend, monkeypatch, chunk_bytes, room=None):
        self.room, self.sizes, self._used = room, [], 0
        monkeypatch.setattr(backend, "chunk_bytes", chunk_bytes)
        limited = self._limited(backend.zeros_chunk)
        for name in ("zeros_chunk", "first_chunk"):
            monkeypatch.setattr(backend, name, limited)

    def _limited(self, allocate):
        def call(num_bytes):
            if self.room is not None and self._used + num_bytes > self.room:
                raise MemoryError("no more")
            memory = allocate(num_bytes)
            self.sizes.append(num_bytes)
            self._used += num_bytes
            weakref.finalize(memory, self._give_back, num_bytes)
            return memory

        return call

    def _give_back(self, num_bytes):
        self._used -= num_bytes


@pytest.mark.parametrize(("batch", "most"), [(100, 180), (7_000, 30), (200_000, 1)])
def test_near_memory_comes_in_slabs_that_grow(backend, monkeypatch, batch, most):
    device = SmallDevice(backend, monkeypatch, 1 << 13)
    store = new_store(backend, 16)
    while store.num_rows < 200_000:
        store.allocate(min(batch, 200_000 - store.num_rows))
    # 1,563 chunks of 128 rows. A slab for each would be as many calls of a GPU's driver.
    assert store.column().num_chunks >= 1_563
    assert len(device.sizes) <= most
    unused = store.num_bytes - store.used_bytes
    assert 0 <= unused <= store.used_bytes / 32 + (1 << 13)
    assert store.num_bytes == sum(device.sizes)
    # A state that comes later is one slab, however the others came.
    device.sizes.clear()
    ensure_state(store, "m", 0.0)
    assert device.sizes == [store.tier_bytes().near // 2]


def test_memory_set_aside_for_more_rows_is_not_what_it_fails_for(backend, monkeypatch):
    chunk, num_chunks = 1 << 10, 150
    device = SmallDevice(backend, monkeypatch, chunk, room=2 * num_chunks * chunk)
    store = new_store(backend, 8)
    ensure_state(store, "m", 0.5)
    rows_per_chunk = 1 << store.chunk_shift
    for _ in range(num_chunks):
        store.allocate(rows_per_chunk)
    assert store.num_bytes == store.used_bytes == device.room
    with pytest.raises(MemoryError, match="no more"):
        store.allocate(1)
    assert store.num_rows == num_chunks * rows_per_chunk
    states = store.read(backend.xp.arange(store.num_rows, dtype=np.uint32), "m")
    assert (backend.to_host(states) == 0.5).all()
    store.clear()
    gc.collect()
    assert len(store.allocate(rows_per_chunk)) == rows_per_chunk


def test_far_memory_comes_in_pieces_that_grow(backend, monkeypatch):
    monkeypatch.setattr(backend, "far_chunk_bytes", 1 << 18)
    store = new_store(backend, 64, near_rows=1)
    real, sizes = backend.far_chunk, []

    def counted(num_bytes):
        sizes.append(num_bytes)
        return real(num_bytes)

    monkeypatch.setattr(backend, "far_chunk", counted)
    while store.num_rows < 200_000:
        store.allocate(1000)
    far_bytes = (store.num_rows - 1) * 64 * 4
    assert far_bytes <= sum(sizes) < 1.2 * far_bytes
    assert len(sizes) < 40  # 200 of the smallest


def test_running_out_of_far_memory_leaves_the_store_as_it_was(backend, monkeypatch):
    store = new_store(backend, near_rows=8)
    ensure_state(store, "m", 0.5)
    rows = store.allocate(7)
    store.write(rows, backend.from_host(np.ones((7, 3), np.float32)))
    real, calls = backend.far_chunk, []

    def fails_on_second_column(num_bytes):
        calls.append(num_bytes)
        if len(calls) > 1:
            raise MemoryError("no more")
        return real(num_bytes)

    monkeypatch.setattr(backend, "far_chunk", fails_on_second_column)
    with pytest.raises(MemoryError):
        store.allocate(2)
    with pytest.raises(MemoryError):
        store.reserve(2)
    monkeypatch.undo()
    assert store.column().num_chunks == store.column("m").num_chunks
    assert store.tier_bytes().far == 0
    assert backend.to_host(store.allocate(2)).tolist() == [7, 8]
    assert (backend.to_host(store.read(rows)) == 1).all()


def test_a_file_for_rows_that_are_all_near_is_refused(backend):
    with pytest.raises(ValueError, match="Give near_rows"):
        new_store(backend, near_rows=None, far_path="/tmp")

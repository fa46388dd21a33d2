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


def test_a_file_for_rows_that_are_all_near_is_refused(backend):
    with pytest.raises(ValueError, match="Give near_rows"):
        new_store(backend, near_rows=None, far_path="/tmp")

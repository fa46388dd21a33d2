"""The row store: chunks, columns, row numbers."""

import gc
import weakref

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.engine.dtypes import bfloat16_to_float32, float32_to_bfloat16, row_dtype
from sok_lite.engine.rows.store import ABSENT, RowStore
from tests.engine.own_process import run_limited


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
    assert store.column().num_chunks >= 37
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


# ---------------------------------------------------------------- two tiers


def tiered(backend, near_rows, dim=3, **options):
    return RowStore(backend, dim, row_dtype("float32"), near_rows=near_rows, **options)


@pytest.mark.parametrize("near_rows", [0, 1, 31, 33, 1000])
def test_rows_of_both_tiers_read_back_what_was_written(backend, near_rows):
    store = tiered(backend, near_rows)
    store.ensure_state("m", 0.5)
    rows = store.allocate(700)
    store.ensure_state("v", 0.0, dim=1)
    rows = backend.xp.concatenate([rows, store.allocate(700)])
    rng = np.random.default_rng(near_rows)
    for name in ("value", "m", "v"):
        column = store.column(name)
        held = backend.to_host(store.read(rows, column=name))
        np.testing.assert_array_equal(held, np.full(held.shape, column.initial, np.float32))
        values = rng.random((1400, column.dim), np.float32)
        store.write(rows, backend.from_host(values), column=name)
        order = rng.permutation(1400)
        read = store.read(backend.from_host(backend.to_host(rows)[order]), column=name)
        np.testing.assert_array_equal(backend.to_host(read), values[order])


@pytest.mark.parametrize("near_rows", [1, 31, 63, 64, 100, 1000, 123_456, 10**8])
def test_the_near_part_is_close_to_what_was_asked_for(backend, near_rows):
    store = tiered(backend, near_rows)
    assert store.near_rows <= near_rows
    assert store.near_rows > near_rows * 31 / 32 or store.near_rows == near_rows
    assert store.near_rows == near_rows or near_rows >= 64


def test_near_rows_are_handed_out_first_and_freed_ones_before_new_ones(backend):
    store = tiered(backend, 4)
    assert backend.to_host(store.allocate(2)).tolist() == [0, 1]
    assert store.num_far_rows == 0
    assert backend.to_host(store.allocate(5)).tolist() == [2, 3, 4, 5, 6]
    assert store.num_far_rows == 3
    store.release(backend.from_host(np.array([5, 1, 4, 2], np.uint32)))
    assert sorted(backend.to_host(store.allocate(1)).tolist())[0] in (1, 2)
    assert set(backend.to_host(store.allocate(4)).tolist()) <= {1, 2, 4, 5, 7}
    assert store.num_rows == 8


def test_memory_is_told_by_tier(backend):
    store = tiered(backend, 64)
    store.ensure_state("v", 0.0, dim=1)
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


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_swapped_rows_exchange_values_and_states(backend, n, dtype):
    store = RowStore(backend, 5, row_dtype(dtype), near_rows=n)
    store.ensure_state("v", 0.0, dim=1)
    rows = store.allocate(2 * n)
    rng = np.random.default_rng(n)
    written = {}
    for name in ("value", "v"):
        column = store.column(name)
        written[name] = rng.random((2 * n, column.dim)).astype(column.dtype)
        store.write(rows, backend.from_host(written[name]), column=name)
    order = rng.permutation(2 * n)[: n + n // 2].astype(np.uint32)
    near, far = order[: n // 2], order[n // 2 : n // 2 * 2]
    store.swap(backend.from_host(near), backend.from_host(far))
    for name, expected in written.items():
        expected[near], expected[far] = expected[far], expected[near]
        np.testing.assert_array_equal(backend.to_host(store.read(rows, column=name)), expected)


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
    store.ensure_state("m", 0.0)
    assert device.sizes == [store.tier_bytes().near // 2]


def test_memory_set_aside_for_more_rows_is_not_what_it_fails_for(backend, monkeypatch):
    chunk, num_chunks = 1 << 10, 150
    device = SmallDevice(backend, monkeypatch, chunk, room=2 * num_chunks * chunk)
    store = new_store(backend, 8)
    store.ensure_state("m", 0.5)
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
    store = tiered(backend, 1, dim=64)
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
    store = tiered(backend, 8)
    store.ensure_state("m", 0.5)
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


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"near_rows": -1}, "at least 0"),
        ({"near_rows": None, "far_path": "/tmp"}, "Give near_rows"),
    ],
)
def test_tiers_that_make_no_sense_are_refused(backend, options, match):
    with pytest.raises(ValueError, match=match):
        RowStore(backend, 3, row_dtype("float32"), **options)


# ---------------------------------------------------------------- far rows in a file


@pytest.fixture
def cpu():
    return get_backend("cpu")


@pytest.mark.parametrize("is_folder", [True, False])
def test_far_rows_in_a_file_grow_with_their_states_and_the_file_goes_with_them(
    cpu, tmp_path, is_folder
):
    path = tmp_path if is_folder else tmp_path / "rows"
    store = tiered(cpu, 100, 64, far_path=path)
    store.ensure_state("m", 0.5)
    rng = np.random.default_rng(0)
    values = rng.random((200_000, 64), np.float32)
    for start in range(0, 200_000, 50_000):
        rows = store.allocate(50_000)
        store.write(rows, values[start : start + 50_000])
    store.ensure_state("v", 0.0, dim=1)
    rows = np.arange(200_000, dtype=np.uint32)
    np.testing.assert_array_equal(store.read(rows), values)
    assert (store.read(rows, column="m") == 0.5).all()
    assert (store.read(rows, column="v") == 0).all()
    if not is_folder:
        assert path.stat().st_size == store.tier_bytes().far
        # Not a sparse file: to write to a mapped page that the disk has no room for kills.
        assert path.stat().st_blocks * 512 >= path.stat().st_size
    store.clear()
    rows = store.allocate(1000)
    assert (store.read(rows) == 0).all()
    assert (store.read(rows, column="m") == 0.5).all()
    assert bool(list(tmp_path.iterdir())) is not is_folder
    del store
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_two_tables_do_not_share_a_file(cpu, tmp_path):
    path = tmp_path / "rows"
    store = tiered(cpu, 10, far_path=path)
    rows = store.allocate(100)
    store.write(rows, np.ones((100, 3), np.float32))
    with pytest.raises(FileExistsError, match="that no other table uses"):
        tiered(cpu, 10, far_path=path)
    assert (store.read(rows) == 1).all()
    others = [tiered(cpu, 10, far_path=tmp_path) for _ in range(2)]
    for number, other in enumerate(others):
        other.write(other.allocate(100), np.full((100, 3), number, np.float32))
    for number, other in enumerate(others):
        assert (other.read(rows) == number).all()


def test_a_file_that_is_there_is_never_touched(cpu, tmp_path):
    path = tmp_path / "checkpoint"
    path.write_text("dear to me")
    with pytest.raises(FileExistsError):
        tiered(cpu, 10, far_path=path)
    gc.collect()
    assert path.read_text() == "dear to me"


def test_a_file_in_no_folder_is_refused(cpu, tmp_path):
    with pytest.raises(FileNotFoundError):
        tiered(cpu, 10, far_path=tmp_path / "none" / "rows")


def test_a_full_disk_leaves_the_store_whole(tmp_path):
    # The limit on the size of a file stands for the disk: 16 MB have room for two more pieces of
    # 4 MB for the values, but then not for those of `m`.
    program = """
        import os, resource, sys
        import numpy as np
        from sok_lite.backend import get_backend
        from sok_lite.engine.dtypes import row_dtype
        from sok_lite.engine.rows.store import RowStore

        backend = get_backend("cpu")
        backend.far_chunk_bytes = 1 << 22
        store = RowStore(backend, 64, row_dtype("float32"), near_rows=64, far_path=sys.argv[1])
        store.ensure_state("m", 0.5)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, 1 << 24))
        rows = store.allocate(64 + (1 << 14))
        values = np.random.default_rng(0).random((rows.size, 64), np.float32)
        store.write(rows, values)
        before = store.tier_bytes(), os.stat(sys.argv[1]).st_size
        for make in (lambda: store.allocate(1 << 15), lambda: store.ensure_state("v", 0.0, 200)):
            try:
                make()
            except MemoryError as error:
                print(str(error).count("bytes"))
            assert (store.tier_bytes(), os.stat(sys.argv[1]).st_size) == before
        np.testing.assert_array_equal(store.read(rows), values)
        assert (store.read(rows, column="m") == 0.5).all()
        more = store.allocate(1 << 14)
        assert (store.read(more, column="m") == 0.5).all() and (store.read(more) == 0).all()
        print("whole")
    """
    assert run_limited(program, tmp_path / "rows") == ["2", "2", "whole"]
    assert not list(tmp_path.iterdir())


def test_a_table_larger_than_memory_trains_in_a_file_and_only_there(tmp_path):
    # 400 MB of rows and states; the process may have 200 MB of memory of its own on top of what it
    # has when it starts. A shared mapping of a file does not count.
    program = """
        import resource, sys
        from types import SimpleNamespace
        import numpy as np
        from sok_lite.backend import get_backend
        from sok_lite.engine.dtypes import row_dtype
        from sok_lite.engine.optimizers import Adagrad
        from sok_lite.engine.optimizers.rule import apply_rule
        from sok_lite.engine.rows.store import RowStore

        path = sys.argv[1] if len(sys.argv) > 1 else None
        backend = get_backend("cpu")
        with open("/proc/self/status") as status:
            data = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
        limit = (data << 10) + (200 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        dim, n, batch = 64, 800_000, 20_000
        store = RowStore(backend, dim, row_dtype("float32"), near_rows=10_000, far_path=path)
        table = SimpleNamespace(backend=backend, store=store)
        rule = Adagrad()
        initial = rule.states["accumulator"]
        store.ensure_state("accumulator", initial)
        for start in range(0, n, batch):
            rows = store.allocate(batch)
            grads = np.repeat((1 + rows % 7).astype(np.float32)[:, None], dim, axis=1)
            apply_rule(table, rule, rows, grads, 0.5, 1)
        for start in range(0, n, batch):
            rows = np.arange(start, start + batch, dtype=np.uint32)
            g = (1 + rows % 7).astype(np.float32)[:, None]
            values = -np.float32(0.5) * g / np.sqrt(np.float32(initial) + g * g)
            np.testing.assert_allclose(store.read(rows)[:, :1], values, rtol=1e-3)
        print(store.tier_bytes().far >> 20 > 200)
    """
    assert run_limited(program, tmp_path) == ["True"]
    with pytest.raises(AssertionError, match="MemoryError: No .* bytes of memory"):
        run_limited(program)

"""Far rows in a file."""

import gc

import numpy as np
import pytest

from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend import get_backend
from tests.engine.rows.helpers import new_store
from tests.support.own_process import run_limited


@pytest.fixture
def cpu():
    return get_backend("cpu")


@pytest.mark.parametrize("is_folder", [True, False])
def test_far_rows_in_a_file_grow_with_their_states_and_the_file_goes_with_them(
    cpu, tmp_path, is_folder
):
    path = tmp_path if is_folder else tmp_path / "rows"
    store = new_store(cpu, 64, near_rows=100, far_path=path)
    ensure_state(store, "m", 0.5)
    rng = np.random.default_rng(0)
    values = rng.random((200_000, 64), np.float32)
    for start in range(0, 200_000, 50_000):
        rows = store.allocate(50_000)
        store.write(rows, values[start : start + 50_000])
    ensure_state(store, "v", 0.0, dim=1)
    rows = np.arange(200_000, dtype=np.uint32)
    np.testing.assert_array_equal(store.read(rows), values)
    assert (store.read(rows, column="m") == 0.5).all()
    assert (store.read(rows, column="v") == 0).all()
    if not is_folder:
        # Each piece is a whole number of pages: there are a dozen of each column.
        assert 0 <= path.stat().st_size - store.tier_bytes().far <= 3 * 12 * 4096
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
    store = new_store(cpu, near_rows=10, far_path=path)
    rows = store.allocate(100)
    store.write(rows, np.ones((100, 3), np.float32))
    with pytest.raises(FileExistsError, match="that no other table uses"):
        new_store(cpu, near_rows=10, far_path=path)
    assert (store.read(rows) == 1).all()
    others = [new_store(cpu, near_rows=10, far_path=tmp_path) for _ in range(2)]
    for number, other in enumerate(others):
        other.write(other.allocate(100), np.full((100, 3), number, np.float32))
    for number, other in enumerate(others):
        assert (other.read(rows) == number).all()


def test_a_file_that_is_there_is_never_touched_and_one_in_no_folder_refused(cpu, tmp_path):
    path = tmp_path / "checkpoint"
    path.write_text("dear to me")
    for wrong, error in ((path, FileExistsError), (path.parent / "no" / "c", FileNotFoundError)):
        with pytest.raises(error):
            new_store(cpu, near_rows=10, far_path=wrong)
    gc.collect()
    assert path.read_text() == "dear to me"


def test_a_full_disk_leaves_the_store_whole(tmp_path):
    # The limit on the size of a file stands for the disk: 16 MB have room for two more pieces of
    # 4 MB for the values, but then not for those of `m`.
    program = """
        import os, resource, sys
        import numpy as np
        from sok_lite.backend import get_backend
        from sok_lite.engine.dtypes import row_dtype
        from sok_lite.engine.rows.store import RowStore
        from scripts.bench.common.row_steps import ensure_state

        backend = get_backend("cpu")
        backend.far_chunk_bytes = 1 << 22
        options = {"near_rows": 64, "far_path": sys.argv[1], "whose": "table 't'"}
        store = RowStore(backend, 64, row_dtype("float32"), **options)
        ensure_state(store, "m", 0.5)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, 1 << 24))
        rows = store.allocate(64 + (1 << 14))
        values = np.random.default_rng(0).random((rows.size, 64), np.float32)
        store.write(rows, values)
        before = store.tier_bytes(), os.stat(sys.argv[1]).st_size
        for make in (lambda: store.allocate(1 << 15), lambda: ensure_state(store, "v", 0.0, 200)):
            try:
                make()
            except MemoryError as error:
                print("table 't' in far_path" in str(error), str(error).count("bytes"))
            assert (store.tier_bytes(), os.stat(sys.argv[1]).st_size) == before
        np.testing.assert_array_equal(store.read(rows), values)
        assert (store.read(rows, column="m") == 0.5).all()
        more = store.allocate(1 << 14)
        assert (store.read(more, column="m") == 0.5).all() and (store.read(more) == 0).all()
        print("whole")
    """
    assert run_limited(program, tmp_path / "rows") == ["True", "3"] * 2 + ["whole"]
    assert not list(tmp_path.iterdir())

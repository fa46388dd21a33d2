"""Memory of rows that nobody holds goes back to the system, and comes back for new keys."""

import itertools
import mmap

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import rule

from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend import get_backend
from tests.conftest import QUICK
from tests.engine.rows.helpers import new_store
from tests.engine.rows.test_tiers import KEYS, TierMachine
from tests.support.forgetful import forgetful_backend
from tests.support.helpers import new_table
from tests.support.own_process import run_limited
from tests.support.table_audit import audit
from tests.support.tripwire import CtrlC


def returned(store):
    return [row for rows in store.allocator.returned for row in rows]


def test_whole_blocks_go_back_and_states_begin_anew():
    backend = forgetful_backend()
    store = new_store(backend, 4)  # blocks of 4 rows
    ensure_state(store, "m", 0.5)
    rows = store.allocate(16)
    store.write(rows, np.full((16, 4), 7, np.float32), column="m")
    store.write(rows, np.full((16, 4), 8, np.float32))
    store.release(np.array([4, 5, 6, 7, 9, 10, 11, 12], np.uint32))
    store.give_back()
    # Rows 9 to 12 are of blocks that are in use; 0 to 3 and 13 to 15 are held.
    assert returned(store) == [4, 5, 6, 7]
    assert backend.num_forgotten == 2 * 4 * 16
    kept = np.array([0, 1, 2, 3, 8, 13, 14, 15], np.uint32)
    assert (store.read(kept) == 8).all()
    assert (store.read(kept, column="m") == 7).all()
    assert store.allocator.num_free == 8
    assert store.used_bytes == (16 - 4) * 32
    # Rows whose memory is there are taken first.
    assert sorted(store.allocate(4).tolist()) == [9, 10, 11, 12]
    assert returned(store) == [4, 5, 6, 7]
    again = store.allocate(5)
    assert sorted(again.tolist()) == [4, 5, 6, 7, 16]
    assert (store.read(again, column="m") == 0.5).all()
    assert store.used_bytes == 17 * 32


def test_an_eighth_of_the_rows_that_are_held_stays_for_new_ones():
    backend = forgetful_backend()
    store = new_store(backend, 4)
    store.allocate(1000)
    store.release(np.arange(100, dtype=np.uint32))
    store.give_back()
    assert returned(store) == []
    store.release(np.arange(100, 200, dtype=np.uint32))
    store.give_back()
    assert len(returned(store)) == 100


def test_a_few_rows_are_not_looked_for(monkeypatch):
    store = new_store(forgetful_backend(), 4)
    store.allocate(4000)
    store.release(np.arange(2000, dtype=np.uint32))
    store.give_back()
    looks = []
    monkeypatch.setattr(
        "sok_lite.engine.rows.allocator.np.bincount", lambda rows: looks.append(rows.size)
    )
    for row in range(2000, 2020):
        store.release(np.array([row], np.uint32))
        store.give_back()
    assert looks == []


def test_rows_of_both_tiers_go_back():
    for near_rows in (0, 8, 13):
        store = new_store(forgetful_backend(), 4, near_rows=near_rows)
        ensure_state(store, "m", 0.5)
        store.allocate(41)
        before = store.tier_bytes()
        assert store.near_rows == near_rows
        store.release(np.arange(40, dtype=np.uint32))
        store.give_back()
        # 12 to 15 are a block of near and far rows where 13 are near; the last block has one row.
        assert sorted(returned(store)) == list(range(40))
        gone = (near_rows * 32, (40 - near_rows) * 32)
        after = tuple(told - less for told, less in zip(before, 2 * gone, strict=True))
        assert store.tier_bytes() == after
        rows = store.allocate(20)
        assert int((rows < near_rows).sum()) == near_rows
        assert (store.read(rows, column="m") == 0.5).all()


def test_far_rows_in_a_file_keep_their_place(tmp_path):
    store = new_store(forgetful_backend(), 4, near_rows=8, far_path=tmp_path)
    store.allocate(41)
    store.release(np.arange(40, dtype=np.uint32))
    store.give_back()
    assert sorted(returned(store)) == list(range(8))


def test_all_memory_goes_back_if_no_row_is_held(backend, monkeypatch, tmp_path):
    monkeypatch.setattr(backend, "chunk_bytes", 64)
    file = {"far_path": tmp_path / "rows"} if backend.name == "cpu" else {}
    store = new_store(backend, 4, near_rows=8, **file)
    ensure_state(store, "m", 0.5)
    store.release(store.allocate(41))
    assert store.num_bytes > 41 * 32
    store.give_back()
    assert (store.num_rows, store.num_bytes) == (0, 0)
    assert not file or file["far_path"].stat().st_size == 0
    rows = store.allocate(9)
    assert (backend.to_host(store.read(rows, column="m")) == 0.5).all()


class GivingBack(TierMachine):
    """What keys hold stays as it is while the memory of others comes and goes."""

    new_backend = staticmethod(forgetful_backend)

    @rule(keys=KEYS)
    def erase(self, keys):
        self.table.erase([key for key in keys if key in self.table.row_of])
        self.table.store.give_back()

    @rule()
    def erase_most(self):
        keys = sorted(self.table.row_of, key=self.table.row_of.get)
        self.table.erase(keys[: len(keys) * 7 // 8])
        self.table.store.give_back()

    @rule()
    def rows_are_held_or_free(self):
        numbers, held = self.table.store.allocator, list(self.table.row_of.values())
        free = [*numbers.free_near.tolist(), *numbers.free_far.tolist()]
        rows = held + free + returned(self.table.store)
        assert sorted(rows) == list(range(numbers.num_rows))


TestGivingBack = GivingBack.TestCase
TestGivingBack.settings = settings(max_examples=30 if QUICK else 200, stateful_step_count=40)


def two_tiers(backend):
    near = 20 * 16 / 2**30
    table = new_table(backend, 4, "hybrid", max_capacity=1 << 10, max_hbm_for_vectors=near)
    ensure_state(table.store, "m", 0.5)
    table.find_or_insert(np.arange(100))
    return table


@pytest.mark.parametrize("what", ["goes", "comes back"])
def test_ctrl_c_while_memory_goes_or_comes_back_leaves_the_table_whole(what):
    gone = np.arange(90)
    for at in itertools.count(1, 7):
        table = two_tiers(forgetful_backend())
        rows = table.find(np.arange(100))
        table.store.write(rows, np.full((100, 4), 7, np.float32), column="m")
        if what == "comes back":
            table.erase(gone)
            assert len(returned(table.store)) > 70
        work = {
            "goes": lambda t=table: t.erase(gone),
            "comes back": lambda t=table: t.find_or_insert(np.arange(200, 290)),
        }[what]
        try:
            CtrlC(at).run(work)
        except KeyboardInterrupt:
            pass
        else:
            break
        audit(table)
        table.find_or_insert(np.arange(300, 400))
        audit(table)
        kept = table.find(np.arange(90, 100))
        assert (table.store.read(kept, "m") == 7).all()
        assert (table.store.read(table.find(np.arange(300, 400)), "m") == 0.5).all()
    assert at > 30


def test_the_system_has_the_whole_pages_of_what_is_given_back():
    backend, page = get_backend("cpu"), mmap.PAGESIZE
    memory = backend.zeros_chunk(1 << 20)
    memory[:] = 7
    before = -backend.address(memory) % page
    backend.give_back(memory[100 : before + 5 * page + 100])
    gone = np.flatnonzero(memory == 0)
    whole = np.arange(before + page * (before < 100), before + 5 * page)
    np.testing.assert_array_equal(gone, whole)


def test_entries_can_be_read_when_all_rows_went_back(tmp_path):
    program = """
        import os, sys
        import numpy as np
        from sok_lite.backend import get_backend
        from sok_lite.engine.initializer_spec import make_initializer
        from sok_lite.engine.table import make_table

        ones, keys = make_initializer("ones", 16), np.arange(200_000)
        for kind, path in (("hbm", None), ("hybrid", None), ("hybrid", sys.argv[1])):
            for is_erased in (True, False):
                options = {"far_path": path, "max_hbm_for_vectors": 2**-14} if path else {}
                table = make_table(kind, get_backend("cpu"), 16, initializer=ones, **options)
                table.lookup(keys)
                entries = table.export_chunk(0, table.num_slots)
                table.erase(keys) if is_erased else table.clear()
                assert table.store.num_rows == 0
                assert entries.values.shape == (len(keys), 16)
                if path:
                    table.lookup(keys[:10_000] + len(keys))
                    table.clear()
                    assert (entries.values == 1).all() and os.path.getsize(path) > 0
                    del entries
                    table.find(keys)
                    assert os.path.getsize(path) == 0
                del table
        print("read")
    """
    assert run_limited(program, tmp_path / "rows") == ["read"]

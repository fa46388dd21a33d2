"""Two tiers of rows: what a key holds follows it through every move, and the hot rows are near."""

import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend import cuda_unavailable, get_backend
from sok_lite.backend.launches import launch_all
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.rows.store import NO_ROW, RowStore
from sok_lite.engine.rows.tiers import RowTiers, lowest
from tests.conftest import QUICK
from tests.support.helpers import new_table
from tests.support.own_process import run_limited
from tests.support.simt import backend as simt

STATES = {"m": (0.25, None), "v": (0.0, 1)}  # initial value, dim


class DictTable:
    """A table whose index is a dict: what a key holds is known beside it, column by column."""

    def __init__(self, backend, near_rows, dim=3, dtype="float32", far_path=None):
        self.backend = backend
        self.store = RowStore(
            backend, dim, row_dtype(dtype), near_rows=near_rows, far_path=far_path
        )
        self.tiers = RowTiers(self.store)
        self.row_of = {}
        self.contents = {"value": {}}
        self.numbers = itertools.count(1)

    def columns(self):
        return ["value", *self.store.state_names]

    def array(self, numbers, dtype):
        return self.backend.from_host(np.array(numbers, dtype))

    def rows(self, keys):
        return self.array([self.row_of.get(key, NO_ROW) for key in keys], np.uint32)

    def write(self, keys, columns=None):
        """Writes a number of its own into every row of some columns."""
        for name in columns or self.columns():
            column = self.store.column(name)
            rows = self.rows(keys)
            content = [next(self.numbers) % 2048 for _ in keys]
            values = np.repeat(np.array(content, column.dtype)[:, None], column.dim, axis=1)
            self.store.write(rows, self.backend.from_host(values), column=name)
            self.contents[name].update(zip(keys, content, strict=True))

    def insert(self, keys):
        rows = self.store.allocate(len(keys))
        self.tiers.assigned(rows, self.array(keys, np.int64))
        self.row_of.update(zip(keys, self.backend.to_host(rows).tolist(), strict=True))
        self.write(keys, ["value"])
        for name in self.store.state_names:
            self.contents[name].update(dict.fromkeys(keys, self.store.column(name).initial))

    def erase(self, keys):
        rows = self.rows(keys)
        launch_all(self.tiers.assign_launches(rows, None))
        self.store.release(rows)
        for key in keys:
            del self.row_of[key]
            for content in self.contents.values():
                del content[key]

    def ensure_state(self, name):
        initial, dim = STATES[name]
        ensure_state(self.store, name, initial, dim)
        self.contents.setdefault(name, dict.fromkeys(self.row_of, initial))

    def rebalance(self):
        moved = self.tiers.rebalance()
        if moved is None:
            return {}
        keys = self.backend.to_host(moved.keys).tolist()
        rows = self.backend.to_host(moved.rows).tolist()
        assert len(set(keys)) == len(keys) and set(keys) <= set(self.row_of)
        assert all(self.row_of[key] != row for key, row in zip(keys, rows, strict=True))
        self.row_of.update(zip(keys, rows, strict=True))
        return dict(zip(keys, rows, strict=True))

    def check(self):
        assert len(set(self.row_of.values())) == len(self.row_of)
        keys = list(self.row_of)
        for name, contents in self.contents.items():
            column = self.store.column(name)
            read = self.backend.to_host(self.store.read(self.rows(keys), column=name))
            expected = np.array([contents[key] for key in keys], column.dtype)[:, None]
            np.testing.assert_array_equal(read, np.repeat(expected, column.dim, axis=1))

    def near_keys(self):
        return {key for key, row in self.row_of.items() if row < self.store.near_rows}


def lookup(table, keys, times=1):
    for _ in range(times):
        rows = table.rows(keys)
        launch_all(table.tiers.count_launches(rows))
        table.tiers.count_lookup(len(rows))


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000, 100_000])
def test_the_lowest_are_found_in_order(backend, n):
    values = np.random.default_rng(n).integers(0, 7, n).astype(np.uint8)
    values[n // 2 :] = 255
    for count in (0, 1, n // 3, n, n + 5):
        expected = np.argsort(values, kind="stable")[:count]
        found = lowest(backend.xp, backend.from_host(values), count)
        np.testing.assert_array_equal(backend.to_host(found), expected)


def test_the_lowest_are_found_across_pieces(backend, monkeypatch):
    monkeypatch.setattr("sok_lite.engine.rows.tiers._SCAN", 7)
    test_the_lowest_are_found_in_order(backend, 1000)


def test_a_row_moves_only_where_chance_does_not_explain_it(backend):
    # (far - near)^2 > 2.25 (far + near + 1): 4 against 0 and 7 against 2, not 3 or 6.
    for near, far, moves in [(0, 3, 0), (0, 4, 1), (2, 6, 0), (2, 7, 1), (9, 5, 0)]:
        table = DictTable(backend, 1)
        table.insert([5, 6])
        assert table.near_keys() == {5}
        lookup(table, [5], near)
        lookup(table, [6], far)
        assert len(table.rebalance()) == 2 * moves
        assert table.near_keys() == {6 if moves else 5}


def test_heat_is_bounded_and_cools(backend):
    table = DictTable(backend, 1)
    table.insert([1, 2])
    lookup(table, [1], 300)
    for _ in range(7):
        assert not table.rebalance()
    lookup(table, [2], 12)  # against 254 / 2^7 = 1
    assert table.rebalance() == {1: 1, 2: 0}
    assert not table.rebalance()  # a count moves with its row


def test_hot_rows_take_near_rows_that_were_freed(backend):
    table = DictTable(backend, 4)
    table.ensure_state("m")
    table.insert(range(8))
    table.write(range(8))
    lookup(table, [0, 1], 200)
    lookup(table, [6, 7], 50)
    table.erase([2, 3])
    moved = table.rebalance()
    assert set(moved) == {6, 7} and set(moved.values()) == {2, 3}
    table.check()
    # Their old rows are free now, with fresh states.
    old = backend.to_host(table.store.allocate(2))
    assert set(old.tolist()) == {6, 7}
    state = table.store.read(backend.from_host(old), column="m")
    assert (backend.to_host(state) == 0.25).all()


@pytest.mark.parametrize(("near_rows", "count"), [(5000, 1000), (None, 100), (0, 50)])
def test_where_no_row_can_come_near_nothing_moves(backend, near_rows, count):
    table = DictTable(backend, near_rows)
    table.insert(range(count))
    for _ in range(30):
        lookup(table, range(count // 2), 3)
    assert table.rebalance() == {}
    assert near_rows == 0 or not table.tiers.is_due
    assert near_rows is not None or table.tiers.num_bytes == 0


def test_a_row_that_nobody_holds_is_not_moved(backend):
    table = DictTable(backend, 2)
    table.insert(range(6))
    lookup(table, [4, 5], 100)
    table.erase([0, 1, 4])
    # Key 5 goes near, into one of two free rows; the other stays free, and so does that of key 4.
    assert set(table.rebalance()) == {5}
    table.check()
    assert set(backend.to_host(table.store.allocate(3)).tolist()) <= {0, 1, 4, 5}


def test_a_pass_is_due_after_half_a_sighting_per_row_and_eight_lookups(backend):
    table = DictTable(backend, 32)
    table.insert(range(100))
    lookup(table, [1], 49)
    assert not table.tiers.is_due
    lookup(table, [1])
    assert table.tiers.is_due
    assert table.rebalance() == {}
    lookup(table, [1], 50)  # the rest after a pass that moved nothing
    lookup(table, range(100), 7)
    assert not table.tiers.is_due
    lookup(table, [])
    assert table.tiers.is_due


def test_passes_that_move_little_are_followed_by_growing_rests(backend):
    table = DictTable(backend, 32)
    table.insert(range(1000))

    def lookups_to_next_pass(hot):
        count = 0
        while not table.tiers.is_due:
            lookup(table, range(*hot))
            count += 1
        return count

    # 50 keys a lookup, 500 sightings a pass: 10 lookups without a rest.
    counts = []
    for number in range(12):
        hot = (0, 50) if number < 7 else (500, 550)
        counts.append(lookups_to_next_pass(hot))
        table.rebalance()
    # The change comes when a rest begins. At the first pass after it the old keys are still as
    # hot as the new ones; the second deals with it.
    assert counts == [10, 20, 30, 40, 50, 50, 50, 50, 50, 10, 20, 30]
    assert len(table.near_keys() & set(range(500, 550))) == 32


KEYS = st.lists(st.integers(-60, 60), max_size=40, unique=True)


class TierMachine(RuleBasedStateMachine):
    """What keys hold does not change, whatever happens to the tiers."""

    new_backend = staticmethod(lambda: get_backend("cpu"))

    @initialize(
        near_rows=st.sampled_from([0, 1, 2, 5, 20, 64, 200]),
        dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    )
    def begin(self, near_rows, dtype):
        self.table = DictTable(self.new_backend(), near_rows, dtype=dtype)

    @rule(keys=KEYS)
    def insert(self, keys):
        self.table.insert([key for key in keys if key not in self.table.row_of])

    @rule(keys=KEYS, times=st.sampled_from([1, 3, 10, 300]))
    def look_up(self, keys, times):
        lookup(self.table, keys, times)

    @rule(keys=KEYS)
    def erase(self, keys):
        self.table.erase([key for key in keys if key in self.table.row_of])

    @rule(keys=KEYS)
    def write(self, keys):
        self.table.write([key for key in keys if key in self.table.row_of])

    @rule(name=st.sampled_from(list(STATES)))
    def ensure_state(self, name):
        self.table.ensure_state(name)

    @precondition(lambda self: self.table.store.num_far_rows)
    @rule()
    def rebalance(self):
        self.table.rebalance()

    @invariant()
    def contents_are_those_written(self):
        if hasattr(self, "table"):
            self.table.check()


class SimtTierMachine(TierMachine):
    new_backend = staticmethod(simt.simt_backend)


class CudaTierMachine(TierMachine):
    new_backend = staticmethod(lambda: get_backend("cuda"))


# On a CPU: with memory that is given back, in test_giving_back.py.
TestSimtTierMachine = pytest.mark.skipif(
    simt.unavailable() is not None, reason=f"no simulated GPU: {simt.unavailable()}"
)(SimtTierMachine.TestCase)
TestSimtTierMachine.settings = settings(max_examples=8 if QUICK else 30, stateful_step_count=20)
TestCudaTierMachine = pytest.mark.skipif(
    cuda_unavailable() is not None, reason=f"no cuda backend: {cuda_unavailable()}"
)(CudaTierMachine.TestCase)
TestCudaTierMachine.settings = settings(max_examples=20, stateful_step_count=30)


# ---------------------------------------------------------------- the table that uses them


def hybrid(backend, near_rows, dim=8, **options):
    return new_table(
        backend,
        dim,
        var_type="hybrid",
        max_hbm_for_vectors=near_rows * dim * 4 / 2**30,
        **{"init_capacity": 64, "max_capacity": 4096, **options},
    )


def test_keys_take_over_the_heat_of_nobody_when_others_are_evicted(backend):
    table = hybrid(backend, 64, init_capacity=256, max_capacity=256, on_refused="ignore")
    rng = np.random.default_rng(3)
    for step in range(80):
        hot = np.arange(40) + 1000 * (step // 40)
        keys = np.unique(np.concatenate([hot, rng.integers(10_000, 10**6, 40)]))
        lookup = table.lookup(keys)
        held = backend.to_host(lookup.rows) != NO_ROW
        values = backend.to_host(lookup.values)[:, 0]
        np.testing.assert_array_equal(values[held], keys[held] % 1000)
        if step % 40 == 39:
            assert (backend.to_host(table.find(hot)) < table.store.near_rows).mean() > 0.9
    assert table.statistics().evicted_total > 1000


def test_a_hybrid_table_tells_its_memory_by_tier(backend):
    table = hybrid(backend, 64)
    table.lookup(np.arange(100))
    statistics = table.statistics()
    assert (statistics.near_bytes, statistics.far_bytes) == (64 * 32, 36 * 32)
    assert statistics.near_reserved_bytes == 64 * 32
    assert statistics.far_reserved_bytes == table.store.tier_bytes().far >= 36 * 32
    table.clear()
    statistics = table.statistics()
    assert (statistics.near_reserved_bytes, statistics.far_reserved_bytes) == (0, 0)
    assert table.tiers.num_bytes == 0
    table.lookup(np.arange(10))
    statistics = table.statistics()
    assert (statistics.near_bytes, statistics.far_bytes) == (10 * 32, 0)


def test_a_table_that_cannot_outgrow_its_near_part_has_no_tiers(backend):
    table = hybrid(backend, 5000)
    table.lookup(np.arange(1000))
    assert table.store.near_rows is None
    assert table.tiers.num_bytes == 0


def test_a_hybrid_table_larger_than_memory_trains_in_a_file_and_only_there(tmp_path):
    # 400 MB of rows and states; the process may have 200 MB of memory of its own on top of what it
    # has when it starts, the index included. A shared mapping of a file does not count.
    program = """
        import resource, sys
        import numpy as np
        from sok_lite.backend import get_backend
        from sok_lite.engine.optimizers import Adagrad
        from sok_lite.engine.update_rows import Update
        from tests.support.helpers import new_table
        from tests.support.steps import apply_updates

        with open("/proc/self/status") as status:
            data = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
        limit = (data << 10) + (200 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        n, batch = 800_000, 20_000
        table = new_table(
            get_backend("cpu"), 64, "hybrid", init_capacity=1 << 20, max_capacity=1 << 20,
            max_hbm_for_vectors=0.005, far_path=sys.argv[1] if len(sys.argv) > 1 else None,
        )
        grads = np.ones((batch, 64), np.float32)
        for keys in np.arange(n).reshape(-1, batch):
            apply_updates([Update(table, Adagrad(), keys, grads)], 0.5, 1)
        for _ in range(60):
            table.lookup(np.arange(n - batch, n))
        for keys in np.arange(n).reshape(-1, batch):
            read = table.lookup(keys, insert=False).values
            assert abs(read - (keys % 1000 - 0.5 / 1.1**0.5)[:, None]).max() < 1e-3
        print(table.statistics().far_bytes >> 20 > 350, table.tiers.num_moved > 20_000)
    """
    assert run_limited(program, tmp_path) == ["True", "True"]
    with pytest.raises(AssertionError, match="MemoryError: No .* bytes of memory"):
        run_limited(program)


@pytest.mark.parametrize("strategy", ["kLru", "kLfu"])
def test_a_repeated_key_warms_its_row_once_a_lookup(backend, strategy):
    table = hybrid(backend, 32, evict_strategy=strategy)
    table.find_or_insert(np.arange(200))
    before = backend.to_host(table.tiers._counts[:200]).astype(int)
    looked_up = table.tiers.record.looked_up
    rows = backend.to_host(table.find_or_insert([7] * 50 + [9] * 3))
    after = backend.to_host(table.tiers._counts[:200]).astype(int)
    assert (after - before).sum() == 2
    assert (after - before)[rows[0]] == (after - before)[rows[-1]] == 1
    assert table.tiers.record.looked_up == looked_up + 2

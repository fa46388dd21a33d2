"""The det table against a dict, on every backend."""

import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sok_lite.backend import get_backend
from sok_lite.engine.row_store import ABSENT, bfloat16_to_float32
from sok_lite.engine.table import make_table
from tests.conftest import LONG
from tests.engine.helpers import KeyInitializer, first_row, new_table
from tests.reference import DictTable

SIZES = [0, 1, 31, 33, 1000, 100_003]
I64 = np.iinfo(np.int64)


def assert_same(backend, table, oracle):
    keys, rows = table.export()
    expected_keys, expected_rows = oracle.export()
    np.testing.assert_array_equal(backend.to_host(keys), expected_keys)
    np.testing.assert_array_equal(backend.to_host(rows), expected_rows)
    assert table.size == len(expected_keys)


@pytest.mark.parametrize("n", SIZES)
def test_lookup_inserts_and_finds_repeated_keys(backend, n):
    table, oracle = new_table(backend), DictTable(4, first_row(4))
    for seed in range(2):
        keys = np.random.default_rng(seed).integers(-(n // 2) - 1, n // 2 + 1, n)
        rows = backend.to_host(table.lookup(keys).values)
        np.testing.assert_array_equal(rows, oracle.find_or_insert(keys))
    assert_same(backend, table, oracle)


def test_two_million_keys_in_one_batch(backend):
    table = new_table(backend, dim=1)
    keys = np.random.default_rng(0).permutation(2_000_000) * 2**40
    rows = backend.to_host(table.lookup(keys).values)
    np.testing.assert_array_equal(rows[:, 0], (keys % 1000).astype(np.float32))
    assert table.size == 2_000_000
    assert len(np.unique(backend.to_host(table.find(keys)))) == 2_000_000


@pytest.mark.parametrize("key_type", ["int64", "int32", "uint64"])
def test_every_value_of_the_key_type_is_a_key(backend, key_type):
    info = np.iinfo(key_type)
    keys = [info.max, info.max - 1, info.min, info.min + 1, 0, 5, info.max // 2]
    keys += [-1, -2, -3, -4] if info.min < 0 else [2**63 - 1, 2**63]
    keys = np.array(list(dict.fromkeys(keys)), key_type)
    table = new_table(backend, key_type=key_type)
    assert not backend.to_host(table.contains(keys)).any()
    values = np.arange(len(keys) * 4, dtype=np.float32).reshape(-1, 4)
    table.insert_or_assign(keys, values)
    assert table.size == len(keys)
    np.testing.assert_array_equal(backend.to_host(table.lookup(keys).values), values)
    exported, rows = table.export()
    assert backend.to_host(exported).dtype == key_type
    np.testing.assert_array_equal(backend.to_host(exported), np.sort(keys))
    np.testing.assert_array_equal(backend.to_host(rows), values[np.argsort(keys)])
    table.reserve(10_000)  # the marks' own rows survive growth
    np.testing.assert_array_equal(backend.to_host(table.lookup(keys).values), values)
    assert table.erase(keys) == len(keys)
    assert table.size == 0
    assert not backend.to_host(table.contains(keys)).any()
    assert backend.to_host(table.export()[0]).size == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [1, 3, 64, 4096])
def test_every_row_format_and_dimension(backend, dtype, dim):
    table = new_table(backend, dim=dim, dtype=dtype)
    keys = np.arange(37)
    values = np.random.default_rng(0).integers(-50, 50, (37, dim)).astype(np.float32)
    table.insert_or_assign(keys, backend.from_host(values))
    read = backend.to_host(table.lookup(keys[::-1]).values)
    read = bfloat16_to_float32(np, read) if dtype == "bfloat16" else read.astype(np.float32)
    np.testing.assert_array_equal(read, values[::-1])


def test_the_last_of_a_repeated_key_is_assigned(backend):
    table, oracle = new_table(backend, dim=2), DictTable(2, first_row(2))
    keys = np.random.default_rng(0).integers(0, 50, 1000)
    values = np.random.default_rng(1).random((1000, 2), np.float32)
    table.insert_or_assign(keys, values)
    oracle.insert_or_assign(keys, values)
    assert_same(backend, table, oracle)


def test_assign_and_accumulate_leave_unknown_keys_out(backend):
    table, oracle = new_table(backend), DictTable(4, first_row(4))
    for each in (table, oracle):
        each.find_or_insert(np.arange(100))
    keys = np.random.default_rng(0).integers(50, 150, 500)
    values = np.random.default_rng(1).integers(-9, 9, (500, 4)).astype(np.float32)
    for each in (table, oracle):
        each.assign(keys, values)
        each.accumulate(keys, values, -2.0)
    assert_same(backend, table, oracle)


def test_inputs_need_not_be_contiguous(backend):
    table = new_table(backend)
    keys = np.arange(200)[::2]
    values = np.asfortranarray(np.random.default_rng(0).random((100, 4), np.float32))
    table.insert_or_assign(keys, values)
    np.testing.assert_array_equal(backend.to_host(table.lookup(keys[::-1]).values), values[::-1])


def test_row_numbers_stay_when_the_index_grows(backend):
    table = new_table(backend)
    keys = np.arange(1000) * 3
    before = backend.to_host(table.find_or_insert(keys))
    capacity, generation = table.capacity, table.generation
    table.find_or_insert(np.arange(100_000) + 1_000_000)
    assert table.capacity > capacity
    assert table.generation == generation
    np.testing.assert_array_equal(backend.to_host(table.find(keys)), before)


def test_the_index_follows_what_is_new_not_the_batch(backend):
    table = new_table(backend, dim=1)
    table.find_or_insert(np.arange(40))
    capacity = table.capacity
    table.find_or_insert(np.arange(1_000_000) % 40)
    assert table.capacity == capacity


def test_erased_rows_are_used_again_and_the_index_stays_small(backend):
    table = new_table(backend, dim=1)
    rng = np.random.default_rng(0)
    for _ in range(200 if LONG else 40):
        keys = rng.integers(I64.min, I64.max, 1000)
        table.find_or_insert(keys)
        assert table.erase(keys) == 1000
    assert table.size == 0
    assert table.capacity <= 4096
    assert backend.to_host(table.find_or_insert(np.arange(1000))).max() < 1000


def test_a_full_index_is_not_rebuilt_for_every_erased_key(backend, monkeypatch):
    table = new_table(backend, dim=1)
    full = int(0.7 * 4096)
    table.find_or_insert(np.arange(full))
    rebuilds, rehash = [], table.index._rehash
    monkeypatch.setattr(table.index, "_rehash", lambda n: (rebuilds.append(n), rehash(n)))
    for i in range(500):
        assert table.erase([i]) == 1
        table.find_or_insert([full + i])
    assert len(rebuilds) <= 3
    assert table.capacity == 4096
    exported = backend.to_host(table.export()[0])
    np.testing.assert_array_equal(exported, np.arange(500, full + 500))


def test_erase_needs_no_memory(backend, monkeypatch):
    table, oracle = new_table(backend), DictTable(4, first_row(4))
    for each in (table, oracle):
        each.find_or_insert(np.arange(40))

    def no_memory(capacity):
        raise MemoryError("none left")

    monkeypatch.setattr(table.index, "_new_slots", no_memory)
    for first in range(0, 400, 40):
        assert table.erase(np.arange(first, first + 40)) == oracle.erase(range(first, first + 40))
        for each in (table, oracle):
            each.find_or_insert(np.arange(first + 40, first + 80))
        assert_same(backend, table, oracle)


def test_erase_tells_stale_row_numbers_by_the_generation(backend):
    table = new_table(backend)
    table.find_or_insert(np.arange(10))
    generation = table.generation
    assert table.erase([77]) == 0
    assert table.generation == generation
    assert table.erase([3, 3, 77]) == 1
    assert table.generation != generation
    assert backend.to_host(table.find([3])).tolist() == [ABSENT]


def test_clear_empties_the_table(backend):
    table = new_table(backend)
    table.find_or_insert(np.arange(5000))
    table.store.ensure_state("m", 0.0)
    table.clear()
    assert table.size == 0 and table.load_factor == 0.0
    assert backend.to_host(table.export()[0]).size == 0
    np.testing.assert_array_equal(backend.to_host(table.lookup([7]).values)[0], 7)


def test_clear_without_memory_leaves_the_table_whole(backend, monkeypatch):
    table, oracle = new_table(backend), DictTable(4, first_row(4))
    for each in (table, oracle):
        each.find_or_insert(np.arange(40))

    def no_memory(capacity):
        raise MemoryError("none left")

    monkeypatch.setattr(table.index, "_new_slots", no_memory)
    with pytest.raises(MemoryError):
        table.clear()
    assert_same(backend, table, oracle)


def test_an_initializer_that_raises_costs_no_rows(backend):
    class Fails(KeyInitializer):
        def fill(self, *args):
            if failing:
                raise ZeroDivisionError
            super().fill(*args)

    failing = True
    table = make_table("hbm", backend, 4, initializer=Fails())
    with pytest.raises(ZeroDivisionError):
        table.find_or_insert(np.arange(10))
    assert table.size == 0
    failing = False
    assert sorted(backend.to_host(table.find_or_insert(np.arange(10)))) == list(range(10))


def test_reserve_makes_growth_unnecessary(backend):
    table = new_table(backend)
    table.reserve(100_000)
    capacity = table.capacity
    table.find_or_insert(np.arange(100_000))
    assert table.capacity == capacity
    table.reserve(10)
    assert table.capacity == capacity


def test_memory_that_runs_out_while_growing_leaves_the_table_whole(backend, monkeypatch):
    table, oracle = new_table(backend), DictTable(4, first_row(4))
    keys = np.arange(40)
    table.find_or_insert(keys)
    oracle.find_or_insert(keys)

    def no_memory(*args, **kwargs):
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "zeros_chunk", no_memory)
        with pytest.raises(MemoryError, match=r"to grow from 64 to 2,097,152 slots"):
            table.find_or_insert(np.arange(1 << 20))
    table.reserve(5 << table.store.chunk_shift)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "zeros_chunk", no_memory)
        with pytest.raises(MemoryError, match="none left"):
            table.find_or_insert(np.arange(5 << table.store.chunk_shift))
    assert_same(backend, table, oracle)
    table.find_or_insert(np.arange(40, 80))
    oracle.find_or_insert(np.arange(40, 80))
    assert_same(backend, table, oracle)


def test_several_python_threads_use_one_table(backend):
    table = new_table(backend, dim=2)
    failures = []

    def work(seed):
        try:
            rng = np.random.default_rng(seed)
            for _ in range(20):
                keys = rng.integers(0, 5000, 700)
                rows = backend.to_host(table.lookup(keys).values)
                np.testing.assert_array_equal(rows[:, 1], (keys % 1000).astype(np.float32))
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    keys, _ = table.export()
    assert len(set(backend.to_host(keys).tolist())) == table.size


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        ([1.5], TypeError, "must be integers that fit int64.*float64"),
        ([[1, 2]], ValueError, r"must have shape \(n,\).*\(1, 2\)"),
        (np.array([2**63 + 5], np.uint64), ValueError, "must fit int64.*9223372036854775813"),
        (np.array([True]), TypeError, "must be integers"),
    ],
)
def test_bad_keys_are_refused_and_nothing_changes(backend, keys, error, text):
    table = new_table(backend)
    with pytest.raises(error, match=text):
        table.find_or_insert(keys)
    assert table.size == 0


def test_a_key_out_of_int32_range_is_refused(backend):
    table = new_table(backend, key_type="int32")
    with pytest.raises(ValueError, match="must fit int32.*Received: 2147483648"):
        table.find_or_insert([1, 2**31])
    with pytest.raises(ValueError, match="must fit uint64.*Received: -1"):
        new_table(backend, key_type="uint64").find_or_insert([4, -1])


def test_values_of_a_wrong_shape_are_refused_and_nothing_changes(backend):
    table = new_table(backend)
    with pytest.raises(ValueError, match=r"must have shape \(2, 4\).*\(2, 3\)"):
        table.insert_or_assign([1, 2], np.zeros((2, 3), np.float32))
    assert table.size == 0


@pytest.mark.parametrize("dtype", ["uint16", "int64", "bool", "complex64"])
def test_deltas_that_are_no_floats_are_refused(backend, dtype):
    table = new_table(backend, dtype="bfloat16")
    table.find_or_insert([1])
    before = backend.to_host(table.export()[1])
    with pytest.raises(TypeError, match=f"floating-point.*Received: dtype {dtype}"):
        table.accumulate([1], np.ones((1, 4), dtype))
    np.testing.assert_array_equal(backend.to_host(table.export()[1]), before)


def test_unknown_kinds_are_refused(backend):
    with pytest.raises(ValueError, match="'hbm' or 'hybrid'.*'hmb'"):
        make_table("hmb", backend, 4, initializer=KeyInitializer())
    with pytest.raises(ValueError, match="key_type must be one of"):
        new_table(backend, key_type="string")
    with pytest.raises(ValueError, match="dtype must be one of"):
        new_table(backend, dtype="float64")
    with pytest.raises(ValueError, match="dimension must be at least 1"):
        new_table(backend, dim=0)


# Few distinct keys, so that they meet again, and both marks of the index among them.
KEYS = st.lists(
    st.integers(-20, 20) | st.sampled_from([I64.max, I64.min, I64.max - 1]), max_size=60
)


class TableAgainstDict(RuleBasedStateMachine):
    """Drives a table and the oracle together through any sequence of calls."""

    @initialize(capacity=st.sampled_from([0, 100]))
    def start(self, capacity):
        self.backend = get_backend("cpu")
        self.table = new_table(self.backend, dim=2, init_capacity=capacity)
        self.oracle = DictTable(2, first_row(2))

    def values(self, keys):
        rng = np.random.default_rng(len(keys))
        return rng.integers(-99, 99, (len(keys), 2)).astype(np.float32)

    @rule(keys=KEYS)
    def lookup(self, keys):
        expected = self.oracle.find_or_insert(keys)
        np.testing.assert_array_equal(self.table.lookup(np.array(keys, np.int64)).values, expected)

    @rule(start=st.integers(-1000, 1000), n=st.integers(0, 300))
    def lookup_many(self, start, n):
        self.lookup(list(range(start, start + n)))

    @rule(keys=KEYS)
    def insert_or_assign(self, keys):
        for each in (self.table, self.oracle):
            each.insert_or_assign(np.array(keys, np.int64), self.values(keys))

    @rule(keys=KEYS)
    def assign(self, keys):
        for each in (self.table, self.oracle):
            each.assign(np.array(keys, np.int64), self.values(keys))

    @rule(keys=KEYS)
    def accumulate(self, keys):
        for each in (self.table, self.oracle):
            each.accumulate(np.array(keys, np.int64), self.values(keys), -1.0)

    @rule(keys=KEYS)
    def erase(self, keys):
        assert self.table.erase(np.array(keys, np.int64)) == self.oracle.erase(keys)

    @rule(start=st.integers(-1000, 1000), n=st.integers(0, 300))
    def erase_many(self, start, n):
        self.erase(list(range(start, start + n)))

    @rule(keys=KEYS)
    def contains(self, keys):
        found = self.table.contains(np.array(keys, np.int64))
        np.testing.assert_array_equal(found, self.oracle.contains(keys))

    @rule()
    def clear(self):
        self.table.clear()
        self.oracle.rows.clear()

    @rule(n=st.integers(0, 500))
    def reserve(self, n):
        self.table.reserve(n)

    @invariant()
    def same(self):
        if hasattr(self, "table"):
            assert_same(self.backend, self.table, self.oracle)
            assert self.table.load_factor <= 0.7


TestTableAgainstDict = TableAgainstDict.TestCase
TestTableAgainstDict.settings = settings(
    max_examples=2000 if LONG else 60, stateful_step_count=50 if LONG else 25, deadline=None
)

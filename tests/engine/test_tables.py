"""What every table must do: state machines against a dict, and what no machine draws.

What only one kind of table does is in test_det.py and test_hkv.py.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend import cuda_unavailable, get_backend
from sok_lite.backend.cpu import CpuBackend
from sok_lite.engine.dtypes import bfloat16_to_float32
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table import make_table
from sok_lite.engine.table.hkv_options import STRATEGIES
from tests.conftest import QUICK
from tests.support.eviction_facts import Watched
from tests.support.helpers import (
    KeyInitializer,
    first_row,
    new_table,
    run_threads,
    sized,
    with_segments,
)
from tests.support.reference import DictTable
from tests.support.simt import backend as simt
from tests.support.table_audit import audit, audit_insides

I64 = np.iinfo(np.int64)

# -------------------------------------------------------------------- the machines

# Few distinct keys, so that they meet again, and the marks of the index among them.
KEYS = st.lists(
    st.integers(-60, 60) | st.sampled_from([I64.max, I64.min, I64.max - 1]), max_size=40
)
MANY = st.tuples(st.integers(-1000, 1000), st.integers(0, 300)).map(
    lambda span: list(range(span[0], span[0] + span[1]))
)
BATCH = KEYS | MANY
DTYPES = st.sampled_from(["float32", "float32", "float64", "int32", "int64", "int8"])
DIMS = st.sampled_from([2, 1, 5])


def four_threads():
    """A backend whose every launch uses four threads, however few the items, and which forgets the
    small blocks of memory that it is given back."""
    backend = CpuBackend(num_threads=4)
    backend.grain = 1
    backend.chunk_bytes = backend.far_chunk_bytes = 64
    backend.give_back = lambda memory: memory.fill(0)
    return backend


class SmallKeys(KeyInitializer):
    """k mod 100, for rows of integers."""

    def values(self, backend, keys, dim, table_seed):
        return (super().values(backend, keys, dim, table_seed) % 100).astype(np.int8)


class TableAgainstDict(RuleBasedStateMachine):
    """Drives a table and the oracle together through any sequence of calls."""

    def begin(self, var_type, dtype, dim, is_logged, **options):
        # In smaller segments a log may find no slot.
        segment_slots = 256 if is_logged or var_type == "hbm" else 16
        self.backend = with_segments(self.new_backend(), segment_slots)
        is_integer = dtype.startswith("int")
        initializer = SmallKeys() if is_integer else KeyInitializer()
        options |= {"dtype": dtype, "initializer": initializer}
        table = make_table(var_type, self.backend, dim, **options)
        ensure_state(table.store, "m", 0.5)
        if is_logged:
            table.log_removals()
        modulus = 100 if is_integer else 1000
        self.watch = Watched(table, lambda key: np.full(dim, key % modulus, dtype))
        self.states, self.first_capacity = {}, table.capacity
        self.numbers, self.row_version = {}, table.row_version
        self.has_lookup_scores = table.evict_strategy in (None, "kLru", "kEpochLru")

    def values(self, keys, dtype=None):
        """Numbers whose sums are exact: of integers those modulo 2**bits, of all of the range."""
        dtype, shape = dtype or self.watch.oracle.dtype, (len(keys), self.watch.table.dim)
        rng = np.random.default_rng(len(keys))
        if dtype == np.float32:
            return rng.integers(-99, 99, shape).astype(dtype)
        if dtype == np.float64:  # float32 holds few of these
            return rng.integers(-(2**40), 2**40, shape) * 2.0**-20
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)

    def scores(self, keys, draw):
        """One for each key, often the number of a lookup that was."""
        most = self.watch.oracle.now + 1 if self.has_lookup_scores else 40
        return [(draw * (7 * i + 1) + key) % most for i, key in enumerate(keys)]

    @rule(keys=BATCH, report=st.booleans(), is_distinct=st.booleans())
    def lookup(self, keys, report, is_distinct):
        keys = list(dict.fromkeys(keys)) if is_distinct else keys
        self.watch.lookup(keys, report=report, unique_keys=is_distinct)

    @rule(keys=BATCH, draw=st.none() | st.integers(0, 30), report=st.booleans())
    def insert(self, keys, draw, report):
        scores = None if draw is None else self.scores(keys, draw)
        report = report and self.watch.is_hybrid
        self.watch.insert(keys, self.values(keys), scores, report=report)

    @rule(keys=BATCH, flip=st.booleans())
    def accum_or_assign(self, keys, flip):
        flags = self.watch.oracle.contains(keys) ^ (flip & (np.arange(len(keys)) % 3 == 0))
        self.watch.accum_or_assign(keys, self.values(keys), flags)

    @rule(keys=KEYS, scale=st.none() | st.sampled_from([1.0, -2.0]))
    def write(self, keys, scale):
        if scale is None:
            self.watch.write("assign", keys, self.values(keys))
        else:
            self.watch.write("accumulate", keys, self.values(keys), scale)

    @rule(keys=KEYS)
    def write_states(self, keys):
        keys = [key for key in dict.fromkeys(keys) if key in self.watch.oracle.rows]
        values = self.values(keys, np.float32)
        self.watch.table.assign_state("m", np.array(keys, np.int64), values)
        self.states.update(zip(keys, values.tolist(), strict=True))
        self.watch.wrote(keys)

    @rule(keys=BATCH)
    def erase(self, keys):
        self.watch.erase(keys)

    @rule(divisor=st.integers(2, 5), score=st.integers(0, 40))
    def choose(self, divisor, score):
        """A predicate may work in place."""

        def is_chosen(held):
            is_low = held.scores < score
            for each in (held.keys, held.rows, held.scores):
                each %= divisor
            return is_low & (held.keys == 0)

        table, oracle, host = self.watch.table, self.watch.oracle, self.backend.to_host
        chosen = [k for k, held in oracle.scores.items() if k % divisor == 0 and held < score]
        keys, rows = map(host, table.export_if(is_chosen))
        assert keys.tolist() == sorted(chosen) and rows.shape == (len(chosen), table.dim)
        np.testing.assert_array_equal(rows, [oracle.rows[key] for key in sorted(chosen)] or rows)
        self.watch.note_erased(table.erase_if(is_chosen), chosen)

    @rule(num_lookups=st.integers(0, 12))
    def expire(self, num_lookups):
        self.watch.expire(num_lookups)

    @rule(keys=KEYS, draw=st.integers(0, 30))
    def assign_scores(self, keys, draw):
        self.watch.assign_scores(keys, self.scores(keys, draw))

    @rule()
    def age(self):
        self.watch.age()

    @rule(keys=KEYS, cutoff=st.sampled_from([0.5, 20, 2.0**40, np.inf]), is_erased=st.booleans())
    def small_rows(self, keys, cutoff, is_erased):
        """They are counted, left out and erased by what is there now."""
        table, oracle, host = self.watch.table, self.watch.oracle, self.backend.to_host
        zeros = -0.0 * np.ones((len(keys), table.dim))
        self.watch.write("assign", keys, zeros.astype(oracle.dtype))
        self.write_states(keys[::2])
        rows = {key: [abs(x) for x in row.tolist()] for key, row in oracle.rows.items()}
        assert table.num_zero_rows() == sum(not any(row) for row in rows.values())
        small = [key for key, row in rows.items() if max(row) < cutoff]
        left = sorted(rows.keys() - set(small))
        found, values = map(host, table.export(cutoff=cutoff))
        assert found.tolist() == left
        expected = np.array([oracle.rows[key] for key in left], oracle.dtype)
        np.testing.assert_array_equal(values, expected.reshape(values.shape))
        assert host(table.export("m", cutoff=cutoff)[0]).tolist() == left
        # Those that an optimizer has set to zero.
        begun = [0.5] * table.dim
        changed = [key for key, row in rows.items() if self.states.get(key, begun) != begun]
        shrunk = sorted(key for key in changed if not any(rows[key]))
        assert host(table.shrunk_keys()).tolist() == shrunk
        if is_erased:
            self.watch.note_erased(table.erase_below(cutoff), small)

    @rule(keys=BATCH, missing=st.sampled_from(["initial", "zeros"]))
    def read(self, keys, missing):
        """Changes nothing, as `same` sees."""
        table, oracle, host = self.watch.table, self.watch.oracle, self.backend.to_host
        array, row_version = np.array(keys, np.int64), table.row_version
        found = table.lookup(array, insert=False, missing=missing)
        zeros = np.zeros(table.dim, oracle.dtype)
        absent = oracle.first_row if missing == "initial" else lambda key: zeros
        expected = [oracle.rows[key] if key in oracle.rows else absent(key) for key in keys]
        expected = np.array(expected, oracle.dtype).reshape(-1, table.dim)
        np.testing.assert_array_equal(host(found.values), expected)
        held = oracle.contains(keys)
        assert found.num_without_row == (~held).sum()
        np.testing.assert_array_equal(host(found.rows), host(table.find(array)))
        np.testing.assert_array_equal(host(found.rows) != NO_ROW, held)
        np.testing.assert_array_equal(host(table.contains(array)), held)
        assert table.row_version == row_version

    @rule(n=st.integers(0, 500))
    def reserve(self, n):
        self.watch.table.reserve(n)

    @rule()
    def clear(self):
        self.watch.clear()
        assert self.watch.table.capacity == self.first_capacity

    @invariant()
    def same(self):
        if not hasattr(self, "watch"):
            return
        self.watch.check()
        table, rows = self.watch.table, self.watch.oracle.rows
        audit_insides(table)
        numbers = {key: place.row for key, place in self.watch.snapshot().items()}
        if table.row_version == self.row_version:
            assert self.numbers.items() <= numbers.items(), "row numbers are stale"
        self.numbers, self.row_version = numbers, table.row_version
        self.states = {key: state for key, state in self.states.items() if key in rows}
        keys = np.array(list(rows), np.int64)
        host = self.backend.to_host
        states = host(table.read_state("m", keys)).tolist()
        assert states == [self.states.get(key, [0.5] * table.dim) for key in rows]
        history = [(table.changed_since, self.watch.last_seen())]
        if table.removals is not None:
            history.append((table.removed_since, self.watch.gone))
        for keys_since, expected in history:
            for number in {0, table.num_lookups // 2, table.num_lookups}:
                late = sorted(key for key, at in expected.items() if at >= number)
                assert host(keys_since(number)).tolist() == late, number


class HbmAgainstDict(TableAgainstDict):
    @initialize(dtype=DTYPES, dim=DIMS, is_logged=st.booleans(), capacity=st.sampled_from([0, 100]))
    def start(self, dtype, dim, is_logged, capacity):
        self.begin("hbm", dtype, dim, is_logged, init_capacity=capacity)

    @rule(part=st.integers(0, 2), is_erased=st.booleans())
    def thousands(self, part, is_erased):
        """For an index of many segments."""
        keys = list(range(part * 1500, (part + 1) * 1500))
        self.watch.erase(keys) if is_erased else self.watch.lookup(keys)


class HybridAgainstDict(TableAgainstDict):
    """A small table: it evicts and refuses all the time."""

    @initialize(
        dtype=DTYPES,
        dim=DIMS,
        is_logged=st.booleans(),
        strategy=st.sampled_from(STRATEGIES),
        sizes=st.sampled_from([(16, 16), (64, 64), (4, 32), (16, 128), (64, 256), (8, 1024)]),
        bucket=st.sampled_from([4, 8, 16, 64]),
        load=st.sampled_from([0.5, 0.75, 1.0]),
        near_rows=st.sampled_from([None, 0, 8]),
    )
    def start(self, dtype, dim, is_logged, strategy, sizes, bucket, load, near_rows):
        options = {"init_capacity": sizes[0], "max_capacity": sizes[1], "max_bucket_size": bucket}
        options |= {"evict_strategy": strategy, "max_load_factor": load, "on_refused": "ignore"}
        if near_rows is not None:
            row_bytes = dim * np.dtype(dtype).itemsize
            options["max_hbm_for_vectors"] = near_rows * row_bytes / 2**30
        self.begin("hybrid", dtype, dim, is_logged, **options)

    @rule(keys=BATCH, draw=st.integers(0, 30))
    def lookup_with_scores(self, keys, draw):
        self.watch.find_or_insert(keys, self.scores(keys, draw))

    @precondition(lambda self: "Lfu" in self.watch.oracle.strategy)
    @rule(factor=st.sampled_from([0, 0.3, 0.5, 1]))
    def decay_scores(self, factor):
        """Counts decay; epochs stay, and when keys were seen."""
        self.watch.table.decay_scores(factor)
        scores, bits = self.watch.oracle.scores, 64 if self.watch.oracle.strategy == "kLfu" else 32
        for key, score in scores.items():
            count = score % 2**bits
            scores[key] = score - count + int(count * float(np.float32(factor)))

    @rule()
    def next_epoch(self):
        self.watch.set_epoch(self.watch.oracle.epoch + 1)


def machine_of(kind, name, examples, steps, reason=None):
    """The test case of a machine, which is skipped for a reason."""
    made = {"cpu": four_threads, "simt": simt.simt_backend, "cuda": lambda: get_backend("cuda")}
    new_backend = staticmethod(made[name])
    case = type(f"{kind.__name__}_{name}", (kind,), {"new_backend": new_backend}).TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=steps)
    return pytest.mark.skipif(reason is not None, reason=f"no {name}: {reason}")(case)


TestHbm = machine_of(HbmAgainstDict, "cpu", 25 if QUICK else 120, 25)
TestHybrid = machine_of(HybridAgainstDict, "cpu", 25 if QUICK else 120, 25)
TestHbm_simt = machine_of(HbmAgainstDict, "simt", 4 if QUICK else 15, 20, simt.unavailable())
TestHybrid_simt = machine_of(HybridAgainstDict, "simt", 4 if QUICK else 10, 20, simt.unavailable())
TestHbm_cuda = machine_of(HbmAgainstDict, "cuda", 20, 25, cuda_unavailable())
TestHybrid_cuda = machine_of(HybridAgainstDict, "cuda", 20, 25, cuda_unavailable())


# -------------------------------------------------------------------- beside them

# Room for everything: what a full table does is in test_hkv.py. Few slots, so that it grows.
OPTIONS = {"hbm": {}, "hybrid": {"init_capacity": 64, "max_capacity": 1 << 23}}


@pytest.fixture(params=OPTIONS)
def var_type(request):
    return request.param


def make(backend, var_type, dim=4, **options):
    return new_table(backend, dim, var_type, **{**OPTIONS[var_type], **options})


def assert_same(backend, table, oracle):
    for found, expected in zip(table.export(), oracle.export(), strict=True):
        np.testing.assert_array_equal(backend.to_host(found), expected)
    assert table.size == len(oracle.rows)


@pytest.mark.parametrize("key_type", ["int64", "int32", "uint64"])
def test_every_value_of_the_key_type_is_a_key(backend, var_type, key_type):
    info = np.iinfo(key_type)
    keys = [info.max, info.max - 1, info.min, info.min + 1, 0, 5, info.max // 2]
    keys += [-1, -2, -3, -4] if info.min < 0 else [2**63 - 1, 2**63]
    keys = np.array(list(dict.fromkeys(keys)), key_type)
    table = make(backend, var_type, key_type=key_type)
    table.log_removals()
    reserved = {table.key_dtype.empty_key, table.key_dtype.reclaim_key}
    assert key_type == "int32" or reserved <= set(keys.view(np.int64).tolist())
    assert not backend.to_host(table.contains(keys)).any()
    values = np.arange(len(keys) * 4, dtype=np.float32).reshape(-1, 4)
    table.insert_or_assign(keys, values)
    table.reserve(10_000)  # the marks' own rows survive growth
    np.testing.assert_array_equal(backend.to_host(table.lookup(keys).values), values)
    exported, rows = map(backend.to_host, table.export())
    np.testing.assert_array_equal(rows, values[np.argsort(keys)])
    chosen = table.export_if(lambda entries: entries.keys == keys[0])[0]
    assert chosen.dtype == key_type and backend.to_host(chosen).tolist() == [keys[0]]
    changed = table.changed_since(0)
    assert table.erase(keys) == len(keys)
    for each in (exported, changed, table.removed_since(0)):
        assert each.dtype == key_type and backend.to_host(each).tolist() == sorted(keys.tolist())
    assert table.size == 0 and not backend.to_host(table.contains(keys)).any()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [1, 3, 4096])
def test_every_row_format_and_dimension(backend, var_type, dtype, dim):
    """Neither keys nor values need be contiguous."""
    table = make(backend, var_type, dim=dim, dtype=dtype)
    keys = np.arange(74)[::2]
    values = np.random.default_rng(0).integers(-50, 50, (37, dim)).astype(np.float32)
    table.insert_or_assign(keys, backend.from_host(np.asfortranarray(values)))
    table.accumulate(keys[:5], np.ones((5, dim), np.float32), 2.0)
    values[:5] += 2
    read = backend.to_host(table.lookup([*keys[::-1], 101]).values)
    read = bfloat16_to_float32(np, read) if dtype == "bfloat16" else read.astype(np.float32)
    np.testing.assert_array_equal(read, [*values[::-1], [101] * dim])


def test_the_row_version_tells_stale_row_numbers(backend, var_type):
    table = make(backend, var_type)
    table.find_or_insert(np.arange(10))
    row_version = table.row_version
    table.find_or_insert(np.arange(1000))
    assert table.erase([7777]) == 0
    assert table.row_version == row_version
    assert table.erase([3, 3, 7777]) == 1
    assert table.row_version != row_version


def test_chunks_hold_every_key_once(backend, var_type):
    table = make(backend, var_type)
    table.find_or_insert(np.concatenate([np.arange(100) * 11, [I64.max, I64.min, I64.max - 1]]))
    expected = backend.to_host(table.export()[0]).tolist()
    for num_slots in (1, 7, table.num_slots, table.num_slots + 5):
        held = []
        for entries in table.chunks(num_slots):
            keys, rows, values = map(backend.to_host, (entries.keys, entries.rows, entries.values))
            assert len(keys) <= num_slots
            np.testing.assert_array_equal(rows, backend.to_host(table.find(entries.keys)))
            np.testing.assert_array_equal(values[:, 3], (keys % 1000).astype(np.float32))
            assert (backend.to_host(entries.scores) == 1).all()
            held += keys.tolist()
        assert sorted(held) == expected
    assert backend.to_host(table.export_chunk(table.num_slots, 10).keys).size == 0


def test_shrunk_keys_are_of_the_tables_type_and_order(backend, var_type):
    table = make(backend, var_type, key_type="uint64", dtype="bfloat16")
    assert table.shrunk_keys().dtype == np.uint64
    keys = np.array([2**64 - 1, 3, 2**63, 0, 1], np.uint64)
    table.insert_or_assign(keys, backend.from_host(np.zeros((5, 4), np.uint16)))
    assert table.shrunk_keys().size == 0  # they have no states
    ensure_state(table.store, "m", 0.0)
    ensure_state(table.store, "total", 0.25, 1)
    table.assign_state("total", keys[:4], np.ones((4, 1), np.float32))
    assert backend.to_host(table.shrunk_keys()).tolist() == sorted(keys[:4].tolist())


def test_statistics_count_what_happened(backend, var_type):
    table = make(backend, var_type)
    ensure_state(table.store, "m", 0.0)
    table.find_or_insert(np.arange(100))
    table.lookup([*range(50, 200), 60, 150])  # each of a repeated key is found, or missed
    table.find(np.arange(190, 210))
    table.erase(np.arange(30))
    held = table.statistics()
    assert (held.size, held.inserted_total, held.erased_total) == (170, 200, 30)
    assert (held.found_total, held.missed_total) == (0 + 51 + 10, 100 + 101 + 10)
    assert (held.evicted_total, held.refused_total, held.not_admitted_total) == (0, 0, 0)
    assert held.capacity == table.capacity and held.load_factor == 170 / held.capacity
    assert held.rehashes_total > 0
    assert 1 <= held.mean_probe <= held.longest_probe <= 8
    # A slot has 16 bytes, and in a "hybrid" index a digest, and each line of 4 has one byte; the
    # reserved keys have two more slots.
    beside = held.capacity + held.capacity // 4 if var_type == "hybrid" else 0
    assert held.index_bytes == 16 * (held.capacity + 2) + beside
    assert (held.near_bytes, held.far_bytes) == (200 * 2 * 4 * 4, 0)
    assert held.near_reserved_bytes == table.store.num_bytes >= held.near_bytes
    assert held.far_reserved_bytes == 0
    table.clear()
    held = table.statistics()
    totals = {name: count for name, count in held._asdict().items() if name.endswith("_total")}
    assert len(totals) == 9 and not any(totals.values())
    assert (held.size, held.mean_probe, held.longest_probe, held.near_bytes) == (0, 0, 0, 0)


def test_old_names_of_counters_name_the_new_one_or_say_why_there_is_none(backend):
    table = make(backend, "hbm")
    table.find_or_insert(np.arange(7))
    counts = table.statistics()
    with pytest.warns(DeprecationWarning, match="`Statistics.inserted` is called `inserted_total`"):
        assert counts.inserted == 7
    old = set(dir(counts)) - set(dir(tuple)) - {*counts._fields, "_fields", "_field_defaults"}
    gone = {name for name in old if name.startswith(("hot_", "residual_"))}
    assert len(gone) == 7
    for name in gone:
        with pytest.raises(AttributeError, match="`Statistics` has it no more: .* any more"):
            getattr(counts, name)
    for name in [name for name in old - gone if not name.startswith("_")]:
        with pytest.warns(DeprecationWarning, match=f"`Statistics.{name}` is called"):
            assert getattr(counts, name) == getattr(counts, f"{name.removeprefix('num_')}_total")


def test_given_scores_grow_old_with_the_clock(backend, var_type):
    """A write that halves the numbers of all lookups halves those that it was given too."""
    last = 2**32 - 1
    table = new_table(backend, 2, var_type)
    table.find_or_insert([1, 2])
    table.clock.now = last
    table.insert_or_assign([1, 2], np.ones((2, 2), np.float32), scores=[last, last // 2])
    assert table.num_lookups < last // 2 + 5
    scores = backend.to_host(table.scores([1, 2])).tolist()
    assert scores[1] < scores[0] <= table.num_lookups


# -------------------------------------------------------------------- growth and memory


def test_reserve_makes_growth_unnecessary(backend, var_type):
    table, n = make(backend, var_type), sized(backend, 100_000, 10_000)
    table.reserve(n)
    capacity = table.capacity
    table.find_or_insert(np.arange(n))
    table.reserve(10)
    assert table.capacity == capacity


def test_an_error_for_want_of_memory_says_how_much(backend, var_type, monkeypatch):
    table = make(backend, var_type)
    table.find_or_insert(np.arange(40))

    def none_left(num_bytes):
        raise MemoryError("none left")

    monkeypatch.setattr(backend, "zeros_chunk", none_left)
    text = r"to grow from 64 to \d[\d,]* slots \(\d[\d,]* bytes\).* with 40 keys"
    with pytest.raises(MemoryError, match=text):
        table.find_or_insert(np.arange(1 << 14))


@pytest.mark.parametrize("options", [{}, {"max_capacity": 16, "on_refused": "ignore"}], ids=str)
def test_an_initializer_that_raises_costs_no_rows(backend, options):
    class Fails(KeyInitializer):
        def fill_launch(self, *args):
            if failing:
                raise ZeroDivisionError
            return super().fill_launch(*args)

    table = make_table("hybrid" if options else "hbm", backend, 4, initializer=Fails(), **options)
    failing = False
    table.find_or_insert(np.arange(16))
    held, failing = table.size, True
    with pytest.raises(ZeroDivisionError):
        table.find_or_insert(np.arange(100, 110))
    failing = False
    assert not backend.to_host(table.contains(np.arange(100, 110))).any()
    assert table.store.allocator.num_free == held - table.size
    table.find_or_insert(np.arange(100, 110))
    audit(table)
    assert options or table.store.num_rows == table.size == 26


# -------------------------------------------------------------------- threads


def test_python_threads_use_one_table_and_tables_of_their_own(backend, var_type):
    table = make(backend, var_type, dim=2)
    own = [make(backend, kind, dim=2) for kind in ("hbm", "hybrid") * 2]
    oracles = [DictTable(2, first_row(2)) for _ in own]
    common = np.arange(-2000, 0)

    def work(number):
        rng, oracle = np.random.default_rng(number), oracles[number]
        for _ in range(sized(backend, 40, 6)):
            n = int(rng.choice([0, 1, 31, 33, 700]))
            keys = rng.integers(3000 * number, 3000 * (number + 1), n)
            values = rng.integers(-9, 9, (n, 2)).astype(np.float32)
            what = rng.integers(0, 6)
            if what < 2:
                expected = oracle.find_or_insert(keys)
                for each in (table, own[number]):
                    np.testing.assert_array_equal(
                        backend.to_host(each.lookup(keys).values), expected
                    )
            elif what == 2:
                assert {table.erase(keys), own[number].erase(keys)} == {oracle.erase(keys)}
            else:
                for each in (table, own[number], oracle):
                    getattr(each, ("insert_or_assign", "assign", "accumulate")[what - 3])(
                        keys, values
                    )
            # All threads insert these, and none writes them.
            keys = rng.choice(common, 500)
            rows = backend.to_host(table.lookup(keys).values)
            np.testing.assert_array_equal(rows[:, 1], (keys % 1000).astype(np.float32))
            seen = backend.to_host(table.export_rows()[0])
            assert len(np.unique(seen)) == len(seen)
            table.statistics()

    run_threads(work)
    whole = DictTable(2, first_row(2))
    for each, oracle in zip(own, oracles, strict=True):
        assert_same(backend, each, oracle)
        whole.rows.update(oracle.rows)
    whole.find_or_insert(common)
    table.find_or_insert(common)
    assert_same(backend, table, whole)
    audit(table)


# -------------------------------------------------------------------- what is refused

ROW = np.zeros((1, 4), np.float32)
NAN = float("nan")
VALUES = {
    r"\(n,\).*\(1, 2\)": lambda t: t.find_or_insert([[1, 2]]),
    "must fit int64.*9223372036854775813": lambda t: t.find_or_insert(np.uint64([2**63 + 5])),
    "'initial' or 'zeros'.*'nan'": lambda t: t.lookup([1], insert=False, missing="nan"),
    r"shape \(2, 4\).*\(1, 4\)": lambda t: t.insert_or_assign([1, 2], ROW),
    r"bool of shape \(1,\).*int64": lambda t: t.accum_or_assign([1], ROW, np.array([0])),
    "`out` must be": lambda t: t.lookup([1, 2], out=t.backend.xp.empty((3, 4), np.float32)),
    r"one bool per key, shape \(10,\).*int64": lambda t: t.erase_if(lambda held: held.keys),
    r"one bool per key, shape \(10,\)": lambda t: t.export_if(lambda held: held.keys[:3] > 0),
    "above 0": lambda t: t.erase_below(0),
    "`cutoff` must be above 0. Received: .*0": lambda t: t.export(cutoff=0),
    "`cutoff` must be above 0. Received: .*-1": lambda t: t.export(cutoff=-1.0),
    "`cutoff` must be above 0. Received: .*nan": lambda t: t.export(cutoff=NAN),
    "num_lookups=None, seconds=None": lambda t: t.expire(),
    "one of them": lambda t: t.expire(num_lookups=1, seconds=1.0),
    "0 or more. Received: num_lookups=-1": lambda t: t.expire(num_lookups=-1),
    "a whole number, 0 or more": lambda t: t.expire(num_lookups=2.5),
    "0 or more. Received: seconds=-0.5": lambda t: t.expire(seconds=-0.5),
    "0 or more": lambda t: t.expire(seconds=NAN),
    "not be negative. Received: num_keys=-1": lambda t: t.reserve(-1),
    r"integers of shape \(1,\).*float64": lambda t: t.assign_scores([1], [0.5]),
    r"integers of shape \(2,\).*\(1,\)": lambda t: t.find_or_insert([1, 2], scores=[1]),
    "not be negative. Received: -4": lambda t: t.assign_scores([1], [-4]),
    "at most 2 by now. Received: 3. .*'kCustomized'": lambda t: t.assign_scores([1], [3]),
    "at most 2 by now. Received: 3": lambda t: t.insert_or_assign([13], ROW, scores=[3]),
}
TYPES = {
    "integers that fit int64.*float64": lambda t: t.find_or_insert([1.5]),
    "must be integers": lambda t: t.find_or_insert(np.array([True])),
    "must be a number. Received: seconds": lambda t: t.expire(seconds="a"),
    "must be a number. Received: num_lookups": lambda t: t.expire(num_lookups=True),
    "an integer": lambda t: t.reserve("a"),
    **{
        f"floating-point.*Received: dtype {dtype}": (
            lambda t, dtype=dtype: t.accumulate([1], ROW.astype(dtype))
        )
        for dtype in ("uint16", "int64", "bool", "complex64")
    },
}


@pytest.mark.cases("error")
@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_what_is_refused_changes_nothing(backend, var_type, error):
    table = make(backend, var_type)
    for _ in range(2):
        table.find_or_insert(np.arange(10))
    for text, call in {ValueError: VALUES, TypeError: TYPES}[error].items():
        with pytest.raises(error, match=text):
            call(table)
        assert table.num_lookups == 2, text
        keys, rows = map(backend.to_host, table.export())
        assert keys.tolist() == rows[:, 3].tolist() == list(range(10)), text
        assert backend.to_host(table.scores(np.arange(10))).tolist() == [2] * 10, text
    # Of these none is.
    table.assign_scores([], np.empty(0, np.uint64))
    assert table.expire(seconds=10**400) == 0


def test_unknown_kinds_and_what_is_out_of_range_are_refused(backend, var_type):
    with pytest.raises(ValueError, match="'hbm' or 'hybrid'.*'hmb'"):
        make_table("hmb", backend, 4, initializer=KeyInitializer())
    for options, text in (
        ({"key_type": "string"}, "key_type must be one of"),
        ({"dtype": "complex64"}, "dtype must be one of"),
        ({"dim": 0}, "dimension must be at least 1"),
        *(
            ({"dim": dim}, f"dimension must be .* Received: {dim} for table 'table'")
            for dim in (0, -1, 2**28 + 1, 2**40)
        ),
        *(
            ({"init_capacity": count}, f"init_capacity` of table 'table' .*{count}")
            for count in (2**32, 2**70)
            if var_type == "hbm"
        ),
    ):
        with pytest.raises(ValueError, match=text):
            make(backend, var_type, **options)
    for count in (2**32, 2**60, 2**62, 2**70):
        with pytest.raises(ValueError, match=f"num_keys` of table 'table' must be .*{count}"):
            make(backend, var_type).reserve(count)
    for key_type, keys, text in (
        ("int32", [1, 2**31], "must fit int32.*Received: 2147483648"),
        ("uint64", [4, -1], "must fit uint64.*Received: -1"),
    ):
        with pytest.raises(ValueError, match=text):
            make(backend, var_type, key_type=key_type).find_or_insert(keys)

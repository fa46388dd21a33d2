"""What both kinds of table must do, against a dict, on every backend.

What only one of them does is in test_det.py and test_hkv.py.
"""

import itertools

import numpy as np
import pytest

from scripts.bench.common.row_steps import ensure_state
from sok_lite.engine.dtypes import bfloat16_to_float32
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table import make_table
from tests.conftest import QUICK
from tests.support.helpers import KeyInitializer, first_row, new_table, run_threads, sized
from tests.support.reference import DictTable

SIZES = [0, 1, 31, 33, 1000, 100_003]
# Room for everything: what a full table does is in test_hkv.py. Few slots, so that it grows.
OPTIONS = {
    "hbm": {},
    "hybrid": {"init_capacity": 64, "max_capacity": 1 << 23},
    "hybrid kLfu": {"init_capacity": 64, "max_capacity": 1 << 23, "evict_strategy": "kLfu"},
}


@pytest.fixture(params=["hbm", "hybrid"])
def var_type(request):
    return request.param


def make(backend, var_type, dim=4, **options):
    return new_table(backend, dim, var_type.split()[0], **{**OPTIONS[var_type], **options})


def pair(backend, var_type, dim=4, **options):
    return make(backend, var_type, dim, **options), DictTable(dim, first_row(dim))


def assert_same(backend, table, oracle):
    keys, rows = table.export()
    expected_keys, expected_rows = oracle.export()
    np.testing.assert_array_equal(backend.to_host(keys), expected_keys)
    np.testing.assert_array_equal(backend.to_host(rows), expected_rows)
    assert table.size == len(expected_keys)


def host_rows(backend, table, keys):
    return backend.to_host(table.find(keys)).tolist()


class Fault:
    """Stands in for a backend's allocation and fails from the call of a number on."""

    def __init__(self, allocate, at):
        self.allocate = allocate
        self.at = at
        self.calls = 0

    def __call__(self, num_bytes):
        self.calls += 1
        if self.calls >= self.at:
            raise MemoryError("none left")
        return self.allocate(num_bytes)


# -------------------------------------------------------------------- lookups


@pytest.mark.parametrize("n", SIZES)
def test_lookup_inserts_and_finds_repeated_keys(backend, var_type, n):
    table, oracle = pair(backend, var_type)
    for seed in range(2):
        keys = np.random.default_rng(seed).integers(-(n // 2) - 1, n // 2 + 1, n)
        rows = backend.to_host(table.lookup(keys).values)
        np.testing.assert_array_equal(rows, oracle.find_or_insert(keys))
    assert_same(backend, table, oracle)


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_one_key_many_times_in_a_batch(backend, var_type, n):
    table, oracle = pair(backend, var_type)
    keys = np.full(n, 42)
    np.testing.assert_array_equal(
        backend.to_host(table.lookup(keys).values), oracle.find_or_insert(keys)
    )
    rows = backend.to_host(table.find_or_insert(keys))
    assert set(rows.tolist()) == ({0} if n else set())
    assert_same(backend, table, oracle)


def test_two_million_keys_in_one_batch(backend, var_type):
    table = make(backend, var_type, dim=1)
    n = sized(backend, 2_000_000, 20_000)
    keys = np.random.default_rng(0).permutation(n) * 2**40
    rows = backend.to_host(table.lookup(keys).values)
    np.testing.assert_array_equal(rows[:, 0], (keys % 1000).astype(np.float32))
    assert table.size == n
    assert len(np.unique(backend.to_host(table.find(keys)))) == n


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_find_says_which_keys_are_absent_and_changes_nothing(backend, var_type, n):
    table, oracle = pair(backend, var_type)
    keys = np.arange(n) * 7 - n
    for each in (table, oracle):
        each.find_or_insert(keys[::2])
    lookups, scores = table.num_lookups, backend.to_host(table.scores(keys))
    found = backend.to_host(table.find(keys)) != NO_ROW
    np.testing.assert_array_equal(found, oracle.contains(keys))
    np.testing.assert_array_equal(backend.to_host(table.contains(keys)), oracle.contains(keys))
    assert table.num_lookups == lookups
    np.testing.assert_array_equal(backend.to_host(table.scores(keys)), scores)
    assert_same(backend, table, oracle)


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_distinct_keys_may_be_promised(backend, var_type, n):
    table, oracle = pair(backend, var_type)
    for first in (0, n // 3):
        keys = np.arange(first, first + n)
        rows = backend.to_host(table.lookup(keys, unique_keys=True).values)
        np.testing.assert_array_equal(rows, oracle.find_or_insert(keys))
    assert_same(backend, table, oracle)


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
@pytest.mark.parametrize("missing", ["initial", "zeros"])
def test_a_lookup_that_must_not_insert_changes_nothing(backend, var_type, n, missing):
    table, oracle = pair(backend, var_type)
    keys = np.random.default_rng(n).integers(0, n + 1, n)
    for each in (table, oracle):
        each.insert_or_assign(keys[::2], np.full((len(keys[::2]), 4), -5, np.float32))
    lookups, row_version = table.num_lookups, table.row_version
    scores = backend.to_host(table.scores(keys))
    asked = np.concatenate([keys, keys + 10_000])
    values, rows, num_without_row = table.lookup(asked, insert=False, missing=missing)
    default = first_row(4) if missing == "initial" else lambda key: np.zeros(4, np.float32)
    expected = np.array([oracle.rows.get(int(key), default(key)) for key in asked]).reshape(-1, 4)
    np.testing.assert_array_equal(backend.to_host(values), expected)
    held = oracle.contains(asked)
    np.testing.assert_array_equal(backend.to_host(rows) != NO_ROW, held)
    assert num_without_row == (~held).sum()
    assert (table.num_lookups, table.row_version) == (lookups, row_version)
    np.testing.assert_array_equal(backend.to_host(table.scores(keys)), scores)
    assert_same(backend, table, oracle)


def test_what_a_missing_key_gives_must_be_known(backend, var_type):
    with pytest.raises(ValueError, match="'initial' or 'zeros'.*'nan'"):
        make(backend, var_type).lookup([1], insert=False, missing="nan")


@pytest.mark.parametrize("key_type", ["int64", "int32", "uint64"])
def test_every_value_of_the_key_type_is_a_key(backend, var_type, key_type):
    info = np.iinfo(key_type)
    keys = [info.max, info.max - 1, info.min, info.min + 1, 0, 5, info.max // 2]
    keys += [-1, -2, -3, -4] if info.min < 0 else [2**63 - 1, 2**63]
    keys = np.array(list(dict.fromkeys(keys)), key_type)
    table = make(backend, var_type, key_type=key_type)
    reserved = {table.key_dtype.empty_key, table.key_dtype.reclaim_key}
    as_int64 = keys.view(np.int64) if key_type == "uint64" else keys
    assert key_type == "int32" or reserved <= set(as_int64.tolist())
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
    assert (backend.to_host(table.scores(keys)) == table.num_lookups).all()
    assert table.erase(keys) == len(keys)
    assert table.size == 0
    assert not backend.to_host(table.contains(keys)).any()
    assert backend.to_host(table.export()[0]).size == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [1, 3, 64, 4096])
def test_every_row_format_and_dimension(backend, var_type, dtype, dim):
    table = make(backend, var_type, dim=dim, dtype=dtype)
    keys = np.arange(37)
    values = np.random.default_rng(0).integers(-50, 50, (37, dim)).astype(np.float32)
    table.insert_or_assign(keys, backend.from_host(values))
    table.accumulate(keys[:5], np.ones((5, dim), np.float32), 2.0)
    values[:5] += 2
    read = backend.to_host(table.lookup(np.arange(40)[::-1]).values)
    read = bfloat16_to_float32(np, read) if dtype == "bfloat16" else read.astype(np.float32)
    np.testing.assert_array_equal(read[3:], values[::-1])
    np.testing.assert_array_equal(read[:3], np.repeat([[39], [38], [37]], dim, axis=1))


def test_inputs_need_not_be_contiguous(backend, var_type):
    table = make(backend, var_type)
    keys = np.arange(200)[::2]
    values = np.asfortranarray(np.random.default_rng(0).random((100, 4), np.float32))
    table.insert_or_assign(keys, values)
    np.testing.assert_array_equal(backend.to_host(table.lookup(keys[::-1]).values), values[::-1])


# -------------------------------------------------------------------- writes


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_the_last_of_a_repeated_key_is_assigned(backend, var_type, n):
    table, oracle = pair(backend, var_type, dim=2)
    keys = np.random.default_rng(0).integers(0, n // 20 + 1, n)
    values = np.random.default_rng(1).random((n, 2), np.float32)
    for each in (table, oracle):
        each.insert_or_assign(keys, values)
    assert_same(backend, table, oracle)
    for each in (table, oracle):
        each.assign(keys[::-1], values)
    assert_same(backend, table, oracle)


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_assign_and_accumulate_leave_unknown_keys_out(backend, var_type, n):
    table, oracle = pair(backend, var_type)
    for each in (table, oracle):
        each.find_or_insert(np.arange(100))
    keys = np.random.default_rng(0).integers(50, 150, n)
    values = np.random.default_rng(1).integers(-9, 9, (n, 4)).astype(np.float32)
    for each in (table, oracle):
        each.assign(keys, values)
        each.accumulate(keys, values, -2.0)
    assert_same(backend, table, oracle)


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_accum_or_assign_follows_the_flags(backend, var_type, n):
    table, oracle = pair(backend, var_type)
    rng = np.random.default_rng(n)
    for each in (table, oracle):
        each.find_or_insert(np.arange(0, 100, 2))
    keys = rng.integers(0, 100, n)
    values = rng.integers(-9, 9, (n, 4)).astype(np.float32)
    flags = oracle.contains(keys)
    # Some of the flags are stale: those keys are skipped.
    flags ^= rng.random(n) < 0.2
    for each in (table, oracle):
        each.accum_or_assign(keys, values, flags)
    assert_same(backend, table, oracle)


def test_accum_or_assign_refuses_flags_that_do_not_fit(backend, var_type):
    table = make(backend, var_type)
    with pytest.raises(ValueError, match=r"bool of shape \(2,\).*int64 of shape \(2,\)"):
        table.accum_or_assign([1, 2], np.zeros((2, 4), np.float32), np.array([0, 1]))
    assert table.size == 0


# -------------------------------------------------------------------- removal


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_erase_removes_repeated_keys_once(backend, var_type, n):
    table, oracle = pair(backend, var_type)
    for each in (table, oracle):
        each.find_or_insert(np.arange(n))
    keys = np.random.default_rng(n).integers(-n, 2 * n + 1, n)
    assert table.erase(keys) == oracle.erase(keys)
    assert_same(backend, table, oracle)
    np.testing.assert_array_equal(backend.to_host(table.contains(keys)), oracle.contains(keys))
    assert table.erase(keys) == 0


def test_erase_tells_stale_row_numbers_by_the_generation(backend, var_type):
    table = make(backend, var_type)
    table.find_or_insert(np.arange(10))
    row_version = table.row_version
    assert table.erase([77]) == 0
    assert table.row_version == row_version
    assert table.erase([3, 3, 77]) == 1
    assert table.row_version != row_version
    assert host_rows(backend, table, [3]) == [NO_ROW]


def test_erased_rows_are_used_again_with_fresh_values_and_states(backend, var_type):
    table = make(backend, var_type)
    ensure_state(table.store, "m", 0.5)
    keys = np.arange(1000)
    rows = table.find_or_insert(keys)
    table.accumulate(keys, np.ones((1000, 4), np.float32))
    table.store.fill_launch("m", rows)()
    table.store.write(rows, backend.xp.full((1000, 4), 9, np.float32), column="m")
    assert table.erase(keys[::2]) == 500
    found = table.lookup(keys[::2] + 5000)
    assert backend.to_host(found.rows).max() < 1000
    np.testing.assert_array_equal(
        backend.to_host(found.values)[:, 0], ((keys[::2] + 5000) % 1000).astype(np.float32)
    )
    assert (backend.to_host(table.store.read(found.rows, "m")) == 0.5).all()
    assert (backend.to_host(table.store.read(table.find(keys[1::2]), "m")) == 9).all()


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_erase_if_asks_for_every_entry(backend, var_type, n):
    table, oracle = pair(backend, var_type)
    keys = np.arange(n) - n // 2
    for each in (table, oracle):
        each.find_or_insert(keys)
    asked = []

    def is_third(entries):
        asked.extend(backend.to_host(entries.keys).tolist())
        np.testing.assert_array_equal(
            backend.to_host(entries.values)[:, 0], backend.to_host(entries.keys) % 1000
        )
        return entries.keys % 3 == 0

    assert table.erase_if(is_third) == oracle.erase_if(lambda key, row: key % 3 == 0)
    assert sorted(asked) == keys.tolist()
    assert_same(backend, table, oracle)


def test_a_predicate_must_return_one_bool_per_key(backend, var_type):
    table = make(backend, var_type)
    table.find_or_insert(np.arange(10))
    with pytest.raises(ValueError, match=r"one bool per key, shape \(10,\).*int64"):
        table.erase_if(lambda entries: entries.keys)
    with pytest.raises(ValueError, match=r"one bool per key, shape \(10,\)"):
        table.export_if(lambda entries: entries.keys[:3] > 0)
    assert table.size == 10


def test_erase_below_removes_rows_that_are_nearly_zero(backend, var_type):
    for dtype in ("float32", "float16", "bfloat16"):
        table = make(backend, var_type, dtype=dtype)
        values = np.array([[0, 0, 0, 0.24], [0, -0.25, 0, 0], [0.1, 0.2, -0.2, 0], [9, 0, 0, 0]])
        table.insert_or_assign(np.arange(4), values.astype(np.float32))
        assert table.erase_below(0.25) == 2
        assert backend.to_host(table.export()[0]).tolist() == [1, 3]
        with pytest.raises(ValueError, match="above 0"):
            table.erase_below(0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("n", [0, 1, 33, 1000])
def test_rows_of_zeros_are_counted_as_of_now_and_left_out_of_an_export(backend, var_type, dtype, n):
    rng = np.random.default_rng(n)
    table = make(backend, var_type, dtype=dtype)
    keys = rng.permutation(10 * n)[:n]
    values = rng.choice([0.0, 0.0, -0.0, 1.0], (n, 4)).astype(np.float32)
    table.insert_or_assign(keys, values)
    for _ in range(2):
        is_zero = (values == 0).all(axis=1)
        before = table.statistics(), table.row_version
        assert table.num_zero_rows() == is_zero.sum()
        left, rows = table.export(cutoff=1e-20)
        assert (table.statistics(), table.row_version) == before
        np.testing.assert_array_equal(backend.to_host(left), np.sort(keys[~is_zero]))
        rows = backend.to_host(table.row_dtype.to_float32(backend.xp, rows))
        np.testing.assert_array_equal(rows, values[~is_zero][np.argsort(keys[~is_zero])])
        assert backend.to_host(table.export()[0]).size == n
        # Rows that were zero come back, and others become zero: what counts is what is there now.
        values = np.roll(values, 1, axis=0)
        table.assign(keys, values)


def test_a_cutoff_leaves_out_rows_whose_every_element_is_below_it(backend, var_type):
    table = make(backend, var_type)
    values = np.array([[0, 0, 0, 0.24], [0, -0.25, 0, 0], [0.1, 0.2, -0.2, 0], [np.nan, 0, 0, 0]])
    table.insert_or_assign(np.arange(4), values.astype(np.float32))
    ensure_state(table.store, "m", 7.0)
    for column in ("value", "m"):  # of a state those whose rows are exported
        assert backend.to_host(table.export(column, cutoff=0.25)[0]).tolist() == [1, 3]
    assert (backend.to_host(table.export("m", cutoff=0.25)[1]) == 7).all()
    assert table.num_zero_rows() == 0
    table.insert_or_assign(np.array([4]), np.zeros((1, 4), np.float32))
    assert table.num_zero_rows() == 1
    for cutoff, left in ((1e-50, [0, 1, 2, 3]), (1e39, [3]), (float("inf"), [3])):
        assert backend.to_host(table.export(cutoff=cutoff)[0]).tolist() == left
    for cutoff in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="`cutoff` must be above 0"):
            table.export(cutoff=cutoff)


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_keys_that_were_not_seen_lately_expire(backend, var_type, n):
    table = make(backend, var_type, dim=1)
    seen = {}
    rng = np.random.default_rng(n)
    for number in range(1, 8):
        keys = rng.integers(0, n + 1, n // 3)
        if number % 3:
            table.lookup(keys)
        else:
            table.insert_or_assign(keys, np.zeros((keys.size, 1), np.float32))
        seen.update((key, number) for key in keys.tolist())
    table.find(list(range(n)))  # no lookup that counts
    table.lookup(list(range(n)), insert=False)
    for num_lookups in (7, 4, 1, 0):
        doomed = {key for key, number in seen.items() if number <= 7 - num_lookups}
        assert table.expire(num_lookups=num_lookups) == len(doomed)
        seen = {key: number for key, number in seen.items() if key not in doomed}
        assert backend.to_host(table.export()[0]).tolist() == sorted(seen)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "num_lookups=None, seconds=None"),
        ({"num_lookups": 1, "seconds": 1.0}, "one of them"),
        ({"num_lookups": -1}, "a whole number, 0 or more. Received: num_lookups=-1"),
        ({"num_lookups": 2.5}, "a whole number, 0 or more"),
        ({"seconds": -0.5}, "0 or more. Received: seconds=-0.5"),
        ({"seconds": float("nan")}, "0 or more"),
    ],
)
def test_expire_takes_one_limit(backend, var_type, given, text):
    table = make(backend, var_type)
    table.find_or_insert([1])
    with pytest.raises(ValueError, match=text):
        table.expire(**given)
    assert table.size == 1


def test_nothing_expires_that_was_seen_within_a_time_that_no_float_holds(backend, var_type):
    table = make(backend, var_type)
    table.find_or_insert([1])
    assert table.expire(seconds=10**400) == 0


@pytest.mark.parametrize("given", [{"seconds": "a"}, {"num_lookups": True}], ids=str)
def test_expire_takes_numbers(backend, var_type, given):
    with pytest.raises(TypeError, match="must be a number. Received"):
        make(backend, var_type).expire(**given)


@pytest.mark.parametrize(
    ("num_keys", "error", "text"),
    [("a", TypeError, "an integer"), (-1, ValueError, "not be negative. Received: num_keys=-1")],
)
def test_reserve_takes_a_number_of_keys(backend, var_type, num_keys, error, text):
    with pytest.raises(error, match=text):
        make(backend, var_type).reserve(num_keys)


def test_clear_empties_the_table(backend, var_type):
    table = make(backend, var_type)
    small = table.capacity
    rows = table.find_or_insert(np.arange(5000))
    ensure_state(table.store, "m", 0.0)
    table.store.write(rows, backend.xp.ones((5000, 4), np.float32), column="m")
    table.clear()
    assert table.size == 0 and table.load_factor == 0.0 and table.capacity == small
    assert backend.to_host(table.export()[0]).size == 0
    found = table.lookup([7])
    np.testing.assert_array_equal(backend.to_host(found.values)[0], 7)
    assert (backend.to_host(table.store.read(found.rows, "m")) == 0).all()
    assert table.statistics().inserted_total == 1


# -------------------------------------------------------------------- the whole table


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000])
def test_chunks_hold_every_key_once(backend, var_type, n):
    table, oracle = pair(backend, var_type)
    info = np.iinfo(np.int64)
    keys = np.concatenate([np.arange(n) * 11, [info.max, info.max - 1, info.min, info.min + 1]])
    for each in (table, oracle):
        each.find_or_insert(keys)
    for num_slots in (1, 7, table.num_slots, table.num_slots + 5):
        if num_slots == 1 and n == 1000:
            continue
        held = {}
        for entries in table.chunks(num_slots):
            rows = dict(
                zip(
                    backend.to_host(entries.keys).tolist(),
                    backend.to_host(entries.values),
                    strict=True,
                )
            )
            assert len(rows) <= num_slots and not rows.keys() & held.keys()
            np.testing.assert_array_equal(
                backend.to_host(entries.rows), backend.to_host(table.find(entries.keys))
            )
            assert (backend.to_host(entries.scores) == 1).all()
            held.update(rows)
        assert sorted(held) == sorted(oracle.rows)
        for key, row in held.items():
            np.testing.assert_array_equal(row, oracle.rows[key])
    exported = table.export_chunk(table.num_slots, 10)
    assert backend.to_host(exported.keys).size == 0


@pytest.mark.parametrize("key_type", ["int64", "int32", "uint64"])
def test_a_predicate_chooses_what_is_exported(backend, var_type, key_type):
    table = make(backend, var_type, key_type=key_type)
    for first in range(0, 500, 100):
        table.find_or_insert(np.arange(first, first + 100, dtype=key_type))
    keys, rows = table.export_if(lambda entries: entries.scores >= 4)
    assert backend.to_host(keys).dtype == key_type
    np.testing.assert_array_equal(backend.to_host(keys), np.arange(300, 500))
    np.testing.assert_array_equal(backend.to_host(rows)[:, 3], np.arange(300, 500))
    keys, rows = table.export_if(lambda entries: entries.scores > 100)
    assert backend.to_host(keys).size == 0 and backend.to_host(rows).shape == (0, 4)


def test_a_predicate_that_works_in_place_chooses_what_is_in_the_table(backend, var_type):
    table = make(backend, var_type)
    table.find_or_insert(np.arange(10))

    def is_even(entries):
        for each in (entries.keys, entries.rows, entries.scores):
            each %= 2
        return entries.keys == 0

    keys, rows = table.export_if(is_even)
    assert backend.to_host(keys).tolist() == [0, 2, 4, 6, 8]
    assert backend.to_host(rows)[:, 3].tolist() == [0, 2, 4, 6, 8]
    assert table.erase_if(is_even) == 5
    assert backend.to_host(table.export()[0]).tolist() == [1, 3, 5, 7, 9]


def test_scores_can_be_set(backend, var_type):
    table = make(backend, var_type)
    for _ in range(8):
        table.find_or_insert([1, 2, 3])
    table.assign_scores([3, 1, 9, 3, 2], [7, 0, 5, 8, 1])
    assert backend.to_host(table.scores([1, 2, 3, 9])).tolist() == [0, 1, 8, 0]
    assert table.size == 3
    with pytest.raises(ValueError, match=r"integers of shape \(1,\).*float64"):
        table.assign_scores([1], [0.5])
    with pytest.raises(ValueError, match="not be negative. Received: -4"):
        table.assign_scores([1], [-4])


def test_statistics_count_what_happened(backend, var_type):
    table = make(backend, var_type)
    ensure_state(table.store, "m", 0.0)
    table.find_or_insert(np.arange(100))
    table.lookup(np.arange(50, 200))
    table.find(np.arange(190, 210))
    table.erase(np.arange(30))
    held = table.statistics()
    assert (held.size, held.inserted_total, held.erased_total) == (170, 200, 30)
    assert (held.found_total, held.missed_total) == (0 + 50 + 10, 100 + 100 + 10)
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
    assert held.size == 0
    assert (held.mean_probe, held.longest_probe, held.near_bytes) == (0, 0, 0)


# -------------------------------------------------------------------- growth and memory


def test_old_names_of_counters_name_the_new_one_or_say_why_there_is_none(backend, var_type):
    table = make(backend, var_type)
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


def test_row_numbers_and_scores_stay_when_the_index_grows(backend, var_type):
    table = make(backend, var_type)
    keys = np.concatenate([np.arange(1000) * 3, [np.iinfo(np.int64).max, np.iinfo(np.int64).min]])
    before = backend.to_host(table.find_or_insert(keys))
    capacity, row_version = table.capacity, table.row_version
    table.find_or_insert(np.arange(sized(backend, 100_000, 10_000)) + 1_000_000)
    assert table.capacity > capacity
    assert table.row_version == row_version
    np.testing.assert_array_equal(backend.to_host(table.find(keys)), before)
    assert (backend.to_host(table.scores(keys)) == 1).all()


def test_reserve_makes_growth_unnecessary(backend, var_type):
    table, n = make(backend, var_type), sized(backend, 100_000, 10_000)
    table.reserve(n)
    capacity = table.capacity
    table.find_or_insert(np.arange(n))
    assert table.capacity == capacity
    table.reserve(10)
    assert table.capacity == capacity


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize(
    "operation", ["find_or_insert", "insert_or_assign", "accum_or_assign", "reserve", "clear"]
)
def test_no_memory_at_any_point_leaves_the_table_whole(backend, monkeypatch, kind, operation):
    """From every allocation of an operation on none succeeds: of slots, scores, rows, states."""
    monkeypatch.setattr(backend, "chunk_bytes", 1 << 10)
    options = {}
    if kind != "hbm":
        # The index also grows early, for crowded buckets.
        options = {"max_bucket_size": 4, "max_load_factor": 1.0}
    keys, more = np.arange(60), np.arange(50, 400)
    failures = 0
    for at in itertools.count(1):
        table, oracle = pair(backend, kind, **options)
        ensure_state(table.store, "m", 0.5)
        for each in (table, oracle):
            each.find_or_insert(keys)
            each.erase(keys[:7])
        state = backend.to_host(table.store.read(table.find(keys), "m"))
        fault = Fault(backend.zeros_chunk, at)
        work = {
            "find_or_insert": lambda t=table: t.find_or_insert(more),
            "insert_or_assign": lambda t=table: t.insert_or_assign(
                more, np.zeros((more.size, 4), np.float32)
            ),
            "accum_or_assign": lambda t=table, o=oracle: t.accum_or_assign(
                more, np.ones((more.size, 4), np.float32), o.contains(more)
            ),
            "reserve": lambda t=table: t.reserve(100_000),
            "clear": lambda t=table: t.clear(),
        }[operation]
        with monkeypatch.context() as patch:
            patch.setattr(backend, "zeros_chunk", fault)
            try:
                work()
            except MemoryError:
                failures += 1
            else:
                break
        assert_same(backend, table, oracle)
        np.testing.assert_array_equal(
            backend.to_host(table.store.read(table.find(keys), "m")), state
        )
        assert (table.statistics().inserted_total, table.statistics().erased_total) == (60, 7)
        for each in (table, oracle):
            each.find_or_insert(more)
        assert_same(backend, table, oracle)
        rows = host_rows(backend, table, more)
        assert len(set(rows)) == more.size
        # No row was lost on the way.
        assert table.store.num_rows <= max(60, table.size)
    # It was not asked so often; how often depends on where threads of a GPU put keys.
    assert fault.calls < at
    assert backend.name != "cpu" or failures == fault.calls
    assert failures >= 1 + (0 if operation in ("reserve", "clear") else 2)


def test_an_error_for_want_of_memory_says_how_much(backend, var_type, monkeypatch):
    table = make(backend, var_type)
    table.find_or_insert(np.arange(40))
    with monkeypatch.context() as patch:
        patch.setattr(backend, "zeros_chunk", Fault(backend.zeros_chunk, 1))
        text = r"to grow from 64 to \d[\d,]* slots \(\d[\d,]* bytes\).* with 40 keys"
        with pytest.raises(MemoryError, match=text):
            table.find_or_insert(np.arange(1 << 14))


def test_an_initializer_that_raises_costs_no_rows(backend, var_type):
    class Fails(KeyInitializer):
        def fill_launch(self, *args):
            if failing:
                raise ZeroDivisionError
            return super().fill_launch(*args)

    failing = True
    table = make_table(var_type, backend, 4, initializer=Fails(), **OPTIONS[var_type])
    with pytest.raises(ZeroDivisionError):
        table.find_or_insert(np.arange(10))
    assert table.size == 0
    assert not backend.to_host(table.contains(np.arange(10))).any()
    failing = False
    assert sorted(backend.to_host(table.find_or_insert(np.arange(10)))) == list(range(10))


def test_churn_leaves_the_table_as_large_as_its_content(backend, var_type):
    """Random inserts and erases, 10 million of them in full."""
    table = make(backend, var_type, dim=1)
    rng = np.random.default_rng(0)
    held = np.empty(0, np.int64)
    most = peak = done = 0
    while done < sized(backend, 1_000_000 if QUICK else 10_000_000, 300_000):
        keys = rng.integers(0, 1 << 60, 20_000)
        table.find_or_insert(keys)
        held = np.union1d(held, keys)
        peak = max(peak, held.size)
        gone = rng.choice(held, min(held.size, int(rng.integers(10_000, 40_000))), replace=False)
        assert table.erase(gone) == gone.size
        held = np.setdiff1d(held, gone, assume_unique=True)
        done += keys.size + gone.size
        most = max(most, peak)
        if table.store.num_rows == 0:  # an empty table may give its rows back and begin anew
            assert held.size == 0
            peak = 0
    assert table.size == held.size
    np.testing.assert_array_equal(backend.to_host(table.export()[0]), held)
    # A row was made only where none was free, and the free ones are known, each of them once.
    assert table.store.num_rows == peak
    assert table.store.used_bytes == peak * 4
    rows = backend.to_host(table.find_or_insert(np.arange(peak - held.size) - (1 << 61)))
    assert len({*rows.tolist(), *host_rows(backend, table, held)}) == peak
    assert table.store.num_rows == peak
    # An index is at most twice as large as the load factor asks for.
    assert table.capacity <= 2 * most / 0.7
    assert table.store.num_bytes <= max(2 * peak * 4, backend.chunk_bytes)
    assert table.statistics().mean_probe < 3


# -------------------------------------------------------------------- threads


def random_steps(backend, table, oracle, rng, first, steps):
    """Drives a table and an oracle with keys in [first, first + 3000)."""
    for _ in range(steps):
        n = int(rng.choice([0, 1, 31, 33, 700]))
        keys = rng.integers(first, first + 3000, n)
        values = rng.integers(-9, 9, (n, 2)).astype(np.float32)
        what = rng.integers(0, 6)
        if what < 2:
            np.testing.assert_array_equal(
                backend.to_host(table.lookup(keys).values), oracle.find_or_insert(keys)
            )
        elif what == 2:
            assert table.erase(keys) == oracle.erase(keys)
        else:
            name = ("insert_or_assign", "assign", "accumulate")[what - 3]
            for each in (table, oracle):
                getattr(each, name)(keys, values)


def test_several_python_threads_use_one_table(backend, var_type):
    table = make(backend, var_type, dim=2)
    oracles = [DictTable(2, first_row(2)) for _ in range(4)]
    common = np.arange(-2000, 0)

    def work(number):
        rng = np.random.default_rng(number)
        for _ in range(10):
            random_steps(backend, table, oracles[number], rng, 3000 * number, 4)
            # All threads insert these, and none writes them.
            keys = rng.choice(common, 500)
            rows = backend.to_host(table.lookup(keys).values)
            np.testing.assert_array_equal(rows[:, 1], (keys % 1000).astype(np.float32))
            seen = backend.to_host(table.export_rows()[0])
            assert len(np.unique(seen)) == len(seen)
            table.statistics()

    run_threads(work)
    whole = DictTable(2, first_row(2))
    for oracle in oracles:
        whole.rows.update(oracle.rows)
    whole.find_or_insert(common)
    table.find_or_insert(common)
    assert_same(backend, table, whole)
    rows = backend.to_host(table.export_rows()[1])
    assert len(np.unique(rows)) == len(rows)


def test_tables_share_no_state(backend):
    """Tables of both kinds with the same keys and kernels, each driven by a thread of its own."""
    kinds = ["hbm", "hybrid", "hbm", "hybrid"]
    tables = [make(backend, kind, dim=2) for kind in kinds]
    oracles = [DictTable(2, first_row(2)) for _ in kinds]

    def work(number):
        rng = np.random.default_rng(number)
        random_steps(backend, tables[number], oracles[number], rng, 0, 40)

    run_threads(work)
    for table, oracle in zip(tables, oracles, strict=True):
        assert_same(backend, table, oracle)


# -------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        ([1.5], TypeError, "must be integers that fit int64.*float64"),
        ([[1, 2]], ValueError, r"must have shape \(n,\).*\(1, 2\)"),
        (np.array([2**63 + 5], np.uint64), ValueError, "must fit int64.*9223372036854775813"),
        (np.array([True]), TypeError, "must be integers"),
    ],
)
def test_bad_keys_are_refused_and_nothing_changes(backend, var_type, keys, error, text):
    table = make(backend, var_type)
    with pytest.raises(error, match=text):
        table.find_or_insert(keys)
    assert table.size == 0


def test_a_key_out_of_range_is_refused(backend, var_type):
    table = make(backend, var_type, key_type="int32")
    with pytest.raises(ValueError, match="must fit int32.*Received: 2147483648"):
        table.find_or_insert([1, 2**31])
    with pytest.raises(ValueError, match="must fit uint64.*Received: -1"):
        make(backend, var_type, key_type="uint64").find_or_insert([4, -1])


def test_values_of_a_wrong_shape_are_refused_and_nothing_changes(backend, var_type):
    table = make(backend, var_type)
    with pytest.raises(ValueError, match=r"must have shape \(2, 4\).*\(2, 3\)"):
        table.insert_or_assign([1, 2], np.zeros((2, 3), np.float32))
    assert table.size == 0


@pytest.mark.parametrize("dtype", ["uint16", "int64", "bool", "complex64"])
def test_deltas_that_are_no_floats_are_refused(backend, var_type, dtype):
    table = make(backend, var_type, dtype="bfloat16")
    table.find_or_insert([1])
    before = backend.to_host(table.export()[1])
    with pytest.raises(TypeError, match=f"floating-point.*Received: dtype {dtype}"):
        table.accumulate([1], np.ones((1, 4), dtype))
    np.testing.assert_array_equal(backend.to_host(table.export()[1]), before)


def test_unknown_kinds_are_refused(backend, var_type):
    with pytest.raises(ValueError, match="'hbm' or 'hybrid'.*'hmb'"):
        make_table("hmb", backend, 4, initializer=KeyInitializer())
    with pytest.raises(ValueError, match="key_type must be one of"):
        make(backend, var_type, key_type="string")
    with pytest.raises(ValueError, match="dtype must be one of"):
        make(backend, var_type, dtype="complex64")
    with pytest.raises(ValueError, match="dimension must be at least 1"):
        make(backend, var_type, dim=0)


@pytest.mark.parametrize("strategy", ["hbm", "kLru", "kLfu"])
def test_a_repeated_key_is_found_or_missed_each_time(backend, strategy):
    options = {} if strategy == "hbm" else {"evict_strategy": strategy}
    table = new_table(backend, 2, "hbm" if strategy == "hbm" else "hybrid", **options)
    table.lookup([5, 5, 6])
    table.find_or_insert([5, 5, 5, 7, 7])
    counts = table.statistics()
    assert (counts.found_total, counts.missed_total, counts.inserted_total) == (3, 5, 3)


@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
def test_a_key_cannot_be_seen_in_the_future(backend, var_type):
    table = new_table(backend, 2, var_type)
    table.find_or_insert([1, 2])
    table.find_or_insert([2])
    for write in (
        lambda: table.assign_scores([1], [3]),
        lambda: table.insert_or_assign([3], np.ones((1, 2), np.float32), scores=[3]),
    ):
        with pytest.raises(ValueError, match="at most 2 by now. Received: 3. .*'kCustomized'"):
            write()
    assert backend.to_host(table.scores([1, 2, 3])).tolist() == [1, 2, 0]
    assert table.num_lookups == 2
    table.assign_scores([1], [2])
    table.assign_scores([], np.empty(0, np.uint64))
    assert backend.to_host(table.scores([1])).tolist() == [2]


@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
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


@pytest.mark.parametrize("dim", [1, 3, 4, 64, 100])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_lookup_copies_wherever_the_output_lies(backend, var_type, dim, dtype, offset):
    table = new_table(backend, dim, var_type, dtype=dtype)
    storage = table.row_dtype.storage
    table.find_or_insert(np.arange(0, 500, 2))
    for keys in (np.arange(300), np.arange(0, 300, 2), np.array([7] * 40), np.array([], int)):
        memory = backend.xp.full(keys.size * dim + 2 * offset, 77, storage)
        out = memory[offset : offset + keys.size * dim].reshape(keys.size, dim)
        expected = np.repeat((keys % 1000).astype(storage)[:, None], dim, axis=1)
        for insert in (False, True):
            values, rows, num_without_row = table.lookup(keys, out=out, insert=insert)
            np.testing.assert_array_equal(backend.to_host(values), expected)
            assert num_without_row == (backend.to_host(rows) == NO_ROW).sum()
        out[:] = 1
        table.lookup(keys + 1000, out=out, insert=False, missing="zeros")
        assert (backend.to_host(out) == 0).all()
        assert (backend.to_host(memory[:offset]) == 77).all()


def test_an_output_that_does_not_fit_is_refused_before_a_key_comes(backend, var_type):
    table = make(backend, var_type)
    with pytest.raises(ValueError, match="`out` must be"):
        table.lookup([1, 2], out=backend.xp.empty((3, 4), np.float32))
    assert table.size == table.num_lookups == 0


def test_rows_that_find_no_memory_to_be_given_back_stay_taken(backend, var_type, monkeypatch):
    table = make(backend, var_type)
    table.find_or_insert(np.arange(10))
    ensure_state(table.store, "m", 0.5)

    def no_memory(*args, **kwargs):
        raise MemoryError

    rows = table.find([3])
    monkeypatch.setattr(backend.xp, "concatenate", no_memory)
    with pytest.raises(MemoryError):
        table.store.release(rows)
    monkeypatch.undo()
    assert table.store.allocator.num_free == 0

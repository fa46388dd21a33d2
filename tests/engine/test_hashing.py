"""The hash of keys and its seeds: keys that somebody has chosen against the hash."""

import copy

import numpy as np
import pytest

from sok_lite.comm import SingleCommunicator
from sok_lite.engine import hashing
from sok_lite.engine.dedup import unique
from sok_lite.engine.optimizers import SGD
from tests.support import chosen_keys
from tests.support.helpers import first_row, new_table, update_of, with_segments
from tests.support.own_process import run_limited
from tests.support.parts import Part, forward_parts
from tests.support.steps import apply_updates
from tests.support.table_audit import audit


def after(seed):
    return int(hashing.hash_keys(np.array([seed]), 1)[0]) >> 6 << 5


# The seed that tests have, and the next one.
SEED = hashing.new_seed()
NEXT = after(SEED)

# The kind of table, slots of a segment, which keys, how many are too many, and for how many there
# is room before they come.
CHOSEN = {
    "line": ("hbm", 1 << 16, chosen_keys.of_one_line, 1100, 0),
    "line, with room": ("hbm", 1 << 16, chosen_keys.of_one_line, 1100, 4000),
    "segment": ("hbm", 1 << 10, chosen_keys.of_one_segment, 2000, 0),
    "buckets": ("hybrid", 1 << 16, chosen_keys.of_two_buckets, 36, 0),
}


@pytest.fixture(autouse=True)
def no_seed_stays():
    yield
    hashing.fix_seed(None)


@pytest.fixture(params=CHOSEN)
def chosen(request, backend):
    """Makes tables, and keys that are chosen against a seed."""
    kind, num_slots, keys_with, count, room = CHOSEN[request.param]
    backend = with_segments(backend, num_slots)

    def new():
        table = new_table(backend, 1, kind)
        table.reserve(room)
        table.store.reserve(room)
        return table

    return new, lambda seed: keys_with(count, seed)


def rows_of(table, keys):
    return table.backend.to_host(table.lookup(keys, insert=False).values).tolist()


def assert_has(table, keys):
    audit(table)
    assert table.size == len(keys)
    host = table.backend.to_host
    assert sorted(host(table.export()[0]).tolist()) == sorted(keys.tolist())
    assert bool((host(table.find(keys)) != 0xFFFFFFFF).all())


@pytest.mark.parametrize("way", ["find_or_insert", "insert_or_assign", "update"])
def test_keys_that_are_chosen_against_the_seed_get_another(chosen, way):
    """Whatever inserts them. An index that shrinks keeps the seed that it took."""
    new, keys_with = chosen
    table, other, keys = new(), new(), keys_with(SEED)
    expected = [first_row(table.dim)(key).tolist() for key in keys.tolist()]
    if way == "update":
        apply_updates([update_of(table, SGD(), keys, np.zeros((len(keys), table.dim)))], 1.0, 1)
    elif way == "insert_or_assign":
        values = np.arange(len(keys) * table.dim, dtype=np.float32).reshape(-1, table.dim)
        table.insert_or_assign(keys, table.backend.from_host(values))
        expected = values.tolist()
    else:
        table.find_or_insert(keys)
    assert rows_of(table, keys) == expected
    table.find_or_insert(np.arange(1, 101))
    other.find_or_insert(-np.arange(len(keys) + 100))
    assert_has(table, np.concatenate([keys, np.arange(1, 101)]))
    assert table.capacity == other.capacity
    assert table.index.seed == NEXT
    assert table.index.probe_lengths()[1] < 40
    many = np.arange(100_000, 110_000)
    table.find_or_insert(many)
    before = table.capacity
    table.erase([*many, *range(1, 101)])
    assert_has(table, keys)
    assert table.capacity < before
    assert table.index.seed == NEXT


@pytest.mark.parametrize("last", ["hbm", "hybrid"])
def test_keys_that_are_chosen_against_both_seeds_change_no_table_of_the_call(chosen, backend, last):
    new, keys_with = chosen
    tables = [new_table(backend, 1), new(), new_table(backend, 1, last)]
    reserved = [np.iinfo(np.int64).max, np.iinfo(np.int64).min]
    keys = np.concatenate([keys_with(SEED), reserved, keys_with(NEXT)])
    for table in tables:
        table.find_or_insert([1, 2])
    parts = []
    for table, batch in zip(tables, (np.arange(5, 25), keys, np.arange(30)), strict=True):
        splits = backend.from_host(np.array([0, len(batch)]))
        parts.append(Part(table, backend.from_host(batch), splits, None, "sum"))
    with pytest.raises(RuntimeError, match="chosen these keys"):
        forward_parts(backend, SingleCommunicator(), parts)
    for table in tables:
        assert_has(table, np.array([1, 2]))
        assert rows_of(table, [1, 2]) == [[1], [2]]
        table.find_or_insert(np.arange(3, 60))
        assert_has(table, np.arange(1, 60))


@pytest.mark.parametrize(("bucket", "slots_per_key"), [(4, 100), (8, 20), (16, 5)])
def test_keys_that_are_chosen_make_no_table_larger_than_so_many_slots_each(
    backend, bucket, slots_per_key
):
    table = new_table(backend, 1, "hybrid", init_capacity=64, max_bucket_size=bucket)
    for number in range(2):
        keys = chosen_keys.of_two_buckets(2 * bucket + 1, table.index.seed) + number
        table.find_or_insert(keys)
        assert table.size == (number + 1) * len(keys)
        assert table.capacity <= 2 * slots_per_key * table.size
    audit(table)


def test_a_hybrid_table_of_its_full_size_takes_another_seed_before_it_evicts(backend):
    table = new_table(backend, 1, "hybrid", init_capacity=1 << 10, max_capacity=1 << 10)
    keys = chosen_keys.of_two_buckets(36, SEED)
    table.find_or_insert(keys)
    assert_has(table, keys)
    assert table.index.seed == NEXT
    # Whoever knows the next two makes it evict, or refuse, as a table that is full does.
    both = [chosen_keys.of_two_buckets(36, seed) for seed in (NEXT, after(NEXT))]
    table.find_or_insert(np.concatenate(both))
    audit(table)
    assert table.statistics().evicted_total + table.statistics().refused_total > 0
    assert table.capacity == 1 << 10


@pytest.mark.parametrize("kind", ["hbm", "hybrid"])
def test_rows_are_the_same_for_every_seed(backend, kind):
    backend = with_segments(backend, 1 << 6)
    exports = []
    for seed in (0, 1, 2**58 - 1):
        hashing.fix_seed(seed)
        table, rng = new_table(backend, 3, kind, init_capacity=64), np.random.default_rng(5)
        for _ in range(5):
            keys = rng.integers(-500, 500, 200)
            table.find_or_insert(keys)
            table.erase(keys[:50])
        audit(table)
        assert table.index.seed == seed * 32
        exports.append([backend.to_host(array).tolist() for array in table.export()])
    assert exports[0] == exports[1] == exports[2]


def test_keys_that_are_chosen_against_no_seed_are_deduplicated_as_any_others(backend):
    keys, slots = chosen_keys.of_one_line(300), []
    backend, packed = copy.copy(backend), backend.packed

    def noting(kernel, parts):
        launches = packed(kernel, parts)
        if kernel != "dedup_insert":
            return launches
        for launch in launches:
            launch()
        *_, slots_of_items, _ = parts[0].arguments
        slots.extend(backend.to_host(slots_of_items).tolist())
        return []

    backend.packed = noting
    given = backend.from_host(np.concatenate([keys, keys[::-1]]))
    distinct, inverse = unique(backend, given)
    assert backend.to_host(distinct).tolist() == keys.tolist()
    assert backend.to_host(inverse).tolist() == [*range(300), *reversed(range(300))]
    # All would begin in one slot, and the last would look at 300.
    in_use = np.zeros(1200, bool)
    in_use[slots] = True
    assert in_use.sum() == 300
    assert max(map(len, "".join("01"[used] for used in in_use.tolist()).split("0"))) < 50


PROGRAM = """
    import numpy as np
    from sok_lite.engine import hashing
    print(hashing.seed_of_process(), hashing.new_seed(), hashing.new_seed(), hashing.seed_after(7))
"""


def test_who_starts_a_process_does_not_know_its_seeds():
    one, two = (run_limited(PROGRAM, SOK_LITE_HASH_SEED="") for _ in range(2))
    assert len({*one, *two}) == 8


def test_a_seed_is_fixed_by_the_environment():
    of_process, *seeds, _ = run_limited(PROGRAM, SOK_LITE_HASH_SEED="42")
    assert int(of_process) == int(hashing.hash_keys(np.array([42]), 2)[0]) >> 1
    assert seeds == 2 * [str(42 * 32)]


def test_a_seed_of_the_environment_that_is_none_is_refused():
    for text in ("many", str(2**58)):
        with pytest.raises(AssertionError, match="SOK_LITE_HASH_SEED must be a number from 0 to"):
            run_limited(PROGRAM, SOK_LITE_HASH_SEED=text)


def test_a_seed_that_is_none_is_refused():
    for seed, error in ((-1, ValueError), (2**58, ValueError), (1.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"`hash_seed` must be"):
            hashing.fix_seed(seed)
        assert hashing.new_seed() == SEED

"""Facts of an index of buckets that tests of it and planted faults share."""

import numpy as np

from sok_lite.backend.base import LaunchArgs
from sok_lite.engine.dtypes import key_dtype
from sok_lite.engine.hashing import seed_of_process
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.directory import LINE
from sok_lite.engine.table.hkv_index import HkvIndex
from sok_lite.engine.table.hkv_options import HkvOptions
from tests.support.table_audit import overflows_of


def new_index(backend, bucket, strategy="kLru", slots=512, most=512, load=1.0):
    sizes = {"init_capacity": slots, "max_capacity": most, "max_bucket_size": bucket}
    options = HkvOptions(**sizes, max_load_factor=load, evict_strategy=strategy)
    return HkvIndex(backend, key_dtype("int64"), "table", options, seed=0x7A5B20)


def some_keys(backend, count, seed=0):
    keys = np.random.default_rng(seed).choice(1 << 40, count, replace=False)
    return backend.from_host(keys.astype(np.int64))


def assert_bytes_are_exact(index):
    """The bytes say what the slots of keys say: so they do if no key has ever left the index."""
    held = index.entries()
    first, _, line = (index.backend.to_host(part) for part in index.homes_of(held.keys))
    lines = (first + line) // LINE
    slots = index.backend.to_host(held.slots)
    is_in_bucket = slots < index.directory.num_slots  # reserved keys are in none
    is_elsewhere = is_in_bucket & (slots // LINE != lines)
    said = np.zeros(index.directory.num_slots // LINE, np.uint8)
    said[lines[is_elsewhere]] = 1
    np.testing.assert_array_equal(overflows_of(index), said)
    return said.any()


def insert_items(index, batches, stamp):
    """Inserts the keys of items (batches of (n,) int64) that are not there, by one launch.

    Returns:
      For each batch (number, row of its key, address of its slot, its own row), and the counters.
    """
    backend, xp = index.backend, index.backend.xp
    batches = [backend.from_host(keys) for keys in batches]
    found = [index.find(keys).rows for keys in batches]
    num_missing = sum(int((rows == np.uint32(NO_ROW)).sum()) for rows in found)
    free = backend.from_host(np.array([901, 902, 903], np.uint32))
    claimed = (free, 3, 1000, num_missing - 3, None, 0)
    heads, rows_of_heads = (
        xp.zeros(2 * num_missing, np.int64),
        xp.empty(2 * num_missing, np.uint32),
    )
    counts = xp.zeros(2, np.int64)
    parts, told = [], []
    for keys, rows in zip(batches, found, strict=True):
        n = int(keys.size)
        told.append([xp.empty(n, kind) for kind in (np.int64, np.int32, np.uint32)])
        first = (stamp, index.record.strategy, index.record.epoch, keys, rows, *claimed)
        scratch = (heads, 2 * num_missing, seed_of_process(), rows_of_heads)
        parts.append(LaunchArgs(n, (*index.kernel_args(), *first, *scratch, *told[-1], counts, n)))
    backend.launch_tables("hkv_insert_items", parts)
    results = []
    for placed, number, own_rows in told:
        number = backend.to_host(number)
        rows = np.where(number < 0, np.uint32(NO_ROW), backend.to_host(rows_of_heads)[number])
        results.append((number, rows, backend.to_host(placed), backend.to_host(own_rows)))
    return results, backend.to_host(counts).tolist()


def check_items(backend, bucket, strategy, seed, stamp=9):
    """Inserts items whose keys repeat, among items of known keys, and compares with their keys."""
    index, rng = new_index(backend, bucket, strategy), np.random.default_rng(seed)
    known = backend.to_host(some_keys(backend, 50, seed))
    index.insert_all(backend.from_host(known))
    reserved = [*index.reserved_keys(), 0, -1]
    new = np.concatenate([rng.choice(1 << 40, 60, replace=False) + (1 << 41), reserved])
    batches = [rng.choice(np.concatenate([new, known]), size) for size in (150, 60)]
    results, counts = insert_items(index, batches, stamp)
    keys = np.concatenate(batches)
    numbers, rows, placed, own_rows = (np.concatenate(part) for part in zip(*results, strict=True))
    is_new = ~np.isin(keys, known)
    np.testing.assert_array_equal(numbers >= 0, is_new)
    distinct = set(keys[is_new].tolist())
    assert counts == [0, len(distinct)]
    its = (part[is_new].tolist() for part in (keys, numbers, rows))
    of_keys = set(zip(*its, strict=True))
    assert len(of_keys) == len(distinct) == len({number for _, number, _ in of_keys})
    # Free rows, then new ones: each is one key's.
    claimed = [901, 902, 903, *range(1000, 1000 + len(distinct) - 3)]
    assert sorted(row for *_, row in of_keys) == claimed
    # One item of each key has taken them.
    has_taken = placed != 0
    np.testing.assert_array_equal(own_rows != np.uint32(NO_ROW), has_taken)
    np.testing.assert_array_equal(own_rows[has_taken], rows[has_taken])
    assert sorted(keys[has_taken].tolist()) == sorted(distinct)
    index.record.size += len(distinct)
    entries = index.entries()
    held, its_rows, stamps = (
        backend.to_host(each).tolist() for each in (entries.keys, entries.rows, entries.last_seen)
    )
    assert sorted(held) == sorted([*known.tolist(), *distinct])
    expected = {key: row for key, _, row in of_keys}
    for key, row, seen in zip(held, its_rows, stamps, strict=True):
        assert (row, seen) == (expected[key], stamp) if key in distinct else seen < stamp
    some = backend.from_host(np.array(sorted(distinct)))
    scores = backend.to_host(index.scores(some)).tolist()
    assert scores == [stamp if strategy == "kLru" else 1] * len(distinct)
    found = backend.to_host(index.find(some).rows).tolist()
    assert found == [expected[key] for key in sorted(distinct)]
    assert_bytes_are_exact(index)

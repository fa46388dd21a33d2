"""The bytes of an index of buckets that say which lines have keys elsewhere, and its digests.

A search that trusts a byte of 0 reads one line and gives up, and one that goes on reads only lines
that have the key's digest: so each byte that says less than is true hides a key, as does a digest
of another one. tests/support/table_audit.py looks for both wherever it is called.
"""

import numpy as np
import pytest

from sok_lite.engine.dtypes import key_dtype
from sok_lite.engine.hashing import hash_keys
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.directory import LINE
from sok_lite.engine.table.hkv_index import HkvIndex
from sok_lite.engine.table.hkv_options import HkvOptions
from sok_lite.engine.table.restore import put_in_slots
from tests.support.helpers import new_table, with_segments
from tests.support.table_audit import digests_of, overflows_of

each_bucket = pytest.mark.parametrize("bucket", [4, 16, 64])
each_strategy = pytest.mark.parametrize("strategy", ["kLru", "kLfu"])


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
    is_elsewhere = index.backend.to_host(held.slots) // LINE != lines
    said = np.zeros(index.directory.num_slots // LINE, np.uint8)
    said[lines[is_elsewhere]] = 1
    np.testing.assert_array_equal(overflows_of(index), said)
    return said.any()


@each_bucket
@each_strategy
def test_bytes_say_what_insertion_growth_and_saved_slots_put_elsewhere(backend, bucket, strategy):
    for count in (1, 40, 330):
        index = new_index(backend, bucket, strategy)
        index.insert_all(some_keys(backend, count))
        assert assert_bytes_are_exact(index) == (count == 330)
    backend = with_segments(backend, 128)
    index = new_index(backend, bucket, strategy, slots=64, most=4096, load=0.8)
    for seed in range(12):
        index.make_room(60)
        index.insert_all(some_keys(backend, 60, seed), index.capacity)
        is_any = assert_bytes_are_exact(index)
    assert is_any and len(index.directory.segments) > 4
    held, other = index.entries(), index.empty_copy(index.directory.num_slots, index.seed)
    put_in_slots(other, held.keys, held.slots, 0)
    for of in (overflows_of, digests_of):
        np.testing.assert_array_equal(of(other), of(index))


def test_a_search_that_goes_on_reads_only_lines_with_the_digest_of_the_key(backend):
    """Seen by what it does not find where all slots have one digest."""
    index = new_index(backend, 16)
    index.insert_all(some_keys(backend, 450))
    entries = index.entries()
    keys, is_first = (
        backend.to_host(a) for a in (entries.keys, index.probe_lengths_of(entries) == 1)
    )
    digests = hash_keys(keys, index.seed) >> np.uint64(56)
    one = digests[~is_first][0]
    for segment in index.directory.segments:
        segment.digests[:] = np.uint8(one)
    is_found = backend.to_host(index.find(entries.keys).rows) != np.uint32(NO_ROW)
    np.testing.assert_array_equal(is_found, is_first | (digests == one))
    assert is_first.any() and not is_found.all()


@each_bucket
def test_what_was_put_elsewhere_is_found_after_its_own_line_has_room(backend, bucket):
    """Erasing leaves the bytes as they are: a free slot does not say that nothing is elsewhere."""
    index = new_index(backend, bucket)
    keys = some_keys(backend, 400)
    index.insert_all(keys)
    entries, before = index.entries(), overflows_of(index)
    elsewhere = backend.to_host(index.probe_lengths_of(entries)) > 1
    assert elsewhere.any() and not elsewhere.all()
    index.erase(entries.keys[backend.from_host(~elsewhere)])
    np.testing.assert_array_equal(overflows_of(index), before)
    found = backend.to_host(index.find(entries.keys).rows)
    np.testing.assert_array_equal(found[elsewhere], backend.to_host(entries.rows)[elsewhere])
    assert (found[~elsewhere] == np.uint32(NO_ROW)).all()


@each_strategy
def test_slots_are_the_same_whichever_is_looked_for_first(backend, strategy, monkeypatch):
    """The look for a victim sees free slots, too: to begin with it saves the other look where most
    buckets are full, and changes nothing else."""
    held = []
    for is_nearly_full in (False, True):
        monkeypatch.setattr(HkvIndex, "is_nearly_full", is_nearly_full)
        options = {"max_capacity": 64, "init_capacity": 64, "evict_strategy": strategy}
        table = new_table(backend, 1, "hybrid", **options)
        for key in range(80):
            table.find_or_insert([key])
        columns = [backend.to_host(column).tolist() for column in table.index.entries()]
        held.append(sorted(zip(*columns, strict=True)))
        assert table.num_evicted > 0
    assert held[0] == held[1]

"""The bytes of an index of buckets that say which lines have keys elsewhere, and its digests.

A search that trusts a byte of 0 reads one line and gives up, and one that goes on reads only lines
that have the key's digest: so each byte that says less than is true hides a key, as does a digest
of another one. tests/support/table_audit.py looks for both wherever it is called.
"""

import numpy as np
import pytest

from sok_lite.engine.hashing import hash_keys
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.hkv_index import HkvIndex
from sok_lite.engine.table.restore import put_in_slots
from tests.support import chosen_keys
from tests.support.helpers import new_table, with_segments
from tests.support.hkv_facts import (
    assert_bytes_are_exact,
    check_items,
    insert_items,
    new_index,
    some_keys,
)
from tests.support.table_audit import digests_of, overflows_of

each_bucket = pytest.mark.parametrize("bucket", [4, 16, 64])
each_strategy = pytest.mark.parametrize("strategy", ["kLru", "kLfu"])


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


# ---------------------------------------------------------------- items, on a GPU


@each_bucket
@each_strategy
def test_of_the_items_of_a_key_one_takes_a_slot_and_a_row(backend, bucket, strategy):
    need_gpu(backend)
    for seed in range(3):
        check_items(backend, bucket, strategy, seed)


@each_strategy
def test_items_whose_keys_find_no_slot_are_counted_once_for_each_key(backend, strategy):
    need_gpu(backend)
    index = new_index(backend, 4, strategy)
    keys = chosen_keys.of_two_buckets(12, index.seed)
    ((_, rows, placed, own_rows),), counts = insert_items(index, [np.repeat(keys, 3)], 1)
    assert counts == [4, 8]
    has_row = rows != np.uint32(NO_ROW)
    assert has_row.sum() == 24 and (placed != 0).sum() == 8
    np.testing.assert_array_equal(own_rows != np.uint32(NO_ROW), placed != 0)
    # As if they had not come.
    addresses = backend.from_host(placed)
    index.launch("hkv_erase", placed.size, backend.from_host(np.repeat(keys, 3)), addresses, 36)
    assert int(index.entries().keys.size) == 0


def need_gpu(backend):
    if backend.name == "cpu":
        pytest.skip("a CPU tells keys apart before")

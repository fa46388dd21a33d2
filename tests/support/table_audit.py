"""What must be true of a table's insides between any two calls, whatever went wrong before.

`audit(table)` raises AssertionError with what is wrong. It changes nothing but the counters of keys
found.
"""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from ctypes import addressof
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sok_lite.backend.table_lock import TableLock
from sok_lite.engine.hashing import hash_keys
from sok_lite.engine.rows.record import FillRecord
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.rows.tiers import _NOT_HELD
from sok_lite.engine.table.det_index import DetIndex
from sok_lite.engine.table.directory import LINE
from sok_lite.engine.table.hkv_options import STRATEGIES
from sok_lite.engine.table.locking import with_lock
from sok_lite.engine.table.record import COUNTERS, INSERTS, READS

_ANOTHER = ThreadPoolExecutor(1)  # to start a thread for every audit would take most of its time


def audit(table):
    """Raises AssertionError if anything inside of a table contradicts anything else."""
    audit_insides(table)
    assert_lock_is_free(table)


def audit_insides(table):
    """Does what `audit` does but for the lock: a forked child has no other thread."""
    # What an interrupted call has left to do is done before the next one begins.
    with_lock(table, lambda: None)
    with table.lock:
        held = _entries(table.index, "the index")
        # First: a search in an index without free slots may not end.
        _audit_slots(table.index, held, "the index")
        _audit_rows(table, held)
        _audit_columns(table.store)
        _audit_record(table)
        _audit_last_gradient(table)
        _audit_free_states(table)
        _audit_tiers(table, held)
        _audit_seen(table, held)
        _audit_log(table)
        _audit_clock(table)
        assert not table.refused[0], f"between calls the table keeps refused keys, {table.refused}"


def assert_lock_is_free(table):
    """Raises AssertionError unless another thread gets the table's lock at once."""

    def take():
        is_free = table.lock.acquire(blocking=False)
        if is_free:
            table.lock.release()
        return is_free

    is_free = _ANOTHER.submit(take).result()
    assert is_free, "the table's lock is held, and no call is under way"


def some(things):
    """The first few of some things, and how many more there are."""
    things = list(things)
    text = ", ".join(str(thing) for thing in things[:5])
    return f"{text} and {len(things) - 5} more" if len(things) > 5 else text


def _none(things, what):
    """Raises AssertionError if there are any of the things that there must not be."""
    assert not len(things), f"{what}: {some(things)}"


def _repeated(numbers):
    distinct, counts = np.unique(numbers, return_counts=True)
    return distinct[counts > 1]


# -------------------------------------------------------------------- an index


class Marks(NamedTuple):
    """Slots of an index without a key: never used, erased, and how many it takes for erased."""

    empty: int
    reclaimed: int
    counted: int | None


def marks_of(index):
    keys = _joined(index, lambda part: part.slots)[:, 0]
    empty = int((keys == index.key_dtype.empty_key).sum())
    reclaimed = int((keys == index.key_dtype.reclaim_key).sum())
    counted = None
    if isinstance(index, DetIndex):
        num_reused, _, num_erased = index.backend.to_host(index._counts).tolist()
        counted = num_erased - num_reused
        told = index.record.num_erased - index._num_reused
        assert told >= counted, "too few slots count as erased"
    return Marks(empty, reclaimed, counted)


def overflows_of(index):
    """The bytes of all lines of a "hybrid" index, in the order of the lines."""
    return _joined(index, lambda part: part.overflows)


def digests_of(index):
    """The digests of all slots of a "hybrid" index."""
    return _joined(index, lambda part: part.digests)


def _joined(index, of):
    return np.concatenate([index.backend.to_host(of(part)) for part in index.directory.segments])


def found_in(index, keys):
    """The row numbers (n,) of keys (n,) int64 by a search; it counts and refreshes nothing."""
    return index.backend.to_host(index.find(index.backend.from_host(keys)).rows)


def _entries(index, what):
    """The entries on the host: keys, rows, stamps, slots."""
    held = index.entries()
    held = type(held)(*(index.backend.to_host(part) for part in held))
    _none(_repeated(held.keys), f"{what} has keys in two slots each")
    assert index.size == held.keys.size, f"{what} counts {index.size} keys of {held.keys.size}"
    return held


def _audit_slots(index, held, what):
    capacity = index.num_slots - 2
    _audit_segments(index)
    marks = marks_of(index)
    in_slots = int((held.slots < capacity).sum())
    assert marks.empty + marks.reclaimed + in_slots == capacity, f"{what}: {in_slots}, {marks}"
    if hasattr(index, "max_capacity"):
        count = index.capacity
        assert count > 0 and count & (count - 1) == 0, f"{what} has a capacity of {count}"
        assert capacity <= index.max_capacity, f"{what} has {capacity} of {index.max_capacity}"
    else:
        assert marks.counted in (None, marks.reclaimed), f"erased slots of {what}: {marks}"
        # Open addressing ends a search at an empty slot.
        used = in_slots + marks.reclaimed
        assert used <= 0.9 * capacity, f"{used} of {capacity} slots of {what} are in use"
    _audit_overflows(index, held)
    lost = held.keys[found_in(index, held.keys) != held.rows]
    _none(lost, f"a search of {what} does not find keys in their slots")


def _audit_segments(index):
    """Raises AssertionError if the segments of an index are not what its directory says."""
    directory, side = index.directory, index.side
    shapes = directory.shapes
    assert sum(2.0**-shape.depth for shape in shapes) == 1.0, f"hashes have no segment: {shapes}"
    assert directory.num_slots == sum(shape.slots for shape in shapes)
    args = index.kernel_args()
    assert args[0] is directory.table and args[2] is side, "kernels look elsewhere"
    _audit_index_record(index, args)
    entries, hashing = index.backend.to_host(args[0]), args[1]
    assert len(entries) == 1 << (31 - hashing % 32)
    assert hashing - hashing % 32 == index.seed
    at = 0
    for segment, start in zip(directory.segments, directory.starts.tolist(), strict=False):
        entry = (segment.address, segment.shape.slots // index.sizes.granule)
        count = len(entries) >> segment.shape.depth
        assert (entries[at : at + count] == np.array(entry, np.uint64)).all(), f"entry {at}"
        assert segment.slots.shape == (segment.shape.slots, 2)
        held = index.entries(start, segment.shape.slots)
        homes = index.backend.to_host(directory.homes(held.keys)[1])
        assert (homes == start).all(), f"keys are in a segment that is not theirs, from {start} on"
        at += count
    assert at == len(entries)


def _audit_index_record(index, args):
    address, record = index.backend.address, index.record
    strategy = getattr(index, "strategy", None)
    number = 0 if strategy is None else STRATEGIES.index(strategy)
    expected = [address(args[0]), args[1], address(args[2]), *args[3:], number]
    _audit_words(f"the index of {index.name}", record, expected)
    most, num_slots = record.most_keys, index.directory.num_slots
    if isinstance(index, DetIndex):
        assert record.counts == address(index._counts), "native code counts elsewhere"
        least_slots, index.least_slots = index.least_slots, 0  # of those it may have fewer
        assert index._is_too_small(most + 1) and (not most or not index._is_too_small(most))
        index.least_slots = least_slots
        return
    assert record.counts == 0 and most >= 0
    if most:  # or native code would put too many keys into it
        assert most <= min(num_slots, index.max_load_factor * index.capacity)
        assert num_slots >= index.capacity and index.directory.effective_slots >= index.capacity
        assert index._slots_for(most, index.capacity) <= num_slots, "it would have to grow"
        may_evict = index.is_at_max_capacity and not index.is_sparse(most - index.size)
        assert not may_evict, "it may have to evict"


def _audit_words(what, record, expected):
    """Raises AssertionError unless a record begins with these words."""
    words = {name: getattr(record, name) for name, _ in record._fields_}
    wanted = dict(zip(words, expected, strict=False))
    wrong = {name: (words[name], word) for name, word in wanted.items() if words[name] != word}
    assert not wrong, f"the record of {what} is not what it is, which comes second: {wrong}"


def _audit_overflows(index, held):
    """Raises AssertionError if a search would give up before it comes to a key's slot, or pass by
    its line."""
    if not index.bucket:
        return
    in_slots = held.slots < index.num_slots - 2
    keys, slots = held.keys[in_slots], held.slots[in_slots]
    homes = index.homes_of(index.backend.from_host(keys))
    first, _, line = (index.backend.to_host(part) for part in homes)
    first_line = (first + line) // LINE
    is_hidden = (slots // LINE != first_line) & (overflows_of(index)[first_line] == 0)
    _none(keys[is_hidden], "lines do not say that keys are elsewhere")
    is_wrong = digests_of(index)[slots] != hash_keys(keys, index.seed) >> np.uint64(56)
    _none(keys[is_wrong], "slots have digests of other keys")


# -------------------------------------------------------------------- what native code sees


def _audit_record(table):
    """Raises AssertionError if native code would see another table."""
    record, store = table.record, table.store
    assert record.index == addressof(table.index.record), "native code sees another index"
    assert record.store == addressof(store.record), "native code sees another store"
    value = store.column("value")
    assert store.record.value == addressof(value.record), "native code sees another column"
    if store.record.states:
        known, store.known_groups = store.known_groups, None
        assert known == store.state_groups, "native code takes the states for what they were"
    for name, column in store.columns.items():
        chunks = store.backend.address(column.pointers) if column.num_chunks else 0
        row_format = store.row_dtype.number if column is value else 0
        words = [chunks, store.chunk_shift, column.dim, row_format]
        _audit_words(f"column {name!r}", column.record, words)
    numbers = store.allocator
    assert store.record.num_rows == numbers.num_rows, "native code sees other rows"
    room = numbers.num_rows if numbers.returned else sum(store.chunks) << store.chunk_shift
    room = 0 if store.near_rows is not None else room
    assert store.record.room == room, "native code sees another room"
    assert store.record.num_free == len(numbers.free_near), "native code sees other free rows"
    if store.record.num_free:
        assert store.record.free_rows == store.backend.address(numbers.free_near)
    begun = [each for each in store.columns.values() if each.initial != 0]
    fills = store.record.fills and FillRecord * store.record.num_fills
    fills = fills.from_address(store.record.fills) if fills else []
    assert [each.column for each in fills] == [addressof(each.record) for each in begun]
    values = np.array([each.value for each in fills], np.uint32).view(np.float32)
    np.testing.assert_array_equal(values, [np.float32(each.initial) for each in begun])
    assert store.record.num_far == store.num_far_rows, "native code sees other far rows"
    if table.tiers is None:
        assert store.record.accesses is None, "native code counts accesses"
    else:
        accesses, counts = table.tiers.record, table.tiers._counts
        assert store.record.accesses == addressof(accesses), "native code counts other accesses"
        address = store.backend.address(counts) if counts.size else None
        assert (accesses.counts, accesses.room) == (address, counts.size)
    allows = (READS | INSERTS) * isinstance(table.lock, TableLock)
    assert allows or table.backend.name != "cpu", "native code may not use the table"
    assert record.allows == allows, f"native code takes the table for {record.allows=}"
    assert record.counts_repeats == table.counts_repeats, "native code counts keys otherwise"
    turns_away = table.may_turn_away(table.filter_ratio)
    assert record.turns_away == turns_away, "native code admits keys otherwise"
    assert addressof(table.clock) == addressof(record.clock), "the table has another clock"
    assert addressof(table.counters) == addressof(record.counters), "it has other counters"
    counts = {name: getattr(record.counters, name) for name in COUNTERS}
    assert min(counts.values()) >= 0, f"things happened less than never: {counts}"
    assert record.row_version >= 0 and table.row_version == record.row_version


def _audit_last_gradient(table):
    """Raises AssertionError if an update would take another row for that of a key."""
    last, record = table.row_cache, table.record.gradient
    if record.room:
        where = [table.backend.address(array) for array in last._room]
        assert [record.room_keys, record.room_rows] == where, "native code writes elsewhere"
        assert {array.size for array in last._room} == {record.room}
    known = last.read()
    assert known.size >= -1 and known.is_complete in (0, 1)
    if table.backend.name != "cpu" or known.size <= 0 or known.row_version != table.row_version:
        return
    kinds = (known.keys, ctypes.c_int64), (known.rows, ctypes.c_uint32)
    keys, rows = (np.array((kind * known.size).from_address(at)) for at, kind in kinds)
    assert np.unique(keys).size == keys.size, "a key of the last gradient comes twice"
    has_row = rows != NO_ROW
    assert has_row.all() or not known.is_complete
    found = found_in(table.index, keys)
    assert (rows == found)[has_row].all(), "the last gradient has rows that are not the keys'"


# -------------------------------------------------------------------- rows


def free_rows(table):
    """The free rows in the order of their lists, near and far."""
    numbers, host = table.store.allocator, table.backend.to_host
    return host(numbers.free_near).tolist(), host(numbers.free_far).tolist()


def returned_rows(table):
    """The free rows whose memory went back to the system; they are in none of the lists."""
    return [row for rows in table.store.allocator.returned for row in rows]


def _audit_rows(table, held):
    rows, keys, num_rows = held.rows, held.keys, table.store.num_rows
    _none(keys[rows == np.uint32(NO_ROW)], "keys in the index have no row")
    _none(keys[rows >= num_rows], f"keys have rows beyond {num_rows}")
    _none(keys[np.isin(rows, _repeated(rows))], "keys share rows")
    near, far = (np.array(part, np.int64) for part in free_rows(table))
    free = np.concatenate([near, far, np.array(returned_rows(table), np.int64)])
    _none(_repeated(free), "rows are free twice")
    # None repeats, as was seen. NumPy's `unique` takes 80 times as long as to sort them.
    _none(np.intersect1d(free, rows, assume_unique=True), "rows are free and held")
    _none(free[free >= num_rows], f"rows beyond {num_rows} are free")
    lost = np.setdiff1d(np.arange(num_rows), np.concatenate([free, rows]), assume_unique=True)
    _none(lost, "rows are neither held nor free")
    first_far = num_rows if table.store.near_rows is None else table.store.near_rows
    _none(near[near >= first_far], "far rows are in the list of free near ones")
    _none(far[far < first_far], "near rows are in the list of free far ones")


def _audit_columns(store):
    chunks, shift = store.chunks, store.chunk_shift
    assert store.num_rows <= chunks.total << shift, f"{store.num_rows} rows of {chunks} chunks"
    for name in ("value", *store.state_names):
        column = store.column(name)
        assert column.num_chunks == chunks.total, f"{name!r} has {column.num_chunks} of {chunks}"
        pointers = store.backend.to_host(column.pointers)[: chunks.total]
        assert (pointers != 0).all(), f"a chunk of column {name!r} is nowhere"
        _none(_repeated(pointers), f"chunks of column {name!r} are one")
    lengths = _far_file(store)
    if lengths is None:
        return
    page, most = os.sysconf("SC_PAGE_SIZE"), 0
    for name in ("value", *store.state_names):
        column = store.column(name)
        ends = np.cumsum([part.nbytes for part in column._memory], dtype=np.int64)
        is_far = ends > chunks.near * (column.row_bytes << shift)
        sizes = np.diff(ends, prepend=0)[is_far]
        most += int((-(-sizes // page) * page).sum())
    assert lengths[0] == lengths[1] <= most, f"the far file has {lengths} bytes, columns {most}"


def _far_file(store):
    """(length it takes itself for, length on the disk); None without a file."""
    file = store._far_file
    return None if file is None else (file.num_bytes, os.fstat(file._fd).st_size)


def _audit_free_states(table):
    """Of free rows, and of those without memory, which have zeros."""
    near, far = free_rows(table)
    for numbers, is_returned in ((near + far, False), (returned_rows(table), True)):
        rows = table.backend.from_host(np.array(numbers, np.uint32))
        for name in table.store.state_names:
            initial = np.float32(table.store.column(name).initial)
            if is_returned and initial != 0:
                continue
            state = table.backend.to_host(table.store.read(rows, name))
            worn = np.array(numbers)[(state != initial).any(axis=1)] if numbers else []
            _none(worn, f"free rows keep a state {name!r} of their last key")


def _audit_tiers(table, held):
    if table.store.near_rows is None or not hasattr(table, "tiers"):
        return
    counts, keys = (table.backend.to_host(x) for x in (table.tiers._counts, table.tiers._keys))
    assert counts.size == keys.size, f"the tiers have {counts.size} counts and {keys.size} keys"
    if held.rows.size:
        assert held.rows.max() < counts.size, "the tiers do not know a row that is held"
    is_hot = counts != _NOT_HELD
    _none(held.keys[~is_hot[held.rows]], "the tiers take rows for free that keys hold")
    _none(held.keys[keys[held.rows] != held.keys], "the tiers name other keys for the rows of")
    counted = np.setdiff1d(np.flatnonzero(is_hot), held.rows, assume_unique=True)
    _none(counted, "the tiers take rows for held that are free")


# -------------------------------------------------------------------- what was seen, and when


def pending_index(table):
    """The index of keys without a row that were seen; None where none is kept."""
    return getattr(table, "pending", None)


def _audit_seen(table, held):
    now = table.num_lookups
    _none(held.keys[held.last_seen > now], f"keys were seen after lookup {now}")
    if getattr(table.index, "strategy", "kLru") in ("kLru", "kEpochLru"):
        late = (held.scores & np.uint64(0xFFFFFFFF)) > now
        _none(held.keys[late], f"keys have scores above {now}")
    pending = pending_index(table)
    if pending is not None:
        seen = _entries(pending, "the index of pending counts")
        _audit_slots(pending, seen, "the index of pending counts")
        assert (seen.rows > 0).all(), "keys were seen 0 times"
        _none(seen.keys[seen.last_seen > now], f"keys without a row were seen after {now}")
        _none(np.intersect1d(seen.keys, held.keys), "keys have a row and are still counted")


def _audit_log(table):
    index, now = table.removals, table.num_lookups
    if index is not None:
        logged = _entries(index, "the log of removals")
        _audit_slots(index, logged, "the log of removals")
        assert index.since <= now, f"the log begins with lookup {index.since} of {now}"
        is_wrong = (logged.last_seen > now) | (logged.last_seen < index.since)
        _none(logged.keys[is_wrong], f"keys were removed after {now}, or before {index.since}")


def _audit_clock(table):
    clock = table.clock
    for where, array in zip((clock.numbers, clock.times, clock.ends), clock._room, strict=True):
        assert where == array.ctypes.data, "native code sees other spans"
        assert array.shape == (clock.max_spans,), f"there is no room for {clock.max_spans} spans"
        assert array.itemsize == 8 and array.flags.c_contiguous
    assert 0 <= clock.num_spans <= clock.max_spans
    # Numbers of the first lookups, their times, and the times of the last.
    numbers, times, ends = clock.spans
    assert len(numbers) == len(times) == len(ends), f"the clock's spans: {clock.spans}"
    assert numbers == sorted(numbers), f"the clock runs backwards: {some(numbers)}"
    for one, other in pairwise([at for span in zip(times, ends, strict=True) for at in span]):
        assert one <= other, f"the clock runs backwards, from {one} to {other}"
    if times:
        assert ends[-1] == clock.last_time, "the last lookup was not in the last span"
    # What is restored, or halved, may begin one lookup ahead.
    now = table.num_lookups
    assert max(numbers, default=0) <= now + 1, f"the last span of {numbers} is after lookup {now}"


def memory_of(table):
    """What a table has of memory, and which rows are free: with equal ones, and an equal State, it
    takes the same way through the next operation."""
    store, known = table.store, table.row_cache.read()
    columns = [(name, store.column(name).num_chunks) for name in store.columns]
    indexes = [each for each in (table.index, pending_index(table), table.removals) if each]
    return (
        *(free_rows(table), returned_rows(table), store.chunks, _far_file(store), columns),
        *(store.num_rows, table.record.gradient.room, known.size, known.is_complete),
        [(each.seed, each.directory.shapes) for each in indexes],
    )

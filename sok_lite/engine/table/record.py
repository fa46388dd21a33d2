"""A table as native code sees it: plain data that both languages read and write.

It is the storage of what it holds, and no copy: Python's objects read and write it here, and native
code finds it as it is. kernels/table_record.h has the same structs, and sok_lite/engine/rows/
record.py those of rows.

Records are never freed: what native code was told of one stays an address of a record. When its
table is gone it serves another one, under another generation.
"""

import math
from ctypes import Structure, c_double, c_int64, c_void_p

from sok_lite.backend.table_lock import TableLock

COUNTERS = (
    *("found", "missed", "inserted", "evicted", "refused", "not_admitted", "not_updated"),
    "erased",
)


class IndexRecord(Structure):
    """Where an index is, as kernels take it, and how it keeps scores.

    Attributes:
      directory, hashing, side, is_scored, bucket, empty_key, reclaim_key: as of an IndexAddress
        (index.py), arrays by their addresses.
      strategy: by which scores are kept, its number among STRATEGIES (hkv_options.py).
      epoch: the current one, that some strategies stamp.
      size: keys in it.
      most_keys: it holds as many, each in a free slot, without growing; 0: native code inserts
        none.
      num_erased: of an "hbm" index, how many slots were erased, at most: what is certain without a
        look at the device.
      counts: of an "hbm" index, the address of what its kernels count.
    """

    PLACE = ("directory", "hashing", "side", "is_scored", "bucket", "empty_key", "reclaim_key")
    strategy: int
    epoch: int
    size: int
    most_keys: int
    num_erased: int
    counts: int
    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *(*PLACE, "strategy", "epoch"),
            *("size", "most_keys", "num_erased", "counts"),
        )
    )


class ClockRecord(Structure):
    """The time of a table: see clock.py and kernels/table_clock.h.

    Attributes:
      now: number of the last lookup; 0 before the first.
      last_time: when that was, in seconds since 1970.
      span_time: when the current span began; -infinity: there is none yet.
      span_number: of its first lookup.
      num_spans, max_spans: how many are before it, and have room.
      numbers, times, ends: addresses of these: of each its first lookup, when that was, and when
        its last lookup was.
    """

    now: int
    last_time: float
    span_time: float
    span_number: int
    num_spans: int
    max_spans: int
    numbers: int | None
    times: int | None
    ends: int | None
    _fields_ = (
        ("now", c_int64),
        *[(name, c_double) for name in ("last_time", "span_time")],
        *[(name, c_int64) for name in ("span_number", "num_spans", "max_spans")],
        *[(name, c_void_p) for name in ("numbers", "times", "ends")],
    )


class CountersRecord(Structure):
    """What a table has done: counts by the names of COUNTERS."""

    found: int
    missed: int
    inserted: int
    evicted: int
    refused: int
    not_admitted: int
    not_updated: int
    erased: int
    _fields_ = tuple((name, c_int64) for name in COUNTERS)

    def by_name(self) -> dict[str, int]:
        """Returns the counts, by the names of COUNTERS."""
        return {name: getattr(self, name) for name in COUNTERS}

    def reset(self) -> None:
        """Begins all counts anew."""
        for name in COUNTERS:
            setattr(self, name, 0)


class GradientRecord(Structure):
    """The keys of the last gradient and their row numbers: see last_gradient.py.

    Attributes:
      keys, rows, size, row_epoch, is_complete, lookup_number: as of `KnownRows` there.
      room_keys, room_rows: addresses of memory that native code may write keys and rows to.
      room: for how many.
    """

    size: int
    room: int
    _fields_ = (
        *[(name, c_void_p) for name in ("keys", "rows")],
        *[(name, c_int64) for name in ("size", "row_epoch", "is_complete", "lookup_number")],
        *[(name, c_void_p) for name in ("room_keys", "room_rows")],
        ("room", c_int64),
    )


# What native code may do with a table.
READS, INSERTS = 1, 2


class TableRecord(Structure):
    """All of it.

    Attributes:
      generation: changes when the table is gone: then the record serves another one.
      is_settled: 1: native code may use the table; 0: a call of Python's has not come to its end;
        2: native code has begun a lookup, under the lock, that this thread goes on with.
      allows: what native code may do: READS, and INSERTS for lookups that would insert.
      row_epoch: changes whenever row numbers handed out before may be stale.
      num_native: calls of native code that have changed the table.
      counts_repeats: whether a lookup counts a key as often as its batch has it, not once.
      turns_away: whether some new keys get no row: native code inserts none then.
      index, store: addresses of an IndexRecord and a StoreRecord, which live as long as the table
        has that index and that store.
    """

    lock: TableLock
    generation: int
    is_settled: int
    allows: int
    row_epoch: int
    num_native: int
    counts_repeats: int
    turns_away: int
    index: int | None
    store: int | None
    clock: ClockRecord
    counters: CountersRecord
    gradient: GradientRecord
    _fields_ = (
        ("lock", TableLock),
        *[(name, c_int64) for name in ("generation", "is_settled", "allows", "row_epoch")],
        *[(name, c_int64) for name in ("num_native", "counts_repeats", "turns_away")],
        *[(name, c_void_p) for name in ("index", "store")],
        ("clock", ClockRecord),
        ("counters", CountersRecord),
        ("gradient", GradientRecord),
    )


_all: list[TableRecord] = []
_free: list[TableRecord] = []


def new_record() -> TableRecord:
    """Returns a record that no table has: all zeros but its generation, and a clock without spans.

    Its lock is free.
    """
    try:
        return _free.pop()
    except IndexError:
        record = TableRecord()
        _clear(record)
        _all.append(record)
        return record


def retire(record: TableRecord) -> None:
    """Lets another table have the record of one that is gone. Hold its lock."""
    record.generation += 1
    _clear(record)
    _free.append(record)


def _clear(record: TableRecord) -> None:
    record.is_settled = record.allows = record.row_epoch = record.num_native = 0
    record.counts_repeats = record.turns_away = 0
    record.index = record.store = None
    record.clock = ClockRecord(span_time=-math.inf)
    record.counters = CountersRecord()
    record.gradient = GradientRecord(size=-1)


def free_locks_in_child() -> None:
    """Frees the locks of records without a table: a thread of the parent may have looked at one."""
    for record in [*_free]:
        record.lock = TableLock()

"""A table as native code sees it: structs that Python and native code read and write in place.

kernels/table_record.h has the same structs, and sok_lite/engine/rows/record.py those of rows.

A record is never freed, so that its address stays valid. When its table is gone another table
reuses it, with a new `generation`.
"""

import math
from ctypes import Structure, c_double, c_int64, c_void_p

from sok_lite.backend.table_lock import TableLock

# The largest lookup number that a slot can store. Then all are halved (`Index.age`).
LAST_LOOKUP_NUMBER = 0xFFFFFFFF

COUNTERS = (
    *("found", "missed", "inserted", "evicted", "refused", "not_admitted", "not_updated"),
    "erased",
)


class IndexRecord(Structure):
    """An index: what kernels take, and its counters.

    Attributes:
      directory, side: addresses; these and `hashing` to `reclaim_key` are described in
        kernels/slots.cuh.
      strategy: of scores, its number among STRATEGIES (hkv_options.py).
      epoch: the current one, for strategies with epochs.
      size: number of keys.
      most_keys: keys that fit without growth or eviction; 0: native code inserts none.
      num_erased: of an "hbm" index, an upper bound of how many slots were erased, known without
        waiting for the device.
      counts: of an "hbm" index, the address of what its kernels count.
    """

    strategy: int
    epoch: int
    size: int
    most_keys: int
    num_erased: int
    counts: int
    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("directory", "hashing", "side", "is_scored", "bucket", "empty_key", "reclaim_key"),
            *("strategy", "epoch", "size", "most_keys", "num_erased", "counts"),
        )
    )


class ClockRecord(Structure):
    """The clock of a table: see clock.py and kernels/table_clock.h.

    Attributes:
      now, last_time: number of the last lookup, 0 before the first, and its time, in seconds since
        1970.
      span_number, span_time: the same of the first lookup of the current span; -infinity: there is
        no span yet.
      num_spans, max_spans: number of earlier spans, and for how many there is memory.
      numbers, times, ends: addresses of their arrays; see `Spans`.
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
    """Counters of a table, named COUNTERS."""

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
        """Returns the counters by name."""
        return {name: getattr(self, name) for name in COUNTERS}

    def reset(self) -> None:
        """Sets all counters to 0."""
        for name in COUNTERS:
            setattr(self, name, 0)


class GradientRecord(Structure):
    """The keys of the last gradient and their row numbers: see row_cache.py.

    Attributes:
      keys, rows, size, row_version, is_complete, lookup_number: as of `CachedRows` there.
      room_keys, room_rows, room: addresses of memory for keys and rows that native code may write,
        and for how many.
    """

    size: int
    room: int
    _fields_ = (
        *[(name, c_void_p) for name in ("keys", "rows")],
        *[(name, c_int64) for name in ("size", "row_version", "is_complete", "lookup_number")],
        *[(name, c_void_p) for name in ("room_keys", "room_rows")],
        ("room", c_int64),
    )


READS, INSERTS = 1, 2  # bits of `TableRecord.allows`


class TableRecord(Structure):
    """A table.

    Attributes:
      generation: changes when another table reuses the record.
      is_settled: 1: native code may use the table; 0: a Python call has not ended; 2: native code
        has begun a lookup, under the lock, that this thread continues.
      allows: what native code may do: READS, and INSERTS for lookups that would insert.
      row_version: changes whenever row numbers handed out before may be stale.
      num_native: native calls that changed the table.
      counts_repeats: whether a lookup counts duplicates of a key in its batch.
      turns_away: whether new keys are subject to admission: then native code inserts none.
      index, store: addresses of an IndexRecord and a StoreRecord.
    """

    lock: TableLock
    generation: int
    is_settled: int
    allows: int
    row_version: int
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
        *[(name, c_int64) for name in ("generation", "is_settled", "allows", "row_version")],
        *[(name, c_int64) for name in ("num_native", "counts_repeats", "turns_away")],
        *[(name, c_void_p) for name in ("index", "store")],
        ("clock", ClockRecord),
        ("counters", CountersRecord),
        ("gradient", GradientRecord),
    )


_all: list[TableRecord] = []
_free: list[TableRecord] = []


def new_record() -> TableRecord:
    """Returns an unused record, with a free lock."""
    try:
        return _free.pop()
    except IndexError:
        record = TableRecord()
        _clear(record)
        _all.append(record)
        return record


def retire(record: TableRecord) -> None:
    """Frees the record of a table that is gone, for another one. Hold its lock."""
    record.generation += 1
    _clear(record)
    _free.append(record)


def _clear(record: TableRecord) -> None:
    record.is_settled = record.allows = record.row_version = record.num_native = 0
    record.counts_repeats = record.turns_away = 0
    record.index = record.store = None
    record.clock = ClockRecord(span_time=-math.inf)
    record.counters = CountersRecord()
    record.gradient = GradientRecord(size=-1)


def free_locks_in_child() -> None:
    """Frees the locks of unused records, one of which another thread may have held at a fork."""
    for record in _free:
        record.lock = TableLock()

"""A table as native code sees it: plain data that both languages read and write.

It is the storage of what it holds, and no copy: Python's objects read and write it here, and native
code finds it as it is. kernels/table_record.h has the same structs.
"""

import ctypes
from ctypes import c_double, c_int64, c_void_p

from sok_lite.backend.table_lock import TableLock

COUNTERS = (
    *("found", "missed", "inserted", "evicted", "refused", "not_admitted", "not_updated"),
    "erased",
)


class IndexRecord(ctypes.Structure):
    """Where an index is, as kernels take it, and how it keeps scores."""

    PLACE = ("directory", "hashing", "side", "is_scored", "bucket", "empty_key", "reclaim_key")
    _fields_ = tuple((name, c_int64) for name in (*PLACE, "strategy", "epoch"))


class ColumnRecord(ctypes.Structure):
    """Where a column of rows is, as kernels take it: the address of its chunks' addresses, how many
    rows a chunk has, elements of a row, and their format."""

    _fields_ = tuple((name, c_int64) for name in ("chunks", "shift", "dim", "format"))


class StoreRecord(ctypes.Structure):
    """The columns of a store; `value` is the address of a ColumnRecord."""

    _fields_ = (("value", c_void_p),)


class ClockRecord(ctypes.Structure):
    """The time of a table: see clock.py."""

    _fields_ = (
        ("now", c_int64),
        ("last_time", c_double),
        *[(name, c_int64) for name in ("num_spans", "max_spans")],
        *[(name, c_void_p) for name in ("numbers", "times", "ends")],
    )


class CountersRecord(ctypes.Structure):
    """What a table has done."""

    _fields_ = tuple((name, c_int64) for name in COUNTERS)


class TableRecord(ctypes.Structure):
    """All of it.

    Attributes:
      generation: changes when the table is gone: then the record serves another one.
      is_settled: 0 while a call of Python's has not come to its end.
      is_plain: 0 where the table does in every call what native code cannot.
      row_epoch: changes whenever row numbers handed out before may be stale.
      num_native: calls of native code that have changed the table.
      index, store: addresses of an IndexRecord and a StoreRecord.
    """

    _fields_ = (
        ("lock", TableLock),
        *[(name, c_int64) for name in ("generation", "is_settled", "is_plain", "row_epoch")],
        ("num_native", c_int64),
        *[(name, c_void_p) for name in ("index", "store")],
        ("clock", ClockRecord),
        ("counters", CountersRecord),
    )


# A record is never freed: native code may know its address for longer than its table lives.
_records: list[TableRecord] = []
_free: list[TableRecord] = []


def new_record() -> TableRecord:
    """Returns a record with zeros, but for its generation, which no record of its address had."""
    try:
        record = _free.pop()
    except IndexError:
        record = TableRecord()
        _records.append(record)
        return record
    begin = TableRecord.is_settled.offset
    ctypes.memset(ctypes.addressof(record) + begin, 0, ctypes.sizeof(record) - begin)
    return record


def retire(record: TableRecord) -> None:
    """Lets another table have a record whose table is gone."""
    record.generation += 1
    _free.append(record)


def free_locks_in_child() -> None:
    """Frees the locks of records without a table: a thread of the parent may have looked at one."""
    for record in [*_free]:
        record.lock = TableLock()

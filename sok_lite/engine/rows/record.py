"""Structs that Python and native code share: where rows are, and which are free.

They are the storage of their fields, not a copy; kernels/table_record.h has the same structs.
"""

from ctypes import Structure, c_int64, c_void_p


class ColumnRecord(Structure):
    """A column of rows.

    Attributes:
      chunks: address of the addresses of the chunks.
      shift: a chunk has 2**shift rows.
      dim: elements of a row.
      format: number of the RowDtype; 0: float32.
    """

    chunks: int
    shift: int
    dim: int
    format: int
    _fields_ = tuple((name, c_int64) for name in ("chunks", "shift", "dim", "format"))


class AccessRecord(Structure):
    """Access counts of the rows of a store with two tiers; see tiers.py.

    Attributes:
      counts: address of the counts, uint8.
      room: number of rows that have a count.
      lookups: counted since the last pass.
      looked_up: rows of these lookups.
      rest: rows to be looked up before counting begins again.
    """

    counts: int | None
    room: int
    lookups: int
    looked_up: int
    rest: int
    _fields_ = (
        ("counts", c_void_p),
        *[(name, c_int64) for name in ("room", "lookups", "looked_up", "rest")],
    )


class FillRecord(Structure):
    """A state whose initial value is not 0.

    Attributes:
      column: address of its ColumnRecord.
      value: the bits of the initial value, float32.
    """

    column: int | None
    value: int
    _fields_ = (("column", c_void_p), ("value", c_int64))


class StoreRecord(Structure):
    """The columns of a store, its number of rows, and its free rows.

    Attributes:
      value: address of the ColumnRecord of the value rows, which lives as long as the store has
        that column.
      states: version of the set of states and their owners, unique among all stores; 0: Python has
        to look.
      num_rows, num_far: rows handed out so far, free ones included, and the far ones among them.
      accesses: address of the AccessRecord, which lives as long as the store; None: accesses are
        not counted.
      room: native code may take new rows whose numbers are below it; 0: no rows at all.
      free_rows, num_free: address and number of free rows, uint32. They are taken from the end,
        before new ones.
      fills, num_fills: address and number of the FillRecords of states.
    """

    value: int | None
    states: int
    num_rows: int
    num_far: int
    accesses: int | None
    room: int
    free_rows: int | None
    num_free: int
    fills: int | None
    num_fills: int
    _fields_ = (
        ("value", c_void_p),
        *[(name, c_int64) for name in ("states", "num_rows", "num_far")],
        ("accesses", c_void_p),
        ("room", c_int64),
        ("free_rows", c_void_p),
        ("num_free", c_int64),
        ("fills", c_void_p),
        ("num_fills", c_int64),
    )

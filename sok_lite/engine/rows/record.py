"""Where rows are, as native code sees it: plain data that both languages read.

It is the storage of what it holds, and no copy; kernels/table_record.h has the same structs.
"""

from ctypes import Structure, c_int64, c_void_p


class ColumnRecord(Structure):
    """Where a column of rows is, as kernels take it.

    Attributes:
      chunks: the address of its chunks' addresses.
      shift: a chunk has 2**shift rows.
      dim: elements of a row.
      format: of an element, the number of a RowDtype; 0: float32.
    """

    chunks: int
    shift: int
    dim: int
    format: int
    _fields_ = tuple((name, c_int64) for name in ("chunks", "shift", "dim", "format"))


class AccessRecord(Structure):
    """How often rows were accessed lately, where a store has two tiers: see tiers.py.

    Attributes:
      counts: the address of the counts, uint8.
      room: for how many rows there are any.
      lookups: those counted since the last pass.
      looked_up: rows of them.
      rest: rows that are looked up before counting begins.
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
    """A state whose rows do not begin with zeros.

    Attributes:
      column: the address of its ColumnRecord.
      value: what they begin with, the bits of a float32.
    """

    column: int | None
    value: int
    _fields_ = (("column", c_void_p), ("value", c_int64))


class StoreRecord(Structure):
    """The columns of a store, how many rows it has, and which are free.

    Attributes:
      value: the address of the ColumnRecord of the value rows, which lives as long as the store has
        that column.
      states: a number that stands for the states there are, with their owners, and that no store
        has had before; 0: somebody has to look.
      num_rows, num_far: rows handed out so far, free ones included, and those of them that are far.
      accesses: the address of the AccessRecord of the store's rows, which lives as long as the
        store; None: accesses are not counted.
      room: native code may take new rows whose numbers are below it; 0: no rows at all.
      free_rows, num_free: the address of row numbers that are free, uint32, and how many they are.
        They are taken from the end, before new ones.
      fills, num_fills: the address of the FillRecords of states, and how many they are.
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

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


class StoreRecord(Structure):
    """The columns of a store.

    Attributes:
      value: the address of the ColumnRecord of the value rows, which lives as long as the store has
        that column.
      states: a number that stands for the states there are, with their owners, and that no store
        has had before; 0: somebody has to look.
    """

    value: int | None
    states: int
    _fields_ = (("value", c_void_p), ("states", c_int64))

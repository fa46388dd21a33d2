"""The rows of a table and their optimizer state, in columns that share one row number.

A column is a list of equally long chunks, so a store grows without moving a row and a row number
stays good for as long as its key lives. Column `value` has the table's row format; every optimizer
state is a float32 column beside it. Rows that nobody holds keep their state at its initial value:
a new key then needs no pass over state columns.

A store may have two tiers. Rows below `near_rows` are near: in the memory of the backend's device.
The others are far: on a GPU in pinned memory of the host, which kernels read and write in place; on
a CPU in ordinary memory or in a file. A kernel sees chunks and cannot tell. Rows do not move by
themselves: `swap` exchanges two of them in all columns, and engine/row_tiers.py says which.
"""

import os
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.dtypes import RowDtype, as_words
from sok_lite.engine.far_file import FarFile

ABSENT = 0xFFFFFFFF  # the row number of a key that has no row; SOK_ABSENT in kernels/platform.cuh


# A near part ends with a chunk. It falls short of the rows asked for by less than one chunk: 1/32.
_MIN_NEAR_CHUNKS = 32
# Far memory is mapped or pinned in few pieces: each costs a system call, and Linux allows 65,530
# mappings. A piece is at least this part of the far chunks there are.
_FAR_GROWTH = 8


class Slab(NamedTuple):
    """Chunks that are allocated together.

    Attributes:
      num_chunks: how many.
      is_far: in which tier.
    """

    num_chunks: int
    is_far: bool


class Copying(NamedTuple):
    """Where a kernel finds value rows and where it copies them to.

    Attributes:
      pointers: (at least num_chunks,) uint64, addresses of the chunks.
      chunk_shift: a chunk holds 2**chunk_shift rows.
      row_bytes: of a row.
      out: (n * row_bytes,) uint8.
    """

    pointers: Array
    chunk_shift: int
    row_bytes: int
    out: Array


class TierBytes(NamedTuple):
    """Memory of a store by tier.

    Attributes:
      near_used, far_used: rows and states that were handed out so far, free ones included.
      near, far: memory set aside.
    """

    near_used: int
    far_used: int
    near: int
    far: int


class Column:
    """One array of rows, in chunks.

    Attributes:
      name: "value" or a state's name.
      dim: elements of a row.
      dtype: storage dtype of an element.
      initial: what unheld rows hold.
      row_bytes: memory of one row.
      pointers: (at least num_chunks,) uint64, on the backend: the chunks' addresses, for kernels.
      owner: of a state, whose it is, as engine/optimizer_states.py says; None: nobody's yet.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        dim: int,
        dtype: np.dtype,
        initial: float,
        shift: int,
        far_file: FarFile | None,
    ) -> None:
        self.name = name
        self.dim = dim
        self.dtype = dtype
        self.initial = initial
        self.num_chunks = 0
        self.owner: Any = None
        self._backend = backend
        self.row_bytes = dim * dtype.itemsize
        self._chunk_bytes = self.row_bytes << shift
        self._far_file = far_file
        self._memory: list[Array] = []
        self.pointers = backend.xp.zeros(0, np.uint64)

    def new_memory(self, slabs: list[Slab]) -> list[Array]:
        """Returns the memory of slabs that are not part of this column yet."""
        far = self._far_file.zeros if self._far_file else self._backend.far_chunk
        memory: list[Array] = []
        for num_chunks, is_far in slabs:
            allocate = far if is_far else self._backend.zeros_chunk
            memory.append(allocate(num_chunks * self._chunk_bytes))
            if self.initial != 0:
                memory[-1].view(self.dtype).fill(self.initial)
        return memory

    def attach(self, memory: list[Array]) -> None:
        """Makes memory part of the column."""
        addresses = [
            self._backend.address(part)
            + self._chunk_bytes * np.arange(part.nbytes // self._chunk_bytes, dtype=np.int64)
            for part in memory
        ]
        start = self.num_chunks
        end = start + sum(part.size for part in addresses)
        if end > self.pointers.size:
            # Doubled: a large table has tens of thousands of chunks and gets them one by one.
            grown = self._backend.xp.zeros(max(end, 2 * self.pointers.size), np.uint64)
            grown[:start] = self.pointers[:start]
            self.pointers = grown
        if addresses:
            self.pointers[start:end] = self._backend.from_host(
                np.concatenate(addresses).view(np.uint64)
            )
        self.num_chunks = end
        self._memory.extend(memory)


class RowStore:
    """Rows by number.

    Args:
      near_rows: how many rows may be near; None: all of them. A store keeps the largest number of
        whole chunks: all that was asked for below 32 rows, more than 31/32 of it above.
      far_path: only on the cpu backend, only with `near_rows`: keeps far rows in a scratch file
        instead of memory; a folder or the name of a new file, see FarFile.

    Attributes:
      backend: where the rows are.
      dim: elements of a value row.
      row_dtype: format of the value rows.
      near_rows: rows below this number are near; None: all are.
      chunk_shift: a chunk holds 2**chunk_shift rows.

    Raises:
      ValueError: an argument is not as said here.
      OSError: the file cannot be made.
    """

    def __init__(
        self,
        backend: Backend,
        dim: int,
        row_dtype: RowDtype,
        *,
        near_rows: int | None = None,
        far_path: str | os.PathLike[str] | None = None,
    ) -> None:
        if dim < 1:
            raise ValueError(f"dimension must be at least 1. Received: {dim}.")
        if near_rows is not None and near_rows < 0:
            raise ValueError(f"near_rows must be at least 0. Received: {near_rows}.")
        if far_path is not None and (near_rows is None or backend.name != "cpu"):
            raise ValueError(
                "far_path is where the cpu backend keeps rows that are not near. "
                f"Received: far_path={os.fspath(far_path)!r} with backend {backend.name!r} and "
                f"near_rows={near_rows}. Give near_rows, or leave far_path out."
            )
        self.backend = backend
        self.dim = dim
        self.row_dtype = row_dtype
        slab_shift = self._shift_of(backend.chunk_bytes)
        self.chunk_shift = slab_shift
        if near_rows:
            most = max(1, near_rows // _MIN_NEAR_CHUNKS).bit_length() - 1
            self.chunk_shift = min(slab_shift, most)
            near_rows = near_rows >> self.chunk_shift << self.chunk_shift
        self.near_rows = near_rows
        self._first_far = ABSENT if near_rows is None else near_rows
        self._near_slab = 1 << (slab_shift - self.chunk_shift)
        far_shift = max(self._shift_of(backend.far_chunk_bytes), self.chunk_shift)
        self._far_slab = 1 << (far_shift - self.chunk_shift)
        self._far_file = None if far_path is None else FarFile(far_path)
        self._columns: dict[str, Column] = {}
        self._slabs: list[Slab] = []  # the same for all columns
        self._num_rows = 0  # handed out so far, free ones included
        self._free_near = backend.xp.empty(0, np.uint32)
        self._free_far = backend.xp.empty(0, np.uint32)
        self._add_column("value", dim, row_dtype.storage, 0.0)

    def _shift_of(self, num_bytes: int) -> int:
        return max(1, num_bytes // (4 * self.dim)).bit_length() - 1

    # ---------------------------------------------------------------- columns

    def _add_column(self, name: str, dim: int, dtype: np.dtype, initial: float) -> Column:
        shift, far_file = self.chunk_shift, self._far_file
        column = Column(self.backend, name, dim, dtype, initial, shift, far_file)
        self._attach([column], self._slabs)
        self._columns[name] = column
        return column

    def _attach(self, columns: list[Column], slabs: list[Slab]) -> None:
        """Gives slabs to all of the columns, or to none if memory runs out between two of them."""
        length = self._far_file.num_bytes if self._far_file else 0
        try:
            memory = [column.new_memory(slabs) for column in columns]
        except BaseException:
            if self._far_file:
                self._far_file.truncate(length)
            raise
        for column, parts in zip(columns, memory, strict=True):
            column.attach(parts)

    def ensure_state(self, name: str, initial: float, dim: int | None = None) -> Column:
        """Returns a float32 state column and makes it on first use.

        Args:
          name: of the state, such as "m".
          initial: what a row holds that no update has touched.
          dim: elements of a row; None: as many as a value row.

        Raises:
          ValueError: the column exists with another dim or initial value.
        """
        dim = self.dim if dim is None else dim
        self.check_state(name, initial, dim)
        column = self._columns.get(name)
        return column or self._add_column(name, dim, np.dtype(np.float32), initial)

    def check_state(self, name: str, initial: float, dim: int) -> None:
        """Raises ValueError if a state exists with another dim or initial value."""
        column = self._columns.get(name)
        if column is not None and (column.dim, column.initial) != (dim, initial):
            raise ValueError(
                f"State {name!r} exists with dim {column.dim} and initial value {column.initial}. "
                f"Received: dim {dim}, initial value {initial}. Use one optimizer per table."
            )

    def column(self, name: str = "value") -> Column:
        """Returns a column.

        Raises:
          KeyError: there is none of that name.
        """
        return self._columns[name]

    @property
    def state_names(self) -> list[str]:
        """The optimizer states, in the order in which they were made."""
        return [name for name in self._columns if name != "value"]

    @property
    def row_bytes(self) -> int:
        """Memory of one row and its states."""
        return sum(column.row_bytes for column in self._columns.values())

    @property
    def used_bytes(self) -> int:
        """Memory of the rows and states that were handed out so far, free ones included."""
        return self._num_rows * self.row_bytes

    @property
    def num_bytes(self) -> int:
        """Memory set aside for rows and states. On a CPU untouched pages of it cost nothing."""
        tiers = self.tier_bytes()
        return tiers.near + tiers.far

    def tier_bytes(self) -> TierBytes:
        """Returns `used_bytes` and `num_bytes` by tier."""
        chunks = [0, 0]
        for slab in self._slabs:
            chunks[slab.is_far] += slab.num_chunks
        far_used = self.num_far_rows * self.row_bytes
        chunk_bytes = self.row_bytes << self.chunk_shift
        near, far = (count * chunk_bytes for count in chunks)
        return TierBytes(self.used_bytes - far_used, far_used, near, far)

    # ---------------------------------------------------------------- row numbers

    @property
    def num_rows(self) -> int:
        """Rows handed out so far, free ones included: every row number is below it."""
        return self._num_rows

    @property
    def num_far_rows(self) -> int:
        """How many of them are far."""
        return max(0, self._num_rows - self._first_far)

    def allocate(self, count: int) -> Array:
        """Takes `count` rows: near ones as long as there are any, freed ones before new ones.

        Returns:
          (count,) uint32, distinct.

        Raises:
          MemoryError: no memory for them; the store is as it was.
        """
        xp = self.backend.xp
        near = min(count, int(self._free_near.size))
        new_near = min(count - near, max(0, self._first_far - self._num_rows))
        far = min(count - near - new_near, int(self._free_far.size))
        fresh = count - near - far
        self._grow(self._num_rows + fresh)
        first = self._num_rows
        rows = xp.arange(first, first + fresh, dtype=np.uint32)
        if near or far:
            freed_near, self._free_near = self._split(self._free_near, near)
            freed_far, self._free_far = self._split(self._free_far, far)
            rows = xp.concatenate([freed_near, rows, freed_far])
        self._num_rows += fresh
        return rows

    def free_near(self, count: int) -> Array:
        """Returns near rows that were freed, `count` or as many as there are: (m,) uint32."""
        return self._split(self._free_near, min(count, int(self._free_near.size)))[0]

    def exchange_free(self, near: Array, far: Array) -> None:
        """Frees far rows (m,) in place of what `free_near` returned last. `swap` them next."""
        if near.size:
            freed = self.backend.xp.concatenate([self._free_far, far])
            self._free_near = self._split(self._free_near, int(near.size))[1]
            self._free_far = freed

    @staticmethod
    def _split(free: Array, count: int) -> tuple[Array, Array]:
        """Returns the last `count` rows of a list of free ones, and the others."""
        kept = free.size - count
        return free[kept:], free[:kept]

    def reserve(self, count: int) -> None:
        """Makes sure that `count` rows can be taken later without running out of memory.

        Raises:
          MemoryError: no memory for them; the store is as it was.
        """
        free = int(self._free_near.size + self._free_far.size)
        self._grow(self._num_rows + max(0, count - free))

    def _grow(self, num_rows: int) -> None:
        if num_rows > ABSENT:
            raise MemoryError(
                f"A table holds at most {ABSENT:,} rows on one rank. Received: "
                f"{self._num_rows:,} rows and {num_rows - self._num_rows:,} more. Use more ranks."
            )
        slabs = self._new_slabs((num_rows + (1 << self.chunk_shift) - 1) >> self.chunk_shift)
        if slabs:
            self._attach(list(self._columns.values()), slabs)
            self._slabs.extend(slabs)

    def _new_slabs(self, num_chunks: int) -> list[Slab]:
        """Returns what a store of `num_chunks` chunks needs beyond what there is."""
        slabs = []
        have = self._columns["value"].num_chunks
        near = self._first_far >> self.chunk_shift
        while have < num_chunks:
            if have < near:
                slab = Slab(min(self._near_slab, near - have), False)
            else:
                slab = Slab(max(self._far_slab, (have - near) // _FAR_GROWTH), True)
            slabs.append(slab)
            have += slab.num_chunks
        return slabs

    def release(self, rows: Array) -> None:
        """Gives rows back, distinct and none absent; their state returns to its initial value."""
        xp = self.backend.xp
        free_far, near = self._free_far, rows
        if self.num_far_rows:
            is_far = rows >= np.uint32(self._first_far)
            near = rows[~is_far]
            free_far = xp.concatenate([self._free_far, rows[is_far]])
        free_near = xp.concatenate([self._free_near, near])
        for name in self.state_names:
            self.fill(name, rows)
        # Both or none: memory may have run out before.
        self._free_near, self._free_far = free_near, free_far

    def clear(self) -> None:
        """Gives all rows and their memory back. The state columns stay, empty."""
        if self.num_far_rows:
            self.backend.synchronize()  # kernels that still use pinned memory or the file
        columns = list(self._columns.values())
        self._columns = {}
        self._slabs = []
        for old in columns:
            self._add_column(old.name, old.dim, old.dtype, old.initial).owner = old.owner
        if self._far_file:
            self._far_file.truncate(0)
        self._num_rows = 0
        self._free_near = self._free_far = self.backend.xp.empty(0, np.uint32)

    # ---------------------------------------------------------------- rows

    def output(self, num_rows: int, column: str = "value", out: Array | None = None) -> Array:
        """Returns memory that `read` can write `num_rows` rows of a column into: `out`, or new.

        Raises:
          ValueError: `out` is not such an array.
        """
        col = self._columns[column]
        shape = (num_rows, col.dim)
        if out is None:
            return self.backend.xp.empty(shape, col.dtype)
        if out.shape != shape or out.dtype != col.dtype or not out.flags.c_contiguous:
            raise ValueError(
                f"`out` must be a C-contiguous {col.dtype} array of shape {shape}. "
                f"Received: {out.dtype}, shape {out.shape}, strides {out.strides}."
            )
        return out

    def can_copy_to(self, out: Array) -> bool:
        """Whether `copying` takes memory from `output`: a GPU copies 16 bytes at a time."""
        return self._columns["value"].row_bytes % 16 != 0 or self.backend.address(out) % 16 == 0

    def copying(self, out: Array) -> Copying:
        """Returns what a kernel needs that copies value rows into `out`; see `can_copy_to`."""
        col = self._columns["value"]
        flat = out.reshape(-1).view(np.uint8)
        return Copying(col.pointers, self.chunk_shift, col.row_bytes, flat)

    def read(self, rows: Array, column: str = "value", out: Array | None = None) -> Array:
        """Copies rows out.

        Args:
          rows: (n,) uint32; an absent one gives zeros.
          column: which column.
          out: (n, dim) C-contiguous, to write into; None: a new array.

        Returns:
          (n, dim) of the column's storage dtype.

        Raises:
          ValueError: `out` is not such an array.
        """
        col = self._columns[column]
        out = self.output(int(rows.size), column, out)
        suffix, words = as_words(out)
        self.backend.launch(
            f"rows_read_{suffix}",
            rows.size,
            col.pointers,
            self.chunk_shift,
            col.dim,
            rows,
            words,
            rows.size,
        )
        return out

    def write(
        self, rows: Array, values: Array, column: str = "value", source: Array | None = None
    ) -> None:
        """Copies rows in.

        Args:
          rows: (n,) uint32, distinct; an absent one is skipped.
          values: (m, dim) of the column's storage dtype, C-contiguous.
          source: (n,) int32, row i takes values[source[i]]; None: values[i].
        """
        col = self._columns[column]
        suffix, words = as_words(values)
        self.backend.launch(
            f"rows_write_{suffix}",
            rows.size,
            col.pointers,
            self.chunk_shift,
            col.dim,
            rows,
            words,
            source,
            rows.size,
        )

    def add(self, rows: Array, deltas: Array, scale: float = 1.0) -> None:
        """Adds `scale * deltas` to value rows.

        Args:
          rows: (n,) uint32, distinct; an absent one is skipped.
          deltas: (n, dim) float32, C-contiguous.
        """
        self.backend.launch(
            f"rows_add_{self.row_dtype.suffix}",
            rows.size,
            self._columns["value"].pointers,
            self.chunk_shift,
            self.dim,
            rows,
            deltas,
            float(scale),
            rows.size,
        )

    def swap(self, rows: Array, others: Array) -> None:
        """Exchanges rows[i] and others[i] in every column.

        Args:
          rows, others: (n,) uint32, all of them distinct and none absent.
        """
        for column in self._columns.values():
            self.backend.launch(
                f"rows_swap_u{8 * column.dtype.itemsize}",
                rows.size,
                column.pointers,
                self.chunk_shift,
                column.dim,
                rows,
                others,
                rows.size,
            )

    def fill(self, state: str, rows: Array) -> None:
        """Sets rows of a state column to its initial value."""
        col = self._columns[state]
        self.backend.launch(
            "rows_fill",
            rows.size,
            col.pointers,
            self.chunk_shift,
            col.dim,
            rows,
            float(col.initial),
            rows.size,
        )

    def to_storage(self, values: Any) -> Array:
        """Returns an array-like of rows in the storage format of the value column.

        Accepts the storage dtype itself, and any real floating dtype for float32 and float16 rows;
        bfloat16 rows are taken as uint16 bits, as an array whose dtype is named bfloat16, or as
        float32, rounded to nearest even.

        Raises:
          TypeError: the dtype cannot become this row format.
        """
        xp = self.backend.xp
        values = xp.asarray(values)
        if self.row_dtype.name != "bfloat16":
            if values.dtype.kind == "f" or values.dtype.name == "bfloat16":
                return xp.ascontiguousarray(values.astype(self.row_dtype.storage, copy=False))
        elif values.dtype == np.uint16:
            return xp.ascontiguousarray(values)
        elif values.dtype.name == "bfloat16":
            return xp.ascontiguousarray(values).view(np.uint16)
        elif values.dtype.kind == "f":
            return float32_to_bfloat16(xp, values.astype(np.float32))
        raise TypeError(
            f"values must be {self.row_dtype.name}, as the table's rows are. "
            f"Received: dtype {values.dtype}. Cast them first."
        )


def float32_to_bfloat16(xp: Any, values: Array) -> Array:
    """Returns the uint16 bits of float32 values rounded to bfloat16, nearest even."""
    bits = xp.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return xp.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def bfloat16_to_float32(xp: Any, bits: Array) -> Array:
    """Returns float32 values of bfloat16 bits (uint16)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)

"""The "hbm" table: an open-addressing index (kernels/det) over a row store. Grows without bound.

A lookup first finds. Only the keys that are missing are then made distinct, given rows and
inserted, so that the index and the rows grow by what is really new, and a lookup of known keys
writes nothing.
"""

import contextlib
import hashlib
import threading
from typing import Any, NamedTuple, Protocol

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.combine import segment_sum
from sok_lite.engine.dtypes import KeyDtype, key_dtype, row_dtype
from sok_lite.engine.row_store import ABSENT, RowStore
from sok_lite.engine.unique import last_of_each, unique

_MIN_CAPACITY = 64
# Windows of 4 slots stay short up to here (1.2 windows a hit), and an index that has just doubled
# still costs less than 48 bytes a key.
_MAX_LOAD_FACTOR = 0.7
# Erased slots lengthen every probe until the index is rebuilt: at once where there are many, and
# where keys crowd the index from a few on. Never for one or two, for a rebuild walks all slots.
_MAX_RECLAIM_FACTOR = 0.15
_MIN_RECLAIM_FACTOR = 0.05


class Lookup(NamedTuple):
    """What a lookup gives.

    Attributes:
      values: (n, dim) of the table's storage dtype.
      rows: (n,) uint32, the row numbers: good until the table's generation changes.
    """

    values: Array
    rows: Array


class FillsRows(Protocol):
    """What a table asks of an initializer."""

    def fill(
        self, backend: Backend, store: RowStore, rows: Array, keys: Array, table_seed: int
    ) -> None:
        """Writes the first values of rows (n,) that belong to keys (n,) int64."""


def table_seed(seed: int, name: str) -> int:
    """Returns the 64-bit seed of a table: the same on every machine for a seed and a name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class DetTable:
    """Rows by key. Every method may be called from several threads; each call is one at a time.

    Keys are integer arrays (n,) of the table's key type, or anything NumPy makes such an array of;
    they may repeat and every value of the type is legal. Methods return arrays of the backend.

    Attributes:
      backend, dim, name: as given.
      seed: as given, or the initializer's own where it came with one.
      key_dtype, row_dtype: formats of keys and rows.
      store: the rows and the optimizer states.
      generation: changes whenever row numbers handed out before may have become stale.
      lock: held during every method; hold it to do several as one.
    """

    var_type = "hbm"

    def __init__(
        self,
        backend: Backend,
        dim: int,
        *,
        initializer: FillsRows,
        key_type: str = "int64",
        dtype: str = "float32",
        name: str = "table",
        seed: int = 0,
        init_capacity: int = 0,
    ) -> None:
        self.backend = backend
        self.dim = dim
        self.key_dtype: KeyDtype = key_dtype(key_type)
        self.row_dtype = row_dtype(dtype)
        self.name = name
        own_seed = getattr(initializer, "seed", None)
        self.seed = seed if own_seed is None else own_seed
        self.initializer = initializer
        self.store = RowStore(backend, dim, self.row_dtype)
        self.generation = 0
        self.lock = threading.RLock()
        self._table_seed = table_seed(self.seed, name)
        self._init_capacity = self._capacity_for(init_capacity)
        self._capacity = self._size = 0
        self._begin(self._new_slots(self._init_capacity))

    # ---------------------------------------------------------------- sizes

    @property
    def size(self) -> int:
        """Keys held."""
        return self._size

    @property
    def capacity(self) -> int:
        """Slots of the index."""
        return self._capacity

    @property
    def load_factor(self) -> float:
        """size / capacity."""
        return self._size / self._capacity

    @property
    def index_bytes(self) -> int:
        """Memory of the index."""
        return int(self._slots.nbytes)

    # ---------------------------------------------------------------- lookups

    def find(self, keys: Any) -> Array:
        """Returns the row number of every key, (n,) uint32; ABSENT where it has none."""
        with self.lock:
            return self._find(self._keys(keys))[0]

    def contains(self, keys: Any) -> Array:
        """Returns whether each key has a row, (n,) bool."""
        return self.find(keys) != np.uint32(ABSENT)

    def find_or_insert(self, keys: Any, *, unique_keys: bool = False) -> Array:
        """Returns the row number of every key; keys without one get a row and its first value.

        Args:
          keys: (n,).
          unique_keys: a promise that no key repeats, which saves a pass when keys are new.

        Returns:
          (n,) uint32.

        Raises:
          MemoryError: no memory for the new keys; the table is as it was.
        """
        keys = self._keys(keys)
        with self.lock:
            rows, num_missing = self._find(keys)
            if num_missing:
                self._insert_missing(keys, rows, unique_keys)
            return rows

    def lookup(self, keys: Any, *, unique_keys: bool = False, out: Array | None = None) -> Lookup:
        """Returns the row of every key and its number; new keys are inserted.

        Args:
          keys: (n,).
          unique_keys: a promise that no key repeats, which saves a pass when keys are new.
          out: (n, dim) of the storage dtype, C-contiguous, to write into; None: a new array.

        Raises:
          MemoryError: no memory for the new keys; the table is as it was.
        """
        with self.lock:
            rows = self.find_or_insert(keys, unique_keys=unique_keys)
            out = self.store.read(rows, out=out)
        return Lookup(out, rows)

    # ---------------------------------------------------------------- writes

    def insert_or_assign(self, keys: Any, values: Any) -> None:
        """Sets the rows of keys, inserting those that have none. A repeated key: the last wins.

        Args:
          values: (n, dim).

        Raises:
          ValueError, TypeError: shape or dtype do not fit. MemoryError: no memory for new keys.
            The table is as it was.
        """
        self._write(keys, values, insert=True)

    def assign(self, keys: Any, values: Any) -> None:
        """Sets the rows of the keys that have one and skips the others. The last of a key wins."""
        self._write(keys, values, insert=False)

    def accumulate(self, keys: Any, deltas: Any, scale: float = 1.0) -> None:
        """Adds `scale * deltas` to the rows of the keys that have one; a repeated key sums.

        Args:
          deltas: (n, dim) of a real floating dtype, summed in float32 whatever the row format.

        Raises:
          ValueError, TypeError: shape or dtype do not fit; the table is as it was.
        """
        keys = self._keys(keys)
        xp = self.backend.xp
        deltas = xp.asarray(deltas)
        if deltas.dtype.kind != "f" and deltas.dtype.name != "bfloat16":
            # Not taken for numbers: the bits of bfloat16 rows, in which `export` gives them.
            raise TypeError(
                f"deltas must be real floating-point numbers. Received: dtype {deltas.dtype}. "
                "Cast them first."
            )
        deltas = xp.ascontiguousarray(deltas, dtype=np.float32)
        self._check_rows(keys, deltas)
        distinct, inverse = unique(self.backend, keys)
        summed = segment_sum(self.backend, deltas, inverse, int(distinct.size))
        with self.lock:
            self.store.add(self._find(distinct)[0], summed, scale)

    def erase(self, keys: Any) -> int:
        """Removes keys with their rows and optimizer states; returns how many were there."""
        keys = self._keys(keys)
        xp = self.backend.xp
        distinct, _ = unique(self.backend, keys)
        with self.lock:
            freed = xp.empty(distinct.size, np.uint32)
            n = int(distinct.size)
            self.backend.launch("det_erase", n, self._slots, *self._index(), distinct, freed, n)
            held = freed != np.uint32(ABSENT)
            count = int(held.sum())
            if count:
                marks = (distinct == self.key_dtype.empty_key) | (
                    distinct == self.key_dtype.reclaim_key
                )
                self._reclaimed += int((held & ~marks).sum())
                self._size -= count
                self.store.release(freed[held])
                self.generation += 1
                self._rebuild_above(_MAX_RECLAIM_FACTOR)
            return count

    def clear(self) -> None:
        """Removes every key and gives the memory back.

        Raises:
          MemoryError: no memory for the empty index; the table is as it was.
        """
        with self.lock:
            slots = self._new_slots(self._init_capacity)
            self.store.clear()
            self._begin(slots)
            self.generation += 1

    def reserve(self, num_keys: int) -> None:
        """Makes the index large enough for `num_keys` keys, so that it need not grow later."""
        with self.lock:
            capacity = self._capacity_for(num_keys)
            if capacity > self._capacity:
                self._rehash(capacity)

    # ---------------------------------------------------------------- whole table

    def export_rows(self) -> tuple[Array, Array]:
        """Returns all keys, ascending, and their row numbers: (size,) key type, (size,) uint32."""
        xp = self.backend.xp
        with self.lock:
            keys = self._slots[:, 0]
            live = (keys != self.key_dtype.empty_key) & (keys != self.key_dtype.reclaim_key)
            slot_rows = self._slots.view(np.uint32)[:, 2]
            marks = slot_rows[-2:] != np.uint32(ABSENT)
            live[-2:] = marks
            at = xp.flatnonzero(live)
            found = keys[at]
            if bool(marks.any()):
                # The two side slots do not hold their key: it is known from their place.
                side = xp.asarray([self.key_dtype.empty_key, self.key_dtype.reclaim_key], np.int64)
                found[found.size - int(marks.sum()) :] = side[marks]
            found = self.key_dtype.from_int64(xp, found)
            order = xp.argsort(found)
            return found[order], slot_rows[at][order]

    def export(self) -> tuple[Array, Array]:
        """Returns all keys, ascending, and their rows: (size,) key type, (size, dim) storage."""
        with self.lock:
            keys, rows = self.export_rows()
            return keys, self.store.read(self.backend.xp.ascontiguousarray(rows))

    # ---------------------------------------------------------------- inside

    def _keys(self, keys: Any) -> Array:
        what = f"keys of table {self.name!r}"
        keys = self.key_dtype.to_int64(self.backend.xp, keys, what)
        if keys.ndim != 1:
            raise ValueError(f"keys must have shape (n,). Received: shape {keys.shape}.")
        return keys

    def _check_rows(self, keys: Array, values: Array) -> None:
        if values.shape != (keys.size, self.dim):
            raise ValueError(
                f"values must have shape ({keys.size}, {self.dim}): one row of dimension "
                f"{self.dim} for each of {keys.size} keys. Received: shape {values.shape}."
            )

    def _index(self) -> tuple[int, int, int]:
        return self._capacity, self.key_dtype.empty_key, self.key_dtype.reclaim_key

    def _find(self, keys: Array) -> tuple[Array, int]:
        xp = self.backend.xp
        n = int(keys.size)
        rows = xp.empty(n, np.uint32)
        missing = xp.zeros(1, np.int64)
        self.backend.launch("det_find", n, self._slots, *self._index(), keys, rows, missing, n)
        return rows, int(missing[0])

    def _insert(self, keys: Array, *, initialise: bool) -> Array:
        """Gives rows to keys that are distinct and absent."""
        n = int(keys.size)
        most = _MAX_LOAD_FACTOR * self._capacity
        if self._size + n > most:
            self._rehash(self._capacity_for(self._size + n))
        elif self._size + self._reclaimed + n > most:
            self._rebuild_above(_MIN_RECLAIM_FACTOR)
        rows = self.store.allocate(n)
        if initialise:
            try:
                self.initializer.fill(self.backend, self.store, rows, keys, self._table_seed)
            except BaseException:
                self.store.release(rows)
                raise
        reclaimed = self.backend.xp.zeros(1, np.int64)
        self.backend.launch("det_insert", n, self._slots, *self._index(), keys, rows, reclaimed, n)
        self._size += n
        if self._reclaimed:
            self._reclaimed -= int(reclaimed[0])
        return rows

    def _insert_missing(self, keys: Array, rows: Array, unique_keys: bool) -> None:
        """Inserts the keys whose row is absent and writes their new row numbers into `rows`."""
        at = self.backend.xp.flatnonzero(rows == np.uint32(ABSENT))
        missing = keys[at]
        if unique_keys:
            rows[at] = self._insert(missing, initialise=True)
        else:
            distinct, inverse = unique(self.backend, missing)
            rows[at] = self._insert(distinct, initialise=True)[inverse]

    def _write(self, keys: Any, values: Any, *, insert: bool) -> None:
        keys = self._keys(keys)
        values = self.store.to_storage(values)
        self._check_rows(keys, values)
        distinct, inverse = unique(self.backend, keys)
        last = last_of_each(self.backend, inverse, int(distinct.size))
        with self.lock:
            rows, num_missing = self._find(distinct)
            if insert and num_missing:
                at = self.backend.xp.flatnonzero(rows == np.uint32(ABSENT))
                rows[at] = self._insert(distinct[at], initialise=False)
            self.store.write(rows, values, source=last)

    @staticmethod
    def _capacity_for(num_keys: int) -> int:
        least = max(_MIN_CAPACITY, int(num_keys / _MAX_LOAD_FACTOR) + 1)
        return 1 << (least - 1).bit_length()

    def _new_slots(self, capacity: int) -> Array:
        xp = self.backend.xp
        try:
            slots = xp.empty((capacity + 2, 2), np.int64)
        except MemoryError as error:
            raise MemoryError(
                f"No memory for the index of table {self.name!r} to grow from {self._capacity:,} "
                f"to {capacity:,} slots ({16 * capacity:,} bytes). It is as it was, with "
                f"{self._size:,} keys."
            ) from error
        slots[:, 0] = self.key_dtype.empty_key
        slots[:, 1] = ABSENT
        return slots

    def _begin(self, slots: Array) -> None:
        self._slots = slots
        self._capacity = len(slots) - 2
        self._size = 0
        self._reclaimed = 0

    def _rebuild_above(self, reclaim_factor: float) -> None:
        """Rids the index of erased slots if there are many and there is memory to do so."""
        if self._reclaimed > reclaim_factor * self._capacity:
            # Erased slots cost time only: the index works on without the memory to be rebuilt.
            with contextlib.suppress(MemoryError):
                self._rehash(self._capacity)

    def _rehash(self, capacity: int) -> None:
        slots = self._new_slots(capacity)
        _, empty_key, reclaim_key = self._index()
        self.backend.launch(
            "det_rehash",
            self._capacity,
            self._slots,
            self._capacity,
            empty_key,
            reclaim_key,
            slots,
            capacity,
        )
        slots[-2:] = self._slots[-2:]
        self._slots = slots
        self._capacity = capacity
        self._reclaimed = 0

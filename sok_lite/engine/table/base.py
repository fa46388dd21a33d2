"""Rows by key, whatever the index: lookups, writes, removal, export, statistics.

A lookup first finds. Only the keys that are missing are then made distinct, admitted, given rows
and inserted, so that the index and the rows grow by what is really new, and a lookup of known keys
writes nothing but when they were last seen.
"""

import contextlib
import hashlib
import numbers
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.combine import segment_sum
from sok_lite.engine.dtypes import KeyDtype, is_integer, key_dtype, row_dtype
from sok_lite.engine.row_store import ABSENT, RowStore, bfloat16_to_float32
from sok_lite.engine.table.clock import Clock
from sok_lite.engine.table.index import CHUNK_SLOTS, Found, Index
from sok_lite.engine.unique import last_of_each, unique


class Lookup(NamedTuple):
    """What a lookup gives.

    Attributes:
      values: (n, dim) of the table's storage dtype.
      rows: (k,) uint32, the row number of each key: good until the table's generation changes.
      num_absent: how many of the keys have no row.
    """

    values: Array
    rows: Array
    num_absent: int


class Entries(NamedTuple):
    """Some keys of a table and what it knows of them.

    Attributes:
      keys: (n,) of the table's key type, distinct.
      rows: (n,) uint32, row numbers.
      scores: (n,) uint64; an "hbm" table's scores are those of kLru: when a key was last seen.
      store: the rows.
    """

    keys: Array
    rows: Array
    scores: Array
    store: RowStore

    @property
    def values(self) -> Array:
        """(n, dim), the rows in their storage format. Read anew at every use."""
        return self.store.read(self.rows)


# What says which entries to take: a function of some of them that returns (n,) bool.
Predicate = Callable[[Entries], Array]


class Statistics(NamedTuple):
    """What a table has done and holds. The counters begin when it is made, cleared or restored.

    Attributes:
      size: keys held.
      capacity: slots of the index.
      load_factor: size / capacity.
      found, missed: keys that lookups (`find`, `find_or_insert`, `lookup`) found and did not, a
        repeated key each time.
      inserted: keys that got a row.
      evicted: keys that lost it to another key.
      refused: keys that got none for want of room.
      not_admitted: times that a key got none since it had not been seen often enough, or not
        drawn.
      erased: keys that were removed.
      num_rehashes: how often the index was written anew.
      mean_probe, longest_probe: lines of slots that a search for a held key reads.
      index_bytes: memory of the index, and of what else is kept by key: sightings, heat.
      near_bytes, far_bytes: memory of rows and optimizer states handed out so far, by tier.
    """

    size: int
    capacity: int
    load_factor: float
    found: int
    missed: int
    inserted: int
    evicted: int
    refused: int
    not_admitted: int
    erased: int
    num_rehashes: int
    mean_probe: float
    longest_probe: int
    index_bytes: int
    near_bytes: int
    far_bytes: int


_COUNTERS = ("found", "missed", "inserted", "evicted", "refused", "not_admitted", "erased")


class GivesFirstRows(Protocol):
    """What a table asks of an initializer."""

    def fill(
        self, backend: Backend, store: RowStore, rows: Array, keys: Array, table_seed: int
    ) -> None:
        """Writes the first values of rows (n,) of keys (n,) int64; an absent row is skipped."""

    def values(self, backend: Backend, keys: Array, dim: int, table_seed: int) -> Array:
        """Returns the first values of keys (n,) int64, (n, dim) float32."""


def table_seed(seed: int, name: str) -> int:
    """Returns the 64-bit seed of a table: the same on every machine for a seed and a name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class EmbeddingTable(ABC):
    """Rows by key. Every method may be called from several threads; each call is one at a time.

    Keys are integer arrays (n,) of the table's key type, or anything NumPy makes such an array of;
    they may repeat and every value of the type is legal. Methods return arrays of the backend.

    Attributes:
      backend, dim, name: as given.
      seed: as given, or the initializer's own where it came with one.
      key_dtype, row_dtype: formats of keys and rows.
      store: the rows and the optimizer states.
      generation: changes whenever row numbers handed out before may have become stale.
      clock: counts the lookups that could insert.
      lock: held during every method; hold it to do several as one.
    """

    var_type: str
    index: Index

    def __init__(
        self,
        backend: Backend,
        dim: int,
        *,
        initializer: GivesFirstRows,
        key_type: str,
        dtype: str,
        name: str,
        seed: int,
        store: dict[str, Any] | None = None,
    ) -> None:
        self.backend = backend
        self.dim = dim
        self.key_dtype: KeyDtype = key_dtype(key_type)
        self.row_dtype = row_dtype(dtype)
        self.name = name
        own_seed = getattr(initializer, "seed", None)
        self.seed = seed if own_seed is None else own_seed
        self.initializer = initializer
        self.store = RowStore(backend, dim, self.row_dtype, **(store or {}))
        self.generation = 0
        self.lock = threading.RLock()
        self._table_seed = table_seed(self.seed, name)
        self.clock = Clock()
        self._counts = dict.fromkeys(_COUNTERS, 0)

    # ---------------------------------------------------------------- sizes

    @property
    def size(self) -> int:
        """Keys held."""
        return self.index.size

    @property
    def capacity(self) -> int:
        """Slots of the index."""
        return self.index.capacity

    @property
    def load_factor(self) -> float:
        """size / capacity."""
        return self.size / self.capacity

    @property
    def index_bytes(self) -> int:
        """Memory of the index, and of what else is kept by key."""
        return self.index.num_bytes

    @property
    def num_lookups(self) -> int:
        """Lookups so far that could insert: the time by which `scores` and `expire` count."""
        return self.clock.now

    def statistics(self) -> Statistics:
        """Returns counters and sizes. It walks through the whole index for the probe lengths."""
        with self.lock:
            probes = self.index.probe_lengths()
            tiers = self.store.tier_bytes()
            return Statistics(
                size=self.size,
                capacity=self.capacity,
                load_factor=self.load_factor,
                **self._counts,
                num_rehashes=self.index.num_rehashes,
                mean_probe=probes.mean,
                longest_probe=probes.longest,
                index_bytes=self.index_bytes,
                near_bytes=tiers.near_used,
                far_bytes=tiers.far_used,
            )

    # ---------------------------------------------------------------- lookups

    def find(self, keys: Any) -> Array:
        """Returns the row number of every key, (n,) uint32; ABSENT where it has none.

        It changes nothing but the counters: no key is inserted and none counts as seen.
        """
        keys = self._keys(keys)
        with self.lock:
            found = self._find(keys)
            self._count_found(keys, found)
            return found.rows

    def contains(self, keys: Any) -> Array:
        """Returns whether each key has a row, (n,) bool. It changes nothing."""
        with self.lock:
            return self._find(self._keys(keys)).rows != np.uint32(ABSENT)

    def scores(self, keys: Any) -> Array:
        """Returns the score of every key, (n,) uint64; 0 where it has no row.

        An "hbm" table keeps that of kLru: the number of the lookup that last saw the key.
        """
        with self.lock:
            return self._scores(self._keys(keys))

    def find_or_insert(
        self,
        keys: Any,
        *,
        unique_keys: bool = False,
        scores: Any = None,
        filter_ratio: float = 1.0,
    ) -> Array:
        """Returns the row number of every key; keys without one get a row and its first value.

        Args:
          keys: (n,).
          unique_keys: a promise that no key repeats, which saves a pass when keys are new.
          scores: (n,) uint64, for a "hybrid" table whose strategy takes scores from the caller.
          filter_ratio: chance of a key without a row to get one this time.

        Returns:
          (n,) uint32; ABSENT for a key that was refused or not admitted.

        Raises:
          MemoryError: no memory for the new keys; the table is as it was.
        """
        keys = self._keys(keys)
        with self.lock:
            rows, _ = self._find_or_insert(keys, unique_keys, scores, filter_ratio)
            self._report_refused()
            return rows

    def lookup(
        self,
        keys: Any,
        *,
        unique_keys: bool = False,
        index: Array | None = None,
        out: Array | None = None,
        insert: bool = True,
        missing: str = "initial",
        filter_ratio: float = 1.0,
    ) -> Lookup:
        """Returns the row of every key and its number; new keys are inserted.

        Args:
          keys: (k,).
          unique_keys: a promise that no key repeats, which saves a pass when keys are new.
          index: (n,) int32, which key each row of the result belongs to; None: every key once.
          out: (n, dim) of the storage dtype, C-contiguous, to write into; None: a new array.
          insert: whether keys without a row get one; if not, nothing but the counters changes.
          missing: what a key gives that has no row afterwards: "initial", the value it would start
            with, or "zeros".
          filter_ratio: chance of a key without a row to get one this time.

        Raises:
          ValueError: `out` is not such an array. MemoryError: no memory for the result or the new
            keys. The table is as it was.
        """
        if missing not in ("initial", "zeros"):
            raise ValueError(f"`missing` must be 'initial' or 'zeros'. Received: {missing!r}.")
        keys = self._keys(keys)
        with self.lock:
            # Before any key is inserted: there may be no memory for it.
            out = self.store.output(int((keys if index is None else index).size), out=out)
            copies = index is None and self.store.can_copy_to(out)
            found_out = out if copies else None
            if insert:
                rows, num_absent = self._find_or_insert(
                    keys, unique_keys, None, filter_ratio, out=found_out
                )
            else:
                rows, num_absent = self._find(keys, out=found_out)
                self._count_found(keys, Found(rows, num_absent))
            wanted = rows if index is None else rows[index]
            if not copies:
                self.store.read(wanted, out=out)
            if num_absent:
                xp = self.backend.xp
                at = xp.flatnonzero(wanted == np.uint32(ABSENT))
                absent = keys[at] if index is None else keys[index[at]]
                out[at] = self._first_values(absent) if missing == "initial" else 0
            self._report_refused()
        return Lookup(out, rows, num_absent)

    # ---------------------------------------------------------------- writes

    def insert_or_assign(self, keys: Any, values: Any, scores: Any = None) -> None:
        """Sets the rows of keys, inserting those that have none. A repeated key: the last wins.

        Args:
          values: (n, dim).
          scores: (n,) uint64, as `assign_scores` takes them; None: as a lookup would.

        Raises:
          ValueError, TypeError: shape, dtype or scores do not fit. MemoryError: no memory for new
            keys. The table is as it was.
        """
        with self.lock:
            self._write(keys, values, insert=True, scores=scores)
            self._report_refused()

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
        distinct, summed = self._summed(keys, self._checked_deltas(keys, deltas))
        with self.lock:
            self.store.add(self._find(distinct).rows, summed, scale)

    def accum_or_assign(self, keys: Any, values: Any, is_found: Any) -> None:
        """Adds to rows that the caller found before and inserts those that it did not.

        A key whose flag no longer says what the table holds is skipped: another caller has
        inserted or removed it since. All of it counts as one lookup.

        Args:
          values: (n, dim) of a real floating dtype: what to add, or the first row.
          is_found: (n,) bool.

        Raises:
          ValueError, TypeError: shape or dtype do not fit. MemoryError: no memory for new keys.
            The table is as it was.
        """
        keys = self._keys(keys)
        xp = self.backend.xp
        values = xp.asarray(values)
        flags = xp.asarray(is_found)
        deltas = self._checked_deltas(keys, values)
        if flags.shape != keys.shape or flags.dtype != np.bool_:
            raise ValueError(
                f"`is_found` must be bool of shape {keys.shape}. "
                f"Received: {flags.dtype} of shape {flags.shape}."
            )
        users = self.key_dtype.from_int64(xp, keys)
        distinct, inverse = unique(self.backend, keys)
        with self.lock:
            # One lookup sees all keys, so that those to insert evict none of those to add to.
            stamp = self._next_lookup()
            is_held = (self._find(distinct, stamp).rows != np.uint32(ABSENT))[inverse]
            add, put = flags & is_held, ~flags & ~is_held
            add_keys, summed = self._summed(keys[add], deltas[add])
            add_rows = self._find(add_keys).rows
            # The last that may fail; it evicts no key that has the stamp.
            self._write(users[put], values[put], insert=True, stamp=stamp)
            self.store.add(add_rows, summed)
            self._report_refused()

    def assign_scores(self, keys: Any, scores: Any) -> None:
        """Sets the scores of the keys that have a row. The last of a repeated key wins.

        Args:
          scores: (n,) non-negative integers. Of an "hbm" table and of kLru they are numbers of
            lookups, at most `num_lookups`.

        Raises:
          ValueError: shapes do not fit, a score is negative, or above `num_lookups` where that is
            the most. Nothing has changed.
        """
        keys = self._keys(keys)
        scores = self._checked_scores(keys, scores)
        distinct, inverse = unique(self.backend, keys)
        last = last_of_each(self.backend, inverse, int(distinct.size))
        with self.lock:
            self._check_assignable(scores)
            self._set_scores(distinct, scores[last])

    # ---------------------------------------------------------------- removal

    def erase(self, keys: Any) -> int:
        """Removes keys with their rows and optimizer states; returns how many were there."""
        keys = self._keys(keys)
        distinct, _ = unique(self.backend, keys)
        with self.lock:
            return self._erase(distinct)

    def erase_if(self, predicate: Predicate) -> int:
        """Removes the entries that a predicate chooses; returns how many.

        Args:
          predicate: called with some entries at a time. All are asked before the first goes. It
            must not wait for another thread that uses the table, such as a tf.function that looks
            it up.
        """
        with self.lock:
            doomed = [self._keys(entries.keys) for entries in self._chosen(predicate)]
            return sum(self._erase(keys) for keys in doomed)

    def expire(self, *, num_lookups: int | None = None, seconds: float | None = None) -> int:
        """Removes keys that were not seen lately; returns how many.

        Args:
          num_lookups: those that none of the last `num_lookups` lookups asked for. A training step
            is one lookup of a table where it is looked up once a step.
          seconds: those that no lookup asked for within that time. Times are kept to a second or
            to 1/128 of them, and not in checkpoints: what is restored counts as seen.

        Raises:
          TypeError, ValueError: not exactly one of the two is given, or it is no number, negative,
            or a fraction of a lookup.
        """
        if (num_lookups is None) == (seconds is None):
            raise ValueError(
                "Give `num_lookups` or `seconds`, one of them. "
                f"Received: num_lookups={num_lookups}, seconds={seconds}."
            )
        name, limit = ("seconds", seconds) if num_lookups is None else ("num_lookups", num_lookups)
        if isinstance(limit, (bool, np.bool_)) or not isinstance(limit, numbers.Real):
            raise TypeError(f"`{name}` must be a number. Received: {name}={limit!r}.")
        if not limit >= 0 or (name == "num_lookups" and limit % 1 != 0):
            kind = "a whole number, 0 or more" if name == "num_lookups" else "0 or more"
            raise ValueError(f"`{name}` must be {kind}. Received: {name}={limit}.")
        with self.lock:
            if seconds is not None:
                oldest = self.clock.first_since(time.monotonic() - seconds)
            else:
                oldest = max(0, self.clock.now - int(num_lookups or 0) + 1)
            self._forget_before(oldest)
            return self._erase(self._keys_seen_before(oldest))

    def erase_below(self, cutoff: float) -> int:
        """Removes the keys whose rows are nearly zero: every |element| < cutoff; returns how many.

        Raises:
          ValueError: the cutoff is not above 0.
        """
        if not cutoff > 0:
            raise ValueError(f"`cutoff` must be above 0. Received: {cutoff}.")
        return self.erase_if(
            lambda entries: (abs(self._as_float32(entries.values)) < cutoff).all(axis=1)
        )

    def clear(self) -> None:
        """Removes every key and gives the memory back. Counters begin anew.

        Raises:
          MemoryError: no memory for the empty index; the table is as it was.
        """
        with self.lock:
            self.index.clear()
            self.store.clear()
            self._counts = dict.fromkeys(_COUNTERS, 0)
            self.generation += 1

    def reserve(self, num_keys: int) -> None:
        """Makes the index large enough for `num_keys` keys, so that it need not grow later.

        Raises:
          TypeError, ValueError: `num_keys` is no integer from 0 on. MemoryError: no memory; the
            table is as it was.
        """
        if not is_integer(num_keys):
            raise TypeError(f"`num_keys` must be an integer. Received: num_keys={num_keys!r}.")
        if num_keys < 0:
            raise ValueError(f"`num_keys` must not be negative. Received: num_keys={num_keys}.")
        with self.lock:
            self.index.reserve(num_keys)

    # ---------------------------------------------------------------- whole table

    @property
    def num_slots(self) -> int:
        """How many slots `export_chunk` can be asked for. It changes when the table grows."""
        return self.index.num_slots

    def export_chunk(self, first_slot: int, num_slots: int) -> Entries:
        """Returns what is in the slots [first_slot, first_slot + num_slots), in their order."""
        with self.lock:
            keys, rows, stamps, slots = self.index.entries(first_slot, num_slots)
            scores = self._slot_scores(stamps, slots)
            return Entries(
                self.key_dtype.from_int64(self.backend.xp, keys), rows, scores, self.store
            )

    def chunks(self, num_slots: int = CHUNK_SLOTS) -> Iterator[Entries]:
        """Yields the whole table in pieces. Hold `lock` if it may change meanwhile."""
        first = 0
        while first < self.num_slots:
            yield self.export_chunk(first, num_slots)
            first += num_slots

    def export_rows(self) -> tuple[Array, Array]:
        """Returns all keys, ascending, and their row numbers: (size,) key type, (size,) uint32."""
        with self.lock:
            return self._sorted(self.export_chunk(0, self.num_slots))

    def export(self) -> tuple[Array, Array]:
        """Returns all keys, ascending, and their rows: (size,) key type, (size, dim) storage."""
        with self.lock:
            keys, rows = self.export_rows()
            return keys, self.store.read(rows)

    def export_if(self, predicate: Predicate) -> tuple[Array, Array]:
        """Returns the entries that a predicate chooses, as `export` does all.

        Args:
          predicate: such as `lambda entries: entries.scores >= 100`; called with some at a time.
        """
        xp = self.backend.xp
        with self.lock:
            chosen = list(self._chosen(predicate))
            keys = xp.concatenate([entries.keys for entries in chosen])
            rows = xp.concatenate([entries.rows for entries in chosen])
            keys, rows = self._sorted(Entries(keys, rows, rows, self.store))
            return keys, self.store.read(rows)

    # ---------------------------------------------------------------- what an index decides

    @abstractmethod
    def _find(
        self,
        keys: Array,
        stamp: int = 0,
        scores: Array | None = None,
        out: Array | None = None,
    ) -> Found:
        """Finds keys; with a stamp they count as seen by the lookup of that number.

        Args:
          out: (n, dim) from `store.output`, gets the rows that are found; the places of the others
            hold anything.
        """

    @abstractmethod
    def _insert(self, keys: Array, stamp: int, scores: Array | None, *, initialise: bool) -> Array:
        """Gives rows to keys that are distinct and absent; ABSENT for those that it refuses.

        Args:
          scores: (n,) uint64, of a lookup's caller; without `initialise` the very scores to have.
        """

    @abstractmethod
    def _erase_index(self, keys: Array) -> Array:
        """Erases distinct keys and returns their row numbers, or ABSENT."""

    @abstractmethod
    def _scores(self, keys: Array) -> Array:
        """Returns the scores (n,) uint64 of keys; 0 for a missing one."""

    @abstractmethod
    def _set_scores(self, keys: Array, scores: Array) -> None:
        """Writes the scores (n,) uint64 of distinct keys; a missing one is skipped."""

    def _report_refused(self) -> None:
        """Says that keys of a call were refused, once everything else of it is done."""
        return None

    def _slot_scores(self, stamps: Array, slots: Array) -> Array:
        """Returns the scores (n,) uint64 of entries of the index."""
        return stamps.astype(np.uint64)

    def _admitted(self, keys: Array, filter_ratio: float) -> Array | None:
        """Returns which of some distinct absent keys get a row now, (n,) bool; None: all."""
        return None

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

    def _checked_deltas(self, keys: Array, deltas: Any) -> Array:
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
        return deltas

    def _checked_scores(self, keys: Array, scores: Any) -> Array:
        xp = self.backend.xp
        scores = xp.asarray(scores)
        if scores.shape != keys.shape or scores.dtype.kind not in "iu":
            raise ValueError(
                f"scores must be integers of shape {keys.shape}, one for each key. "
                f"Received: {scores.dtype} of shape {scores.shape}."
            )
        if scores.dtype.kind == "i" and bool((scores < 0).any()):
            raise ValueError(f"scores must not be negative. Received: {int(scores.min())}.")
        return xp.ascontiguousarray(scores, dtype=np.uint64)

    def _as_float32(self, values: Array) -> Array:
        if self.row_dtype.name == "bfloat16":
            return bfloat16_to_float32(self.backend.xp, values)
        return values.astype(np.float32, copy=False)

    def _first_values(self, keys: Array) -> Array:
        values = self.initializer.values(self.backend, keys, self.dim, self._table_seed)
        return self.store.to_storage(values)

    def _count_found(self, keys: Array, found: Found, inverse: Array | None = None) -> None:
        num_items, num_missing = int(keys.size), found.num_missing
        if inverse is not None:
            num_items = int(inverse.size)
            if num_missing:
                num_missing = int((found.rows == np.uint32(ABSENT))[inverse].sum())
        self._counts["found"] += num_items - num_missing
        self._counts["missed"] += num_missing

    def _next_lookup(self) -> int:
        """Begins a lookup that may insert, and returns its number."""
        if self.clock.is_full:
            self._age()
        return self.clock.tick()

    def _age(self) -> None:
        """Halves the number of every lookup, so that counting can go on."""
        self.index.age()
        self.clock.halve()

    def _summed(self, keys: Array, deltas: Array) -> tuple[Array, Array]:
        """Returns distinct keys and the sums of their deltas, float32."""
        distinct, inverse = unique(self.backend, keys)
        return distinct, segment_sum(self.backend, deltas, inverse, int(distinct.size))

    def _check_assignable(self, scores: Array) -> None:
        """Raises where scores (n,) uint64 cannot be kept: a key cannot be seen in the future."""
        highest = int(scores.max()) if scores.size else 0
        if highest > self.num_lookups:
            raise ValueError(
                f"The scores of table {self.name!r} are numbers of lookups, at most "
                f"{self.num_lookups:,} by now. Received: {highest:,}. Make a hybrid table with "
                "evict_strategy='kCustomized' for scores of your own."
            )

    def _find_or_insert(
        self,
        keys: Array,
        unique_keys: bool,
        scores: Any,
        filter_ratio: float,
        inverse: Array | None = None,
        out: Array | None = None,
    ) -> tuple[Array, int]:
        """Returns row numbers, and how many are still absent.

        Args:
          out: (n, dim) from `store.output`, gets the rows; the places of absent ones hold anything.
          inverse: (n,) int32, which key each item of the batch is, for the counters; None: each
            key is an item.
        """
        given = None if scores is None else self._checked_scores(keys, scores)
        stamp = self._next_lookup()
        rows, num_missing = self._find(keys, stamp, given, out)
        self._count_found(keys, Found(rows, num_missing), inverse)
        if not num_missing:
            return rows, 0
        at = self.backend.xp.flatnonzero(rows == np.uint32(ABSENT))
        # Before any key is inserted: there may be no memory for it.
        new_out = None if out is None else self.store.output(int(at.size))
        given = None if given is None else given[at]
        rows[at] = self._insert_missing(keys[at], stamp, unique_keys, given, filter_ratio)
        if out is not None:
            out[at] = self.store.read(rows[at], out=new_out)
        return rows, int((rows[at] == np.uint32(ABSENT)).sum())

    def _insert_missing(
        self,
        keys: Array,
        stamp: int,
        unique_keys: bool,
        scores: Array | None,
        filter_ratio: float,
    ) -> Array:
        """Inserts absent keys, as far as they are admitted; returns their row numbers or ABSENT."""
        xp = self.backend.xp
        inverse = None
        if not unique_keys:
            keys, inverse = unique(self.backend, keys)
            if scores is not None:
                scores = scores[last_of_each(self.backend, inverse, int(keys.size))]
        is_admitted = self._admitted(keys, filter_ratio)
        if is_admitted is None:
            rows = self._insert(keys, stamp, scores, initialise=True)
        else:
            rows = xp.full(keys.size, ABSENT, np.uint32)
            let_in = xp.flatnonzero(is_admitted)
            self._counts["not_admitted"] += int(keys.size - let_in.size)
            if let_in.size:
                scores = None if scores is None else scores[let_in]
                rows[let_in] = self._insert(keys[let_in], stamp, scores, initialise=True)
        return rows if inverse is None else rows[inverse]

    def _write(
        self, keys: Any, values: Any, *, insert: bool, scores: Any = None, stamp: int | None = None
    ) -> None:
        """Writes rows, as part of the lookup `stamp`; None: as one of its own."""
        keys = self._keys(keys)
        values = self.store.to_storage(values)
        self._check_rows(keys, values)
        given = None if scores is None else self._checked_scores(keys, scores)
        distinct, inverse = unique(self.backend, keys)
        last = last_of_each(self.backend, inverse, int(distinct.size))
        with self.lock:
            if given is not None:
                self._check_assignable(given)
            if not insert:
                rows = self._find(distinct).rows
            else:
                stamp = self._next_lookup() if stamp is None else stamp
                rows, num_missing = self._find(distinct, stamp)
                if num_missing:
                    at = self.backend.xp.flatnonzero(rows == np.uint32(ABSENT))
                    new_scores = None if given is None else given[last[at]]
                    rows[at] = self._insert(distinct[at], stamp, new_scores, initialise=False)
                if given is not None:
                    self._set_scores(distinct, given[last])
            self.store.write(rows, values, source=last)

    def _erase(self, keys: Array) -> int:
        """Erases distinct keys."""
        freed = self._erase_index(keys)
        held = freed != np.uint32(ABSENT)
        count = int(held.sum())
        if count:
            self._release(freed[held])
            self._counts["erased"] += count
            self.generation += 1
        return count

    def _forget_before(self, stamp: int) -> None:
        """Forgets what else is known of keys that no lookup from number `stamp` on has seen."""
        return None

    @contextlib.contextmanager
    def _room_for(self, count: int) -> Iterator[None]:
        """Names the table in a MemoryError of its row store."""
        try:
            yield
        except MemoryError as error:
            raise MemoryError(
                f"No memory for {count:,} more rows of table {self.name!r}, "
                f"{self.store.row_bytes:,} bytes each. It is as it was, with {self.size:,} keys. "
                f"Use more ranks, fewer keys or shorter rows. ({error})"
            ) from error

    def _release(self, rows: Array) -> None:
        """Gives rows back."""
        self.store.release(rows)

    def _keys_seen_before(self, stamp: int) -> Array:
        """Returns the keys (n,) int64 that no lookup from number `stamp` on has seen."""
        xp = self.backend.xp
        found = []
        for first in range(0, self.num_slots, CHUNK_SLOTS):
            held = self.index.entries(first, CHUNK_SLOTS)
            found.append(held.keys[held.stamps < stamp])
        return xp.concatenate(found)

    def _chosen(self, predicate: Predicate) -> Iterator[Entries]:
        for entries in self.chunks():
            mask = self.backend.xp.asarray(predicate(entries))
            if mask.shape != entries.keys.shape or mask.dtype != np.bool_:
                raise ValueError(
                    f"A predicate must return one bool per key, shape {entries.keys.shape}. "
                    f"Received: {mask.dtype} of shape {mask.shape}."
                )
            yield Entries(entries.keys[mask], entries.rows[mask], entries.scores[mask], self.store)

    def _sorted(self, entries: Entries) -> tuple[Array, Array]:
        order = self.backend.xp.argsort(entries.keys)
        return entries.keys[order], entries.rows[order]

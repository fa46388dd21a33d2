"""The "hybrid" table: up to a number of keys, then the lowest score goes; two tiers of rows."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.dtypes import is_integer, row_dtype
from sok_lite.engine.row_store import ABSENT
from sok_lite.engine.row_tiers import RowTiers
from sok_lite.engine.table.admission import SightingCounter, drawn
from sok_lite.engine.table.base import EmbeddingTable, GivesFirstRows
from sok_lite.engine.table.hkv_index import HkvIndex, Placed
from sok_lite.engine.table.hkv_options import HkvOptions
from sok_lite.engine.table.index import Found
from sok_lite.engine.unique import last_of_each, unique


class Evicted(NamedTuple):
    """Keys that lost their place to others.

    Attributes:
      keys: (n,) of the table's key type.
      values: (n, dim) of the storage dtype, their last rows.
      scores: (n,) uint64.
    """

    keys: Array
    values: Array
    scores: Array


class RefusedError(RuntimeError):
    """Keys were refused, and the table was made with on_refused="error".

    Their buckets were full of keys of the same batch, or of keys with higher scores than they came
    with.

    Attributes:
      evicted: what the other keys of the batch evicted, where the call was to return it.
    """

    evicted: Evicted | None = None


class HkvTable(EmbeddingTable):
    """A table over buckets with scores. See EmbeddingTable for what every table does.

    It doubles up to `max_capacity` slots. A new key that then finds both of its buckets full takes
    the place of the key with the lowest score there; a key that the same lookup has found or
    inserted is never taken. Where a batch has more keys for two buckets than they have slots, the
    surplus is refused: it gets no row this time. So is a key that comes with a score below all
    others in its two buckets.

    Args:
      backend, dim, initializer, key_type, dtype, name, seed: as of DetTable.
      options: the fields of HkvOptions.

    Attributes:
      tiers: which rows are hot. A lookup that may insert warms its rows and, every so often,
        moves hot rows near first: then `generation` changes.
    """

    var_type = "hybrid"

    def __init__(
        self,
        backend: Backend,
        dim: int,
        *,
        initializer: GivesFirstRows,
        key_type: str = "int64",
        dtype: str = "float32",
        name: str = "table",
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.options = HkvOptions.checked(options)
        backend = backend.for_table(
            self.options.block_size, self.options.device_id, bool(self.options.io_by_cpu)
        )
        super().__init__(
            backend,
            dim,
            initializer=initializer,
            key_type=key_type,
            dtype=dtype,
            name=name,
            seed=seed,
            store=self._tiers_of_store(dim, dtype),
        )
        self.tiers = RowTiers(self.store)
        self.index: HkvIndex = HkvIndex(
            backend,
            self.key_dtype,
            name,
            init_capacity=max(self.options.init_capacity, self.options.bucket),
            max_capacity=self.options.max_capacity,
            bucket=self.options.bucket,
            max_load_factor=self.options.max_load_factor,
            strategy=self.options.evict_strategy,
        )
        self.sightings: SightingCounter | None = None
        if self.options.enter_threshold > 1:
            self.sightings = SightingCounter(
                backend, self.key_dtype, name, self.options.enter_threshold
            )
        self._has_warned = False
        # Of the call that is under way: new keys refused, and all of them.
        self._refused = (0, 0)
        self._evicted: list[Evicted] | None = None

    # ---------------------------------------------------------------- scores and eviction

    @property
    def epoch(self) -> int:
        """The epoch that kEpochLru and kEpochLfu stamp: a later one outweighs every earlier."""
        return self.index.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        if not is_integer(epoch):
            raise TypeError(f"`epoch` must be an integer. Received: {epoch!r}.")
        if not 0 <= epoch <= 0xFFFFFFFF:
            raise ValueError(f"`epoch` must be in [0, 2**32). Received: {epoch}.")
        with self.lock:
            self.index.epoch = int(epoch)

    @property
    def num_evicted(self) -> int:
        """Keys that lost their row to another key since the counters began."""
        return self._counts["evicted"]

    @property
    def index_bytes(self) -> int:
        others = 0 if self.sightings is None else self.sightings.num_bytes
        return self.index.num_bytes + self.tiers.num_bytes + others

    def lookup_and_evict(
        self, keys: Any, *, unique_keys: bool = False, out: Array | None = None
    ) -> tuple[Array, Evicted]:
        """Does what `lookup` does and returns, beside the rows, what was evicted for new keys.

        Returns:
          ((n, dim) of the storage dtype, the evicted entries in no order).
        """
        with self._reporting() as evicted:
            values = self.lookup(keys, unique_keys=unique_keys, out=out).values
            return values, self._gathered(evicted)

    def insert_and_evict(self, keys: Any, values: Any, scores: Any = None) -> Evicted:
        """Does what `insert_or_assign` does and returns what was evicted for new keys."""
        with self._reporting() as evicted:
            self.insert_or_assign(keys, values, scores)
            return self._gathered(evicted)

    def clear(self) -> None:
        with self.lock:
            super().clear()
            self.tiers.clear()
            if self.sightings is not None:
                self.sightings.clear()

    # ---------------------------------------------------------------- tiers

    def _tiers_of_store(self, dim: int, dtype: str) -> dict[str, Any]:
        """The arguments of RowStore that split it."""
        row_bytes = dim * row_dtype(dtype).storage.itemsize
        near_rows = self.options.max_hbm_for_vectors * 2**30 / max(1, row_bytes)
        if near_rows >= self.options.max_capacity:
            return {}  # the rows of the two reserved keys do not make a second tier worth it
        return {"near_rows": int(near_rows), "far_path": self.options.far_path}

    def _rebalance(self) -> None:
        moved = self.tiers.rebalance()
        if moved is not None:
            self.index.update(moved.keys, rows=moved.rows)
            self.generation += 1

    def _release(self, rows: Array) -> None:
        self.tiers.released(rows)
        super()._release(rows)

    # ---------------------------------------------------------------- what the index decides

    def _find(
        self,
        keys: Array,
        stamp: int = 0,
        scores: Array | None = None,
        out: Array | None = None,
    ) -> Found:
        if out is None or (stamp and self.index.has_scores):
            found = self.index.find(keys, stamp, scores)
            if out is not None:
                self.store.read(found.rows, out=out)
            return found
        return self.index.find_and_copy(keys, stamp, self.store.copying(out))

    def _find_or_insert(
        self,
        keys: Array,
        unique_keys: bool,
        scores: Any,
        filter_ratio: float,
        inverse: Array | None = None,
        out: Array | None = None,
    ) -> tuple[Array, int]:
        if self.tiers.is_due:
            # Before any row number of this lookup is known.
            self._rebalance()
        # A repeated key counts once: in its score, which two threads must not write at a time, and
        # in the heat of its row.
        must_differ = self.index.has_scores or self.store.num_far_rows > 0
        if unique_keys or not must_differ:
            found = super()._find_or_insert(keys, unique_keys, scores, filter_ratio, out=out)
            self.tiers.touched(found[0])
            return found
        distinct, inverse = unique(self.backend, keys)
        if scores is not None:
            # The last in the batch counts, as for values.
            last = last_of_each(self.backend, inverse, int(distinct.size))
            scores = self._checked_scores(keys, scores)[last]
        rows, num_absent = super()._find_or_insert(distinct, True, scores, filter_ratio, inverse)
        self.tiers.touched(rows)
        rows = rows[inverse]
        if out is not None:
            self.store.read(rows, out=out)
        if num_absent:
            num_absent = int((rows == np.uint32(ABSENT)).sum())
        return rows, num_absent

    def _insert(self, keys: Array, stamp: int, scores: Array | None, *, initialise: bool) -> Array:
        xp = self.backend.xp
        n = int(keys.size)
        # Whatever needs much memory comes before the first change.
        self.index.make_room(n)
        with self._room_for(min(n, self.index.room)):
            self.store.reserve(min(n, self.index.room))
            self.tiers.reserve(self.store.num_rows + n)
        last_rows = None if self._evicted is None else self.store.output(n)
        rows = xp.full(n, ABSENT, np.uint32)
        at = xp.arange(n)
        owned: list[Array] = []  # rows that are those of the new keys by now
        try:
            while True:
                given = None if scores is None else scores[at]
                # Scores that come with rows are scores; with a lookup they may be increments.
                placed = self.index.insert(keys[at], stamp, given, given_is_score=not initialise)
                self._take_evicted(placed, owned, last_rows)
                rows[at] = self._rows_for(keys[at], placed, owned)
                at = at[placed.slots < 0]
                if at.size == 0 or self.index.is_full_size:
                    break
                # Both buckets full before the table is: it grows early rather than lose a key.
                self.index.double()
            if initialise:
                self.initializer.fill(self.backend, self.store, rows, keys, self._table_seed)
        except BaseException:
            # No memory to grow early, or an initializer that failed: no key stays without a value.
            self.index.take_back(keys)
            for part in owned:
                self._release(part)
            raise
        if self.sightings is not None:
            # Not before: a key that is refused, or finds no memory, need not be counted anew.
            self.sightings.forget(keys[rows != np.uint32(ABSENT)])
        self._counts["inserted"] += n - int(at.size)
        self._counts["refused"] += int(at.size)
        self._refused = (int(at.size), n)
        return rows

    def _take_evicted(self, placed: Placed, owned: list[Array], out: Array | None) -> None:
        """Counts and reports what was evicted, and sets its optimizer states back.

        Args:
          owned: gets the rows that the evicted keys had.
          out: (n, dim), room for what they hold; None: it is not to be reported.
        """
        has_evicted = placed.evicted_rows != np.uint32(ABSENT)
        rows = placed.evicted_rows[has_evicted]
        if rows.size == 0:
            return
        owned.append(rows)
        self._counts["evicted"] += int(rows.size)
        self.generation += 1
        if self._evicted is not None and out is not None:
            values = self.store.read(rows, out=out[: rows.size])
            keys, scores = placed.evicted_keys[has_evicted], placed.evicted_scores[has_evicted]
            self._evicted.append(Evicted(keys, values, scores))
        for state in self.store.state_names:
            self.store.fill(state, rows)

    def _rows_for(self, keys: Array, placed: Placed, owned: list[Array]) -> Array:
        """Gives row numbers to keys that were placed: those of the evicted, and free ones.

        Args:
          owned: gets the free ones that are taken.
        """
        xp = self.backend.xp
        rows = placed.evicted_rows
        new = xp.flatnonzero((placed.slots >= 0) & (rows == np.uint32(ABSENT)))
        if new.size:
            owned.append(self.store.allocate(int(new.size)))
            rows = rows.copy()
            rows[new] = owned[-1]
        self.index.set_rows(placed, rows)
        held = xp.flatnonzero(placed.slots >= 0)
        self.tiers.assigned(rows[held], keys[held])
        return rows

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[list[Evicted]]:
        """Gives a list that grows by what is evicted."""
        with self.lock:
            evicted: list[Evicted] = []
            self._evicted = evicted
            try:
                yield evicted
            except RefusedError as error:
                error.evicted = self._gathered(evicted)
                raise
            finally:
                self._evicted = None

    def _report_refused(self) -> None:
        (count, num_new), self._refused = self._refused, (0, 0)
        if not count or self.options.on_refused == "ignore":
            return
        text = (
            f"Table {self.name!r} had no room for {count:,} of {num_new:,} new keys of one lookup: "
            "their buckets are full of keys of the same lookup, or of higher scores. It holds "
            f"{self.size:,} keys in {self.capacity:,} slots. They get no row this time. Use a "
            "larger max_capacity or smaller batches."
        )
        if self.options.on_refused == "error":
            raise RefusedError(f"{text} The other keys of the lookup are in the table.")
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{text} (Said once for a table.)", RuntimeWarning, stacklevel=2)

    def _erase_index(self, keys: Array) -> Array:
        if self.sightings is not None:
            self.sightings.forget(keys)
        return self.index.erase(keys)

    def _scores(self, keys: Array) -> Array:
        return self.index.scores(keys)

    def _check_assignable(self, scores: Array) -> None:
        if not self.index.has_scores:
            super()._check_assignable(scores)

    def _set_scores(self, keys: Array, scores: Array) -> None:
        self.index.update(keys, scores=scores)

    def _slot_scores(self, stamps: Array, slots: Array) -> Array:
        return self.index.slot_scores(stamps, slots)

    def _admitted(self, keys: Array, filter_ratio: float) -> Array | None:
        is_admitted = None
        if filter_ratio < 1.0:
            is_admitted = drawn(keys, filter_ratio, self._table_seed, self.num_lookups)
        if self.sightings is not None:
            is_admitted = self.sightings.count(keys, self.num_lookups, is_admitted)
        return is_admitted

    def _forget_before(self, stamp: int) -> None:
        if self.sightings is not None:
            self.sightings.forget_before(stamp)

    def _age(self) -> None:
        super()._age()
        if self.sightings is not None:
            self.sightings.age()

    def _gathered(self, parts: list[Evicted]) -> Evicted:
        xp = self.backend.xp
        keys = xp.concatenate([xp.empty(0, np.int64), *(part.keys for part in parts)])
        empty = xp.empty((0, self.dim), self.row_dtype.storage)
        values = xp.concatenate([empty, *(part.values for part in parts)])
        scores = xp.concatenate([xp.empty(0, np.uint64), *(part.scores for part in parts)])
        return Evicted(self.key_dtype.from_int64(xp, keys), values, scores)

"""What a table is made of, and what all that uses it shares."""

import hashlib
from abc import ABC
from functools import partial
from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, plan_set
from sok_lite.engine.dtypes import KeyDtype, key_dtype, row_dtype
from sok_lite.engine.owner import MOD, OwnerRule
from sok_lite.engine.rows.store import NO_ROW, RowStore
from sok_lite.engine.table.clock import Clock
from sok_lite.engine.table.dumped import Dumped
from sok_lite.engine.table.exclusive import Exclusive, exclusive
from sok_lite.engine.table.index import Found, Index
from sok_lite.engine.table.removal_log import RemovalLog
from sok_lite.engine.table.results import GivesFirstRows, KnownRows, Statistics

# A row of this many float32 numbers takes a gigabyte: a larger dimension is a mistake.
MAX_DIM = 1 << 28
# One rank has as many row numbers.
MAX_KEYS = NO_ROW

COUNTERS = (
    *("found", "missed", "inserted", "evicted", "refused", "not_admitted", "not_updated"),
    "erased",
)


def table_seed(seed: int, name: str) -> int:
    """Returns the 64-bit seed of a table: the same on every machine for a seed and a name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def checked_num_keys(name: str, what: str, count: int) -> int:
    """Returns a number of keys to make room for, or raises ValueError."""
    if not 0 <= count <= MAX_KEYS:
        raise ValueError(
            f"`{what}` of table {name!r} must be from 0 to {MAX_KEYS:,}, the most rows that one "
            f"rank can hold. Received: {what}={count}."
        )
    return count


class TableParts(Exclusive, ABC):
    """What a table is made of: index, row store, clock, counters.

    Attributes:
      backend, dim, name: as given.
      seed: as given, or the initializer's own where it came with one.
      key_dtype, row_dtype: formats of keys and rows.
      owner: which rank owns a key. The table takes every key that it is given; those who send keys
        between ranks ask.
      store: the rows and the optimizer states.
      row_epoch: changes whenever row numbers handed out before may have become stale.
      clock: counts the lookups that could insert.
      is_static: whether it has a fixed number of rows, which somebody else keeps; see
        engine/static_table.py.
      all_ranks_refusal: why a lookup of all ranks does not reach its rows; None: it does.
      lists_states: whether its optimizer states have names to list, rename and drop them by.
      step_type: the class of steps by rules that tables of its kind take, and which has
        `refuse(table, why)` for what such a step cannot do; None: `update.UpdateStep`.
      keeps_every_key: whether it neither evicts keys nor turns new ones away. A lookup has nothing
        else to prepare or to report then.
      counts_repeats: whether a lookup counts a key as often as it comes; see `counts`.
      sees_updates: whether every update is a lookup of its keys to their scores, not only one that
        has to insert some: for those whose lookups in training do not insert, nor count as such.
      removals: a log of keys that have lost their rows; None: nobody wants one.
      rounds_gradients: whether gradients travel to other ranks as bfloat16.
      dumps: the files that have what it held, for incremental dumps; see engine/table/dumped.py.
      last_gradient: the keys of the last gradient, most likely those of the update that follows,
        among those of the tables of its lookup, and the number of this table there; None: there was
        none.
    """

    var_type: str
    is_static = False
    all_ranks_refusal: str | None = None
    lists_states = True
    step_type: Any = None
    # Of the call that is under way: new keys that had no room, and all of them.
    refused = (0, 0)
    keeps_every_key = True
    counts_repeats = False
    sees_updates = False
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
        owner: OwnerRule = MOD,
        rounds_gradients: bool = False,
        store: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= dim <= MAX_DIM:
            raise ValueError(
                f"The dimension must be at least 1 and at most {MAX_DIM:,}. Received: {dim} for "
                f"table {name!r}."
            )
        self.backend = backend
        self.dim = dim
        self.key_dtype: KeyDtype = key_dtype(key_type)
        self.row_dtype = row_dtype(dtype)
        initializer.check(self.row_dtype, dim)
        self.name = name
        self.owner = owner
        own_seed = getattr(initializer, "seed", None)
        self.seed = seed if own_seed is None else own_seed
        self.initializer = initializer
        self.store = RowStore(backend, dim, self.row_dtype, **(store or {}))
        self.row_epoch = 0
        self._table_seed = table_seed(self.seed, name)
        self.clock = Clock()
        self.removals: RemovalLog | None = None
        self.rounds_gradients = rounds_gradients
        self.dumps: tuple[Dumped, ...] = ()
        self.last_gradient: tuple[KnownRows, int] | None = None
        self._counts = dict.fromkeys(COUNTERS, 0)

    # ---------------------------------------------------------------- sizes

    @property
    def size(self) -> int:
        """Keys held."""
        if self._unfinished is not None:
            self._settled()
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
        return self.index.num_bytes + (0 if self.removals is None else self.removals.num_bytes)

    @property
    def num_evicted(self) -> int:
        """Keys that lost their row to another key since the counters began."""
        if self._unfinished is not None:
            self._settled()
        return self._counts["evicted"]

    @property
    def max_capacity(self) -> int | None:
        """Slots up to which it grows; None: without bound."""
        return None

    @property
    def evict_strategy(self) -> str | None:
        """What the score of a key is, by which it is evicted; None: none is."""
        return None

    @property
    def epoch(self) -> int:
        """The epoch that scores are stamped with; always 0 where every key is kept."""
        return 0

    @property
    def num_lookups(self) -> int:
        """Lookups so far that could insert: the time by which `scores` and `expire` count."""
        return self.clock.now

    @exclusive
    def _settled(self) -> None:
        """Finishes what an interrupted call has left, as every outermost call does."""

    @exclusive
    def statistics(self) -> Statistics:
        """Returns counters and sizes. It walks through the whole index for the probe lengths."""
        probes = self.index.probe_lengths()
        tiers = self.store.tier_bytes()
        return Statistics(
            size=self.size,
            capacity=self.capacity,
            load_factor=self.load_factor,
            **self.totals(),
            rehashes_total=self.index.num_rehashes,
            mean_probe=probes.mean,
            longest_probe=probes.longest,
            index_bytes=self.index_bytes,
            near_bytes=tiers.near_used,
            far_bytes=tiers.far_used,
            near_reserved_bytes=tiers.near,
            far_reserved_bytes=tiers.far,
        )

    @exclusive
    def totals(self) -> dict[str, int]:
        """Returns the counters of `statistics()`, such as "found_total". The index is not read."""
        return {f"{name}_total": count for name, count in self._counts.items()}

    @exclusive
    def seen_lately(self) -> tuple[int, int] | None:
        """Returns how often lookups asked lately for keys whose row is near now, and for any.

        Older lookups count less, those during a rest of the tiers not at all. None: all rows are
        near.
        """
        return None

    @property
    def filter_ratio(self) -> float:
        """The chance of a new key to get a row at a lookup with the low-frequency filter."""
        return 1.0

    def options_of_all_ranks(self) -> dict[str, Any]:
        """Returns the options of this kind of table that ranks must have in common."""
        return {}

    # ---------------------------------------------------------------- one call at a time

    def _finish(self) -> None:
        if self._unfinished is not None:
            super()._finish()
        if self.store.has_far_file:
            self.store.trim()

    def _unusable_after_fork(self) -> str | None:
        if not self.store.has_far_file:
            return None
        return (
            f"Table {self.name!r} keeps rows in far_path, a file of the process that made it. This "
            "process was forked from that one and would write the same rows. Make a table of its "
            "own here, or fork before the table is made."
        )

    # ---------------------------------------------------------------- what an index decides

    def _find(self, keys: Array) -> Found:
        """Finds keys and changes nothing."""
        return self.index.find(keys)

    # ---------------------------------------------------------------- arguments

    def engine_keys(self, keys: Any) -> Array:
        """Returns keys of any shape as int64; of a uint64 table their bits.

        Raises:
          TypeError: they are no integers. ValueError: one does not fit the key type.
        """
        what = f"keys of table {self.name!r}"
        return self.key_dtype.to_int64(self.backend.xp, keys, what)

    def _keys(self, keys: Any) -> Array:
        keys = self.engine_keys(keys)
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
        if self.row_dtype.is_integer:
            deltas = self.row_dtype.to_storage(xp, deltas)
        elif deltas.dtype.kind != "f" and deltas.dtype.name != "bfloat16":
            # Not taken for numbers: the bits of bfloat16 rows, in which `export` gives them.
            raise TypeError(
                f"deltas must be real floating-point numbers. Received: dtype {deltas.dtype}. "
                "Cast them first."
            )
        deltas = xp.ascontiguousarray(deltas, dtype=self.row_dtype.added_in)
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

    def plan_draw(self, out: Array, keys: Array, rows: Array | None = None) -> Action:
        """Prepares to write what rows begin with.

        Args:
          out: (n, dim) from `store.output`.
          keys: (n,) int64.
          rows: (n,) uint32; a key whose row is not NO_ROW is skipped; None: none is.
        """
        seed = self._table_seed
        return self.initializer.plan_draw(self.backend, self.row_dtype, out, keys, seed, rows)

    # ---------------------------------------------------------------- counters

    def _plan_count(self, **more: int) -> Action:
        """Prepares to add to counters."""
        counts = {name: self._counts[name] + count for name, count in more.items()}
        return partial(self._counts.update, counts)

    def _plan_renew(self) -> list[Action]:
        """Prepares what follows whenever row numbers handed out before may be stale."""
        return plan_set(self, row_epoch=self.row_epoch + 1, last_gradient=None)

"""The state of a table: its index, its rows, and what decides which keys have a row."""

import hashlib
from abc import ABC, abstractmethod
from ctypes import addressof
from operator import attrgetter
from typing import Any

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import Launch
from sok_lite.backend.table_lock import TableLock
from sok_lite.engine.dtypes import KeyDtype, key_dtype, row_dtype
from sok_lite.engine.initializer import AnyInitializer
from sok_lite.engine.owner import MOD, OwnerRule
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.rows.store import NO_ROW, RowStore
from sok_lite.engine.rows.tiers import RowTiers
from sok_lite.engine.table.admission import CountUpdate, PendingCounts
from sok_lite.engine.table.clock import Clock
from sok_lite.engine.table.dump_mark import DumpMark, forget
from sok_lite.engine.table.index import AccessCounts, Index
from sok_lite.engine.table.locking import Lockable
from sok_lite.engine.table.record import INSERTS, READS
from sok_lite.engine.table.removal_log import RemovalLog
from sok_lite.engine.table.row_cache import RowCache
from sok_lite.engine.texts import TextStore

# A row of this many float32 numbers takes a gigabyte: a larger dimension is a mistake.
MAX_DIM = 1 << 28
MAX_KEYS = NO_ROW  # row numbers of one rank


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


class TableBase(Lockable, ABC):
    """The state of a table, and what each kind of table does in its own way.

    The functions of a table are in find.py, insert.py, write.py, remove.py, export.py, history.py
    and summary.py, and take it.

    Attributes:
      seed: the argument, or the initializer's own seed where it has one.
      owner: which rank owns a key, for the exchange between ranks. The table itself takes any
        key.
      tiers: which rows are hot; None: all rows are kept in one way.
      pending: how often keys without a row were seen; None: every new key is admitted.
      record: the table as native code sees it, which has the numbers of `clock` and `counters`.
      table_seed: of its rows, made from `seed` and `name`.
      refused: of the current call, how many new keys had no room, and how many there were.
      row_version: changes whenever row numbers handed out before may have become stale.
      clock: counts the lookups that could insert.
      is_static: whether it has a fixed number of rows, which another variable keeps; see
        engine/static_table.py.
      all_ranks_refusal: why a lookup of all ranks does not reach its rows; None: it does.
      lists_states: whether its optimizer states have names to list, rename and drop them by.
      step_type: the class of steps by rules for such tables, which has `refuse(table, why)` for
        what such a step cannot do; None: `update.UpdateStep`.
      keeps_every_key: whether it neither evicts keys nor turns new ones away. A lookup has nothing
        else to prepare or to report then.
      counts_repeats: whether a lookup counts a key as often as its batch has it, not once.
      scores_are_counts: whether a score says how often a key was looked up.
      sees_updates: whether every update refreshes scores as a lookup does, not only one that
        inserts: for those whose lookups in training do not insert, nor count as such.
        Under kCustomized new keys without a score get theirs after the call.
      removals: a log of keys that have lost their rows; None: nothing asks for one.
      rounds_gradients: whether gradients travel to other ranks as bfloat16.
      dumps: the files that have all rows as of some lookup, for incremental dumps; see
        engine/table/dump_mark.py.
      row_cache: keys and rows of the last gradient, most likely those of the next update.
      texts: of the keys that this rank has looked up; None: they are not kept.
      ids: what programs look up: "integers", or "texts", whose hashes are the keys; None: not
        known, and hashes may come as integers.
    """

    var_type: str
    is_static = False
    record: Any = None
    all_ranks_refusal: str | None = None
    lists_states = True
    step_type: Any = None
    keeps_every_key = True
    counts_repeats = False
    scores_are_counts = False
    sees_updates = False
    index: Index
    texts: TextStore | None = None
    ids: str | None = None

    def __init__(
        self,
        backend: Backend,
        dim: int,
        *,
        initializer: AnyInitializer,
        key_type: str,
        dtype: str,
        name: str,
        seed: int,
        owner: OwnerRule = MOD,
        rounds_gradients: bool = False,
        store: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(backend)
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
        whose = f"table {name!r}"
        self.store = RowStore(backend, dim, self.row_dtype, whose=whose, **(store or {}))
        self.table_seed = table_seed(self.seed, name)
        self.clock = Clock.of(self.record)
        self.removals: RemovalLog | None = None
        # Changes assign these: a new attribute there might find no memory.
        self.tiers: RowTiers | None = None
        self.pending: PendingCounts | None = None
        self.refused = (0, 0)
        self.rounds_gradients = rounds_gradients
        self.dumps: tuple[DumpMark, ...] = ()
        self.row_cache = RowCache(self.record)
        self.counters = self.record.counters

    def set_parts(self, index: Index, store: RowStore) -> None:
        """Sets index and rows, also for native code."""
        record, self.index, self.store = self.record, index, store
        record.index, record.store = addressof(index.record), addressof(store.record)
        record.counts_repeats = self.counts_repeats
        record.turns_away = self.may_turn_away(self.filter_ratio)
        record.allows = (READS | INSERTS) * isinstance(self.lock, TableLock)

    # In C: a step may have a thousand tables.
    row_version = property(attrgetter("record.row_version"))

    # ---------------------------------------------------------------- sizes

    @property
    def size(self) -> int:
        """Number of keys with a row."""
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
        """Memory of the index, and of all else that is kept by key."""
        others = (self.removals, self.tiers, self.pending)
        return self.index.num_bytes + sum(each.num_bytes for each in others if each is not None)

    @property
    def text_bytes(self) -> int:
        """Memory of the host for the texts of keys that this rank has seen."""
        return 0 if self.texts is None else self.texts.num_bytes

    @property
    def num_evicted(self) -> int:
        """Keys evicted since the counters began."""
        return self.counters.evicted

    @property
    def max_capacity(self) -> int | None:
        """Slots up to which it grows; None: without bound."""
        return None

    @property
    def evict_strategy(self) -> str | None:
        """The eviction strategy, such as "kLru"; None: no key is evicted."""
        return None

    @property
    def epoch(self) -> int:
        """The epoch that new scores carry in their high half; always 0 where every key is kept."""
        return 0

    @property
    def num_lookups(self) -> int:
        """Lookups so far that could insert: the time by which `scores` and `expire` count."""
        return self.clock.now

    @property
    def filter_ratio(self) -> float:
        """The chance of a new key to get a row at a lookup with the low-frequency filter."""
        return 1.0

    def options_of_all_ranks(self) -> dict[str, Any]:
        """Returns the options of this kind of table that ranks must have in common."""
        return {}

    # ---------------------------------------------------------------- one call at a time

    def on_failure(self) -> None:
        if self.store.has_far_file:
            self.store.trim()

    def why_unusable_after_fork(self) -> str | None:
        if not self.store.has_far_file:
            return None
        return (
            f"Table {self.name!r} keeps rows in far_path, a file of the process that made it. This "
            "process was forked from that one and would write the same rows. Make a table of its "
            "own here, or fork before the table is made."
        )

    # ---------------------------------------------------------------- what a kind of table decides

    @abstractmethod
    def new_insertion(self, *args: Any) -> Any:
        """Returns the insertion of new keys; see engine/table/insert.py."""

    def can_skip_dedup(self, most: int) -> bool:
        """Whether the index takes up to so many new keys, and removes duplicates itself, with the
        memory that it has."""
        return False

    @abstractmethod
    def make_room(self, count: int) -> Claim:
        """Makes room for new keys, and claims rows for as many as need not evict another.

        Raises:
          MemoryError: there is no memory for them; the table is as it was.
        """

    @abstractmethod
    def scores_of(self, keys: Array) -> Array:
        """Returns the scores (n,) uint64 of keys; 0 for a missing one."""

    @abstractmethod
    def score_launch(self, keys: Array, scores: Array) -> Launch:
        """Returns the launch that writes the scores (n,) uint64 of distinct keys; a missing one is
        skipped. `scores_were_set` follows."""

    def scores_were_set(self) -> None:
        """Called after scores were written, which may make keys seem seen earlier."""
        forget(self)

    def may_turn_away(self, filter_ratio: float) -> bool:
        """Whether a lookup that admits each new key with this chance may turn some away."""
        return False

    def admission_launches(
        self,
        keys: Array,
        filter_ratio: float,
        admitted: Array,
        counters: Array,
        occurrences: Array | None,
    ) -> tuple[list[Launch], CountUpdate | None]:
        """Returns the launches that decide which distinct missing keys are admitted, and their new
        pending counts, which are still to be stored; None: the table has none.

        Args:
          keys: (n,) int64.
          filter_ratio: chance of each one.
          admitted: (n,) uint8, all 1; gets 0 for those that are not.
          counters: (len(Count),) int64, of this table.
          occurrences: (n,) uint64, how often the lookup has each key; None: once.
        """
        raise NotImplementedError(f"Table {self.name!r} turns no new key away.")

    def report_refused(self, evicted: list[Any] | None = None) -> None:
        """Warns or raises if keys of the call were refused. The last step of a call."""
        return None

    @property
    def inserts_for_updates(self) -> bool:
        """Whether an update inserts keys without a row.

        Not where some are turned away: gradients have those as well, and to insert them would undo
        the admission.
        """
        return not self.may_turn_away(self.filter_ratio)

    # ---------------------------------------------------------------- arguments

    def engine_keys(self, keys: Any) -> Array:
        """Returns keys of any shape as int64; of a uint64 table their bits.

        Raises:
          TypeError: they are no integers. ValueError: one does not fit the key type.
        """
        what = f"keys of table {self.name!r}"
        return self.key_dtype.to_int64(self.backend.xp, keys, what)

    def draw_launch(self, out: Array, keys: Array, rows: Array | None = None) -> Launch:
        """Returns the launch that writes the initial values of keys.

        Args:
          out: (n, dim) from `store.output`.
          keys: (n,) int64.
          rows: (n,) uint32: only keys with NO_ROW are drawn; None: all.
        """
        seed = self.table_seed
        return self.initializer.draw_launch(self.backend, self.row_dtype, out, keys, seed, rows)

    # ---------------------------------------------------------------- rows

    def invalidate_row_numbers(self) -> None:
        """Starts another `row_version`: row numbers handed out before may be stale."""
        self.record.row_version += 1

    def access_counts(self) -> AccessCounts | None:
        """Returns the access counts of rows, to which a lookup that may insert adds; None: rows are
        not counted."""
        tiers = self.tiers
        counts = None if tiers is None else tiers.access_counts()
        return None if tiers is None or counts is None else AccessCounts(counts, tiers.is_counting)

    def count_launches(self, new_rows: Array) -> list[Launch]:
        """Returns the launches that count accesses of new rows (n,) uint32, before
        `count_lookup`."""
        if self.tiers is None:
            return []
        self.tiers.reserve(self.store.num_rows)
        return self.tiers.count_launches(new_rows)

    def count_lookup(self, num_rows: int) -> None:
        """Counts the rows that a lookup has accessed, with new ones."""
        if self.tiers is not None:
            self.tiers.count_lookup(num_rows)

"""The "hybrid" table: a maximum capacity with eviction by score, and two tiers of rows."""

from dataclasses import asdict
from typing import Any

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import Launch
from sok_lite.engine.callers import warn
from sok_lite.engine.dtypes import is_integer, row_dtype
from sok_lite.engine.initializer import AnyInitializer
from sok_lite.engine.owner import MOD, OwnerRule
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.rows.tiers import RowTiers
from sok_lite.engine.table.admission import CountUpdate, PendingCounts, draw_launch
from sok_lite.engine.table.counters import Count, counter
from sok_lite.engine.table.hkv_index import HkvIndex
from sok_lite.engine.table.hkv_options import HkvOptions
from sok_lite.engine.table.insert import HkvInsertion, claim_rows, gather_evicted
from sok_lite.engine.table.locking import mutating
from sok_lite.engine.table.results import Evicted
from sok_lite.engine.table.table import EmbeddingTable
from sok_lite.engine.table.write import assign_and_evict


class RefusedError(RuntimeError):
    """Keys were refused by a table with on_refused="error".

    Their buckets were full of keys of the same batch, or of keys with higher scores.

    Attributes:
      evicted: what the other keys of the batch evicted, if the call returns that.
    """

    evicted: Evicted | None = None


class HkvTable(EmbeddingTable):
    """A table with an index of buckets with scores; see EmbeddingTable.

    It doubles up to `max_capacity` slots. Then a new key whose two buckets are full evicts the key
    with the lowest score there, but none that the same lookup has found or inserted. If a batch has
    more keys for two buckets than they have slots, the surplus is refused and gets no row. So is a
    key that comes with a score below all others in its two buckets.

    Args:
      backend, dim, initializer, key_type, dtype, name, seed, owner, rounds_gradients: as of
        DetTable.
      options: the fields of HkvOptions.

    Attributes:
      tiers: which rows are hot. A lookup that may insert counts its rows and, from time to time,
        moves hot rows into the near tier before: then `row_version` changes.
    """

    var_type = "hybrid"
    keeps_every_key = False
    has_call_hook = True

    def __init__(
        self,
        backend: Backend,
        dim: int,
        *,
        initializer: AnyInitializer,
        key_type: str = "int64",
        dtype: str = "float32",
        name: str = "table",
        seed: int = 0,
        owner: OwnerRule = MOD,
        rounds_gradients: bool = False,
        **options: Any,
    ) -> None:
        try:
            opts = self.options = HkvOptions.checked(options)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error} (Of table {name!r}.)") from error
        backend = backend.for_table(opts.block_size, opts.device_id, bool(opts.io_by_cpu))
        super().__init__(
            backend,
            dim,
            initializer=initializer,
            key_type=key_type,
            dtype=dtype,
            name=name,
            seed=seed,
            owner=owner,
            rounds_gradients=rounds_gradients,
            store=self._store_tiers(dim, dtype),
        )
        self.tiers: RowTiers = RowTiers(self.store)
        self.index: HkvIndex
        if opts.enter_threshold > 1:
            counted = (f"{name} (pending counts)", opts.enter_threshold)
            self.pending = PendingCounts(backend, self.key_dtype, *counted)
        self.counts_repeats = opts.count_repeats
        self.scores_are_counts = opts.evict_strategy in ("kLfu", "kEpochLfu")
        self.set_parts(HkvIndex(backend, self.key_dtype, name, opts), self.store)
        self._has_warned = False

    @property
    def filter_ratio(self) -> float:
        return self.options.filter_ratio

    def options_of_all_ranks(self) -> dict[str, Any]:
        may_differ = ("device_id", "far_path", "init_capacity", "max_capacity")
        return {name: x for name, x in asdict(self.options).items() if name not in may_differ}

    # ---------------------------------------------------------------- scores and eviction

    @property
    def epoch(self) -> int:
        """The current epoch: under kEpochLru and kEpochLfu scores of later epochs are higher."""
        return self.index.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        if not is_integer(epoch):
            raise TypeError(f"`epoch` must be an integer. Received: {epoch!r}.")
        if not 0 <= epoch <= 0xFFFFFFFF:
            raise ValueError(f"`epoch` must be in [0, 2**32). Received: {epoch}.")
        self._set_epoch(int(epoch))

    @mutating
    def _set_epoch(self, epoch: int) -> None:
        self.index.epoch = epoch

    @property
    def evict_strategy(self) -> str:
        return self.options.evict_strategy

    @property
    def max_capacity(self) -> int:
        return self.options.max_capacity

    @mutating
    def insert_and_evict(self, keys: Any, values: Any, scores: Any = None) -> Evicted:
        """Runs `insert_or_assign`, and returns what new keys evicted."""
        evicted: list[Evicted] = []
        assign_and_evict(self, keys, values, scores, evicted)
        self.report_refused(evicted)
        return gather_evicted(self, evicted)

    # ---------------------------------------------------------------- tiers

    def _store_tiers(self, dim: int, dtype: str) -> dict[str, Any]:
        """Returns the arguments of RowStore for two tiers, if not all rows are near."""
        row_bytes = dim * row_dtype(dtype).storage.itemsize
        near_rows = self.options.max_hbm_for_vectors * 2**30 / max(1, row_bytes)
        if near_rows >= self.options.max_capacity:
            return {}  # the rows of the two reserved keys do not need a second tier
        return {"near_rows": int(near_rows), "far_path": self.options.far_path}

    # ---------------------------------------------------------------- what the index decides

    def make_room(self, count: int) -> Claim:
        self.index.make_room(count)
        room = min(count, self.index.room)
        self.tiers.reserve(self.store.num_rows + room)
        return claim_rows(self, room)

    def new_insertion(self, *args: Any) -> HkvInsertion:
        return HkvInsertion(self, *args)

    def on_call(self) -> None:
        super().on_call()
        if self.store.has_far_file:
            self.store.trim()
        self.refused = (0, 0)

    def report_refused(self, evicted: list[Evicted] | None = None) -> None:
        count, num_new = self.refused
        if not count or self.options.on_refused == "ignore":
            return
        text = (
            f"Table {self.name!r} had no room for {count:,} of {num_new:,} new keys of one lookup: "
            "their buckets are full of keys of the same lookup, or of higher scores. It holds "
            f"{self.size:,} keys in {self.capacity:,} slots. They get no row this time. Use a "
            "larger max_capacity or smaller batches."
        )
        if self.options.on_refused == "error":
            error = RefusedError(f"{text} The other keys of the lookup are in the table.")
            error.evicted = None if evicted is None else gather_evicted(self, evicted)
            raise error
        if not self._has_warned:
            self._has_warned = True
            warn(f"{text} (Said once for a table.)", RuntimeWarning)

    def scores_of(self, keys: Array) -> Array:
        return self.index.scores(keys)

    def score_launch(self, keys: Array, scores: Array) -> Launch:
        return self.index.update_launch(keys, scores=scores)

    def scores_were_set(self) -> None:
        if not self.index.has_scores:
            super().scores_were_set()

    def may_turn_away(self, filter_ratio: float) -> bool:
        return filter_ratio < 1.0 or self.pending is not None

    def admission_launches(
        self,
        keys: Array,
        filter_ratio: float,
        admitted: Array,
        counters: Array,
        occurrences: Array | None,
    ) -> tuple[list[Launch], CountUpdate | None]:
        pending, lookup, backend = self.pending, self.num_lookups, self.backend
        launches: list[Launch] = []
        if filter_ratio < 1.0:
            count = counter(counters, Count.ADMITTED) if pending is None else None
            draw = (keys, filter_ratio, self.table_seed, lookup, admitted, count)
            launches.append(draw_launch(backend, *draw))
        if pending is None:
            return launches, None
        counts = counter(counters, Count.ADMITTED, Count.FIRST_SEEN)
        occurrences = occurrences if self.counts_repeats else None
        seen, counting = pending.count_launches(keys, lookup, admitted, counts, occurrences)
        return [*launches, *counting], seen

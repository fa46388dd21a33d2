"""Finding keys, and inserting those that are missing: what lookups and writes are made of."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.publish import Action, publish
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.segments import last_of_each, segment_sum, unique
from sok_lite.engine.table.counters import new_counters
from sok_lite.engine.table.dumped import plan_forget
from sok_lite.engine.table.index import AccessCounts, Found, Search
from sok_lite.engine.table.removal import Removes
from sok_lite.engine.table.stages import Stages, run
from sok_lite.engine.typed_sums import sum_of_each


class NewKeys(NamedTuple):
    """Keys that are to be inserted.

    Attributes:
      keys: (n,) int64, distinct and missing.
      stamp: number of the lookup that they come with.
      scores: (n,) uint64, what the caller gave for them; None: nothing.
      are_scores: whether those are the scores to have, whatever the strategy.
      values: (m, dim) storage, what their rows begin with; None: the initial values of the keys.
      source: (n,) int32, which of `values` each key has; None: key i the i-th.
      are_updated: whether they come with an update, which leaves out those that are refused.
    """

    keys: Array
    stamp: int
    scores: Array | None = None
    are_scores: bool = False
    values: Array | None = None
    source: Array | None = None
    are_updated: bool = False


class Admission(NamedTuple):
    """How it is decided which of some new keys get a row now.

    Attributes:
      actions: write which, and count them.
      plan_note: of what was counted, prepares to note what was seen, along with the insertion.
    """

    actions: list[Action]
    plan_note: Callable[[list[int]], list[Action]]


# Prepares what is to follow when new keys have their rows, (n,) uint32.
WithRows = Callable[[Array], list[Action]]


class Inserts(Removes):
    """What finds and inserts keys, for the methods that users call."""

    # ---------------------------------------------------------------- what an index decides

    @abstractmethod
    def _inserting(
        self,
        new: NewKeys,
        before: list[Action],
        after: WithRows,
        counters: Array,
        evicted: list[Any] | None = None,
    ) -> Stages:
        """Gives rows to new keys, as far as it does not refuse them.

        Args:
          before: actions to be taken along, in front; none of the index, which may grow first.
          after: prepares those to be taken when the keys have their rows; NO_ROW if refused.
          counters: of this table, see engine/table/counters.py.
          evicted: grows by what was evicted; None: it is not wanted.
        """

    def _insert(
        self,
        new: NewKeys,
        before: list[Action],
        after: WithRows,
        evicted: list[Any] | None = None,
    ) -> None:
        """Does what `_inserting` does, for this table alone."""
        counters = new_counters(self.backend, 1)
        run(self.backend, counters, {0: self._inserting(new, before, after, counters[0], evicted)})

    @abstractmethod
    def _scores(self, keys: Array) -> Array:
        """Returns the scores (n,) uint64 of keys; 0 for a missing one."""

    @abstractmethod
    def _plan_scores(self, keys: Array, scores: Array) -> list[Action]:
        """Prepares to write the scores (n,) uint64 of distinct keys; a missing one is skipped."""

    def _report_refused(self, evicted: list[Any] | None = None) -> None:
        """Says that keys of a call were refused, once everything else of it is done."""
        return None

    def _may_turn_away(self, filter_ratio: float) -> bool:
        """Whether some new keys are not admitted at a lookup with this chance for each."""
        return False

    def _admission(
        self,
        keys: Array,
        filter_ratio: float,
        admitted: Array,
        counters: Array,
        given: Array | None,
    ) -> Admission:
        """Prepares to decide which of some distinct missing keys get a row now.

        Args:
          keys: (n,) int64.
          filter_ratio: chance of each one.
          admitted: (n,) uint8, all 1; gets 0 for those that do not.
          counters: of this table.
          given: (n,) uint64, how often the lookup has each key; None: once.
        """
        raise NotImplementedError(f"Table {self.name!r} turns no new key away.")

    def _may_refuse(self) -> bool:
        """Whether keys that are inserted may get no row."""
        return False

    def _before_lookup(self) -> None:
        """Called before any row number of a lookup is known."""
        return None

    def _plan_score_update(self, num_seen: int, new_rows: Array | None) -> list[Action]:
        """Prepares to note how many rows a lookup saw, beside new ones (n,) uint32."""
        return []

    # ---------------------------------------------------------------- an update

    @property
    def inserts_for_updates(self) -> bool:
        """Whether a key of an update gets a row if it has none.

        Not where some are turned away: the gradient of a lookup has those as well, and an update
        that inserted them would leave nothing of it.
        """
        return not self._may_turn_away(self.filter_ratio)

    @abstractmethod
    def _room_for(self, count: int) -> Claim:
        """Makes room for new keys, and chooses rows for as many as can have one of their own.

        Raises:
          MemoryError: there is no memory for them; the table is as it was.
        """

    # ---------------------------------------------------------------- a lookup

    def _access_counts(self) -> AccessCounts | None:
        """How often rows were accessed, to which a lookup that may insert adds; None: not
        counted."""
        return None

    def _plan_begin_lookup(self) -> list[Action]:
        """Prepares to begin a lookup that may insert. Its number is that of the last one and 1."""
        if self.clock.is_full:
            publish(self._plan_age())
        return self.clock.plan_tick()

    def _seen(self, keys: Array) -> Found:
        """Begins a lookup that may insert, and finds keys, which count as seen by it."""
        ticking = self._plan_begin_lookup()
        search = self.index.plan_search(keys, self.clock.now + 1, accesses=self._access_counts())
        publish([search.launch, *ticking])
        return search.found

    def mark_seen_search(self, keys: Array) -> Search:
        """Prepares to find keys whose rows are to change: they count as seen by the last lookup."""
        into = (self.backend.xp.empty(int(keys.size), np.uint32), None)
        return self.index.plan_search(keys, self.clock.now, into=into, refreshes=False)

    def _count_found(self, num_items: int, num_missing: int) -> None:
        counts = self._counts
        if not num_missing:  # as in most lookups
            counts["found"] += num_items
            return
        counts.update(
            found=counts["found"] + num_items - num_missing, missed=counts["missed"] + num_missing
        )

    def _plan_age(self) -> list[Action]:
        """Prepares to halve the number of every lookup, so that counting can go on."""
        log = [] if self.removals is None else self.removals.plan_age()
        return [*self.index.plan_age(), *log, *self.clock.plan_halve(), *plan_forget(self)]

    # ---------------------------------------------------------------- a write

    def _insert_or_assign(
        self, keys: Any, values: Any, scores: Any, evicted: list[Any] | None = None
    ) -> None:
        keys, values = self._keys(keys), self.store.to_storage(values)
        self._check_rows(keys, values)
        distinct, inverse = unique(self.backend, keys)
        last = last_of_each(self.backend, inverse, int(distinct.size))
        given = None
        if scores is not None:
            given = self._checked_scores(keys, scores)
            self._check_assignable(given)
            given = self.backend.xp.take(given, last)
            if self.clock.is_full:
                # They were given by the numbers that lookups have before they are halved.
                given = self.index.aged(given)
        rows, num_missing = self._seen(distinct)
        actions = [self.store.plan_write(rows, values, source=last)]

        def scoring(_: Array | None = None) -> list[Action]:
            return [] if given is None else self._plan_scores(distinct, given)

        if num_missing == 0:
            publish([*actions, *scoring()])
            return
        at = self.backend.xp.flatnonzero(rows == np.uint32(NO_ROW))
        new_scores = None if given is None else given[at]
        new = NewKeys(distinct[at], self.clock.now, new_scores, True, values, last[at])
        self._insert(new, actions, scoring, evicted)

    def _summed(self, keys: Array, deltas: Array) -> tuple[Array, Array]:
        """Returns distinct keys and the sums of their deltas, of the dtype of these."""
        distinct, inverse = unique(self.backend, keys)
        return distinct, self._sums(deltas, inverse, int(distinct.size))

    def _sums(self, deltas: Array, inverse: Array, num_distinct: int) -> Array:
        """Returns the sums of the deltas of each distinct key, in order of first occurrence."""
        if num_distinct == len(deltas):
            return deltas  # none repeats
        sum_rows = segment_sum if deltas.dtype == np.float32 else sum_of_each
        return sum_rows(self.backend, deltas, inverse, num_distinct)

    def _check_assignable(self, scores: Array) -> None:
        """Raises where scores (n,) uint64 cannot be kept: a key cannot be seen in the future."""
        highest = int(scores.max()) if scores.size else 0
        if highest > self.num_lookups:
            raise ValueError(
                f"The scores of table {self.name!r} are numbers of lookups, at most "
                f"{self.num_lookups:,} by now. Received: {highest:,}. Make a hybrid table with "
                "evict_strategy='kCustomized' for scores of your own."
            )

    # ---------------------------------------------------------------- rows of new keys

    def _claim(self, count: int) -> Claim:
        """Chooses rows for keys.

        Raises:
          MemoryError: it names the table.
        """
        try:
            return self.store.claim(count)
        except MemoryError as error:
            raise MemoryError(
                f"No memory for {count:,} more rows of table {self.name!r}, "
                f"{self.store.row_bytes:,} bytes each. It is as it was, with {self.size:,} keys. "
                f"Use more ranks, fewer keys or shorter rows. ({error})"
            ) from error

    def _content(self, new: NewKeys, rows: Array) -> Action:
        """Prepares to write what the rows (n,) uint32 of new keys begin with."""
        if new.values is not None:
            return self.store.plan_write(rows, new.values, source=new.source)
        seed = self._table_seed
        return self.initializer.plan_fill(self.backend, self.store, rows, new.keys, seed)

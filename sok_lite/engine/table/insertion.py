"""Finding keys, and inserting those that are missing: what lookups and writes are made of."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.publish import Action, publish
from sok_lite.engine.combine import segment_sum
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.rows.store import ABSENT
from sok_lite.engine.table.index import Search
from sok_lite.engine.table.removal import Removes
from sok_lite.engine.unique import last_of_each, unique


class NewKeys(NamedTuple):
    """Keys that are to be inserted.

    Attributes:
      keys: (n,) int64, distinct and absent.
      stamp: number of the lookup that they come with.
      scores: (n,) uint64, what the caller gave for them; None: nothing.
      are_scores: whether those are the scores to have, whatever the strategy.
      values: (m, dim) storage, what their rows begin with; None: the initial values of the keys.
      source: (n,) int32, which of `values` each key has; None: key i the i-th.
    """

    keys: Array
    stamp: int
    scores: Array | None = None
    are_scores: bool = False
    values: Array | None = None
    source: Array | None = None


class Admission(NamedTuple):
    """Which of some new keys get a row now.

    Attributes:
      mask: (n,) bool; None: all.
      actions: note what was seen, along with the insertion.
    """

    mask: Array | None
    actions: list[Action]


# Prepares what is to follow when new keys have their rows, (n,) uint32.
WithRows = Callable[[Array], list[Action]]


class Inserts(Removes):
    """What finds and inserts keys, for the methods that users call."""

    # ---------------------------------------------------------------- what an index decides

    @abstractmethod
    def _insert(
        self,
        new: NewKeys,
        before: list[Action],
        after: WithRows,
        evicted: list[Any] | None = None,
    ) -> None:
        """Gives rows to new keys, as far as it does not refuse them.

        Args:
          before: actions to be taken along, in front; none of the index, which may grow first.
          after: prepares those to be taken when the keys have their rows; ABSENT if refused.
          evicted: grows by what was evicted; None: it is not wanted.
        """

    @abstractmethod
    def _scores(self, keys: Array) -> Array:
        """Returns the scores (n,) uint64 of keys; 0 for a missing one."""

    @abstractmethod
    def _scoring(self, keys: Array, scores: Array) -> list[Action]:
        """Prepares to write the scores (n,) uint64 of distinct keys; a missing one is skipped."""

    def _report_refused(self) -> None:
        """Says that keys of a call were refused, once everything else of it is done."""
        return None

    def _admission(self, keys: Array, filter_ratio: float) -> Admission:
        """Decides which of some distinct absent keys get a row now."""
        return Admission(None, [])

    def _counts_each_key_once(self) -> bool:
        """Whether a key that repeats in a batch must be looked up once."""
        return False

    def _may_refuse(self) -> bool:
        """Whether keys that are inserted may get no row."""
        return False

    def _before_lookup(self) -> None:
        """Called before any row number of a lookup is known."""
        return None

    def _touching(self, rows: Array) -> list[Action]:
        """Prepares to note that a lookup saw rows (n,) uint32, distinct where it matters."""
        return []

    # ---------------------------------------------------------------- a lookup

    def _look_up(
        self,
        keys: Array,
        *,
        unique_keys: bool,
        filter_ratio: float = 1.0,
        given: Array | None = None,
        index: Array | None = None,
        out: Array | None = None,
        missing: str = "initial",
        evicted: list[Any] | None = None,
    ) -> tuple[Array, int]:
        """Finds keys, inserts those that are missing, and gives row numbers and rows.

        Args:
          given: (n,) uint64, of a caller who gives scores or increments.
          index, out, missing: as of `lookup`; `out` is from `store.output`.
          evicted: grows by what was evicted; None: it is not wanted.

        Returns:
          (row numbers (n,) uint32, how many of them are absent).
        """
        xp, store = self.backend.xp, self.store
        self._before_lookup()
        asked, inverse = int(keys.size), None
        if not unique_keys and self._counts_each_key_once():
            keys, inverse = unique(self.backend, keys)
            unique_keys = True
            if given is not None:
                # The last in the batch counts, as for values.
                given = xp.take(given, last_of_each(self.backend, inverse, int(keys.size)))
            index = inverse if index is None else xp.take(inverse, index)
        n = int(keys.size)
        copies = out is not None and index is None
        result = None if inverse is None else xp.empty(asked, np.uint32)
        search = self._seen(keys, given, out if copies else None)
        rows, num_missing = search.found
        self._count_found(*self._items(rows, num_missing, asked, inverse))
        # Of missing keys, of the keys as they were asked for, and of items.
        num_absent = xp.zeros(3, np.int64)

        def finishing() -> list[Action]:
            """Prepares what follows when `rows` has the row numbers of all keys."""
            actions = self._touching(rows)
            if result is not None:
                items = (inverse, None, result, None, num_absent[1:], asked)
                actions.append(store.delivering(rows, *items))
            if out is not None and not copies:
                items = (index, None, None, out, num_absent[2:], int(out.shape[0]))
                actions.append(store.delivering(rows, *items))
            return actions

        if num_missing == 0:
            publish(finishing())
            return (rows if result is None else result), 0

        at = xp.flatnonzero(rows == np.uint32(ABSENT))
        new_keys, number, new_given = keys[at], None, None if given is None else given[at]
        if not unique_keys:
            new_keys, number = unique(self.backend, new_keys)
            if new_given is not None:
                last = last_of_each(self.backend, number, int(new_keys.size))
                new_given = xp.take(new_given, last)
        values = None
        if out is not None and self._may_refuse():
            # What a key gives that gets no row is written now: there may be no memory afterwards.
            values = self._initial_values(new_keys)
            self._write_missing(out, n, index, at, number, values if missing == "initial" else None)
        entering = self._entering(new_keys, new_given, number, values, filter_ratio)

        def after(new_rows: Array) -> list[Action]:
            items = (entering.number, at, rows, out if copies else None, num_absent, int(at.size))
            return [store.delivering(new_rows, *items), *finishing()]

        self._insert(entering.new, entering.actions, after, evicted)
        rows = rows if result is None else result
        return rows, int(num_absent[0 if result is None else 1]) if self._may_refuse() else 0

    def _write_missing(
        self,
        out: Array,
        num_keys: int,
        index: Array | None,
        at: Array,
        number: Array | None,
        values: Array | None,
    ) -> None:
        """Writes what the items of missing keys give.

        Args:
          out: (n, dim) of the items.
          num_keys: of all keys.
          index: (n,) int32, which key each item is; None: item i is key i.
          at: (m,) int64, which keys are missing.
          number: (m,) int32, which of `values` each of them has; None: the i-th.
          values: (k, dim) storage; None: zeros.
        """
        xp = self.backend.xp
        items = at
        if index is not None:
            place = xp.full(num_keys, -1, np.int32)
            place[at] = xp.arange(at.size, dtype=np.int32) if number is None else number
            of_items = xp.take(place, index)
            items = xp.flatnonzero(of_items >= 0)
            number = xp.take(of_items, items)
        if values is None:
            out[items] = 0
        else:
            out[items] = values if number is None else xp.take(values, number, axis=0)

    def _seen(self, keys: Array, given: Array | None = None, out: Array | None = None) -> Search:
        """Begins a lookup that may insert, and finds keys, which count as seen by it.

        Args:
          given, out: as of `_searching`.
        """
        if self.clock.is_full:
            publish(self._ageing())
        search = self._searching(keys, self.clock.now + 1, given, out)
        publish([*search.actions, *self.clock.ticking()])
        return search

    def _entering(
        self,
        keys: Array,
        given: Array | None,
        number: Array | None,
        values: Array | None,
        filter_ratio: float,
    ) -> "_Entering":
        """Decides which of some distinct new keys are inserted.

        Args:
          number: (m,) int32, which of the keys each missing item is; None: item i is key i.
        """
        xp, stamp = self.backend.xp, self.clock.now
        mask, actions = self._admission(keys, filter_ratio)
        if mask is None:
            return _Entering(NewKeys(keys, stamp, given, values=values), number, actions)
        let_in = xp.flatnonzero(mask)
        place = xp.full(keys.size, -1, np.int32)
        place[let_in] = xp.arange(let_in.size, dtype=np.int32)
        given = None if given is None else given[let_in]
        new = NewKeys(keys[let_in], stamp, given, values=values, source=let_in.astype(np.int32))
        count = self._counting(not_admitted=int(keys.size - let_in.size))
        return _Entering(
            new, place if number is None else xp.take(place, number), [*actions, count]
        )

    def _read(
        self, keys: Array, index: Array | None, out: Array, missing: str
    ) -> tuple[Array, int]:
        """Does what `_look_up` does and inserts nothing."""
        xp = self.backend.xp
        copies = index is None
        rows, num_absent = self._searching(keys, out=out if copies else None).run()
        self._count_found(int(keys.size), num_absent)
        wanted = rows if index is None else xp.take(rows, index)
        if not copies:
            self.store.read(wanted, out=out)
        if num_absent:
            at = xp.flatnonzero(wanted == np.uint32(ABSENT))
            absent = keys[at] if index is None else xp.take(keys, index[at])
            out[at] = self._initial_values(absent) if missing == "initial" else 0
        return rows, num_absent

    def _count_found(self, num_items: int, num_missing: int) -> None:
        counts = self._counts
        counts.update(
            found=counts["found"] + num_items - num_missing, missed=counts["missed"] + num_missing
        )

    def _items(
        self, rows: Array, num_missing: int, num_items: int, inverse: Array | None
    ) -> tuple[int, int]:
        """Returns how many items a lookup of keys had, and for how many of them there is no row."""
        if inverse is not None and num_missing:
            absent = self.backend.xp.zeros(1, np.int64)
            self.store.delivering(rows, inverse, None, None, None, absent, num_items)()
            num_missing = int(absent[0])
        return num_items, num_missing

    def _ageing(self) -> list[Action]:
        """Prepares to halve the number of every lookup, so that counting can go on."""
        return [*self.index.ageing(), *self.clock.halving()]

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
        rows, num_missing = self._seen(distinct).found
        actions = [self.store.writing(rows, values, source=last)]

        def scoring(_: Array | None = None) -> list[Action]:
            return [] if given is None else self._scoring(distinct, given)

        if num_missing == 0:
            publish([*actions, *scoring()])
            return
        at = self.backend.xp.flatnonzero(rows == np.uint32(ABSENT))
        new_scores = None if given is None else given[at]
        new = NewKeys(distinct[at], self.clock.now, new_scores, True, values, last[at])
        self._insert(new, actions, scoring, evicted)

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
            return self.store.writing(rows, new.values, source=new.source)
        seed = self._table_seed
        return self.initializer.filling(self.backend, self.store, rows, new.keys, seed)


class _Entering(NamedTuple):
    """New keys that are to be inserted, `number` (m,) int32, which of them each missing item is
    (-1: none; None: item i is key i), and the actions to be taken along."""

    new: NewKeys
    number: Array | None
    actions: list[Action]

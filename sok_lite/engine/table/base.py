"""Rows by key, whatever the index: lookups and writes.

A lookup first finds. Only the keys that are missing are then deduplicated, admitted, given rows and
inserted, so that the index and the rows grow by what is really new, and a lookup of known keys
writes nothing but when they were last seen.

Whatever changes a table is prepared first: arguments are checked, memory is found, rows that nobody
has yet are filled. Then `publish` changes index, rows and counters in one piece. So an exception,
whatever it is and wherever it comes from, leaves the table as it was before the call or as it is
after it. Two things may have happened of a call that changed nothing else: the table has grown, and
keys that it held count as seen.
"""

from typing import Any

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.publish import publish
from sok_lite.engine.dtypes import is_integer
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.segments import dedup, last_of_each, unique
from sok_lite.engine.table.exclusive import changing, exclusive
from sok_lite.engine.table.insertion import Inserts, NewKeys
from sok_lite.engine.table.lookups import look_up
from sok_lite.engine.table.new_keys import LookupRequest, Output
from sok_lite.engine.table.parts import checked_num_keys
from sok_lite.engine.table.results import Evicted, Lookup
from sok_lite.engine.table.summary import facts, summary


class EmbeddingTable(Inserts):
    """Rows by key. Every method may be called from several threads; each call is one at a time.

    Keys are integer arrays (n,) of the table's key type, or anything NumPy makes such an array of;
    they may repeat and every value of the type is legal. Methods return arrays of the backend. A
    method that raises or is interrupted has done nothing or everything.
    """

    summary, facts = summary, facts

    # ---------------------------------------------------------------- lookups

    @exclusive
    def find(self, keys: Any) -> Array:
        """Returns the row number of every key, (n,) uint32; NO_ROW where it has none.

        It changes nothing but the counters: no key is inserted and none counts as seen.
        """
        keys = self._keys(keys)
        found = self._find(keys)
        self._count_found(int(keys.size), found.num_missing)
        return found.rows

    @exclusive
    def contains(self, keys: Any) -> Array:
        """Returns whether each key has a row, (n,) bool. It changes nothing."""
        return self._find(self._keys(keys)).rows != np.uint32(NO_ROW)

    @exclusive
    def scores(self, keys: Any) -> Array:
        """Returns the score of every key, (n,) uint64; 0 where it has no row.

        An "hbm" table keeps that of kLru: the number of the lookup that last saw the key.
        """
        return self._scores(self._keys(keys))

    @changing
    def find_or_insert(
        self,
        keys: Any,
        *,
        unique_keys: bool = False,
        scores: Any = None,
        filter_ratio: float = 1.0,
    ) -> Array:
        """Returns the row number of every key; keys without one get a row and its initial value.

        Args:
          keys: (n,).
          unique_keys: a promise that no key repeats, which saves a pass when keys are new.
          scores: (n,) uint64, for a "hybrid" table whose strategy takes scores from the caller.
          filter_ratio: chance of a key without a row to get one this time.

        Returns:
          (n,) uint32; NO_ROW for a key that was refused or not admitted.

        Raises:
          MemoryError: no memory for the new keys; the table is as it was.
          RuntimeError: they are chosen against the hash, and fill some of its places; the table is
            as it was.
        """
        keys = self._keys(keys)
        result = self._row_numbers(keys)
        if scores is None:
            size = int(keys.size)
            request = LookupRequest(self, size, filter_ratio=filter_ratio, unique_keys=unique_keys)
            look_up(self.backend, keys, result, request)
        else:
            self._find_or_insert_with_scores(keys, scores, result, filter_ratio)
        self._report_refused()
        return result

    def _find_or_insert_with_scores(
        self, keys: Array, scores: Any, result: Array, filter_ratio: float
    ) -> None:
        """Looks up each key once, with the last of its scores."""
        backend, n = self.backend, int(keys.size)
        scores = self._checked_scores(keys, scores)
        distinct, inverse = unique(backend, keys)
        size = int(distinct.size)
        given = backend.xp.take(scores, last_of_each(backend, inverse, size))
        rows = self._row_numbers(distinct)
        spread = backend.prepared("dense_gather_u32", n, rows, 1, inverse, result, n)
        request = LookupRequest(
            self, size, filter_ratio=filter_ratio, unique_keys=True, given=given
        )
        look_up(backend, distinct, rows, request)
        publish([spread])

    @exclusive
    def read_state(self, name: str, keys: Any) -> Array:
        """Returns an optimizer state of keys, (n, dim) float32. It changes nothing.

        A key without a row gives what the state begins with.

        Raises:
          KeyError: there is no such state.
        """
        rows = self._find(self._keys(keys)).rows
        column = self.store.column(name)
        state = self.store.read(rows, name)
        if column.initial != 0:
            state[rows == np.uint32(NO_ROW)] = column.initial
        return state

    def _row_numbers(self, keys: Array) -> Array:
        """Returns memory for the row numbers of keys."""
        return self.backend.xp.empty(keys.size, np.uint32)

    @changing
    def lookup(
        self,
        keys: Any,
        *,
        unique_keys: bool = False,
        out: Array | None = None,
        insert: bool = True,
        missing: str = "initial",
        filter_ratio: float = 1.0,
        counts: Any = None,
    ) -> Lookup:
        """Returns the row of every key and its number; new keys are inserted.

        Args:
          keys: (n,).
          unique_keys: a promise that no key repeats, which saves a pass when keys are new.
          out: (n, dim) of the storage dtype, C-contiguous, to write into; None: a new array.
          insert: whether keys without a row get one; if not, nothing but the counters changes.
          missing: what a key gives that has no row afterwards: "initial", the value it would start
            with, or "zeros".
          filter_ratio: chance of a key without a row to get one this time.
          counts: (n,) integers from 1 to 2**32 - 1, how often each key counts in a table with
            `count_repeats`, for who has deduplicated them; those of a repeated key add up. None:
            once. A lookup that inserts nothing counts nothing.

        Raises:
          ValueError: `out` or `counts` are not such arrays, or the table does not count.
          MemoryError: no memory for the result or the new keys.
          RuntimeError: new keys are chosen against the hash, see `find_or_insert`.
          The table is as it was.
        """
        if missing not in ("initial", "zeros"):
            raise ValueError(f"`missing` must be 'initial' or 'zeros'. Received: {missing!r}.")
        keys = self._keys(keys)
        whole = Output(self.store.output(int(keys.size), out=out), 0, int(keys.size))
        given = None if counts is None else self._checked_counts(keys, counts)
        rows = self._row_numbers(keys)
        request = LookupRequest(
            *(self, whole.end, [whole], insert, missing, filter_ratio, unique_keys, given),
        )
        num_without_row = look_up(self.backend, keys, rows, request)
        self._report_refused()
        return Lookup(whole.out, rows, num_without_row)

    @changing
    def lookup_and_evict(
        self, keys: Any, *, unique_keys: bool = False, out: Array | None = None
    ) -> tuple[Array, Evicted]:
        """Does what `lookup` does and returns, beside the rows, what was evicted for new keys.

        Returns:
          ((n, dim) of the storage dtype, the evicted entries in no order).
        """
        keys = self._keys(keys)
        out = self.store.output(int(keys.size), out=out)
        evicted: list[Evicted] = []
        rows, whole = self._row_numbers(keys), Output(out, 0, int(keys.size))
        request = LookupRequest(self, whole.end, [whole], unique_keys=unique_keys, evicted=evicted)
        look_up(self.backend, keys, rows, request)
        self._report_refused(evicted)
        return out, self._gathered(evicted)

    # ---------------------------------------------------------------- writes

    @changing
    def insert_or_assign(self, keys: Any, values: Any, scores: Any = None) -> None:
        """Sets the rows of keys, inserting those that have none. A repeated key: the last wins.

        Args:
          values: (n, dim).
          scores: (n,) uint64, as `assign_scores` takes them; None: as a lookup would.

        Raises:
          ValueError, TypeError: shape, dtype or scores do not fit. MemoryError: no memory for new
            keys. RuntimeError: see `find_or_insert`. The table is as it was.
        """
        self._insert_or_assign(keys, values, scores)
        self._report_refused()

    @changing
    def assign(self, keys: Any, values: Any) -> None:
        """Sets the rows of the keys that have one and skips the others. The last of a key wins.

        As of every write, they count as seen by the last lookup, and their scores stay where these
        are not numbers of lookups.
        """
        keys, values = self._keys(keys), self.store.to_storage(values)
        self._check_rows(keys, values)
        distinct, inverse = unique(self.backend, keys)
        last = last_of_each(self.backend, inverse, int(distinct.size))
        search = self.mark_seen_search(distinct)
        publish([search.launch, self.store.plan_write(search.rows, values, source=last)])

    @changing
    def assign_state(self, name: str, keys: Any, values: Any) -> None:
        """Sets an optimizer state of keys that have a row. The last of a repeated key wins.

        Args:
          name: of the state.
          values: (n, dim) float32.

        Raises:
          KeyError: there is no such state. ValueError: a key has no row, or shapes do not fit.
            Nothing has changed.
        """
        keys = self._keys(keys)
        xp, column = self.backend.xp, self.store.column(name)
        values = xp.ascontiguousarray(xp.asarray(values, np.float32))
        if values.shape != (keys.size, column.dim):
            raise ValueError(
                f"State {name!r} of table {self.name!r} takes values of shape "
                f"({keys.size}, {column.dim}), a row for each key. Received: shape {values.shape}."
            )
        distinct, inverse = unique(self.backend, keys)
        found = self._find(distinct)
        if found.num_missing:
            raise ValueError(
                f"State {name!r} of table {self.name!r} cannot be set for {found.num_missing} of "
                f"{distinct.size} keys, which have no row. Assign their rows first."
            )
        last = last_of_each(self.backend, inverse, int(distinct.size))
        writing = self.store.plan_write(found.rows, values, name, source=last)
        publish([self.mark_seen_search(distinct).launch, writing])

    @changing
    def accumulate(self, keys: Any, deltas: Any, scale: float = 1.0) -> None:
        """Adds `scale * deltas` to the rows of the keys that have one; a repeated key sums.

        Args:
          deltas: (n, dim) of a real floating dtype, summed in float32, for rows of float64 in
            float64; for rows of integers integers that fit, whose sums wrap around.
          scale: for rows of integers a whole number.

        Raises:
          ValueError, TypeError: shape, dtype or scale do not fit; the table is as it was.
        """
        if self.row_dtype.is_integer and not float(scale).is_integer():
            raise ValueError(
                f"`scale` must be a whole number for rows of {self.row_dtype.name}. "
                f"Received: scale={scale}."
            )
        keys = self._keys(keys)
        distinct, summed = self._summed(keys, self._checked_deltas(keys, deltas))
        adding = self.store.plan_add(self._find(distinct).rows, summed, scale)
        publish([self.mark_seen_search(distinct).launch, adding])

    @changing
    def accum_or_assign(self, keys: Any, values: Any, is_found: Any) -> None:
        """Adds to rows that the caller found before and inserts those that it did not.

        A key whose flag no longer says what the table holds is skipped: another caller has
        inserted or removed it since. So is a repeated key that is to be inserted, but for its first
        one: as if they came one after the other. All of it counts as one lookup.

        Args:
          values: (n, dim), what to add, as of `accumulate`, or the first row.
          is_found: (n,) bool.

        Raises:
          ValueError, TypeError: shape or dtype do not fit. MemoryError: no memory for new keys.
            RuntimeError: see `find_or_insert`. The table is as it was.
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
        rows = self.store.to_storage(values)
        distinct, inverse = unique(self.backend, keys)
        # One lookup sees all keys, so that those to insert evict none of those to add to.
        found = self._seen(distinct)
        is_held = xp.take(found.rows != np.uint32(NO_ROW), inverse)
        if bool((flags & is_held).all()):  # most often
            publish([self.store.plan_add(found.rows, self._sums(deltas, inverse, len(distinct)))])
            return
        add, put = xp.flatnonzero(flags & is_held), xp.flatnonzero(~flags & ~is_held)
        add_keys, summed = self._summed(keys[add], deltas[add])
        adding = self.store.plan_add(self._find(add_keys).rows, summed)
        if put.size == 0:
            publish([adding])
            return
        new_keys = dedup(self.backend, keys[put], (0, put.size))
        source = xp.take(put, new_keys.first).astype(np.int32)
        new = NewKeys(new_keys.keys, self.clock.now, values=rows, source=source)
        self._insert(new, [adding], lambda rows: [])
        self._report_refused()

    @changing
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
        self._check_assignable(scores)
        publish(self._plan_scores(distinct, self.backend.xp.take(scores, last)))

    @changing
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
        self.index.reserve(checked_num_keys(self.name, "num_keys", num_keys))

    def _gathered(self, parts: list[Evicted]) -> Evicted:
        xp = self.backend.xp
        keys = xp.concatenate([xp.empty(0, np.int64), *(part.keys for part in parts)])
        empty = xp.empty((0, self.dim), self.row_dtype.storage)
        values = xp.concatenate([empty, *(part.values for part in parts)])
        scores = xp.concatenate([xp.empty(0, np.uint64), *(part.scores for part in parts)])
        return Evicted(self.key_dtype.from_int64(xp, keys), values, scores)

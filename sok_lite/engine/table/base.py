"""Rows by key, whatever the index: lookups and writes.

A lookup first finds. Only the keys that are missing are then deduplicated, admitted, given rows and
inserted, so that the index and the rows grow by what is really new, and a lookup of known keys
writes nothing but when they were last seen.

Whatever changes a table is prepared first: arguments are checked, memory is found, rows that nobody
has yet are filled. Then `publish` changes index, rows and counters in one piece. So an exception,
whatever it is and wherever it comes from, leaves the table as it was before the call or as it is
after it. Two things may have happened of a call that changed nothing else: the table has grown, and
keys that it had count as seen.
"""

from collections.abc import Callable
from typing import Any

from sok_lite.backend import Array
from sok_lite.engine.table import export, finding, history, removal, single_lookup, writes
from sok_lite.engine.table.arguments import checked_keys
from sok_lite.engine.table.exclusive import changing, exclusive
from sok_lite.engine.table.parts import TableParts
from sok_lite.engine.table.results import Evicted, Lookup, Predicate
from sok_lite.engine.table.summary import facts, seen_lately, statistics, summary, totals


class EmbeddingTable(TableParts):
    """Rows by key. Every method may be called from several threads; each call is one at a time.

    Keys are integer arrays (n,) of the table's key type, or anything NumPy makes such an array of;
    they may repeat and every value of the type is legal. Methods return arrays of the backend. A
    method that raises or is interrupted has done nothing or everything.
    """

    summary, facts = summary, facts
    statistics, totals, seen_lately = statistics, totals, seen_lately

    # ---------------------------------------------------------------- lookups

    @exclusive
    def find(self, keys: Any) -> Array:
        """Returns the row number of every key, (n,) uint32; NO_ROW where it has none.

        It changes nothing but the counters: no key is inserted and none counts as seen.
        """
        return finding.find(self, keys)

    @exclusive
    def contains(self, keys: Any) -> Array:
        """Returns whether each key has a row, (n,) bool. It changes nothing."""
        return finding.contains(self, keys)

    @exclusive
    def scores(self, keys: Any) -> Array:
        """Returns the score of every key, (n,) uint64; 0 where it has no row.

        An "hbm" table keeps that of kLru: the number of the lookup that last saw the key.
        """
        return self.scores_of(checked_keys(self, keys))

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
        return single_lookup.find_or_insert(
            self, keys, unique_keys=unique_keys, scores=scores, filter_ratio=filter_ratio
        )

    @exclusive
    def read_state(self, name: str, keys: Any) -> Array:
        """Returns an optimizer state of keys, (n, dim) float32. It changes nothing.

        A key without a row gives what the state begins with.

        Raises:
          KeyError: there is no such state.
        """
        return finding.read_state(self, name, keys)

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
          RuntimeError: new keys find no slot: they are chosen against the hash.
          The table is as it was.
        """
        return single_lookup.lookup(
            self,
            keys,
            unique_keys=unique_keys,
            out=out,
            insert=insert,
            missing=missing,
            filter_ratio=filter_ratio,
            counts=counts,
        )

    @changing
    def lookup_and_evict(
        self, keys: Any, *, unique_keys: bool = False, out: Array | None = None
    ) -> tuple[Array, Evicted]:
        """Does what `lookup` does and returns, beside the rows, what was evicted for new keys.

        Returns:
          ((n, dim) of the storage dtype, the evicted entries in no order).
        """
        return single_lookup.lookup_and_evict(self, keys, unique_keys=unique_keys, out=out)

    mark_seen_search = finding.mark_seen_search

    # ---------------------------------------------------------------- writes

    @changing
    def insert_or_assign(self, keys: Any, values: Any, scores: Any = None) -> None:
        """Sets the rows of keys, inserting those that have none. A repeated key: the last wins.

        Args:
          values: (n, dim).
          scores: (n,) uint64, as `assign_scores` takes them; None: as a lookup would.

        Raises:
          ValueError, TypeError: shape, dtype or scores do not fit. MemoryError: no memory for new
            keys. RuntimeError: new keys find no slot: they are chosen against the hash. The table
            is as it was.
        """
        writes.insert_or_assign(self, keys, values, scores)
        self.report_refused()

    @changing
    def assign(self, keys: Any, values: Any) -> None:
        """Sets the rows of the keys that have one and skips the others. The last of a key wins.

        As of every write, they count as seen by the last lookup, and their scores stay where these
        are not numbers of lookups.
        """
        writes.assign(self, keys, values)

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
        writes.assign_state(self, name, keys, values)

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
        writes.accumulate(self, keys, deltas, scale)

    @changing
    def accum_or_assign(self, keys: Any, values: Any, is_found: Any) -> None:
        """Adds to rows that the caller found before and inserts those that it did not.

        A key whose flag no longer says what the table holds is skipped: another caller has
        inserted or removed it since. So is a repeated key that is to be inserted, but for its first
        one: as if they came one after the other. All of it counts as one lookup.

        Args:
          values: (n, dim), what to add to a row, of the dtypes that `accumulate` takes, or the new
            row.
          is_found: (n,) bool.

        Raises:
          ValueError, TypeError: shape or dtype do not fit. MemoryError: no memory for new keys.
            RuntimeError: new keys find no slot: they are chosen against the hash. The table is
            as it was.
        """
        writes.accum_or_assign(self, keys, values, is_found)

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
        writes.assign_scores(self, keys, scores)

    @changing
    def reserve(self, num_keys: int) -> None:
        """Makes the index large enough for `num_keys` keys, so that it need not grow later.

        Raises:
          TypeError, ValueError: `num_keys` is no integer from 0 on. MemoryError: no memory; the
            table is as it was.
        """
        writes.reserve(self, num_keys)

    # ---------------------------------------------------------------- what it holds

    @property
    def num_slots(self) -> int:
        """Number of slots that `export_chunk` can read. It changes when the table grows."""
        return self.index.num_slots

    export_chunk = export.export_chunk
    chunks = export.chunks

    @exclusive
    def export_rows(self) -> tuple[Array, Array]:
        """Returns all keys, ascending, and their row numbers: (size,) key type, (size,) uint32."""
        return export.export_rows(self)

    @exclusive
    def export(
        self,
        column: str = "value",
        out: Callable[[int], Array] | None = None,
        cutoff: float | None = None,
    ) -> tuple[Array, Array]:
        """Returns all keys, ascending, and their rows: (n,) key type, (n, dim) storage.

        Args:
          column: "value", or the name of an optimizer state, whose rows are float32.
          out: gives memory for a number of rows; None: the backend's.
          cutoff: leaves out the keys whose row, whatever the column, has nothing but
            |element| < cutoff now; None: none.

        Raises:
          ValueError: the cutoff is not above 0.
        """
        return export.export(self, column, out, cutoff)

    @exclusive
    def export_if(self, predicate: Predicate) -> tuple[Array, Array]:
        """Returns the entries that a predicate chooses, as `export` does all.

        Args:
          predicate: such as `lambda entries: entries.scores >= 100`; called with some at a time.
        """
        return export.export_if(self, predicate)

    @exclusive
    def num_zero_rows(self) -> int:
        """Returns how many keys have a row of nothing but 0 now. It looks at every row."""
        return export.num_zero_rows(self)

    @exclusive
    def shrunk_keys(self) -> Array:
        """Returns the keys that an optimizer has set to zero, (n,) of the key type, ascending.

        Their rows are nothing but 0 now, and an optimizer state is not what it began with: those of
        group lasso, among others. It looks at every row, some at a time.
        """
        return export.shrunk_keys(self)

    # ---------------------------------------------------------------- what happened to keys

    counts = history.counts
    times = history.times
    pending_keys = history.pending_keys
    changed_since = history.changed_since
    export_since = history.export_since
    log_removals = history.log_removals
    removed_since = history.removed_since
    forget_removals = history.forget_removals

    # ---------------------------------------------------------------- removals

    erase = removal.erase
    erase_if = removal.erase_if
    expire = removal.expire
    erase_below = removal.erase_below
    clear = removal.clear

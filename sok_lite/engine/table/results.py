"""Result types of a table's methods."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from sok_lite.backend import Array
from sok_lite.engine.callers import warn
from sok_lite.engine.rows.store import RowStore


class Lookup(NamedTuple):
    """The result of a lookup.

    Attributes:
      values: (n, dim) of the table's storage dtype.
      rows: (k,) uint32, the row number of each key: good until the table's row_version changes.
      num_without_row: how many of the keys have no row.
    """

    values: Array
    rows: Array
    num_without_row: int


class Entries(NamedTuple):
    """Some keys of a table, with row numbers and scores.

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
        """(n, dim), the rows in their storage format, as they are now: each use reads them. If a
        key has lost its row, another key may have it."""
        return self.store.read(self.rows)


class Evicted(NamedTuple):
    """Evicted keys.

    Attributes:
      keys: (n,) of the table's key type.
      values: (n, dim) of the storage dtype, their last rows.
      scores: (n,) uint64.
    """

    keys: Array
    values: Array
    scores: Array


# Returns (n,) bool: which of some entries to take.
Predicate = Callable[[Entries], Array]


class _Numbers(NamedTuple):
    size: int
    capacity: int
    load_factor: float
    found_total: int
    missed_total: int
    inserted_total: int
    evicted_total: int
    refused_total: int
    not_admitted_total: int
    not_updated_total: int
    erased_total: int
    rehashes_total: int
    mean_probe: float
    longest_probe: int
    index_bytes: int
    near_bytes: int
    far_bytes: int
    near_reserved_bytes: int
    far_reserved_bytes: int
    text_bytes: int


# For one version, old attributes warn of their new names, and removed ones say why they are gone.


def _renamed(old: str, new: str) -> Any:
    """Returns a deprecated alias of the attribute `new`."""

    def get(self: Any) -> Any:
        warn(
            f"`{type(self).__name__}.{old}` is called `{new}` now. The old name will go in the "
            "next version.",
            DeprecationWarning,
        )
        return getattr(self, new)

    return property(get, doc=f"The old name of `{new}`.")


def _removed(why: str) -> Any:
    """Returns a property that raises AttributeError."""

    def get(self: Any) -> NoReturn:
        raise AttributeError(f"`{type(self).__name__}` has it no more: {why}.")

    return property(get, doc=f"Gone: {why}.")


class Statistics(_Numbers):
    """Sizes of a table, and counts of what it has done, on this rank; each rank has its own.

    What ends in `_total` counts since the table was made, cleared (`clear`) or given its content by
    a whole load, whichever came last. It never falls in between. All else is of now.

    Attributes:
      size: keys with a row.
      capacity: slots of the index.
      load_factor: size / capacity.
      found_total, missed_total: keys that lookups (`find`, `find_or_insert`, `lookup`) found and
        did not. On one rank a repeated key counts each time, on several once for each call and rank
        that asks for it: compare only jobs of equally many ranks.
      inserted_total: keys that got a row.
      evicted_total: keys that lost it to another key.
      refused_total: keys that got none since there was no room, each time they were refused.
      not_admitted_total: times that a key got none since it had not been seen often enough, or not
        drawn.
      not_updated_total: times that an update left a key out that had no row and got none.
      erased_total: keys that were removed, by `erase`, `expire` and the like.
      rehashes_total: how many segments of the index were written anew; a small one has one.
      mean_probe, longest_probe: lines of slots that a search for a key of the table reads.
      index_bytes: memory of the index, and of what else is kept by key: pending counts, access
        counts.
      near_bytes, far_bytes: memory of rows and optimizer states handed out so far, by tier.
      near_reserved_bytes, far_reserved_bytes: memory set aside for rows and states, that which is
        handed out included, by tier. On a CPU untouched pages of it cost nothing.
      text_bytes: memory of the host for the texts that a table with keep_texts=True remembers on
        this rank, about; of other tables 0.
    """

    __slots__ = ()
    found = _renamed("found", "found_total")
    missed = _renamed("missed", "missed_total")
    inserted = _renamed("inserted", "inserted_total")
    evicted = _renamed("evicted", "evicted_total")
    refused = _renamed("refused", "refused_total")
    not_admitted = _renamed("not_admitted", "not_admitted_total")
    not_updated = _renamed("not_updated", "not_updated_total")
    erased = _renamed("erased", "erased_total")
    num_rehashes = _renamed("num_rehashes", "rehashes_total")
    hot_keys = hot_asked = hot_asked_total = _removed("tables have no hot keys any more")
    hot_refreshed = hot_refreshed_total = hot_bytes = hot_keys
    residual_bytes = _removed("rounding of gradients keeps nothing any more")

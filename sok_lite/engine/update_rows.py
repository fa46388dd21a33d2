"""The row numbers of the keys of an update, each key once.

In training the keys of an update are those of the table's last gradient: distinct, with row numbers
that the table has cached (`row_cache`). A kernel compares the keys with the cached ones and
searches only for those that differ. So an update whose caller promises that its keys are those of a
gradient (`Update.of_gradient`) waits for nothing; for other keys the host first reads whether all
are the cached ones, and deduplicates them if not.

Only the device knows whether a key has no row, and the host of a GPU would have to wait for that.
It does not where it may assume that no row is missing: the caller makes the promise, the keys are
as many as the cached ones, the lookup of that gradient had a row for each, and no row number has
changed since. The assumption fails only where a program takes the step of a gradient after it has
made a later one of as many keys; a GPU then leaves out keys without a row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import Launch, launch_all
from sok_lite.backend.ragged import split, split_offsets
from sok_lite.engine.dedup import dedup
from sok_lite.engine.optimizers import UpdateRule
from sok_lite.engine.segments import Terms, group, segment_sums
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.find import find_and_mark_seen
from sok_lite.engine.table.row_cache import CachedRows


class Update(NamedTuple):
    """The gradient of one table in a step.

    Attributes:
      rule: the update rule; None: a fallback step, without a rule.
      keys: (n,) integers; a key without a row gets one if the table inserts for updates.
      grads: (n, dim) float32; those of a repeated key are summed.
      optimizer: the owner of the states; None: they are free, for the next optimizer.
      of_gradient: a promise that the keys are all those of a `lookup.Gradients` of a table with
        this key type: int64, and none repeats.
    """

    table: EmbeddingTable
    rule: UpdateRule | None
    keys: Array
    grads: Array
    optimizer: Any = None
    of_gradient: bool = False


class ResolvedUpdate(NamedTuple):
    """An update with row numbers.

    Attributes:
      keys: (u,) int64, distinct.
      rows: (u,) uint32, their row numbers, or NO_ROW.
      grads: (u, dim) float32.
      num_without_row: number of keys that have no row.
      are_seen: whether all keys are known to count as seen by the last lookup of the table.
    """

    table: EmbeddingTable
    keys: Array
    rows: Array
    grads: Array
    num_without_row: int
    are_seen: bool

    @property
    def inserts(self) -> bool:
        """Whether keys without a row are to be inserted."""
        return self.num_without_row > 0 and self.table.inserts_for_updates


class _Query(NamedTuple):
    """An update, and the cached rows of its table if its keys may be the cached ones."""

    update: Update
    cached: CachedRows | None

    @property
    def is_of_last_lookup(self) -> bool:
        """Whether the cached keys are from the last lookup of the table."""
        cached = self.cached
        return cached is not None and cached.lookup_number == self.update.table.clock.now


def _query(update: Update) -> _Query:
    table, cached = update.table, update.table.row_cache.read()
    may_match = cached.size == len(update.keys) and cached.row_version == table.row_version
    return _Query(update, cached if may_match else None)


def resolve_rows(updates: Sequence[Update], marks: bool) -> list[ResolvedUpdate]:
    """Returns updates of different tables with distinct keys and their row numbers.

    Args:
      marks: whether the search may mark keys as seen by the last lookup, though the step may still
        fail; otherwise `mark_seen_launches` do it with the step.
    """
    backend, queries = updates[0].table.backend, list(map(_query, updates))
    unsure = [i for i, each in enumerate(updates) if not each.of_gradient]
    # By number of the update: its rows, and whether all of its keys are seen.
    found, is_row_missing = _match_cached(queries, unsure)
    unsure = [i for i in unsure if i not in found]
    for i, each in zip(unsure, sum_duplicates([updates[i] for i in unsure]), strict=True):
        queries[i] = _query(each)
    numbers = [i for i in range(len(queries)) if i not in found]
    others = [queries[i] for i in numbers]
    lookups = [
        each.update.table.clock.now if marks and each.is_of_last_lookup else 0 for each in others
    ]
    if _must_have_rows(others):
        rows_of_others = _find_rows(others, lookup_numbers=lookups)
    else:
        total = backend.xp.zeros(1, np.int64)
        rows_of_others = _find_rows(others, num_without_row=total, lookup_numbers=lookups)
        is_row_missing |= _read_counts(backend, total)[0] > 0
    for i, rows, lookup in zip(numbers, rows_of_others, lookups, strict=True):
        found[i] = rows, lookup > 0
    num_without_row = [0] * len(queries)
    if is_row_missing:
        counts = backend.xp.zeros(len(queries), np.int64)
        _find_rows(queries, num_without_row=counts)
        num_without_row = _read_counts(backend, counts)
    return [
        ResolvedUpdate(update.table, update.keys, found[i][0], update.grads, count, found[i][1])
        for i, ((update, _), count) in enumerate(zip(queries, num_without_row, strict=True))
    ]


def _match_cached(
    queries: Sequence[_Query], numbers: Sequence[int]
) -> tuple[dict[int, tuple[Array, bool]], bool]:
    """Finds updates whose keys are the cached ones, though nobody promises it. It may wait once.

    Args:
      numbers: of the updates to compare.

    Returns:
      (by number of an update with the cached keys: its row numbers, and whether its keys were seen
      by the last lookup; whether any key that was compared has no row).
    """
    numbers = [i for i in numbers if queries[i].cached is not None]
    if not numbers:
        return {}, False
    backend = queries[0].update.table.backend
    counts = backend.xp.zeros(len(numbers) + 1, np.int64)
    compared = [queries[i] for i in numbers]
    found = _find_rows(compared, num_others=counts[:-1], num_without_row=counts[-1:])
    *num_others, num_without_row = _read_counts(backend, counts)
    columns = zip(numbers, num_others, found, compared, strict=True)
    matched = {i: (rows, each.is_of_last_lookup) for i, n, rows, each in columns if n == 0}
    return matched, num_without_row > 0


def _must_have_rows(queries: Sequence[_Query]) -> bool:
    """Returns whether the host assumes that all keys have a row, without waiting."""
    if queries and queries[0].update.table.backend.name == "cpu":
        return False  # its counts can be read at once
    return all(
        update.of_gradient and cached is not None and cached.is_complete
        for update, cached in queries
    )


def _find_rows(
    queries: Sequence[_Query],
    num_others: Array | None = None,
    num_without_row: Array | None = None,
    lookup_numbers: Sequence[int] | None = None,
) -> list[Array]:
    """Returns the row numbers of keys, by one launch: (n,) uint32 for each update, or NO_ROW.

    Args:
      num_others: (len(queries),) int64, grows by the keys of each that differ from the cached ones.
      num_without_row: (len(queries),) int64, grows by the keys of each that have no row, or (1,) by
        those of all.
      lookup_numbers: for each, the number of the lookup by which keys that differ from the cached
        ones count as seen; 0: they are not marked.
    """
    if not queries:
        return []
    sizes = [len(each.update.keys) for each in queries]
    results = split(queries[0].update.table.backend.xp.empty(sum(sizes), np.uint32), sizes)
    launches = []
    for i, ((update, cached), size, rows) in enumerate(zip(queries, sizes, results, strict=True)):
        table = update.table
        hint: tuple[Array | None, Array | None] = (None, None)
        if cached is not None and cached.size > 0:  # without keys there may be no arrays
            hint = table.row_cache.arrays(cached)
        counts = [
            count if count is None or count.size == 1 else count[i:]
            for count in (num_others, num_without_row)
        ]
        number = 0 if lookup_numbers is None else lookup_numbers[i]
        arguments = (*table.index.kernel_args(), number, update.keys, *hint, rows, *counts, size)
        launches.append([table.backend.prepared("find_with_hint", size, *arguments)])
    launch_all(*launches)
    return results


def _read_counts(backend: Backend, counts: Array) -> list[int]:
    """Returns the counts of kernels; on a GPU it waits for them."""
    return (counts if backend.name == "cpu" else backend.to_host(counts)).tolist()


def sum_duplicates(updates: Sequence[Update]) -> Sequence[Update]:
    """Returns the updates with each key once, and the sum of its gradients. It waits once."""
    if not updates:
        return updates
    backend = updates[0].table.backend
    begin = split_offsets([len(each.keys) for each in updates])
    keys = backend.xp.concatenate([each.keys for each in updates])
    distinct = dedup(backend, keys, begin)
    if len(distinct.keys) == len(keys):
        return updates  # distinct keys keep their order
    groups = group(backend, distinct.inverse, begin, distinct.starts)
    sums = segment_sums(backend, groups, Terms([each.grads for each in updates]))
    of_each = zip(updates, split(distinct.keys, distinct.sizes), sums, strict=True)
    return [each._replace(keys=its_keys, grads=its) for each, its_keys, its in of_each]


# ---------------------------------------------------------------- keys seen


def count_as_lookups(updates: Sequence[ResolvedUpdate]) -> None:
    """Counts updates as lookups of their keys, in tables with `sees_updates`.

    An insertion counts by itself.
    """
    for each in updates:
        if each.table.sees_updates and not each.inserts:
            find_and_mark_seen(each.table, each.keys)


def mark_seen_launches(update: ResolvedUpdate) -> list[Launch]:
    """Returns the launches that mark keys not seen yet as seen by the last lookup."""
    if update.are_seen or update.inserts or update.table.sees_updates:
        return []
    return [update.table.mark_seen_search(update.keys).launch]

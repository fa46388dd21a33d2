"""The row numbers of the keys of an update, each key once.

In training the keys of an update are those of the gradient before it, which are distinct and whose
row numbers the table has stored (`last_gradient`). A kernel compares: a key that equals the stored
one has the stored row number, any other is searched for. So an update whose caller promises that
its keys are those of a gradient (`Update.of_gradient`) waits for nothing; for other keys the host
first reads whether they are the stored ones, and deduplicates them if not.

Only the device knows whether a key has no row, and a GPU would have to be waited for. So the host
of a GPU does not read that where it may assume that none is missing: the caller makes that promise,
the keys are as many as those of the table's last gradient, the lookup of that gradient had a row
for each, and no row number has changed since. The assumption fails only where a program takes the
step of a gradient after it has made a later one of as many keys; a GPU then leaves out keys that
have no row.
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
from sok_lite.engine.table.last_gradient import KnownRows


class Update(NamedTuple):
    """The step of one table.

    Attributes:
      table: the table.
      rule: its update rule; None: a fallback step, without a rule.
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
      table: the table.
      keys: (u,) int64, distinct.
      rows: (u,) uint32, their row numbers, or NO_ROW.
      grads: (u, dim) float32.
      num_without_row: how many of the keys have no row.
      are_seen: whether all of the keys are known to count as seen by the last lookup of the table.
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


class _Sought(NamedTuple):
    """An update whose rows are sought.

    Attributes:
      update: its keys distinct, or maybe those that are known.
      known: the keys of its table's last gradient if they may be the same; None: they are not.
    """

    update: Update
    known: KnownRows | None

    @staticmethod
    def of(update: Update) -> "_Sought":
        """Returns an update with what is known of its table."""
        table, known = update.table, update.table.last_gradient.read()
        may_be = known.size == len(update.keys) and known.row_epoch == table.row_epoch
        return _Sought(update, known if may_be else None)

    @property
    def is_last(self) -> bool:
        """Whether the known keys are from the last lookup of the table."""
        known = self.known
        return known is not None and known.lookup_number == self.update.table.clock.now


def resolve_rows(updates: Sequence[Update], marks: bool) -> list[ResolvedUpdate]:
    """Returns updates of different tables with distinct keys and their row numbers.

    Args:
      marks: whether keys that are searched for may count as seen by the last lookup at once, though
        the step may still fail; otherwise `mark_seen_launches` mark them with the step.
    """
    backend, sought = updates[0].table.backend, list(map(_Sought.of, updates))
    doubtful = [i for i, each in enumerate(updates) if not each.of_gradient]
    # By number, rows and whether all keys are seen.
    found, is_any_without_row = _match_stored(sought, doubtful)
    doubtful = [i for i in doubtful if i not in found]
    for i, each in zip(doubtful, summed([updates[i] for i in doubtful]), strict=True):
        sought[i] = _Sought.of(each)
    unknown = [i for i in range(len(sought)) if i not in found]
    others = [sought[i] for i in unknown]
    lookup_numbers = [
        each.update.table.clock.now if marks and each.is_last else 0 for each in others
    ]
    if _have_rows(others):
        rows_of_others = _recall(others, lookup_numbers=lookup_numbers)
    else:
        total = backend.xp.zeros(1, np.int64)
        rows_of_others = _recall(others, num_without_row=total, lookup_numbers=lookup_numbers)
        is_any_without_row |= _read_counts(backend, total)[0] > 0
    for i, rows, number in zip(unknown, rows_of_others, lookup_numbers, strict=True):
        found[i] = rows, number > 0
    num_without_row = _num_without_row(sought) if is_any_without_row else [0] * len(sought)
    resolved = []
    for i, ((update, _), count) in enumerate(zip(sought, num_without_row, strict=True)):
        rows, are_seen = found[i]
        resolved.append(
            ResolvedUpdate(update.table, update.keys, rows, update.grads, count, are_seen)
        )
    return resolved


def _match_stored(
    sought: Sequence[_Sought], numbers: Sequence[int]
) -> tuple[dict[int, tuple[Array, bool]], bool]:
    """Finds updates whose keys are the stored ones, though nobody promises it. It may wait once.

    Args:
      numbers: which updates to compare.

    Returns:
      (by number of an update that is one of these: its row numbers, and whether its keys were seen
      by the last lookup; whether a key of those that were compared has no row).
    """
    likely = [i for i in numbers if sought[i].known is not None]
    if not likely:
        return {}, False
    backend = sought[0].update.table.backend
    counts = backend.xp.zeros(len(likely) + 1, np.int64)
    compared = [sought[i] for i in likely]
    found = _recall(compared, num_others=counts[:-1], num_without_row=counts[-1:])
    *num_others, num_without_row = _read_counts(backend, counts)
    columns = zip(likely, num_others, found, compared, strict=True)
    matched = {i: (rows, each.is_last) for i, others, rows, each in columns if others == 0}
    return matched, num_without_row > 0


def touch(updates: Sequence[ResolvedUpdate]) -> None:
    """Counts updates as lookups of their keys, in tables with `sees_updates`.

    Where keys are to be inserted the insertion does so.
    """
    for each in updates:
        if each.table.sees_updates and not each.inserts:
            find_and_mark_seen(each.table, each.keys)


def mark_seen_launches(update: ResolvedUpdate) -> list[Launch]:
    """Returns the launches that mark the keys of an update as seen by the last lookup, where they
    are not yet."""
    if update.are_seen or update.inserts or update.table.sees_updates:
        return []
    return [update.table.mark_seen_search(update.keys).launch]


def _have_rows(sought: Sequence[_Sought]) -> bool:
    """Returns whether the host assumes that all keys of updates have a row, without waiting."""
    if sought and sought[0].update.table.backend.name == "cpu":
        return False  # its counts can be read at once
    return all(
        update.of_gradient and known is not None and known.is_complete for update, known in sought
    )


def _recall(
    sought: Sequence[_Sought],
    num_others: Array | None = None,
    num_without_row: Array | None = None,
    lookup_numbers: Sequence[int] | None = None,
) -> list[Array]:
    """Returns the row numbers of keys, by one launch.

    Args:
      num_others: (len(sought),) int64, grows by the keys of each that differ from the stored ones;
        None: they are not counted.
      num_without_row: (len(sought),) int64, grows by the keys of each that have no row, or (1,) by
        those of all; None: they are not counted.
      lookup_numbers: of each, the number of the lookup by which keys that differ from the stored
        ones count as seen; 0, or None for all: they are not marked.

    Returns:
      (n,) uint32 for each update; NO_ROW for a key without a row.
    """
    if not sought:
        return []
    sizes = [len(each.update.keys) for each in sought]
    results = split(sought[0].update.table.backend.xp.empty(sum(sizes), np.uint32), sizes)
    launches = []
    for i, ((update, known), size, rows) in enumerate(zip(sought, sizes, results, strict=True)):
        table = update.table
        stored: tuple[Array | None, Array | None] = (None, None)
        if known is not None and known.size > 0:  # of a first one without keys there are no arrays
            stored = table.last_gradient.arrays(known)
        counts = [
            count if count is None or count.size == 1 else count[i:]
            for count in (num_others, num_without_row)
        ]
        number = 0 if lookup_numbers is None else lookup_numbers[i]
        arguments = (*table.index.kernel_args(), number, update.keys, *stored, rows, *counts, size)
        launches.append([table.backend.prepared("recall_rows", size, *arguments)])
    launch_all(*launches)
    return results


def _num_without_row(sought: Sequence[_Sought]) -> list[int]:
    """Returns how many keys of each update have no row. It waits."""
    backend = sought[0].update.table.backend
    counts = backend.xp.zeros(len(sought), np.int64)
    _recall(sought, num_without_row=counts)
    return _read_counts(backend, counts)


def _read_counts(backend: Backend, counts: Array) -> list[int]:
    """Returns the counts of kernels; on a GPU it waits for them."""
    return (counts if backend.name == "cpu" else backend.to_host(counts)).tolist()


def summed(updates: Sequence[Update]) -> Sequence[Update]:
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

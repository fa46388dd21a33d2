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
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import I64, U32, Words, joined_column_launches, joined_launches
from sok_lite.backend.publish import Action
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.dedup import dedup
from sok_lite.engine.optimizers import UpdateRule
from sok_lite.engine.pieces import Pieces, addresses_of, chosen, shapes_of
from sok_lite.engine.segments import Terms, group, segment_sums
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.finding import find_and_mark_seen
from sok_lite.engine.table.index import place_words
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


class Updates(NamedTuple):
    """The steps of several tables: in each column the attribute of `Update` of every one."""

    tables: Sequence[EmbeddingTable]
    rules: Sequence[UpdateRule | None]
    keys: Sequence[Array]
    grads: Sequence[Array]
    optimizers: Sequence[Any]
    of_gradients: Sequence[bool]

    @staticmethod
    def of(updates: "Sequence[Update] | Updates") -> "Updates":
        """Returns updates as columns."""
        if type(updates) is Updates:
            return updates
        columns: Any = zip(*updates, strict=True) if updates else [()] * len(Updates._fields)
        return Updates(*columns)

    def some(self, numbers: Sequence[int]) -> "Updates":
        """Returns the updates with these numbers."""
        return Updates(*chosen(self, numbers))

    @property
    def sizes(self) -> list[int]:
        """The number of keys of each."""
        return [shape[0] for shape in shapes_of(self.keys)]


class ResolvedUpdates(NamedTuple):
    """Updates with row numbers, as columns: every sequence has one entry per update.

    Attributes:
      tables: the tables.
      keys: (u,) int64, distinct.
      rows: (u,) uint32, their row numbers, or NO_ROW.
      grads: (u, dim) float32.
      num_without_row: how many of the keys have no row.
      are_seen: whether all of the keys are known to count as seen by the last lookup of the table.
    """

    tables: Sequence[EmbeddingTable]
    keys: Sequence[Array]
    rows: Sequence[Array]
    grads: Sequence[Array]
    num_without_row: Sequence[int]
    are_seen: Sequence[bool]

    @property
    def inserts(self) -> list[bool]:
        """Whether keys without a row are to be inserted, of each update."""
        pairs = zip(self.tables, self.num_without_row, strict=True)
        return [count > 0 and table.inserts_for_updates for table, count in pairs]

    def some(self, numbers: Sequence[int]) -> "ResolvedUpdates":
        """Returns the updates with these numbers."""
        return ResolvedUpdates(*chosen(self, numbers))


# Stored keys and rows that may be those of an update.
Known: TypeAlias = KnownRows | None


def resolve_rows(updates: Updates, marks: bool) -> ResolvedUpdates:
    """Returns updates of different tables with distinct keys and their row numbers.

    Args:
      marks: whether keys that are searched for may count as seen by the last lookup at once, though
        the step may still fail; otherwise `plan_mark_seen` marks them with the step.
    """
    backend, n = updates.tables[0].backend, len(updates.tables)
    known = _known(updates, updates.sizes)
    doubtful: list[int] = []
    if False in updates.of_gradients:
        doubtful = [i for i, of_gradient in enumerate(updates.of_gradients) if not of_gradient]
    matched, is_any_without_row = dict[int, tuple[Array, bool]](), False
    if doubtful:
        matched, is_any_without_row = _match_stored(updates, known, doubtful)
        doubtful = [i for i in doubtful if i not in matched]
    if doubtful:
        of_doubtful = summed(updates.some(doubtful))
        updates = _with(updates, doubtful, of_doubtful)
        for i, of_summed in zip(doubtful, _known(of_doubtful, of_doubtful.sizes), strict=True):
            known[i] = of_summed
    unknown = [i for i in range(n) if i not in matched]
    sought, its_known = updates, known
    if matched:
        sought, its_known = updates.some(unknown), [known[i] for i in unknown]
    lookup_numbers = [0] * len(unknown)
    if marks:
        lookup_numbers = [
            table.clock.now if is_last else 0
            for table, is_last in zip(sought.tables, _are_last(sought, its_known), strict=True)
        ]
    if _have_rows(sought, its_known):
        found = _recall(sought, its_known, lookup_numbers=lookup_numbers)
    else:
        total = backend.xp.zeros(1, np.int64)
        found = _recall(sought, its_known, num_without_row=total, lookup_numbers=lookup_numbers)
        is_any_without_row |= _read_counts(backend, total)[0] > 0
    are_seen = [number > 0 for number in lookup_numbers]
    if matched:
        pairs = matched | dict(zip(unknown, zip(found, are_seen, strict=True), strict=True))
        found, are_seen = [pairs[i][0] for i in range(n)], [pairs[i][1] for i in range(n)]
    num_without_row_of = _num_without_row(updates, known) if is_any_without_row else [0] * n
    return ResolvedUpdates(
        updates.tables, updates.keys, found, updates.grads, num_without_row_of, are_seen
    )


def _match_stored(
    updates: Updates, known: Sequence[Known], numbers: Sequence[int]
) -> tuple[dict[int, tuple[Array, bool]], bool]:
    """Finds updates whose keys are the stored ones, though nobody promises it. It may wait once.

    Args:
      numbers: which updates to compare.

    Returns:
      (by number of an update that is one of these: its row numbers, and whether its keys were seen
      by the last lookup; whether a key of those that were compared has no row).
    """
    likely = [i for i in numbers if known[i] is not None]
    if not likely:
        return {}, False
    backend = updates.tables[0].backend
    counts = backend.xp.zeros(len(likely) + 1, np.int64)
    sought, its_known = updates.some(likely), [known[i] for i in likely]
    found = _recall(sought, its_known, num_others=counts[:-1], num_without_row=counts[-1:])
    *num_others, num_without_row = _read_counts(backend, counts)
    columns = zip(likely, num_others, found, _are_last(sought, its_known), strict=True)
    matched = {i: (rows, is_last) for i, others, rows, is_last in columns if others == 0}
    return matched, num_without_row > 0


def _with(updates: Updates, numbers: Sequence[int], others: Updates) -> Updates:
    """Returns updates in which those with these numbers are replaced by others."""
    replaced: list[Any] = [list(each) for each in updates]
    for each, of_others in zip(replaced, others, strict=True):
        for i, other in zip(numbers, of_others, strict=True):
            each[i] = other
    return Updates(*replaced)


def touch(updates: ResolvedUpdates) -> None:
    """Counts updates as lookups of their keys, in tables with `sees_updates`.

    Where keys are to be inserted the insertion does so.
    """
    seeing = [i for i, table in enumerate(updates.tables) if table.sees_updates]
    if seeing:
        inserts = updates.inserts
        for i in [i for i in seeing if not inserts[i]]:
            find_and_mark_seen(updates.tables[i], updates.keys[i])


def plan_mark_seen(updates: ResolvedUpdates) -> list[Action]:
    """Prepares to mark the keys of updates as seen by the last lookups, where they are not yet."""
    if False not in updates.are_seen:
        return []
    parts = []
    columns = (updates.tables, updates.keys, updates.are_seen, updates.inserts)
    for table, keys, are_seen, inserts in zip(*columns, strict=True):
        if not (are_seen or inserts or table.sees_updates):
            launch = table.mark_seen_search(keys).launch
            parts.append((table.backend, launch.kernel, launch.part))
    return joined_launches(parts)


def _are_last(updates: Updates, known: Sequence[Known]) -> list[bool]:
    """Returns of each update whether its stored keys are from the last lookup of its table."""
    return [
        each is not None and each.lookup_number == table.clock.now
        for table, each in zip(updates.tables, known, strict=True)
    ]


def _known(updates: Updates, sizes: Sequence[int]) -> list[Known]:
    """Returns of each update the keys of its table's last gradient if they may be the same."""
    return [
        each if each.size == size and each.row_epoch == table.row_epoch else None
        for table, size in zip(updates.tables, sizes, strict=True)
        for each in (table.last_gradient.read(),)
    ]


def _have_rows(updates: Updates, known: Sequence[Known]) -> bool:
    """Returns whether the host assumes that all keys of updates have a row, without waiting."""
    if not known:
        return True
    if updates.tables[0].backend.name == "cpu":
        return False  # its counts can be read at once
    return False not in updates.of_gradients and False not in [
        each is not None and each.is_complete for each in known
    ]


def _recall(
    updates: Updates,
    known: Sequence[Known],
    num_others: Array | None = None,
    num_without_row: Array | None = None,
    lookup_numbers: Sequence[int] | None = None,
) -> Sequence[Array]:
    """Returns the row numbers of keys, by one launch.

    Args:
      known: stored keys and rows of each update.
      num_others: (len(updates),) int64, grows by the keys of each that differ from the stored ones;
        None: they are not counted.
      num_without_row: (len(updates),) int64, grows by the keys of each that have no row, or (1,) by
        those of all; None: they are not counted.
      lookup_numbers: of each, the number of the lookup by which keys that differ from the stored
        ones count as seen; 0, or None for all: they are not marked.

    Returns:
      (n,) uint32 for each update; NO_ROW for a key without a row.
    """
    tables = updates.tables
    if not tables:
        return []
    backend, sizes = tables[0].backend, updates.sizes
    rows = backend.xp.empty(sum(sizes), np.uint32)
    results, address = Pieces.of_sizes(rows, sizes), backend.address
    counts: list[Words] = [
        0
        if count is None
        else address(count) + (8 * np.arange(count.size) if count.size > 1 else 0)
        for count in (num_others, num_without_row)
    ]
    of_known = [(0, 0) if each is None else (each.keys, each.rows) for each in known]
    columns = [
        place_words([table.index for table in tables]),
        0 if lookup_numbers is None else np.array(lookup_numbers, np.int64),
        addresses_of(backend, updates.keys, I64),
        np.array(of_known, np.int64),
        *(addresses_of(backend, results, U32), *counts, np.array(sizes, np.int64)),
    ]
    kernels = [(table.backend, "recall_rows") for table in tables]
    arrays = (updates, rows, num_others, num_without_row)
    for launch in joined_column_launches(kernels, sizes, columns, arrays):
        launch()
    return results


def _num_without_row(updates: Updates, known: Sequence[Known]) -> list[int]:
    """Returns how many keys of each update have no row. It waits."""
    backend = updates.tables[0].backend
    counts = backend.xp.zeros(len(known), np.int64)
    _recall(updates, known, num_without_row=counts)
    return _read_counts(backend, counts)


def _read_counts(backend: Backend, counts: Array) -> list[int]:
    """Returns the counts of kernels; on a GPU it waits for them."""
    return (counts if backend.name == "cpu" else backend.to_host(counts)).tolist()


def summed(updates: Updates) -> Updates:
    """Returns the updates with each key once, and the sum of its gradients. It waits once."""
    if not updates.tables:
        return updates
    backend, sizes = updates.tables[0].backend, updates.sizes
    begin, keys = split_offsets(sizes), backend.xp.concatenate(list(updates.keys))
    distinct = dedup(backend, keys, begin)
    if len(distinct.keys) == len(keys):
        return updates  # distinct keys keep their order
    groups = group(backend, distinct.inverse, begin, distinct.starts)
    sums = segment_sums(backend, groups, Terms(updates.grads))
    return updates._replace(keys=Pieces.of_sizes(distinct.keys, distinct.sizes), grads=sums)

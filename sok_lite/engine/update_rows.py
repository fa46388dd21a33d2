"""The row numbers of the keys of an update, each key once.

In training the keys of an update are those of the gradient before it, which are distinct and whose
row numbers a table has kept. They are compared with those kept by the kernel that gives the row
numbers: a key that is another one is looked for. So an update whose caller says that its keys are
those of a gradient waits for nothing; of other keys the host asks first whether they repeat.

Whether keys have no row only the device knows, so on a GPU that is asked only where it may be: not
where the keys are as many as those of a table's last gradient, and of a gradient as the caller
says, if the lookup of that one had a row for each and the table has lost none since. They are the
same keys then, unless a program takes the step of a gradient after it has made a later one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import I64, U32, Words, joined_column_launches, joined_launches
from sok_lite.backend.publish import Action
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.optimizers import UpdateRule
from sok_lite.engine.pieces import Pieces, addresses_of, chosen, shapes_of
from sok_lite.engine.segments import Terms, dedup, group, segment_sums
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.finding import find_and_mark_seen
from sok_lite.engine.table.index import place_words
from sok_lite.engine.table.results import KnownRows


class Update(NamedTuple):
    """The step of one table.

    Attributes:
      table: the table.
      rule: its update rule; None: the step is not of a rule.
      keys: (n,) integers; one without a row gets one where the table takes it.
      grads: (n, dim) float32; those of a repeated key are summed.
      optimizer: whose the states are; None: nobody's, the next optimizer may take them over.
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
    """The step of several tables. What is a sequence has one of each; see `Update`."""

    tables: Sequence[EmbeddingTable]
    rules: Sequence[UpdateRule | None]
    keys: Sequence[Array]
    grads: Sequence[Array]
    optimizers: Sequence[Any]
    of_gradients: Sequence[bool]

    @staticmethod
    def of(updates: "Sequence[Update] | Updates") -> "Updates":
        """Returns updates that are told one by one."""
        if type(updates) is Updates:
            return updates
        columns: Any = zip(*updates, strict=True) if updates else [()] * len(Updates._fields)
        return Updates(*columns)

    def some(self, numbers: Sequence[int]) -> "Updates":
        """Returns those of some numbers."""
        return Updates(*chosen(self, numbers))

    @property
    def sizes(self) -> list[int]:
        """How many keys each has."""
        return [shape[0] for shape in shapes_of(self.keys)]


class ResolvedUpdates(NamedTuple):
    """Updates by row numbers. What is a sequence has one of each.

    Attributes:
      tables: the tables.
      keys: (u,) int64, distinct.
      rows: (u,) uint32, their row numbers, or NO_ROW.
      grads: (u, dim) float32.
      num_without_row: how many have no row.
      are_seen: whether all of them count as seen by the last lookup of the table, as far as that is
        known.
    """

    tables: Sequence[EmbeddingTable]
    keys: Sequence[Array]
    rows: Sequence[Array]
    grads: Sequence[Array]
    num_without_row: Sequence[int]
    are_seen: Sequence[bool]

    @property
    def inserts(self) -> list[bool]:
        """Of each, whether there are keys without a row that are to get one."""
        pairs = zip(self.tables, self.num_without_row, strict=True)
        return [count > 0 and table.inserts_for_updates for table, count in pairs]

    def some(self, numbers: Sequence[int]) -> "ResolvedUpdates":
        """Returns those of some numbers."""
        return ResolvedUpdates(*chosen(self, numbers))


# What is known of the keys of an update, if anything is, and its number there.
Known: TypeAlias = tuple[KnownRows, int] | None


def resolve_rows(updates: Updates, marks: bool = True) -> ResolvedUpdates:
    """Returns updates of different tables with distinct keys and their row numbers.

    Args:
      marks: whether keys that are looked for may count as seen by the last lookup at once, though
        the step may fail yet; else only `plan_mark_seen` lets them.
    """
    backend = updates.tables[0].backend
    # Looked at once for each update: another thread may make a gradient of its table meanwhile.
    sizes = updates.sizes
    known, n = _known(updates, sizes), len(sizes)
    rows: dict[int, Array] = {}  # of those that are known by now
    are_seen = [False] * n
    is_any_without_row = False
    doubtful: list[int] = []
    if False in updates.of_gradients:
        doubtful = [i for i, of_gradient in enumerate(updates.of_gradients) if not of_gradient]
    # Most likely these are the keys of the last gradient as well.
    likely = [i for i in doubtful if known[i] is not None]
    if likely:
        counts = backend.xp.zeros(len(likely) + 1, np.int64)
        num_others, num_without_row = counts[:-1], counts[-1:]
        sought, its_known = updates.some(likely), [known[i] for i in likely]
        found = _recalled(sought, its_known, num_others, num_without_row)
        *counted, absent = _read(backend, counts)
        is_any_without_row = absent > 0
        last = _are_last(sought, its_known)
        for i, its_rows, others, is_last in zip(likely, found, counted, last, strict=True):
            if others == 0:
                rows[i], are_seen[i] = its_rows, is_last
    doubtful = [i for i in doubtful if i not in rows]
    if doubtful:
        of_doubtful = summed(updates.some(doubtful))
        updates = _with(updates, doubtful, of_doubtful)
        for i, of_summed in zip(doubtful, _known(of_doubtful, of_doubtful.sizes), strict=True):
            known[i] = of_summed
    unknown = [i for i in range(n) if i not in rows]
    sought, its_known = updates, known
    if rows:
        sought, its_known = updates.some(unknown), [known[i] for i in unknown]
    if not marks:
        stamps = [0] * len(unknown)
    else:
        stamps = [
            table.clock.now if is_last else 0
            for table, is_last in zip(sought.tables, _are_last(sought, its_known), strict=True)
        ]
    if _have_rows(sought, its_known):
        found = _recalled(sought, its_known, stamps=stamps)
    else:
        total = backend.xp.zeros(1, np.int64)
        found = _recalled(sought, its_known, num_without_row=total, stamps=stamps)
        is_any_without_row |= _read(backend, total)[0] > 0
    if rows:
        rows |= zip(unknown, found, strict=True)
        found = [rows[i] for i in range(n)]
    for i, stamp in zip(unknown, stamps, strict=True):
        are_seen[i] = stamp > 0
    num_without_row_of = _num_without_row(updates, known) if is_any_without_row else [0] * n
    return ResolvedUpdates(
        updates.tables, updates.keys, found, updates.grads, num_without_row_of, are_seen
    )


def _with(updates: Updates, numbers: Sequence[int], others: Updates) -> Updates:
    """Returns updates with others in the place of those of some numbers."""
    replaced: list[Any] = [list(each) for each in updates]
    for each, of_others in zip(replaced, others, strict=True):
        for i, other in zip(numbers, of_others, strict=True):
            each[i] = other
    return Updates(*replaced)


def touch(updates: ResolvedUpdates) -> None:
    """Counts updates as lookups of their keys, where tables want it and no insertion does so."""
    seeing = [i for i, table in enumerate(updates.tables) if table.sees_updates]
    if seeing:
        inserts = updates.inserts
        for i in [i for i in seeing if not inserts[i]]:
            find_and_mark_seen(updates.tables[i], updates.keys[i])


def plan_mark_seen(updates: ResolvedUpdates) -> list[Action]:
    """Prepares to count the keys of updates as seen by the last lookups, where they are not yet."""
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
    """Of each update, whether the last lookup of its table was that of a gradient of it."""
    return [
        each is not None and each[0].stamps[each[1]] == table.clock.now
        for table, each in zip(updates.tables, known, strict=True)
    ]


def _known(updates: Updates, sizes: Sequence[int]) -> list[Known]:
    """Returns of each update the keys of its table's last gradient if they may be its own."""
    # Nothing is called for each: a step may have a thousand tables.
    return [
        each
        if each is not None
        and each[0].row_epochs[each[1]] == table.row_epoch
        and each[0].sizes[each[1]] == size
        else None
        for table, size in zip(updates.tables, sizes, strict=True)
        for each in (table.last_gradient,)
    ]


def _have_rows(updates: Updates, known: Sequence[Known]) -> bool:
    """Whether all keys of updates are taken to have a row without asking the device."""
    if not known:
        return True
    if updates.tables[0].backend.name == "cpu":
        return False  # what it counts is there at once
    return False not in updates.of_gradients and False not in [
        each is not None and each[0].are_complete[each[1]] for each in known
    ]


def _recalled(
    updates: Updates,
    known: Sequence[Known],
    num_others: Array | None = None,
    num_without_row: Array | None = None,
    stamps: Sequence[int] | None = None,
) -> Sequence[Array]:
    """Returns the row numbers of keys, by one launch.

    Args:
      known: what is known of the keys of each.
      num_others: (len(updates),) int64, grows by the keys of each that are not those known; None:
        not wanted.
      num_without_row: (len(updates),) int64, grows by the keys of each that have no row, or (1,) by
        those of all; None: not wanted.
      stamps: of each, the number of the lookup by which keys count as seen that are not known; 0,
        or None for all: none do.

    Returns:
      (n,) uint32 for each update; absent for a key without a row.
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
    of_known = [
        (0, 0) if each is None else (each[0].key_addresses[each[1]], each[0].row_addresses[each[1]])
        for each in known
    ]
    columns = [
        place_words([table.index for table in tables]),
        0 if stamps is None else np.array(stamps, np.int64),
        addresses_of(backend, updates.keys, I64),
        np.array(of_known, np.int64),
        *(addresses_of(backend, results, U32), *counts, np.array(sizes, np.int64)),
    ]
    kernels = [(table.backend, "recall_rows") for table in tables]
    arrays = (updates, known, rows, num_others, num_without_row)
    for launch in joined_column_launches(kernels, sizes, columns, arrays):
        launch()
    return results


def _num_without_row(updates: Updates, known: Sequence[Known]) -> list[int]:
    """Returns how many keys of each update have no row. It waits."""
    backend = updates.tables[0].backend
    counts = backend.xp.zeros(len(known), np.int64)
    _recalled(updates, known, num_without_row=counts)
    return _read(backend, counts)


def _read(backend: Backend, counts: Array) -> list[int]:
    """Returns what kernels have counted; on a CPU it is there already."""
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

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
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import I64, U32, Words, joined_column_launches, joined_launches
from sok_lite.backend.publish import Action, publish
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.optimizers import UpdateRule
from sok_lite.engine.segments import Terms, cut, dedup, group, segment_sums
from sok_lite.engine.table import EmbeddingTable
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


class Ready(NamedTuple):
    """An update by row numbers.

    Attributes:
      table: the table.
      keys: (u,) int64, distinct.
      rows: (u,) uint32, their row numbers, or absent.
      grads: (u, dim) float32.
      num_absent: how many have no row.
      are_seen: whether all of them count as seen by the last lookup of the table, as far as that is
        known.
    """

    table: EmbeddingTable
    keys: Array
    rows: Array
    grads: Array
    num_absent: int
    are_seen: bool

    @property
    def inserts(self) -> bool:
        """Whether there are keys without a row that are to get one."""
        return self.num_absent > 0 and self.table.inserts_for_updates


def ready(updates: Sequence[Update], marks: bool = True) -> list[Ready]:
    """Returns updates of different tables with distinct keys and their row numbers.

    Args:
      marks: whether keys that are looked for may count as seen by the last lookup at once, though
        the step may fail yet; else only `marking` lets them.
    """
    updates = list(updates)
    backend = updates[0].table.backend
    rows: list[Array] = [None] * len(updates)
    are_seen = [False] * len(updates)
    # Looked at once for each update: another thread may make a gradient of its table meanwhile.
    known = [_known(update) for update in updates]
    doubtful = [i for i, update in enumerate(updates) if not update.of_gradient]
    # Most likely these are the keys of the last gradient as well.
    likely = [i for i in doubtful if known[i] is not None]
    is_any_absent = False
    if likely:
        counts = backend.xp.zeros(len(likely) + 1, np.int64)
        num_others, num_absent = counts[:-1], counts[-1:]
        asked = [updates[i] for i in likely]
        found = _recalled(asked, [known[i] for i in likely], num_others, num_absent)
        *counted, absent = _read(backend, counts)
        is_any_absent = absent > 0
        for i, its_rows, others in zip(likely, found, counted, strict=True):
            if others == 0:
                rows[i], are_seen[i] = its_rows, _is_last(updates[i], known[i])
    doubtful = [i for i in doubtful if rows[i] is None]
    for i, update in zip(doubtful, summed([updates[i] for i in doubtful]), strict=True):
        updates[i], known[i] = update, _known(update)
    unknown = [i for i, its_rows in enumerate(rows) if its_rows is None]
    asked, of_gradients = [updates[i] for i in unknown], [known[i] for i in unknown]
    stamps = [0] * len(asked)
    if marks:
        pairs = zip(asked, of_gradients, strict=True)
        stamps = [each.table.clock.now if _is_last(each, its) else 0 for each, its in pairs]
    if not all(map(_have_rows, asked, of_gradients)):
        total = backend.xp.zeros(1, np.int64)
        found = _recalled(asked, of_gradients, num_absent=total, stamps=stamps)
        is_any_absent |= _read(backend, total)[0] > 0
    else:
        found = _recalled(asked, of_gradients, stamps=stamps)
    for i, its_rows, stamp in zip(unknown, found, stamps, strict=True):
        rows[i], are_seen[i] = its_rows, stamp > 0
    num_absent_of = _num_absent(updates, known) if is_any_absent else [0] * len(updates)
    return [
        Ready(update.table, update.keys, its_rows, update.grads, absent, is_seen)
        for update, its_rows, absent, is_seen in zip(
            updates, rows, num_absent_of, are_seen, strict=True
        )
    ]


def see(updates: Sequence[Ready]) -> None:
    """Counts updates as lookups of their keys, where tables want it and no insertion does so."""
    for update in updates:
        if update.table.sees_updates and not update.inserts:
            update.table._seen(update.keys)


def marking(updates: Sequence[Ready]) -> list[Action]:
    """Prepares to count the keys of updates as seen by the last lookups, where they are not yet."""
    parts = []
    for update in updates:
        table = update.table
        if not (update.are_seen or update.inserts or table.sees_updates):
            launch = table._marking(update.keys).launch
            parts.append((table.backend, launch.kernel, launch.part))
    return joined_launches(parts)


def _is_last(update: Update, known: KnownRows | None) -> bool:
    """Whether the last lookup of a table was that of a gradient of it."""
    return known is not None and known.stamp == update.table.clock.now


def _known(update: Update) -> KnownRows | None:
    """Returns the keys of the table's last gradient if they may be those of an update."""
    known = update.table.last_gradient
    if known is None or known.generation != update.table.generation:
        return None
    return known if known.keys.size == update.keys.size else None


def _have_rows(update: Update, known: KnownRows | None) -> bool:
    """Whether all keys of an update are taken to have a row without asking the device."""
    if update.table.backend.name == "cpu":
        return False  # what it counts is there at once
    return update.of_gradient and known is not None and known.is_complete


def _recalled(
    updates: Sequence[Update],
    known: Sequence[KnownRows | None],
    num_others: Array | None = None,
    num_absent: Array | None = None,
    stamps: Sequence[int] | None = None,
) -> list[Array]:
    """Returns the row numbers of keys, by one launch.

    Args:
      known: what is known of the keys of each.
      num_others: (len(updates),) int64, grows by the keys of each that are not those known; None:
        not wanted.
      num_absent: (len(updates),) int64, grows by the keys of each that have no row, or (1,) by
        those of all; None: not wanted.
      stamps: of each, the number of the lookup by which keys count as seen that are not known; 0,
        or None for all: none do.

    Returns:
      (n,) uint32 for each update; absent for a key without a row.
    """
    if not updates:
        return []
    tables, sizes = [update.table for update in updates], [len(update.keys) for update in updates]
    backend = tables[0].backend
    rows = backend.xp.empty(sum(sizes), np.uint32)
    keys = [update.keys for update in updates]
    known_keys = [None if each is None else each.keys for each in known]
    known_rows = [None if each is None else each.rows for each in known]
    places = np.concatenate([table.index.place_words() for table in tables])
    addresses, address = backend.addresses, backend.address
    counts: list[Words] = []
    for count in (num_others, num_absent):
        if count is None or len(count) == 1:
            counts.append(0 if count is None else address(count))
        else:
            counts.append(address(count) + 8 * np.arange(len(count)))
    columns = [
        *(
            places.reshape(len(tables), -1),
            0 if stamps is None else np.array(stamps, np.int64),
            addresses(keys, I64),
        ),
        *(addresses(known_keys, I64), addresses(known_rows, U32)),
        *(address(rows) + 4 * split_offsets(sizes)[:-1], *counts, np.array(sizes, np.int64)),
    ]
    kernels = [(table.backend, "recall_rows") for table in tables]
    arrays = (keys, known, rows, num_others, num_absent)
    publish(joined_column_launches(kernels, sizes, columns, arrays))
    return cut(rows, sizes)


def _num_absent(updates: Sequence[Update], known: Sequence[KnownRows | None]) -> list[int]:
    """Returns how many keys of each update have no row. It waits."""
    backend = updates[0].table.backend
    counts = backend.xp.zeros(len(updates), np.int64)
    _recalled(updates, known, num_absent=counts)
    return _read(backend, counts)


def _read(backend: Backend, counts: Array) -> list[int]:
    """Returns what kernels have counted; on a CPU it is there already."""
    return (counts if backend.name == "cpu" else backend.to_host(counts)).tolist()


def summed(updates: Sequence[Update]) -> list[Update]:
    """Returns the updates with each key once, and the sum of its gradients. It waits once."""
    if not updates:
        return []
    backend = updates[0].table.backend
    xp = backend.xp
    sizes = [len(update.keys) for update in updates]
    begin, keys = split_offsets(sizes), xp.concatenate([update.keys for update in updates])
    distinct = dedup(backend, keys, begin)
    if len(distinct.keys) == len(keys):
        return list(updates)  # distinct keys keep their order
    terms = [Terms(update.grads) for update in updates]
    sums = segment_sums(backend, group(backend, distinct.inverse, begin, distinct.starts), terms)
    return [
        update._replace(keys=keys, grads=grads)
        for update, keys, grads in zip(
            updates, cut(distinct.keys, distinct.sizes), sums, strict=True
        )
    ]

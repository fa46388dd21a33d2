"""Restores a table: it gets what was saved, and nothing else.

A table that comes back evicts, admits and expires as it would have done: scores, the number of the
lookup that last saw each key and its time, and the pending counts of keys without a row come with
the keys. Keys are read first, and get rows; then what is known of them, and then column after
column of rows. What is in memory beside the new table is a piece, and at most the row numbers of
the keys.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.optimizer_states import (
    copy_states,
    fitting,
    give_states,
    restored,
    warn_if_several_fit,
)
from sok_lite.engine.rows.column import Kinds, StateOwner, kinds_of
from sok_lite.engine.rows.store import NO_ROW, RowStore
from sok_lite.engine.rows.tiers import RowTiers
from sok_lite.engine.table.admission import MOST_SIGHTINGS, PendingCounts
from sok_lite.engine.table.choosing import Chosen, are_first, pieces_with
from sok_lite.engine.table.clock import Spans
from sok_lite.engine.table.dumped import forget
from sok_lite.engine.table.exclusive import changing_alone
from sok_lite.engine.table.filling import AnyIndex, Filled, filled
from sok_lite.engine.table.hkv import HkvTable
from sok_lite.engine.table.hkv_index import HkvIndex
from sok_lite.engine.table.near_rows import near_first
from sok_lite.engine.table.record import COUNTERS
from sok_lite.engine.table.saved import Saved, SavedPart
from sok_lite.engine.table.table import EmbeddingTable

_TAKEN = 1 << 20  # rows that are taken at once

# Puts what was made in the place of what there is; it cannot fail.
Swap: TypeAlias = Callable[[], None]


def restore(table: EmbeddingTable, saved: Saved) -> None:
    """Makes a table hold the keys of what was saved and no others. Counters begin anew, and so does
    a log of removals.

    All that it is to hold is made beside what it holds, and takes its place in one piece. So until
    then there must be memory for both, unless the table is empty.

    The kinds and options of the two tables may differ: scores are taken over between equal
    strategies only, and else begin as those of new keys. Rows of the highest scores come near.

    Of the states those of an optimizer that uses the table go on with the first that fit. Where
    there are more such optimizers the others have copies, in the same order: one may be that of the
    checkpoint, made anew. Where none fit they begin anew. What nobody takes is free.

    Raises:
      ValueError: the keys do not fit the key type or `max_capacity`, or what was saved contradicts
        itself. The table is as it was.
      MemoryError: no memory for keys and rows; the table is as it was.
    """
    changing_alone(table, lambda: swap_all([table], [restored_table(table, saved)]))


def swap_all(tables: Sequence[EmbeddingTable], swaps: Sequence[Swap]) -> None:
    """Gives tables what `restored_table` has made for each, all of them together."""
    old = [table.store for table in tables]
    with uninterrupted():
        for swap in swaps:
            swap()
    for store in old:
        store.close_far()


def restored_table(table: EmbeddingTable, saved: Saved, *, evicts: bool = False) -> Swap:
    """Makes what `restore` gives a table, for `swap_all`. Hold the table from before it on.

    Args:
      evicts: whether keys that find no room are left out, those of the lowest scores; else they are
        an error.

    Raises:
      ValueError: the keys do not fit, or what was saved contradicts itself. MemoryError: no memory
        for it beside the table. Whatever reading a part raises.
    """
    times = _times(saved.facts)
    try:
        index, store, tiers, pending = _made(table, saved, evicts)
    except MemoryError as error:
        n = sum(part.num_keys for part in saved.parts)
        size = f" Clear it first: it holds {table.size:,} keys." if table.size else ""
        raise MemoryError(
            f"No memory to restore {n:,} keys of table {table.name!r}, beside what it holds. It is "
            f"as it was.{size} ({error})"
        ) from error
    log = None if table.removals is None else table.removals.begun_anew(times[0])
    restart_clock = table.clock.restarting(*times)

    def swap() -> None:
        restart_clock()
        table.set_parts(index, store)
        table.tiers, table.pending, table.removals = tiers, pending, log
        for name in COUNTERS:
            setattr(table.counters, name, 0)
        table.renew()
        forget(table)

    return swap


def _times(facts: dict[str, Any]) -> tuple[int, Spans | None]:
    """Returns the number of the last lookup, and when there were lookups if that was saved."""
    now = facts["num_lookups"]
    return now, Spans.of(facts["spans"], now) if "spans" in facts else None


def _made(
    table: EmbeddingTable, saved: Saved, evicts: bool
) -> tuple[AnyIndex, RowStore, RowTiers | None, PendingCounts | None]:
    """Makes what the table is to hold."""

    def scores(index: AnyIndex, part: SavedPart) -> Iterator[Array]:
        return _Scoring(table, index, saved).hottest(part)

    made = filled(table, saved, scores if evicts else None)
    index, chooser = made.new_index, made.chooser
    scoring = _Scoring(table, index, saved)
    store, n = table.store.emptied(), chooser.num_rows
    store.reserve(n)
    for first in range(0, n, _TAKEN):  # from 0 on: it is new
        store.allocate(min(_TAKEN, n - first))
    if store.near_rows and store.near_rows < n:
        near_first(table.backend, store.near_rows, made.parts, scoring.hottest, scoring.bits)
    tiers = RowTiers(store) if isinstance(table, HkvTable) else None
    for chosen in made.parts:
        scoring.write(chosen, tiers)
    for chosen in made.parts:  # now that all keys have the rows that they keep
        chooser.choose_older(chosen)
    _write_rows(table, saved, made, store)
    counter = None if table.pending is None else table.pending.emptied()
    if counter is not None:
        _restore_pending(counter, saved, made)
    return index, store, tiers, counter


class _Scoring:
    """Writes to a new index when its keys were last seen, and their scores."""

    def __init__(self, table: EmbeddingTable, index: AnyIndex, saved: Saved) -> None:
        self._table, self._index, self._has_scores = table, index, False
        self._device, self._xp = table.backend.from_host, table.backend.xp
        # No lookup has seen a key that is still to come: it would not be evicted or expire.
        self._latest = np.uint32(saved.facts["num_lookups"])
        if isinstance(index, HkvIndex) and isinstance(table, HkvTable):
            # Scores and epochs of another strategy say nothing here.
            is_same = saved.facts.get("strategy") == index.strategy
            index.epoch = saved.facts["epoch"] if is_same else table.index.epoch
            self._has_scores = is_same and index.has_scores and saved.has_scores

    def _read_seen(self, part: SavedPart) -> Iterator[tuple[Array, Array | None]]:
        """Yields when a piece's keys were last seen and their scores; None: the same numbers."""
        index = self._index
        scores = part.read("scores") if self._has_scores else None
        for piece in part.read("stamps"):
            last_seen = self._xp.minimum(self._device(piece), self._latest)
            if scores is not None and isinstance(index, HkvIndex):
                yield last_seen, index.not_after(self._device(next(scores)), self._latest)
            elif isinstance(index, HkvIndex) and index.has_scores:
                yield last_seen, index.initial_scores(last_seen)
            else:
                yield last_seen, None

    @property
    def bits(self) -> int:
        """Bits of a number that `hottest` yields."""
        return 64 if isinstance(self._index, HkvIndex) and self._index.has_scores else 32

    def hottest(self, part: SavedPart) -> Iterator[Array]:
        """Yields what says which keys of a piece are to have near rows: the highest, unsigned."""
        for last_seen, scores in self._read_seen(part):
            yield last_seen if scores is None else scores

    def write(self, chosen: Chosen, tiers: RowTiers | None) -> None:
        """Writes what is known of the keys of a part."""
        table, index, part = self._table, self._index, chosen.part
        for keys, numbers, (last_seen, scores) in zip(
            part.read("keys"), chosen.numbers, self._read_seen(part), strict=True
        ):
            if len(numbers.rows) == 0:
                continue
            rows = numbers.as_array(table.backend)
            keys = table.key_dtype.to_int64(self._xp, self._device(keys))
            if numbers.counts is not None:
                counts = rows != np.uint32(NO_ROW)
                keys, rows, last_seen = keys[counts], rows[counts], last_seen[counts]
                scores = None if scores is None else scores[counts]
            if isinstance(index, HkvIndex) and tiers is not None:
                tiers.assigned(rows, keys)
                index.update(keys, rows, scores, last_seen)
            else:
                index.update(keys, rows, last_seen)


def _write_rows(table: EmbeddingTable, saved: Saved, made: Filled, store: RowStore) -> None:
    """Writes rows and states, and gives states to the optimizers of the table."""
    for chosen in made.parts:
        _write(store, chosen, "value", "value")
    owners: dict[int | None, StateOwner | None] = {s.group: StateOwner() for s in saved.states}
    owners[None] = None
    for state in saved.states:
        kinds = {state.name: (state.dim, state.initial)}
        (column,) = store.add_states(kinds, owners[state.group])
        for i, tensor in state.tensors.items():
            _write(store, made.parts[i], tensor, column.name)
    copied: list[Kinds] = []
    for owner, its_states in table.store.state_groups.items():
        if owner is None or owner.optimizer is None:
            continue
        kinds, owner = kinds_of(its_states), StateOwner(owner.reference, is_restored=True)
        free, saved_states = fitting(store, kinds), restored(store, kinds)
        warn_if_several_fit(table.name, store, kinds)
        if free is not None:
            give_states(store, free.values(), owner)
        elif saved_states:
            copy_states(
                store,
                saved_states[copied.count(kinds) % len(saved_states)],
                store.add_states(kinds, owner),
            )
            copied.append(kinds)
        else:
            store.add_states(kinds, StateOwner(owner.reference))


def _write(store: RowStore, chosen: Chosen, tensor: Any, column: str) -> None:
    device = store.backend.from_host
    for rows, its_numbers in chosen.rows():
        wanted = pieces_with(its_numbers)
        # None come of a state that is younger than a file: it has its initial value.
        for i, piece in zip(wanted, rows.read(tensor, wanted), strict=False):
            store.write(its_numbers[i].as_array(store.backend), device(piece), column)


def _restore_pending(counter: PendingCounts, saved: Saved, made: Filled) -> None:
    """Gives a new counter the keys without a row; of equal ones the first counts."""
    device, host = made.new_index.backend.from_host, made.new_index.backend.to_host
    xp, now = made.new_index.backend.xp, np.uint32(saved.facts["num_lookups"])
    for part in saved.pending:
        names = ("sighted_keys", "sightings", "sighting_stamps")
        for keys, *numbers in zip(*map(part.read, names), strict=True):
            counts, last_seen = map(device, numbers)
            # Others stand for a key that is not there, and the next lookup or dump would lose it.
            num_wrong = int(xp.count_nonzero((counts == 0) | (counts > MOST_SIGHTINGS)))
            if num_wrong:
                raise part.corrupt(
                    f"{num_wrong:,} of its keys without a row were seen 0 times, or more than "
                    f"{MOST_SIGHTINGS:,} times"
                )
            wanted = xp.ones(keys.size, bool)
            if part.owns is not None:
                wanted = device(part.owns(host(keys)))
            keys = made.chooser.keys(keys)
            wanted &= are_first(xp, keys) & (counter.of(keys) == 0)
            wanted &= made.new_index.find(keys).rows == np.uint32(NO_ROW)
            counts, last_seen = counts[wanted], last_seen[wanted]
            last_seen = xp.where(last_seen == 0, now, xp.minimum(last_seen, now))
            counter.restore(keys[wanted], counts, last_seen)

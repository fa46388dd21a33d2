"""Restores a table: what was saved fills a new index and new rows, which take the place of the old.

A table that comes back evicts, admits and expires as it would have done: scores, the number of the
lookup that last saw each key and its time, and the pending counts of keys without a row come with
the keys. Keys are read first, with what is known of them, and get rows; then column after column of
rows. What is in memory beside the new table is a chunk, and at most the row numbers of the keys.

Nobody else sees what is new until `swap_all`: a restore that fails leaves the table
as it was.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.hashing import new_seed, seed_after
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
from sok_lite.engine.static_table import AnyTable
from sok_lite.engine.table.admission import MOST_SIGHTINGS, PendingCounts
from sok_lite.engine.table.clock import Spans
from sok_lite.engine.table.content import (
    PENDING,
    Content,
    Saved,
    SavedPart,
    SavedRows,
    TablePart,
    as_saved,
    join_states,
    warn_of_repeated,
    without_slots,
)
from sok_lite.engine.table.det_index import DetIndex
from sok_lite.engine.table.directory import LINE
from sok_lite.engine.table.dumped import forget
from sok_lite.engine.table.exclusive import changing_alone
from sok_lite.engine.table.hkv import HkvTable
from sok_lite.engine.table.hkv_index import HkvIndex, capacity_for
from sok_lite.engine.table.hkv_options import MAX_CAPACITY
from sok_lite.engine.table.table import EmbeddingTable

_log = logging.getLogger("sok_lite")

_TAKEN = 1 << 20  # rows that are taken at once
_SCANNED = 1 << 18  # slots of an index that are looked at together
# The largest index that is made because a file says so: so many slots, or so many a key. Fewer keys
# than that find room in any smaller one.
_SMALL, _MOST_SLOTS_A_KEY = 1 << 16, 64
# Seeds that are tried where keys must have other slots than they had: a full table of small buckets
# may have no room for all of them by one seed, and room by another.
_MOST_SEEDS = 4
# The row number of a key that has a slot and is not selected yet: no table has so many rows.
_TO_BE_SELECTED = NO_ROW - 1
# Keys that are inserted together where scores decide: so large a share of `max_capacity`.
_SHARE_OF_A_BATCH = 64
_BITS = 16  # of a score that are looked at in one pass
# Strategies whose scores do not say when a key was looked up: they mean the same in all tables.
_TIMELESS = ("kLfu", "kCustomized")

AnyIndex: TypeAlias = DetIndex | HkvIndex


# Puts what was made in the place of what there is; it cannot fail.
Swap: TypeAlias = Callable[[], None]


class NoRoomError(ValueError):
    """A table that evicts has fewer slots than the keys that were saved need."""


class Filled(NamedTuple):
    """What a table is to hold, complete, for `swap_of`.

    Attributes:
      new_index, store, tiers, pending: as a table has them.
      facts: of what was saved.
    """

    new_index: AnyIndex
    store: RowStore
    tiers: RowTiers | None
    pending: PendingCounts | None
    facts: Mapping[str, Any]


def restore(table: EmbeddingTable, content: Saved | Content) -> None:
    """Makes a table hold what was saved and no other keys. Counters begin anew, and so does a log
    of removals.

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
    saved = as_saved(table, [content]) if isinstance(content, Content) else content
    changing_alone(table, lambda: swap_all([table], [swap_of(table, fill(table, saved))]))


def fill(table: EmbeddingTable, saved: Saved, *, evicts: bool = False) -> Filled:
    """Makes what a table holds once it is restored. Hold it from before that until it is swapped.

    Args:
      evicts: whether keys that find no room are left out, those of the lowest scores; else they are
        an error.

    Raises:
      ValueError: the keys do not fit, or what was saved contradicts itself. MemoryError: no memory
        for it beside the table. Whatever reading a part raises.
    """
    try:
        return _fill(table, saved, evicts)
    except MemoryError as error:
        size = f" Clear it first: it holds {table.size:,} keys." if table.size else ""
        raise MemoryError(
            f"No memory to restore {saved.num_keys:,} keys of table {table.name!r}, beside what it "
            f"holds. It is as it was.{size} ({error})"
        ) from error


def swap_of(table: EmbeddingTable, filled: Filled) -> Swap:
    """Returns what gives a table what `fill` has made, for `swap_all`."""
    now, spans = filled.facts["num_lookups"], filled.facts.get("spans")
    log = None if table.removals is None else table.removals.begun_anew(now)
    restart_clock = table.clock.restarting(now, None if spans is None else Spans.of(spans, now))

    def swap() -> None:
        restart_clock()
        table.set_parts(filled.new_index, filled.store)
        table.tiers, table.pending, table.removals = filled.tiers, filled.pending, log
        table.counters.reset()
        table.renew()
        forget(table)

    return swap


def swap_all(tables: Sequence[EmbeddingTable], swaps: Sequence[Swap]) -> None:
    """Gives tables what `fill` has made for each, all of them together."""
    old = [table.store for table in tables]
    with uninterrupted():
        for swap in swaps:
            swap()
    for store in old:
        store.close_far()


def _fill(table: EmbeddingTable, saved: Saved, evicts: bool) -> Filled:
    index, selection, parts = _rebuild(table, saved, evicts)
    warn_of_repeated(f"table {table.name!r}", selection.num_repeated)
    store, n = table.store.emptied(), selection.num_rows
    store.reserve(n)
    for first in range(0, n, _TAKEN):  # from 0 on: it is new
        store.allocate(min(_TAKEN, n - first))
    tiers = pending = None
    if isinstance(table, HkvTable) and isinstance(index, HkvIndex):
        tiers = RowTiers(store)
        if store.near_rows is not None:
            moved = _place_in_tiers(index, store.near_rows, tiers, saved.facts["num_lookups"])
            parts = [selected._replace(moved=moved) for selected in parts]
    for selected in parts:  # now that all keys have the rows that they keep
        selection.select_older(selected)
    _write_rows(table, saved, parts, store)
    if isinstance(table, HkvTable) and table.pending is not None:
        pending = table.pending.emptied()
        _restore_pending(pending, saved, selection, index)
    return Filled(index, store, tiers, pending, saved.facts)


# ---- which keys count ----------------------------------------------------------------------------


class ChunkRows(NamedTuple):
    """The row numbers of a chunk's keys: those of an own file take no memory.

    Attributes:
      size: how many keys.
      counts: which of them count, as bits on the host; None: all.
      rows: the row numbers of those, uint32 on the device; a range where they follow each other.
    """

    size: int
    counts: np.ndarray | None
    rows: range | Array

    @staticmethod
    def of(backend: Backend, counts: Array, rows: range | Array) -> "ChunkRows":
        """Returns those of keys of which some count, (k,) bool."""
        is_all = len(rows) == counts.size
        bits = None if is_all else np.packbits(backend.to_host(counts))
        return ChunkRows(int(counts.size), bits, rows)


class Selected(NamedTuple):
    """The keys of a part that count, each with its row number.

    Attributes:
      part: the part.
      chunks: the row numbers of each chunk of its keys.
      older: of each of `part.older` the same.
      moved: (all keys,) uint32, the row of each key, by its number; None: its number is its row.
    """

    part: SavedPart
    chunks: list[ChunkRows]
    older: list[list[ChunkRows]]
    moved: Array | None = None

    def read(self, backend: Backend, name: str | int) -> Iterator[tuple[Array, Array]]:
        """Yields row numbers and a column, in chunks that have keys that count: (k,) uint32 on the
        device, NO_ROW where a key does not, and (k, dim)."""
        files: list[tuple[SavedRows, list[ChunkRows]]]
        files = [(self.part, self.chunks[: self.part.num_with_rows])]
        for rows, chunks in [*files, *zip(self.part.older, self.older, strict=True)]:
            wanted = [i for i, chunk in enumerate(chunks) if len(chunk.rows)]
            # None come of a state that is younger than a file: it has its initial value.
            for i, values in zip(wanted, rows.read(name, wanted), strict=False):
                yield self._rows_of(backend, chunks[i]), values

    def counting_rows(self, backend: Backend, chunk: ChunkRows) -> Array:
        """Returns the row numbers of the keys of a chunk that count, (k,) uint32."""
        if not isinstance(chunk.rows, range):
            return chunk.rows
        if self.moved is not None:
            return self.moved[chunk.rows.start : chunk.rows.stop]
        return backend.xp.arange(chunk.rows.start, chunk.rows.stop, dtype=np.uint32)

    def _rows_of(self, backend: Backend, chunk: ChunkRows) -> Array:
        rows = self.counting_rows(backend, chunk)
        if chunk.counts is None:
            return rows
        whole = backend.xp.full(chunk.size, NO_ROW, np.uint32)
        bits = np.unpackbits(chunk.counts, count=chunk.size).view(bool)
        whole[backend.from_host(bits)] = rows
        return whole


class KeySelection:
    """Selects keys: of one that comes again the first counts. They are numbered as they come.

    Args:
      table: whose keys they are.
      find: returns the row numbers of keys (k,) int64, which may repeat: (k,) uint32, NO_ROW for
        others than those that count.
      insert: called for each chunk with the keys (k,) int64 that count, distinct and not there; the
        row number of the first of them, which the others follow; and which of the chunk's they are,
        (chunk,) bool, or None: all. It returns how many it has refused.
      keeps: says which of some keys (k,) int64 may count, (k,) bool; None: all.

    Attributes:
      num_rows: how many keys count.
      num_repeated: how many have come again that should not.
      num_refused: how many `insert` has refused.
    """

    def __init__(
        self,
        table: AnyTable,
        find: Callable[[Array], Array],
        insert: Callable[[Array, int, Array | None], int],
        keeps: Callable[[Array], Array] | None = None,
    ) -> None:
        self._table, self._backend = table, table.backend
        self._find, self._insert, self._keeps = find, insert, keeps
        self.num_rows = self.num_repeated = self.num_refused = 0

    def keys(self, keys: Array) -> Array:
        """Returns keys of the table's key type as int64 on its device."""
        device = self._backend.from_host(keys)
        whose = f"keys of {self._table.name!r}"
        return self._table.key_dtype.to_int64(self._backend.xp, device, whose)

    def select(self, part: SavedPart) -> Selected:
        """Inserts the keys of a part that count."""
        return Selected(part, [self._rows(part, keys) for keys in part.read("keys")], [])

    def _rows(self, part: SavedPart, keys: Array) -> ChunkRows:
        xp, is_own = self._backend.xp, np.True_
        if part.owns is not None:
            is_own = self._backend.from_host(part.owns(self._backend.to_host(keys)))
        keys, first = self.keys(keys), self.num_rows
        is_new = are_first(xp, keys) & (self._find(keys) == np.uint32(NO_ROW))
        if not part.may_repeat:
            self.num_repeated += int(xp.count_nonzero(~is_new & is_own))
        counts = is_new & is_own
        if self._keeps is not None:
            counts &= self._keeps(keys)
        self.num_rows += int(xp.count_nonzero(counts))
        rows = range(first, self.num_rows)
        some = (keys, first, None) if len(rows) == keys.size else (keys[counts], first, counts)
        self.num_refused += self._insert(*some)
        return ChunkRows.of(self._backend, counts, rows)

    def select_older(self, selected: Selected) -> None:
        """Selects the rows of a part that the files it continues have, newest first.

        Raises:
          ValueError: a key has no row.
        """
        xp, part = self._backend.xp, selected.part
        if part.num_with_rows is None:
            return
        is_left = xp.zeros(self.num_rows + 1, bool)  # the last stands for keys without a row
        for chunk in selected.chunks[part.num_with_rows :]:
            is_left[selected.counting_rows(self._backend, chunk).astype(np.int64)] = True
        for file in part.older:
            selected.older.append([])
            for keys in file.read("keys"):
                keys = self.keys(keys)
                rows = xp.minimum(self._find(keys), np.uint32(self.num_rows))
                is_wanted = is_left[rows.astype(np.int64)] & are_first(xp, keys)
                rows = rows[is_wanted]
                is_left[rows.astype(np.int64)] = False
                selected.older[-1].append(ChunkRows.of(self._backend, is_wanted, rows))
        num_left = int(xp.count_nonzero(is_left))
        if num_left:
            raise part.corrupt(
                f"{num_left:,} of its keys have no row there, nor in the files that it continues"
            )


def are_first(xp: Any, keys: Array) -> Array:
    """Returns of each key (k,) whether none before is equal."""
    is_first = xp.ones(keys.size, bool)
    # Most are distinct: to sort them alone takes less than half the time.
    ordered = xp.sort(keys)
    if bool((ordered[1:] == ordered[:-1]).any()):
        order = xp.argsort(keys, kind="stable")
        is_first[order[1:]] = keys[order[1:]] != keys[order[:-1]]
    return is_first


# ---- the index -----------------------------------------------------------------------------------
#
# A full "hybrid" table must hold all of its keys again, and in another order of insertion some
# might find both of their buckets full: so where the slots are known they are used, if buckets and
# segments are of the same size. Where more keys come than fit, those of the highest scores may be
# kept.


_Rebuilt: TypeAlias = tuple[AnyIndex, KeySelection, list[Selected]]


class _CannotUseSlotsError(Exception):
    """Not all keys count: slots say something of all keys together."""


def _rebuild(table: EmbeddingTable, saved: Saved, evicts: bool) -> _Rebuilt:
    """Returns a new index like that of a table, with the keys that count and what is known of them.

    Raises:
      ValueError: they do not fit the key type, or contradict their slots.
      NoRoomError: they do not fit `max_capacity`, and not `evicts`.
      MemoryError: no memory for it.
    """
    if not isinstance(table, HkvTable):
        assert isinstance(table.index, DetIndex)
        index = table.index.emptied()
        index.make_room(saved.num_keys)
        return _insert_all(table, saved, index, partial(_insert, index))
    made = _in_their_slots(table, saved)
    if made is not None:
        return made
    seed, num_refused = new_seed(), 0
    for _ in range(_MOST_SEEDS):
        other = _emptied(table, saved, None, seed)
        other.make_room(saved.num_keys)
        made = _insert_all(table, saved, other, other.insert_all)
        num_refused = made[1].num_refused
        if not num_refused:
            return made
        seed = seed_after(seed)
    if evicts:
        return _by_score(table, saved)
    raise NoRoomError(_no_room(table, saved, num_refused))


def _insert(index: DetIndex, keys: Array, first: int) -> int:
    index.make_room(int(keys.size))
    index.insert(keys, _rows_from(index, first, keys), 1)
    return 0


def _rows_from(index: AnyIndex, first: int, keys: Array) -> Array:
    """Returns a row number for each key, from `first` on."""
    return index.backend.xp.arange(first, first + keys.size, dtype=np.uint32)


def _insert_all(
    table: EmbeddingTable,
    saved: Saved,
    index: AnyIndex,
    insert: Callable[..., int],
    find: Callable[[Array], Array] | None = None,
    keeps: Callable[[Array], Array] | None = None,
) -> _Rebuilt:
    """Selects keys and gives them to an index, with what is known of them.

    Args:
      insert: takes keys (k,) int64 that are not there, and `first`, the number of the row that the
        first of them gets, and the others the next; returns how many it has refused.
      find, keeps: of `KeySelection`; None: all that are in the index, or may be.
    """
    seen = chain.from_iterable(_seen(table, index, saved, part) for part in saved.parts)

    def insert_seen(keys: Array, first: int, counts: Array | None) -> int:
        num_refused = insert(keys, first=first)
        last_seen, scores = next(seen)
        if counts is not None:
            last_seen, scores = last_seen[counts], None if scores is None else scores[counts]
        if isinstance(index, HkvIndex):
            index.update(keys, scores=scores, last_seen=last_seen)
        else:
            index.update(keys, last_seen=last_seen)
        return num_refused

    find = find or (lambda keys: index.find(keys).rows)
    selection = KeySelection(table, find, insert_seen, keeps)
    return index, selection, [selection.select(part) for part in saved.parts]


def _emptied(table: HkvTable, saved: Saved, *size_and_seed: int | None) -> HkvIndex:
    """Returns an index like that of a table without keys, in the epoch that was saved."""
    index = table.index.emptied(*size_and_seed)
    index.epoch = saved.facts["epoch"] if _is_of_strategy(index, saved) else table.index.epoch
    return index


def _seen(
    table: EmbeddingTable, index: AnyIndex, saved: Saved, part: SavedPart
) -> Iterator[tuple[Array, Array | None]]:
    """Yields when a chunk's keys were last seen, and their scores; None: the same numbers."""
    device, xp = table.backend.from_host, table.backend.xp
    # No lookup has seen a key that is still to come: it would not be evicted or expire.
    latest, saved_scores = np.uint32(saved.facts["num_lookups"]), None
    if _is_of_strategy(index, saved) and index.has_scores and saved.has_scores:
        saved_scores = part.read("scores")
    for stamps in part.read("stamps"):
        last_seen, scores = xp.minimum(device(stamps), latest), None
        if isinstance(index, HkvIndex) and saved_scores is not None:
            scores = index.not_after(device(next(saved_scores)), latest)
        elif isinstance(index, HkvIndex) and index.has_scores:
            scores = index.initial_scores(last_seen)
        yield last_seen, scores


def _is_of_strategy(index: AnyIndex, saved: Saved) -> bool:
    """Whether scores and epochs of what was saved say something in an index."""
    return isinstance(index, HkvIndex) and saved.facts.get("strategy") == index.strategy


def _no_room(table: HkvTable, saved: Saved, num_refused: int) -> str:
    """Returns what an error says of keys that find no slot."""
    facts, capacity = saved.facts, saved.facts.get("capacity", 0)
    n, has, bucket = saved.num_keys, table.index.max_capacity, table.index.bucket
    room = "no limit"
    if capacity:
        room = f"{capacity:,} slots on each rank, in buckets of {facts['bucket']}"
    text = (
        f"Table {table.name!r} has no room for {num_refused:,} of the {n:,} keys that were saved: "
        f"max_capacity is {has:,} slots, in buckets of {bucket}, some of which are full before "
        f"others. They come from a table with {room}. Nothing was changed. "
    )
    needed = capacity_for(n, 2 * has, MAX_CAPACITY, table.options.max_load_factor)
    more = f"Make the table with max_capacity={needed:,} or more"
    if needed > MAX_CAPACITY:
        more = "Load on more ranks"
    return f"{text}{more}, or leave the keys of the lowest scores out: on_full='evict' of sok.load."


def _by_score(table: HkvTable, saved: Saved) -> _Rebuilt:
    """Returns a new index with as many of the keys as find room, those of higher scores first.

    So a key is left out only where both of its buckets are full of keys with scores that are no
    lower. Of the keys that are inserted together, a 64th of the table, each may come before any
    other; the logger "sok_lite" says how many are left out. It needs some 40 bytes a key on the
    host.
    """
    index, xp = _emptied(table, saved, None, new_seed()), table.backend.xp
    device = table.backend.from_host
    keys, scores = _keys_with_scores(table, saved, index)
    order = np.argsort(~scores, kind="stable")
    index.make_room(keys.size)
    step, num_left_out = max(1, index.max_capacity // _SHARE_OF_A_BATCH), 0
    for at in range(0, keys.size, step):
        num_left_out += index.insert_all(device(keys[order[at : at + step]]))
    _log.warning(
        "Table %r has left out %s of %s keys that were saved, those of the lowest scores: "
        "max_capacity is %s.",
        *(table.name, f"{num_left_out:,}", f"{keys.size:,}", f"{index.max_capacity:,}"),
    )
    # Those that have found room get their rows when they are selected.
    held = index.entries().keys
    index.update(held, xp.full(held.size, _TO_BE_SELECTED, np.uint32))

    def insert(keys: Array, first: int) -> int:
        index.update(keys, _rows_from(index, first, keys))
        return 0

    def find(keys: Array) -> Array:
        rows = index.find(keys).rows
        return xp.where(rows == np.uint32(_TO_BE_SELECTED), np.uint32(NO_ROW), rows)

    def keeps(keys: Array) -> Array:
        return index.find(keys).rows != np.uint32(NO_ROW)

    return _insert_all(table, saved, index, insert, find, keeps)


def _keys_with_scores(
    table: HkvTable, saved: Saved, index: HkvIndex
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct keys that count, (n,) int64 on the host, and their scores there, (n,)
    uint64."""
    host, kind = table.backend.to_host, table.key_dtype
    all_keys, all_scores = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    for part in saved.parts:
        seen = _seen(table, index, saved, part)
        for keys, (last_seen, scores) in zip(map(host, part.read("keys")), seen, strict=True):
            its_scores = host(last_seen if scores is None else scores)
            is_own = slice(None) if part.owns is None else part.owns(keys)
            all_keys.append(kind.to_int64(np, keys[is_own], f"keys of {table.name!r}"))
            all_scores.append(its_scores[is_own].astype(np.uint64, copy=False))
    keys, its_scores = np.concatenate(all_keys), np.concatenate(all_scores)
    distinct = are_first(np, keys)
    return keys[distinct], its_scores[distinct]


def _in_their_slots(table: HkvTable, saved: Saved) -> _Rebuilt | None:
    """Returns an index that has the keys where they were; None: they have to be inserted."""
    index, facts, n = table.index, saved.facts, saved.num_keys
    if len(saved.parts) > 1 or "slots" not in saved.parts[0].columns:
        return None
    capacity, num_slots = (facts.get(name, 0) for name in ("capacity", "num_slots"))
    is_same = (facts.get("bucket"), facts.get("segment")) == (index.bucket, index.sizes.unit)
    # As of an index that has so many slots, or the next size that it grows to step by step: by a
    # segment each, where it has several. Growth relies on it.
    is_capacity = (
        capacity.bit_count() == 1
        and index.bucket <= capacity <= num_slots < 2 * capacity
        and num_slots % min(capacity, index.sizes.unit) == 0
        and num_slots <= min(index.max_capacity, max(_SMALL, _MOST_SLOTS_A_KEY * n))
    )
    if not is_same or not is_capacity:
        return None
    # Files of before there were seeds name none.
    seed = facts.get("hash_seed", 0)
    # Where there is no key, nothing depends on a seed that the file makes known.
    other = _emptied(table, saved, num_slots, seed if n else new_seed())
    slots: Iterator[Array] = saved.parts[0].read("slots")

    def insert(keys: Array, first: int) -> int:
        at = table.backend.from_host(next(slots))
        if keys.size < at.size:
            raise _CannotUseSlotsError
        put_in_slots(other, keys, at, first)
        return 0

    try:
        made = _insert_all(table, saved, other, insert)
    except _CannotUseSlotsError:
        return None
    other.begin_from(capacity)
    return made


def put_in_slots(index: HkvIndex, keys: Array, slots: Array, first: int) -> None:
    """Puts distinct keys, which are not there, where they were in another index like this one.

    Nothing else may use the index meanwhile, and `begin_from` follows.

    Args:
      slots: (n,) int64, their numbers there.
      first: their row numbers begin with it.

    Raises:
      ValueError: a slot is none of its key's, or has another key.
    """
    xp, host, num_slots = index.backend.xp, index.backend.to_host, index.directory.num_slots
    if keys.size == 0:
        return
    rows, order = _rows_from(index, first, keys), xp.argsort(slots)
    slots, sorted_keys = slots[order], keys[order]
    # Not by `unique`: with NumPy 2.3 and newer it takes 80 times as long as to sort them.
    repeats = slots[1:] == slots[:-1]
    home, second, line = index.homes_of(sorted_keys)
    digests = index.digests_of(sorted_keys)
    first_line = (home + line) // LINE
    is_away = slots // LINE != first_line
    # Buckets lie at multiples of their size: so do segments.
    at = slots & ~np.int64(index.bucket - 1)
    fits = (at == home) | (at == second)
    for side, key in enumerate(index.reserved_keys()):
        fits = xp.where(sorted_keys == np.int64(key), slots == num_slots + side, fits)
    is_free = bool(fits.all()) and not bool(repeats.any())
    ends = np.searchsorted(host(slots), index.directory.starts[1:]).tolist()
    begin = 0
    for segment, start, end in zip(
        index.directory.segments, index.directory.starts.tolist(), ends, strict=False
    ):
        if is_free and begin < end:
            places = slots[begin:end] - start
            is_free = bool((segment.slots[places, 0] == np.int64(index.reserved_keys()[0])).all())
            segment.slots[places, 0] = sorted_keys[begin:end]
            # As insertion notes it, in the lines where such keys are looked for first.
            assert segment.overflows is not None and segment.digests is not None
            away = first_line[begin:end][is_away[begin:end]]
            segment.overflows[away - start // LINE] = 1
            segment.digests[places] = digests[begin:end]
        begin = end
    if not is_free:
        raise ValueError(
            f"What was saved of table {index.name!r} is corrupt: keys and slots contradict "
            "each other. Nothing was changed."
        )
    # The last two do not hold their key: they are in use where they have a row.
    index.side[2 * (slots[begin:] - num_slots) + 1] = 0
    index.update(keys, rows)
    index.record.size += int(keys.size)


# ---- rows ----------------------------------------------------------------------------------------


def _place_in_tiers(index: HkvIndex, num_near: int, tiers: RowTiers, latest: int) -> Array | None:
    """Gives the keys of the highest scores near rows, those below `num_near`, and notes whose rows
    they are. Of equal scores the first come near.

    Args:
      latest: number of the last lookup, which no key was seen after.

    Returns:
      (n,) uint32, by its number the row that a key has now; None: all are near, or far.
    """
    moved = None
    if 0 < num_near < index.size:
        moved = _rows_by_score(index, num_near, latest)
    for entries in _entries(index):
        rows = entries.rows
        if moved is not None:
            rows = moved[rows.astype(np.int64)]
            index.update(entries.keys, rows)
        tiers.assigned(rows, entries.keys)
    return moved


def _rows_by_score(index: HkvIndex, num_near: int, latest: int) -> Array:
    """Returns the rows of the keys of an index in two tiers, (n,) uint32, by their numbers."""
    xp, n = index.backend.xp, index.size
    least, num_equal = _least_near(index, num_near, latest)
    rank = xp.zeros(n, np.uint8)  # 2: it comes near, 1: where there is room
    for entries in _entries(index):
        scores = entries.scores
        rank[entries.rows.astype(np.int64)] = (scores >= least) + (scores > least).astype(np.uint8)
    rows, near, far = xp.empty(n, np.uint32), 0, num_near
    for first in range(0, n, _TAKEN):
        some, its_rows = rank[first : first + _TAKEN], rows[first : first + _TAKEN]
        equal = xp.flatnonzero(some == 1)[:num_equal]
        num_equal -= int(equal.size)
        some[equal] = 2
        is_near = some == 2
        count = int(xp.count_nonzero(is_near))
        its_rows[is_near] = xp.arange(near, near + count, dtype=np.uint32)
        its_rows[~is_near] = xp.arange(far, far + some.size - count, dtype=np.uint32)
        near, far = near + count, far + int(some.size) - count
    return rows


def _least_near(index: HkvIndex, num_near: int, latest: int) -> tuple[np.uint64, int]:
    """Returns the lowest score of a near row, and how many with that score are near."""
    found, digits = 0, np.uint64((1 << _BITS) - 1)
    if index.has_scores:
        latest = max(int(each.scores.max()) for each in _entries(index) if each.scores.size)
    for shift in range(max(0, latest.bit_length() - 1) // _BITS * _BITS, -1, -_BITS):
        counts = np.zeros(1 << _BITS, np.int64)
        for entries in _entries(index):
            some = index.backend.to_host(entries.scores) >> np.uint64(shift)
            some = some[some >> np.uint64(_BITS) == found] & digits
            counts += np.bincount(some.astype(np.int64), minlength=counts.size)
        above = np.cumsum(counts[::-1])[::-1] - counts  # those with higher digits
        digit = int(np.flatnonzero(above < num_near)[0])
        num_near -= int(above[digit])
        found = found << _BITS | digit
    return np.uint64(found), num_near


def _entries(index: HkvIndex) -> Iterator[Any]:
    return (index.entries(at, _SCANNED) for at in range(0, index.num_slots, _SCANNED))


def _write_rows(
    table: EmbeddingTable, saved: Saved, parts: Sequence[Selected], store: RowStore
) -> None:
    """Writes rows and states, and gives states to the optimizers of the table."""
    for selected in parts:
        _write(store, selected, "value", "value")
    owners: dict[int | None, StateOwner | None] = {s.group: StateOwner() for s in saved.states}
    owners[None] = None
    for state in saved.states:
        kinds = {state.name: (state.dim, state.initial)}
        (column,) = store.add_states(kinds, owners[state.group])
        for i, place in state.places.items():
            _write(store, parts[i], place, column.name)
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


def _write(store: RowStore, selected: Selected, name: str | int, column: str) -> None:
    for rows, values in selected.read(store.backend, name):
        store.write(rows, store.backend.from_host(values), column)


def _restore_pending(
    counter: PendingCounts, saved: Saved, selection: KeySelection, index: AnyIndex
) -> None:
    """Gives a new counter the keys without a row; of equal ones the first counts."""
    device, host, xp = index.backend.from_host, index.backend.to_host, index.backend.xp
    now = np.uint32(saved.facts["num_lookups"])
    for part in saved.pending:
        for keys, *numbers in zip(*map(part.read, PENDING), strict=True):
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
            keys = selection.keys(keys)
            wanted &= are_first(xp, keys) & (counter.counts(keys) == 0)
            wanted &= index.find(keys).rows == np.uint32(NO_ROW)
            counts, last_seen = counts[wanted], last_seen[wanted]
            last_seen = xp.where(last_seen == 0, now, xp.minimum(last_seen, now))
            counter.restore(keys[wanted], counts, last_seen)


# ---- a merge -------------------------------------------------------------------------------------


def merge(table: EmbeddingTable, saved: Saved, num_bytes: int) -> Saved:
    """Returns what a table holds once the keys of what was saved are assigned to it.

    A key of both has the row and the states that were saved; a state that was not saved begins
    anew. The saved keys count as seen by the last lookup of this table. Their scores are those of
    new keys, or, between tables with the same strategy "kLfu" or "kCustomized", the saved ones.
    Pending counts stay as they are; those of other keys are added. A saved group of states goes on
    in the first of the table's that has the same states.

    Args:
      table: locked by the caller until the result has been restored.
      num_bytes: of the table's own rows that are read together.
    """
    keeps_scores = False
    if isinstance(table, HkvTable) and table.index.has_scores:
        strategy = table.index.strategy
        is_same = strategy in _TIMELESS and saved.facts.get("strategy") == strategy
        keeps_scores = is_same and saved.has_scores
    others = [_Assigned(table, part, keeps_scores) for part in saved.parts]
    own = TablePart(table, num_bytes)
    own.num_keys -= sum(part.num_known for part in others)
    # Those of an optimizer that is gone are not to be free, for another of its kind.
    kept = [i for i, state in enumerate(own.states) if not state.rows.is_gone]
    states = join_states([[own.states[i] for i in kept], saved.states], are_nested_one=False)
    for i, state in enumerate(states):
        of_own, of_saved = state.places.get(0), state.places.get(1)
        places = {} if of_saved is None else dict(saved.states[of_saved].places)
        places |= {} if of_own is None else {len(others): kept[of_own]}
        states[i] = state._replace(places=places)
    return Saved([*others, own], [own, *others], states, without_slots(dict(own.facts)))


class _Assigned(SavedPart):
    """A part that was saved, whose keys the table's last lookup has seen."""

    def __init__(self, table: EmbeddingTable, part: SavedPart, keeps_scores: bool) -> None:
        self._table, self._part, self._keeps_scores = table, part, keeps_scores
        self.num_keys, self.states, self.facts = part.num_keys, part.states, part.facts
        self.num_with_rows, self.older, self.owns = part.num_with_rows, part.older, part.owns
        self.columns = ("stamps", "scores")

    @property
    def num_known(self) -> int:
        """How many of its keys the table has."""
        table, num_known = self._table, 0
        xp, device, host = table.backend.xp, table.backend.from_host, table.backend.to_host
        for keys in self._part.read("keys"):
            whole = table.key_dtype.to_int64(xp, device(keys), f"keys of {table.name!r}")
            is_known = table.index.find(whole).rows != np.uint32(NO_ROW)
            if self.owns is not None:
                is_known &= device(self.owns(host(keys)))
            num_known += int(xp.count_nonzero(is_known))
        return num_known

    def corrupt(self, reason: str) -> ValueError:
        return self._part.corrupt(reason)

    def read(self, name: str | int, wanted: Collection[int] | None = None) -> Iterator[Array]:
        is_new = name in ("stamps", "sighting_stamps", "scores")
        if not is_new or (name == "scores" and self._keeps_scores):
            yield from self._part.read(name, wanted)
            return
        xp, now = self._table.backend.xp, np.uint32(self._table.num_lookups)
        of = "sighted_keys" if name == "sighting_stamps" else "keys"
        for keys in self._part.read(of):
            last_seen = xp.full(keys.size, now, np.uint32)
            if name == "scores" and isinstance(self._table, HkvTable):
                yield self._table.index.initial_scores(last_seen)
            else:
                yield last_seen

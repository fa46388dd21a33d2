"""Restores a table: saved parts fill a new index and new rows, which then replace the old ones.

The restored table evicts, admits and expires as the saved one would have: scores, the lookup that
last saw each key and its time, and the counts of pending keys come with the keys. Keys come first,
with their scores and lookups, and get rows; then each column of rows is written. Beside the new
table this takes the memory of a chunk, and at most that of the keys' row numbers.

Nobody sees the new content before `swap_all`: a restore that fails leaves the table as it was.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.engine.hashing import new_seed, seed_after
from sok_lite.engine.optimizer_states import (
    copy_states,
    find_matching_states,
    give_states,
    restored,
    warn_if_several_fit,
)
from sok_lite.engine.rows.column import Kinds, StateOwner, kinds_of
from sok_lite.engine.rows.store import NO_ROW, RowStore
from sok_lite.engine.rows.tiers import RowTiers
from sok_lite.engine.static_table import AnyTable
from sok_lite.engine.table.admission import MAX_PENDING_COUNT, PendingCounts
from sok_lite.engine.table.clock import Spans
from sok_lite.engine.table.content import (
    PENDING,
    Content,
    SavedPart,
    SavedParts,
    TablePart,
    as_saved,
    join_states,
    warn_of_repeated,
    without_slots,
)
from sok_lite.engine.table.det_index import DetIndex
from sok_lite.engine.table.directory import LINE
from sok_lite.engine.table.dump_mark import forget
from sok_lite.engine.table.hkv import HkvTable
from sok_lite.engine.table.hkv_index import HkvIndex, capacity_for
from sok_lite.engine.table.hkv_options import MAX_CAPACITY
from sok_lite.engine.table.locking import mutate
from sok_lite.engine.table.table import EmbeddingTable

_log = logging.getLogger("sok_lite")

_ROWS_AT_ONCE = 1 << 20  # that are allocated or placed
_SLOTS_AT_ONCE = 1 << 18  # of an index that are scanned
# A saved capacity is believed up to so many slots, or so many a key: a corrupt file may claim any.
# Fewer keys than that fit any smaller index.
_SMALL, _MAX_SLOTS_PER_KEY = 1 << 16, 64
# Seeds tried if keys cannot have their old slots: a full table of small buckets may have room for
# all keys under one seed, and not under another.
_MAX_SEEDS = 4
# The row number of a key that has a slot and is not selected yet: no table has so many rows.
_UNSELECTED = NO_ROW - 1
_BATCHES = 64  # in which keys are inserted by score: each is this fraction of `max_capacity`
_RADIX_BITS = 16  # of scores that one pass of the selection counts
# Strategies whose scores do not depend on the lookups of a table: they mean the same in all tables.
_TIMELESS = ("kLfu", "kCustomized")

AnyIndex: TypeAlias = DetIndex | HkvIndex
# Replaces a table's content by the restored one. It cannot fail.
Swap: TypeAlias = Callable[[], None]


class NoRoomError(ValueError):
    """A table that evicts has too few slots for the saved keys."""


def restore(table: EmbeddingTable, content: SavedParts | Content) -> None:
    """Replaces the content of a table. Counters and the log of removals restart.

    The new content is made beside the old one and takes its place in one piece. So there must be
    memory for both, unless the table is empty.

    Kind and options of the saved table may differ. Scores are taken over between equal strategies;
    otherwise they are those of new keys. Rows with the highest scores become near.

    An optimizer of the table continues with the first saved states that fit. Further optimizers
    with such states get copies, in the same order: each may be that of the checkpoint, made anew.
    States start anew if none fit, and saved ones that no optimizer takes stay free.

    Raises:
      ValueError: the keys do not fit the key type or `max_capacity`, or the content contradicts
        itself. The table is as it was.
      MemoryError: no memory for keys and rows; the table is as it was.
    """
    saved = as_saved(table, [content]) if isinstance(content, Content) else content
    mutate(table, lambda: swap_all([table], [prepare_restore(table, saved)]))


def prepare_restore(table: EmbeddingTable, saved: SavedParts, *, evicts: bool = False) -> Swap:
    """Makes the new content of a table, for `swap_all`. Lock the table from before until then.

    Args:
      evicts: whether keys without room, those of the lowest scores, are left out; else they are an
        error.

    Raises:
      ValueError: the keys do not fit, or the content contradicts itself. MemoryError: no memory
        for it beside the table. And all that reading a part raises.
    """
    try:
        return _prepare(table, saved, evicts)
    except MemoryError as error:
        size = f" Clear it first: it holds {table.size:,} keys." if table.size else ""
        raise MemoryError(
            f"No memory to restore {saved.num_keys:,} keys of table {table.name!r}, beside what it "
            f"holds. It is as it was.{size} ({error})"
        ) from error


def swap_all(tables: Sequence[EmbeddingTable], swaps: Sequence[Swap]) -> None:
    """Replaces the content of tables, all of them together."""
    old = [table.store for table in tables]
    with uninterrupted():
        for swap in swaps:
            swap()
    for store in old:
        store.close_far()


def _prepare(table: EmbeddingTable, saved: SavedParts, evicts: bool) -> Swap:
    now, spans = saved.facts["num_lookups"], saved.facts.get("spans")
    index, selection = _rebuild(table, saved, evicts)
    warn_of_repeated(f"table {table.name!r}", selection.num_repeated)
    store, n = table.store.empty_copy(), selection.num_rows
    store.reserve(n)
    for first in range(0, n, _ROWS_AT_ONCE):  # it is new: row numbers start at 0
        store.allocate(min(_ROWS_AT_ONCE, n - first))
    tiers = pending = None
    if isinstance(table, HkvTable) and isinstance(index, HkvIndex):
        tiers = RowTiers(store)
        if store.near_rows is not None:
            selection.moved = _place_in_tiers(index, store.near_rows, tiers, now)
    selection.select_older_rows()  # now that rows do not move any more
    _write_rows(table, saved, selection, store)
    if isinstance(table, HkvTable) and table.pending is not None:
        pending = table.pending.empty_copy()
        _restore_pending(pending, saved, selection, index)
    removals = None if table.removals is None else table.removals.empty_log(now)
    restart_clock = table.clock.prepare_restart(
        now, None if spans is None else Spans.of(spans, now)
    )

    def swap() -> None:
        restart_clock()
        table.set_parts(index, store)
        table.tiers, table.pending, table.removals = tiers, pending, removals
        table.counters.reset()
        table.invalidate_row_numbers()
        forget(table)

    return swap


# ---- which keys count ----------------------------------------------------------------------------


class _ChunkRows(NamedTuple):
    """The rows of a chunk's keys that count.

    Attributes:
      size: number of keys in the chunk.
      bits: which of them count, packed, on the host; None: all.
      rows: their row numbers, uint32 on the device; a range if consecutive, which takes no memory.
    """

    size: int
    bits: np.ndarray | None
    rows: range | Array


class KeySelection:
    """Selects the keys of parts that count, and numbers their rows from 0 on as they come.

    The first of repeated keys counts.

    Args:
      table: whose keys they are.
      find: returns the row numbers of keys (k,) int64, which may repeat: (k,) uint32, at least
        `_UNSELECTED` for keys that are not selected yet.
      unselected: what `find` returns for keys that may be selected.

    Attributes:
      num_rows: number of keys that count.
      num_repeated: number of repeated keys, without those of `is_own` parts.
      moved: (num_rows,) uint32, the final row of each selected key; None: the number it got.
    """

    def __init__(
        self, table: AnyTable, find: Callable[[Array], Array], unselected: int = NO_ROW
    ) -> None:
        self._table, self._backend = table, table.backend
        self._find, self._unselected = find, np.uint32(unselected)
        self._parts: list[SavedPart] = []
        # Of each part the chunks of its own file, then of those that it continues.
        self._chunks: list[list[list[_ChunkRows]]] = []
        self.num_rows = self.num_repeated = 0
        self.moved: Array | None = None

    def keys(self, keys: Array) -> Array:
        """Converts keys of the table's key type to int64 on its device."""
        device = self._backend.from_host(keys)
        whose = f"keys of {self._table.name!r}"
        return self._table.key_dtype.to_int64(self._backend.xp, device, whose)

    def select(self, part: SavedPart) -> Iterator[tuple[Array, int, Array | None]]:
        """Selects the keys of a part, in chunks. `find` must know those of a chunk before the next
        chunk is taken.

        Yields:
          The selected keys, (k,) int64; the row number of the first, which the others follow; and
          which keys of the chunk they are, (chunk,) bool, None: all.
        """
        xp, chunks = self._backend.xp, list[_ChunkRows]()
        self._parts.append(part)
        self._chunks.append([chunks])
        for keys in part.read("keys"):
            is_owned = np.True_
            if part.owns is not None:
                is_owned = self._backend.from_host(part.owns(self._backend.to_host(keys)))
            keys, first = self.keys(keys), self.num_rows
            found = self._find(keys)
            is_repeated = ~are_first(xp, keys) | (found < np.uint32(_UNSELECTED))
            if not part.is_own:
                self.num_repeated += int(xp.count_nonzero(is_repeated & is_owned))
            mask = (found == self._unselected) & ~is_repeated & is_owned
            self.num_rows += int(xp.count_nonzero(mask))
            chunks.append(self._chunk(mask, range(first, self.num_rows)))
            if chunks[-1].bits is None:
                yield keys, first, None
            else:
                yield keys[mask], first, mask

    def select_older_rows(self) -> None:
        """Selects the rows of keys that are in files which their part continues, newest first.

        Raises:
          ValueError: a key has no row.
        """
        xp = self._backend.xp
        for part, files in zip(self._parts, self._chunks, strict=True):
            if part.num_with_rows is None:
                continue
            is_left = xp.zeros(self.num_rows + 1, bool)  # the last stands for keys without a row
            for chunk in files[0][part.num_with_rows :]:
                is_left[self._rows_of(chunk).astype(np.int64)] = True
            del files[0][part.num_with_rows :]
            for file in part.older:
                files.append([])
                for keys in file.read("keys"):
                    keys = self.keys(keys)
                    rows = xp.minimum(self._find(keys), np.uint32(self.num_rows))
                    mask = is_left[rows.astype(np.int64)] & are_first(xp, keys)
                    rows = rows[mask]
                    is_left[rows.astype(np.int64)] = False
                    files[-1].append(self._chunk(mask, rows))
            num_left = int(xp.count_nonzero(is_left))
            if num_left:
                raise part.corrupt(
                    f"{num_left:,} of its keys have no row there, nor in the files that it "
                    "continues"
                )

    def read(self, number: int, name: str | int) -> Iterator[tuple[Array, Array]]:
        """Yields a column of a part with its rows, in chunks, after `select_older_rows`.

        Args:
          number: of the part, in the order of selection.
          name: as in `SavedRows.read`.

        Yields:
          Row numbers, (k,) uint32 on the device, NO_ROW for keys that do not count, and (k, dim).
        """
        part = self._parts[number]
        for file, chunks in zip([part, *part.older], self._chunks[number], strict=True):
            wanted = [i for i, chunk in enumerate(chunks) if len(chunk.rows)]
            # A file older than a state has none of it: the rows keep its initial value.
            for i, values in zip(wanted, file.read(name, wanted), strict=False):
                chunk = chunks[i]
                rows = self._rows_of(chunk)
                if chunk.bits is not None:
                    bits = np.unpackbits(chunk.bits, count=chunk.size).view(bool)
                    whole = self._backend.xp.full(chunk.size, NO_ROW, np.uint32)
                    whole[self._backend.from_host(bits)] = rows
                    rows = whole
                yield rows, values

    def _chunk(self, mask: Array, rows: range | Array) -> _ChunkRows:
        is_all = len(rows) == mask.size
        bits = None if is_all else np.packbits(self._backend.to_host(mask))
        return _ChunkRows(int(mask.size), bits, rows)

    def _rows_of(self, chunk: _ChunkRows) -> Array:
        """Returns the row numbers of the keys of a chunk that count, (k,) uint32."""
        if not isinstance(chunk.rows, range):
            return chunk.rows
        if self.moved is not None:
            return self.moved[chunk.rows.start : chunk.rows.stop]
        return self._backend.xp.arange(chunk.rows.start, chunk.rows.stop, dtype=np.uint32)


def are_first(xp: Any, keys: Array) -> Array:
    """Returns whether each key is the first of its equals, (k,) bool."""
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
# might find both of their buckets full. So keys return to their slots if these are known, and
# buckets and segments have the same size. If more keys come than fit, those of the highest scores
# may be kept.


class _CannotUseSlotsError(Exception):
    """Some keys do not count: slots are right only for all keys together."""


def _rebuild(
    table: EmbeddingTable, saved: SavedParts, evicts: bool
) -> tuple[AnyIndex, KeySelection]:
    """Returns a new index with the keys that count.

    Raises:
      ValueError: they do not fit the key type, or contradict their slots.
      NoRoomError: they do not fit `max_capacity`, and not `evicts`.
      MemoryError: no memory for it.
    """
    if not isinstance(table, HkvTable):
        assert isinstance(table.index, DetIndex)
        index = table.index.empty_copy()
        index.make_room(saved.num_keys)
        return index, _insert_all(table, saved, index, partial(_insert, index))[0]
    made = _in_their_slots(table, saved)
    if made is not None:
        return made
    seed, num_refused = new_seed(), 0
    for _ in range(_MAX_SEEDS):
        other = _emptied(table, saved, None, seed)
        other.make_room(saved.num_keys)
        selection, num_refused = _insert_all(table, saved, other, other.insert_all)
        if not num_refused:
            return other, selection
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
    saved: SavedParts,
    index: AnyIndex,
    insert: Callable[..., int],
    unselected: int = NO_ROW,
) -> tuple[KeySelection, int]:
    """Selects keys and inserts them into an index, with their scores and last lookups.

    Args:
      insert: takes new keys (k,) int64, and `first`, the row number of the first, which the others
        follow; returns how many found no room.
      unselected: as in `KeySelection`.

    Returns:
      The selection, and how many keys found no room.
    """
    selection = KeySelection(table, lambda keys: index.find(keys).rows, unselected)
    num_refused = 0
    for part in saved.parts:
        chunks = zip(selection.select(part), _seen(table, index, saved, part), strict=True)
        for (keys, first, mask), (last_seen, scores) in chunks:
            num_refused += insert(keys, first=first)
            if mask is not None:
                last_seen, scores = last_seen[mask], None if scores is None else scores[mask]
            if isinstance(index, HkvIndex):
                index.update(keys, scores=scores, last_seen=last_seen)
            else:
                index.update(keys, last_seen=last_seen)
    return selection, num_refused


def _emptied(table: HkvTable, saved: SavedParts, *size_and_seed: int | None) -> HkvIndex:
    """Returns an empty index like that of a table, in the saved epoch."""
    index = table.index.empty_copy(*size_and_seed)
    index.epoch = saved.facts["epoch"] if _is_of_strategy(index, saved) else table.index.epoch
    return index


def _seen(
    table: EmbeddingTable, index: AnyIndex, saved: SavedParts, part: SavedPart
) -> Iterator[tuple[Array, Array | None]]:
    """Yields, for each chunk, the last lookups of its keys and their scores; None: the same."""
    device, xp = table.backend.from_host, table.backend.xp
    # A key seen by a lookup that is still to come would be neither evicted nor expired.
    latest, saved_scores = np.uint32(saved.facts["num_lookups"]), None
    if _is_of_strategy(index, saved) and index.has_scores and saved.has_scores:
        saved_scores = part.read("scores")
    for stamps in part.read("stamps"):
        last_seen, scores = xp.minimum(device(stamps), latest), None
        if isinstance(index, HkvIndex) and saved_scores is not None:
            scores = index.cap_scores(device(next(saved_scores)), latest)
        elif isinstance(index, HkvIndex) and index.has_scores:
            scores = index.initial_scores(last_seen)
        yield last_seen, scores


def _is_of_strategy(index: AnyIndex, saved: SavedParts) -> bool:
    """Whether saved scores and epochs are those of an index's strategy."""
    return isinstance(index, HkvIndex) and saved.facts.get("strategy") == index.strategy


def _no_room(table: HkvTable, saved: SavedParts, num_refused: int) -> str:
    """Returns the text of a `NoRoomError`."""
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


def _by_score(table: HkvTable, saved: SavedParts) -> tuple[HkvIndex, KeySelection]:
    """Returns a new index with as many of the keys as find room, those of higher scores first.

    So a key is left out only if both of its buckets are full of keys with scores that are no
    lower. Within a batch, a 64th of the table, keys come in any order. The logger "sok_lite" warns
    of how many are left out. It takes some 40 bytes a key on the host.
    """
    index, device = _emptied(table, saved, None, new_seed()), table.backend.from_host
    keys, scores = _keys_with_scores(table, saved, index)
    order = np.argsort(~scores, kind="stable")
    index.make_room(keys.size)
    step, num_left_out = max(1, index.max_capacity // _BATCHES), 0
    for at in range(0, keys.size, step):
        num_left_out += index.insert_all(device(keys[order[at : at + step]]))
    _log.warning(
        "Table %r has left out %s of %s keys that were saved, those of the lowest scores: "
        "max_capacity is %s.",
        *(table.name, f"{num_left_out:,}", f"{keys.size:,}", f"{index.max_capacity:,}"),
    )
    held = index.entries().keys
    index.update(held, table.backend.xp.full(held.size, _UNSELECTED, np.uint32))

    def insert(keys: Array, first: int) -> int:
        index.update(keys, _rows_from(index, first, keys))
        return 0

    return index, _insert_all(table, saved, index, insert, _UNSELECTED)[0]


def _keys_with_scores(
    table: HkvTable, saved: SavedParts, index: HkvIndex
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct keys of this rank and their scores, on the host: (n,) int64, uint64."""
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


def _in_their_slots(table: HkvTable, saved: SavedParts) -> tuple[HkvIndex, KeySelection] | None:
    """Returns an index with the keys in their saved slots; None: they have to be inserted."""
    index, facts, n = table.index, saved.facts, saved.num_keys
    if len(saved.parts) > 1 or "slots" not in saved.parts[0].columns:
        return None
    capacity, num_slots = (facts.get(name, 0) for name in ("capacity", "num_slots"))
    is_same = (facts.get("bucket"), facts.get("segment")) == (index.bucket, index.sizes.unit)
    # Growth relies on it: between two capacities an index grows by whole segments.
    is_capacity = (
        capacity.bit_count() == 1
        and index.bucket <= capacity <= num_slots < 2 * capacity
        and num_slots % min(capacity, index.sizes.unit) == 0
        and num_slots <= min(index.max_capacity, max(_SMALL, _MAX_SLOTS_PER_KEY * n))
    )
    if not is_same or not is_capacity:
        return None
    seed = facts.get("hash_seed", 0)  # old files have none
    # A seed that files make known is kept only if slots depend on it.
    other = _emptied(table, saved, num_slots, seed if n else new_seed())
    slots: Iterator[Array] = saved.parts[0].read("slots")

    def insert(keys: Array, first: int) -> int:
        at = table.backend.from_host(next(slots))
        if keys.size < at.size:
            raise _CannotUseSlotsError
        put_in_slots(other, keys, at, first)
        return 0

    try:
        selection, _ = _insert_all(table, saved, other, insert)
    except _CannotUseSlotsError:
        return None
    other.adopt_capacity(capacity)
    return other, selection


def put_in_slots(index: HkvIndex, keys: Array, slots: Array, first: int) -> None:
    """Puts new keys into the slots that they had in another index of this layout.

    Nothing else may use the index meanwhile, and `adopt_capacity` follows.

    Args:
      keys: (n,) int64, distinct.
      slots: (n,) int64, slot numbers.
      first: row number of the first key, which the others follow.

    Raises:
      ValueError: a slot is not one of its key's, or taken.
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
            # As insertion does: a search for such a key starts in its first line.
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
    """Gives the keys with the highest scores near rows, those below `num_near`.

    Of equal scores the first come near.

    Args:
      latest: number of the last lookup, which no key was seen after.

    Returns:
      (n,) uint32, the new row of each row; None: no row has moved.
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
    """Returns the new row of each row of an index with two tiers, (n,) uint32."""
    xp, n = index.backend.xp, index.size
    least, num_equal = _least_near(index, num_near, latest)
    rank = xp.zeros(n, np.uint8)  # 2: near, 1: near if there is room
    for entries in _entries(index):
        scores = entries.scores
        rank[entries.rows.astype(np.int64)] = (scores >= least) + (scores > least).astype(np.uint8)
    rows, near, far = xp.empty(n, np.uint32), 0, num_near
    for first in range(0, n, _ROWS_AT_ONCE):
        some, its_rows = (each[first : first + _ROWS_AT_ONCE] for each in (rank, rows))
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
    """Returns the lowest score of a near row, and how many rows of that score are near.

    It is a radix selection: pass by pass it finds the digits of the score, the highest first.
    """
    found, digits = 0, np.uint64((1 << _RADIX_BITS) - 1)
    if index.has_scores:
        latest = max(int(each.scores.max()) for each in _entries(index) if each.scores.size)
    highest = max(0, latest.bit_length() - 1) // _RADIX_BITS
    for shift in range(highest * _RADIX_BITS, -1, -_RADIX_BITS):
        counts = np.zeros(1 << _RADIX_BITS, np.int64)
        for entries in _entries(index):
            some = index.backend.to_host(entries.scores) >> np.uint64(shift)
            some = some[some >> np.uint64(_RADIX_BITS) == found] & digits
            counts += np.bincount(some.astype(np.int64), minlength=counts.size)
        above = np.cumsum(counts[::-1])[::-1] - counts  # those with higher digits
        digit = int(np.flatnonzero(above < num_near)[0])
        num_near -= int(above[digit])
        found = found << _RADIX_BITS | digit
    return np.uint64(found), num_near


def _entries(index: HkvIndex) -> Iterator[Any]:
    return (
        index.entries(first, _SLOTS_AT_ONCE) for first in range(0, index.num_slots, _SLOTS_AT_ONCE)
    )


def _write_rows(
    table: EmbeddingTable, saved: SavedParts, selection: KeySelection, store: RowStore
) -> None:
    """Writes rows and states, and gives states to the optimizers of the table."""

    def write(part: int, name: str | int, column: str) -> None:
        for rows, values in selection.read(part, name):
            store.write(rows, store.backend.from_host(values), column)

    for i in range(len(saved.parts)):
        write(i, "value", "value")
    owners: dict[int | None, StateOwner | None] = {s.group: StateOwner() for s in saved.states}
    owners[None] = None
    for state in saved.states:
        kinds = {state.name: (state.dim, state.initial)}
        (column,) = store.add_states(kinds, owners[state.group])
        for i, place in state.places.items():
            write(i, place, column.name)
    copied: list[Kinds] = []
    for owner, its_states in table.store.state_groups.items():
        if owner is None or owner.optimizer is None:
            continue
        kinds, owner = kinds_of(its_states), StateOwner(owner.reference, is_restored=True)
        free, saved_states = find_matching_states(store, kinds), restored(store, kinds)
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


def _restore_pending(
    counter: PendingCounts, saved: SavedParts, selection: KeySelection, index: AnyIndex
) -> None:
    """Gives a new counter the pending keys; the first of repeated ones counts."""
    device, host, xp = index.backend.from_host, index.backend.to_host, index.backend.xp
    now = np.uint32(saved.facts["num_lookups"])
    for part in sorted(saved.parts, key=lambda part: not part.is_own):
        for keys, *numbers in zip(*map(part.read, PENDING), strict=True):
            counts, last_seen = map(device, numbers)
            # With any other count the counter takes a key for missing.
            num_wrong = int(xp.count_nonzero((counts == 0) | (counts > MAX_PENDING_COUNT)))
            if num_wrong:
                raise part.corrupt(
                    f"{num_wrong:,} of its keys without a row were seen 0 times, or more than "
                    f"{MAX_PENDING_COUNT:,} times"
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


def merge(table: EmbeddingTable, saved: SavedParts, num_bytes: int) -> SavedParts:
    """Returns the content of a table once the saved keys are assigned to it.

    A key of both has the saved row and states; a state that was not saved has its initial value.
    The last lookup of this table counts as the last that saw the saved keys. Their scores are those
    of new keys, or, between tables with the same strategy "kLfu" or "kCustomized", the saved ones.
    Pending counts stay, and those of other keys are added. A saved group of states continues the
    first of the table's with the same states.

    Args:
      table: locked by the caller until the result has been restored.
      num_bytes: the most bytes of a chunk of the table's own rows.
    """
    keeps_scores = False
    if isinstance(table, HkvTable) and table.index.has_scores:
        strategy = table.index.strategy
        is_same = strategy in _TIMELESS and saved.facts.get("strategy") == strategy
        keeps_scores = is_same and saved.has_scores
    others = [_MergedPart(table, part, keeps_scores) for part in saved.parts]
    own = TablePart(table, num_bytes)
    own.num_keys -= sum(part.num_known for part in others)
    # Without those of optimizers that are gone, which others of their kind would take.
    kept = [i for i, state in enumerate(own.states) if not state.rows.is_gone]
    states = join_states([[own.states[i] for i in kept], saved.states], are_nested_one=False)
    for i, state in enumerate(states):
        of_own, of_saved = state.places.get(0), state.places.get(1)
        places = {} if of_saved is None else dict(saved.states[of_saved].places)
        places |= {} if of_own is None else {len(others): kept[of_own]}
        states[i] = state._replace(places=places)
    return SavedParts([*others, own], states, without_slots(dict(own.facts)))


class _MergedPart(SavedPart):
    """A saved part, whose keys the table's last lookup has seen."""

    def __init__(self, table: EmbeddingTable, part: SavedPart, keeps_scores: bool) -> None:
        self._table, self._part, self._keeps_scores = table, part, keeps_scores
        self.num_keys, self.states, self.facts = part.num_keys, part.states, part.facts
        self.num_with_rows, self.older, self.owns = part.num_with_rows, part.older, part.owns
        self.columns = ("stamps", "scores")

    @property
    def num_known(self) -> int:
        """Number of its keys that the table has."""
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

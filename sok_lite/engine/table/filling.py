"""A new index with the keys of what was saved.

A full "hybrid" table must hold all of its keys again, and in another order of insertion some might
find both of their buckets full: so where the slots are known they are used, if buckets and segments
are of the same size.

Where more keys come than fit, those of the highest scores may be kept: see `_filled_by_score`.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.hashing import new_seed, seed_after
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.choosing import Chooser, Chosen, are_first
from sok_lite.engine.table.det_index import DetIndex
from sok_lite.engine.table.directory import LINE
from sok_lite.engine.table.hkv import HkvTable
from sok_lite.engine.table.hkv_index import HkvIndex, capacity_for
from sok_lite.engine.table.hkv_options import MAX_CAPACITY
from sok_lite.engine.table.saved import Saved, SavedPart
from sok_lite.engine.table.table import EmbeddingTable

_log = logging.getLogger("sok_lite")

# The largest index that is made because a file says so: so many slots, or so many a key. Fewer keys
# than that find room in any smaller one.
_SMALL, _MOST_SLOTS_A_KEY = 1 << 16, 64
# Seeds that are tried where keys must have other slots than they had: a full table of small buckets
# may have no room for all of them by one seed, and room by another.
_MOST_SEEDS = 4

# The row number of a key that has a slot and is not chosen yet: no table has so many rows.
_TO_BE_CHOSEN = NO_ROW - 1
# Keys that are inserted together where scores decide: so large a share of `max_capacity`.
_SHARE_OF_A_BATCH = 64

AnyIndex: TypeAlias = DetIndex | HkvIndex
# Gives the scores that the keys of a part are to have in an index, in its pieces, unsigned.
Scores: TypeAlias = Callable[[AnyIndex, SavedPart], Iterator[Array]]


class Filled(NamedTuple):
    """A new index, and what it has.

    Attributes:
      new_index: whose keys have the rows from 0 on; `last_seen` and scores are still to be written.
      chooser: that has chosen them.
      parts: what counts of each part.
    """

    new_index: AnyIndex
    chooser: Chooser
    parts: list[Chosen]


class NoRoomError(ValueError):
    """A table that evicts has fewer slots than the keys that were saved need."""


class _CannotUseSlotsError(Exception):
    """Not all keys count: slots say something of all keys together."""


def filled(table: EmbeddingTable, saved: Saved, scores: Scores | None) -> Filled:
    """Returns a new index like that of a table, with the keys that were saved.

    Args:
      scores: of more keys than there is room for, those whose scores are the lowest are left out;
        None: none may be.

    Raises:
      ValueError: they do not fit the key type, or contradict their slots.
      NoRoomError: they do not fit `max_capacity`.
      MemoryError: no memory for it.
    """
    if isinstance(table, HkvTable):
        made = _filled_hybrid(table, saved, scores)
    else:
        made = _fill(table, saved)
    made.chooser.warn()
    return made


def _fill(table: EmbeddingTable, saved: Saved) -> Filled:
    assert isinstance(table.index, DetIndex)
    index, xp = table.index.emptied(), table.backend.xp
    index.make_room(_num_keys(saved))

    def insert(keys: Array, first: int) -> None:
        index.make_room(int(keys.size))
        index.insert(keys, xp.arange(first, first + keys.size, dtype=np.uint32), 1)

    return _choose(table, saved, index, insert)


def _choose(
    table: EmbeddingTable,
    saved: Saved,
    index: AnyIndex,
    insert: Callable[[Array, int], None],
    find: Callable[[Array], Array] | None = None,
    keeps: Callable[[Array], Array] | None = None,
) -> Filled:
    of_table = (table.backend, table.key_dtype, table.name)
    chooser = Chooser(*of_table, find or (lambda keys: index.find(keys).rows), insert, keeps)
    return Filled(index, chooser, [chooser.choose(part) for part in saved.parts])


def _num_keys(saved: Saved) -> int:
    return sum(part.num_keys for part in saved.parts)


def _filled_hybrid(table: HkvTable, saved: Saved, scores: Scores | None) -> Filled:
    made = _in_their_slots(table, saved)
    if made is not None:
        return made
    n, seed, num_refused = _num_keys(saved), new_seed(), 0
    for _ in range(_MOST_SEEDS):
        index = table.index.emptied(seed=seed)
        index.make_room(n)
        refused: list[int] = []

        def insert(
            keys: Array, first: int, index: HkvIndex = index, refused: list[int] = refused
        ) -> None:
            refused.append(index.insert_all(keys, first=first))

        made = _choose(table, saved, index, insert)
        num_refused = sum(refused)
        if not num_refused:
            return made
        seed = seed_after(seed)
    if scores is not None:
        return _filled_by_score(table, saved, scores)
    raise NoRoomError(_no_room(table, saved, num_refused))


def _no_room(table: HkvTable, saved: Saved, num_refused: int) -> str:
    """Returns what an error says of keys that find no slot."""
    facts, capacity = saved.facts, saved.facts.get("capacity", 0)
    n, has, bucket = _num_keys(saved), table.index.max_capacity, table.index.bucket
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


def _filled_by_score(table: HkvTable, saved: Saved, scores: Scores) -> Filled:
    """Returns a new index with as many of the keys as find room, those of higher scores first.

    So a key is left out only where both of its buckets are full of keys with scores that are no
    lower. Of the keys that are inserted together, a 64th of the table, each may come before any
    other; the logger "sok_lite" says how many are left out. It needs some 40 bytes a key on the
    host.
    """
    index, device = table.index.emptied(seed=new_seed()), table.backend.from_host
    keys, order = _by_score(table, saved, partial(scores, index))
    index.make_room(keys.size)
    step, num_left_out = max(1, index.max_capacity // _SHARE_OF_A_BATCH), 0
    for at in range(0, keys.size, step):
        num_left_out += index.insert_all(device(keys[order[at : at + step]]))
    _log.warning(
        "Table %r has left out %s of %s keys that were saved, those of the lowest scores: "
        "max_capacity is %s.",
        *(table.name, f"{num_left_out:,}", f"{keys.size:,}", f"{index.max_capacity:,}"),
    )
    # Those that have found room get their rows when they are chosen.
    xp, held = table.backend.xp, index.entries().keys
    index.update(held, xp.full(held.size, _TO_BE_CHOSEN, np.uint32))

    def insert(keys: Array, first: int) -> None:
        rows = xp.arange(first, first + keys.size, dtype=np.uint32)
        index.update(keys, rows)

    def find(keys: Array) -> Array:
        rows = index.find(keys).rows
        return xp.where(rows == np.uint32(_TO_BE_CHOSEN), np.uint32(NO_ROW), rows)

    return _choose(
        *(table, saved, index, insert, find),
        lambda keys: index.find(keys).rows != np.uint32(NO_ROW),
    )


def _by_score(
    table: HkvTable, saved: Saved, scores: Callable[[SavedPart], Iterator[Array]]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct keys that count, (n,) int64 on the host, and their order by scores.

    Of equal scores the first come first.
    """
    host, kind = table.backend.to_host, table.key_dtype
    all_keys, all_scores = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    for part in saved.parts:
        for keys, its_scores in zip(map(host, part.read("keys")), scores(part), strict=True):
            is_own = slice(None) if part.owns is None else part.owns(keys)
            all_keys.append(kind.to_int64(np, keys[is_own], f"keys of {table.name!r}"))
            all_scores.append(host(its_scores)[is_own].astype(np.uint64, copy=False))
    keys, its_scores = np.concatenate(all_keys), np.concatenate(all_scores)
    distinct = are_first(np, keys)
    return keys[distinct], np.argsort(~its_scores[distinct], kind="stable")


def _in_their_slots(table: HkvTable, saved: Saved) -> Filled | None:
    """Returns an index that has the keys where they were; None: they have to be inserted."""
    index, facts, n = table.index, saved.facts, _num_keys(saved)
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
    other = index.emptied(num_slots, seed if n else new_seed())
    slots: Iterator[Array] = saved.parts[0].read("slots")

    def insert(keys: Array, first: int) -> None:
        at = table.backend.from_host(next(slots))
        if keys.size < at.size:
            raise _CannotUseSlotsError
        put_in_slots(other, keys, at, first)

    try:
        made = _choose(table, saved, other, insert)
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
    rows = xp.arange(first, first + keys.size, dtype=np.uint32)
    order = xp.argsort(slots)
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

"""What a table knows of its keys beside their rows, taken out and put back: for checkpoints.

A table that comes back evicts, admits and expires as it would have done: scores, the number of the
lookup that last saw each key, and the sightings of keys without a row come with the keys. A full
"hybrid" table must hold all of its keys again, and in another order of insertion some might find
both of their buckets full: so the slots are kept too, and used where the buckets are the same.
"""

from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.engine.table.base import EmbeddingTable
from sok_lite.engine.table.det_index import DetIndex
from sok_lite.engine.table.hkv import HkvTable
from sok_lite.engine.table.hkv_index import HkvIndex


class Snapshot(NamedTuple):
    """The keys of a table and what it knows of them.

    Attributes:
      keys: (n,) of the table's key type, ascending.
      rows: (n,) uint32, their row numbers in the table that it was taken of.
      stamps: (n,) uint32, the number of the lookup that last saw each key.
      scores: (n,) uint64; (0,) where the stamps are the scores.
      slots: (n,) int64, where in the index each key is; (0,) of an "hbm" table.
      sighted_keys: (m,) int64, keys that were seen and have no row yet.
      sightings: (m,) uint32, how often.
      facts: num_lookups, and of a "hybrid" table capacity, bucket, strategy and epoch.
    """

    keys: Array
    rows: Array
    stamps: Array
    scores: Array
    slots: Array
    sighted_keys: Array
    sightings: Array
    facts: dict[str, Any]


def take(table: EmbeddingTable) -> Snapshot:
    """Returns a snapshot. Its row numbers are good as long as the caller holds `table.lock`."""
    xp = table.backend.xp
    with table.lock:
        held = table.index.entries()
        keys = table.key_dtype.from_int64(xp, held.keys)
        order = xp.argsort(keys)
        scores, slots = xp.empty(0, np.uint64), xp.empty(0, np.int64)
        sighted_keys, sightings = xp.empty(0, np.int64), xp.empty(0, np.uint32)
        facts: dict[str, Any] = {"num_lookups": table.num_lookups}
        if isinstance(table, HkvTable):
            index = table.index
            slots = held.slots[order]
            if index.has_scores:
                scores = index.slot_scores(held.stamps[order], slots)
            if table.sightings is not None:
                sighted_keys, sightings = table.sightings.export()
            facts |= {
                "capacity": index.capacity,
                "bucket": index.bucket,
                "strategy": index.strategy,
                "epoch": index.epoch,
            }
        return Snapshot(
            keys[order],
            held.rows[order],
            held.stamps[order],
            scores,
            slots,
            sighted_keys,
            sightings,
            facts,
        )


def restore(table: EmbeddingTable, snapshot: Snapshot) -> Array:
    """Makes a table hold the keys of a snapshot and no others. Counters begin anew.

    The content of the rows is the caller's to write before it gives up `table.lock`. The kinds and
    options of the two tables may differ: scores are taken over between equal strategies only, and
    else begin as those of new keys.

    Args:
      snapshot: its rows are not used.

    Returns:
      (n,) uint32, the new row numbers, those of the highest scores near.

    Raises:
      ValueError: the keys do not fit the key type or `max_capacity`, or the snapshot contradicts
        itself. The table is as it was.
      MemoryError: no memory for the keys; the table is as it was. None for the rows: it is empty.
    """
    keys = table.key_dtype.to_int64(table.backend.xp, snapshot.keys, f"keys of {table.name!r}")
    with table.lock:
        _check(table, snapshot)
        if isinstance(table, HkvTable):
            return _restored_hybrid(table, keys, snapshot)
        return _restored_hbm(table, keys, snapshot)


def _check(table: EmbeddingTable, snapshot: Snapshot) -> None:
    n = int(snapshot.keys.size)
    sizes = {
        "stamps": ({n}, snapshot.stamps),
        "scores": ({0, n}, snapshot.scores),
        "slots": ({0, n}, snapshot.slots),
        "sightings": ({int(snapshot.sighted_keys.size)}, snapshot.sightings),
    }
    for name, (expected, array) in sizes.items():
        if int(array.size) not in expected:
            raise ValueError(
                f"What was saved of table {table.name!r} is damaged: {array.size:,} {name} for "
                f"{n:,} keys."
            )
    if bool((snapshot.keys[1:] <= snapshot.keys[:-1]).any()):
        raise ValueError(f"What was saved of table {table.name!r} is damaged: its keys repeat.")


def _hottest_first(table: EmbeddingTable, scores: Array) -> Array:
    """Takes a row for each score; where there are two tiers, the highest ones get near rows."""
    xp = table.backend.xp
    rows = xp.empty(scores.size, np.uint32)
    order = xp.argsort(~scores)  # descending: ~ turns unsigned numbers round
    rows[order] = table.store.allocate(int(scores.size))
    return rows


def _restored_hbm(table: EmbeddingTable, keys: Array, snapshot: Snapshot) -> Array:
    assert isinstance(table.index, DetIndex)
    index = table.index.emptied()
    index.make_room(int(keys.size))
    table.clear()
    rows = _hottest_first(table, snapshot.stamps)
    index.insert(keys, rows, 1)
    index.update(keys, stamps=snapshot.stamps)
    table.index = index
    table.clock.restart(int(snapshot.facts["num_lookups"]))
    return rows


def _restored_hybrid(table: HkvTable, keys: Array, snapshot: Snapshot) -> Array:
    facts = snapshot.facts
    index, slots = _index_with(table, keys, snapshot)
    # Scores and epochs of another strategy say nothing here.
    is_same = facts.get("strategy") == index.strategy
    index.epoch = int(facts["epoch"]) if is_same else table.index.epoch
    scores = None
    if index.has_scores:
        scores = (
            snapshot.scores
            if is_same and snapshot.scores.size == keys.size
            else index.first_scores(snapshot.stamps)
        )
    table.clear()
    try:
        rows = _hottest_first(table, snapshot.stamps if scores is None else scores)
        table.tiers.assigned(rows, keys)
        if table.sightings is not None:
            now = int(facts["num_lookups"])
            table.sightings.restore(snapshot.sighted_keys, snapshot.sightings, now)
    except MemoryError:
        table.clear()
        raise
    index.write(slots, rows, snapshot.stamps, scores)
    table.index = index
    table.clock.restart(int(facts["num_lookups"]))
    return rows


def _index_with(table: HkvTable, keys: Array, snapshot: Snapshot) -> tuple[HkvIndex, Array]:
    """Returns a new index that has the keys, and their slots."""
    index, facts, n = table.index, snapshot.facts, int(keys.size)
    capacity = int(facts.get("capacity", 0))
    is_same = facts.get("bucket") == index.bucket and capacity <= index.max_capacity
    if is_same and snapshot.slots.size == n:
        return index.with_keys_in(keys, snapshot.slots, capacity)
    index = index.emptied()
    index.make_room(n)
    num_refused = index.insert_all(keys)
    if num_refused:
        room = f"{capacity:,} slots in buckets of {facts['bucket']}" if capacity else "no limit"
        raise ValueError(
            f"Table {table.name!r} has no room for {num_refused:,} of the {n:,} keys that were "
            f"saved: max_capacity is {index.max_capacity:,} slots, in buckets of {index.bucket}. "
            f"They come from a table with {room}. Nothing was changed. Use a larger max_capacity."
        )
    return index, index.slots_of_rows(n)

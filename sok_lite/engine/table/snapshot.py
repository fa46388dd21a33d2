"""What a table knows of its keys, taken out and put back with their rows: for checkpoints.

A table that comes back evicts, admits and expires as it would have done: scores, the number of the
lookup that last saw each key, and the sightings of keys without a row come with the keys. A full
"hybrid" table must hold all of its keys again, and in another order of insertion some might find
both of their buckets full: so the slots are kept too, and used where buckets and segments are of
the same size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.publish import Action, publish, setting
from sok_lite.engine.rows.store import RowStore
from sok_lite.engine.rows.tiers import RowTiers
from sok_lite.engine.table.base import EmbeddingTable
from sok_lite.engine.table.det_index import DetIndex
from sok_lite.engine.table.exclusive import alone, changing_alone
from sok_lite.engine.table.hkv import HkvTable
from sok_lite.engine.table.hkv_index import HkvIndex
from sok_lite.engine.table.parts import COUNTERS


class Snapshot(NamedTuple):
    """The keys of a table and what it knows of them.

    Attributes:
      keys: (n,) of the table's key type, ascending.
      rows: (n,) uint32, their row numbers in the table that it was taken of.
      stamps: (n,) uint32, the number of the lookup that last saw each key.
      scores: (n,) uint64; (0,) where the stamps are the scores.
      slots: (n,) int64, the number of the slot of each key; (0,) of an "hbm" table, and where an
        index that failed to grow has segments of its own sizes.
      sighted_keys: (m,) int64, keys that were seen and have no row yet.
      sightings: (m,) uint32, how often.
      facts: num_lookups, and of a "hybrid" table capacity, strategy, epoch and where its slots
        are: bucket, segment, num_slots.
    """

    keys: Array
    rows: Array
    stamps: Array
    scores: Array
    slots: Array
    sighted_keys: Array
    sightings: Array
    facts: dict[str, Any]


class State(NamedTuple):
    """The rows of an optimizer state.

    Attributes:
      name, dim, initial: of the column; see `RowStore.ensure_state`.
      rows: (n, dim) float32.
    """

    name: str
    dim: int
    initial: float
    rows: Array


def take(table: EmbeddingTable) -> Snapshot:
    """Returns a snapshot. Its row numbers are good as long as the caller holds `table.lock`."""
    return alone(table, lambda: _taken(table))


def _taken(table: EmbeddingTable) -> Snapshot:
    xp = table.backend.xp
    held = table.index.entries()
    keys = table.key_dtype.from_int64(xp, held.keys)
    order = xp.argsort(keys)
    scores, slots = xp.empty(0, np.uint64), xp.empty(0, np.int64)
    sighted_keys, sightings = xp.empty(0, np.int64), xp.empty(0, np.uint32)
    facts: dict[str, Any] = {"num_lookups": table.num_lookups}
    if isinstance(table, HkvTable):
        index = table.index
        if index.is_regular:
            slots = held.slots[order]
        if index.has_scores:
            scores = held.scores[order]
        if table.sightings is not None:
            sighted_keys, sightings = table.sightings.export()
        facts |= {
            "capacity": index.capacity,
            "bucket": index.bucket,
            "segment": index.segment_slots,
            "num_slots": index.num_slots - 2,
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


def restore(
    table: EmbeddingTable, snapshot: Snapshot, values: Array, states: Sequence[State] = ()
) -> None:
    """Makes a table hold the keys of a snapshot and no others. Counters begin anew.

    All that it is to hold is made beside what it holds, and takes its place in one piece. So until
    then there must be memory for both, unless the table is empty.

    The kinds and options of the two tables may differ: scores are taken over between equal
    strategies only, and else begin as those of new keys. Rows of the highest scores come near.

    Args:
      snapshot: its rows are not used.
      values: (n, dim) of the row's storage dtype.
      states: of the optimizer. Those that the table has beside them begin anew.

    Raises:
      ValueError: the keys do not fit the key type or `max_capacity`, a state exists with another
        dim or initial value, or the snapshot contradicts itself. The table is as it was.
      MemoryError: no memory for keys and rows; the table is as it was.
    """
    keys = table.key_dtype.to_int64(table.backend.xp, snapshot.keys, f"keys of {table.name!r}")
    changing_alone(table, lambda: _restore(table, keys, snapshot, values, states))


def _restore(
    table: EmbeddingTable,
    keys: Array,
    snapshot: Snapshot,
    values: Array,
    states: Sequence[State],
) -> None:
    _check(table, snapshot)
    for state in states:
        table.store.check_state(state.name, state.initial, state.dim)
    try:
        actions = _prepared(table, keys, snapshot, values, states)
    except MemoryError as error:
        held = f" Clear it first: it holds {table.size:,} keys." if table.size else ""
        raise MemoryError(
            f"No memory to restore {int(keys.size):,} keys of table {table.name!r}, beside what it "
            f"holds. It is as it was.{held} ({error})"
        ) from error
    counts = dict.fromkeys(COUNTERS, 0)
    clock = table.clock.restarting(int(snapshot.facts["num_lookups"]))
    renewed = setting(table, _counts=counts, generation=table.generation + 1)
    old = table.store  # kept, so that nothing of it is given back while `publish` runs
    publish([*actions, *clock, *renewed])
    old.close_far()


def _prepared(
    table: EmbeddingTable,
    keys: Array,
    snapshot: Snapshot,
    values: Array,
    states: Sequence[State],
) -> list[Action]:
    """Makes what the table is to hold, and returns the actions that give it that."""
    if isinstance(table, HkvTable):
        return _prepared_hybrid(table, keys, snapshot, values, states)
    assert isinstance(table.index, DetIndex)
    index = table.index.emptied()
    index.make_room(int(keys.size))
    store, rows = _new_store(table, snapshot.stamps, values, states)
    index.insert(keys, rows, 1)
    publish(index.updating(keys, stamps=snapshot.stamps))
    return setting(table, index=index, store=store)


def _new_store(
    table: EmbeddingTable, scores: Array, values: Array, states: Sequence[State]
) -> tuple[RowStore, Array]:
    """Returns a new row store, and the row of each key.

    Args:
      scores: (n,) unsigned, of the keys; where there are two tiers, the highest get near rows.
    """
    xp, old = table.backend.xp, table.store
    store = old.emptied()
    rows = xp.empty(scores.size, np.uint32)
    order = xp.argsort(~scores)  # descending: ~ turns unsigned numbers round
    rows[order] = store.allocate(int(scores.size))
    store.write(rows, values)
    for state in states:
        column = store.ensure_state(state.name, state.initial, state.dim)
        if state.name in old.state_names:
            column.owner = old.column(state.name).living_owner
        store.write(rows, xp.ascontiguousarray(state.rows), column=state.name)
    for name in set(old.state_names).difference(store.state_names):
        column = old.column(name)
        store.ensure_state(name, column.initial, column.dim).owner = column.owner
    return store, rows


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
                f"What was saved of table {table.name!r} is corrupt: {array.size:,} {name} for "
                f"{n:,} keys."
            )
    if bool((snapshot.keys[1:] <= snapshot.keys[:-1]).any()):
        raise ValueError(f"What was saved of table {table.name!r} is corrupt: its keys repeat.")


def _prepared_hybrid(
    table: HkvTable,
    keys: Array,
    snapshot: Snapshot,
    values: Array,
    states: Sequence[State],
) -> list[Action]:
    facts = snapshot.facts
    index = _index_with(table, keys, snapshot)
    # Scores and epochs of another strategy say nothing here.
    is_same = facts.get("strategy") == index.strategy
    index.epoch = int(facts["epoch"]) if is_same else table.index.epoch
    scores = None
    if index.has_scores:
        scores = (
            snapshot.scores
            if is_same and snapshot.scores.size == keys.size
            else index.initial_scores(snapshot.stamps)
        )
    hottest = snapshot.stamps if scores is None else scores
    store, rows = _new_store(table, hottest, values, states)
    tiers = RowTiers(store)
    tiers.assigned(rows, keys)
    publish(index.updating(keys, rows, scores, snapshot.stamps))
    sightings = table.sightings
    if sightings is not None:
        sightings = sightings.emptied()
        now = int(facts["num_lookups"])
        sightings.restore(snapshot.sighted_keys, snapshot.sightings, now)
    return setting(table, index=index, store=store, tiers=tiers, sightings=sightings)


def _index_with(table: HkvTable, keys: Array, snapshot: Snapshot) -> HkvIndex:
    """Returns a new index that has the keys."""
    index, facts, n = table.index, snapshot.facts, int(keys.size)
    capacity = int(facts.get("capacity", 0))
    num_slots = int(facts.get("num_slots", 0))
    is_same = (facts.get("bucket"), facts.get("segment")) == (index.bucket, index.segment_slots)
    if is_same and num_slots <= index.max_capacity and snapshot.slots.size == n:
        return index.with_keys_in(keys, snapshot.slots, num_slots, capacity)
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
    return index

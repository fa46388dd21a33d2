"""All that a table holds, taken out and put back: for checkpoints.

A table that comes back evicts, admits and expires as it would have done: scores, the number of the
lookup that last saw each key and its time, and the sightings of keys without a row come with the
keys. A full "hybrid" table must hold all of its keys again, and in another order of insertion some
might find both of their buckets full: so the slots are kept too, and used where buckets and
segments are of the same size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.publish import Action, publish, setting
from sok_lite.engine.hashing import is_seed, new_seed, seed_after
from sok_lite.engine.rows.column import Column
from sok_lite.engine.rows.state_owner import (
    Kinds,
    StateOwner,
    fitting,
    kinds_of,
    restored,
    warn_if_several_fit,
)
from sok_lite.engine.rows.store import RowStore
from sok_lite.engine.rows.tiers import RowTiers
from sok_lite.engine.table.base import EmbeddingTable
from sok_lite.engine.table.clock import Spans
from sok_lite.engine.table.det_index import DetIndex
from sok_lite.engine.table.dumped import forgetting
from sok_lite.engine.table.exclusive import alone, changing_alone
from sok_lite.engine.table.hkv import HkvTable
from sok_lite.engine.table.hkv_index import HkvIndex
from sok_lite.engine.table.lazy_rows import LazyRows
from sok_lite.engine.table.parts import COUNTERS


class Held(NamedTuple):
    """The keys of a table and what it knows of them, without their rows.

    Attributes:
      keys: (n,) of the table's key type, ascending.
      rows: (n,) uint32, their row numbers in the table that it was taken of.
      stamps: (n,) uint32, the number of the lookup that last saw each key.
      scores: (n,) uint64; (0,) where the stamps are the scores.
      slots: (n,) int64, the number of the slot of each key; (0,) of an "hbm" table, and where an
        index that failed to grow has segments of its own sizes.
      sighted_keys: (m,) int64, keys that were seen and have no row yet.
      sightings: (m,) uint32, how often.
      sighting_stamps: (m,) uint32, the number of the lookup that last saw each; 0: nobody knows, as
        in old checkpoints.
      facts: num_lookups, and spans, when those were, which old checkpoints do not have; of a
        "hybrid" table also capacity, strategy, epoch and where its slots are: bucket, segment,
        num_slots, hash_seed.
    """

    keys: Array
    rows: Array
    stamps: Array
    scores: Array
    slots: Array
    sighted_keys: Array
    sightings: Array
    sighting_stamps: Array
    facts: dict[str, Any]


class State(NamedTuple):
    """The rows of an optimizer state.

    Attributes:
      name, dim, initial: what the optimizer calls it, elements of a row, of a new row.
      rows: (n, dim) float32; of what is restored, LazyRows of such will do.
      group: the states of one optimizer have a number of their own; None: nobody knows what
        belongs together, as in old checkpoints.
    """

    name: str
    dim: int
    initial: float
    rows: Array
    group: int | None = None


class Snapshot(NamedTuple):
    """All that a table holds.

    Attributes:
      held: its keys; of those that are restored the row numbers are not used.
      values: (n, dim) of the row's storage dtype, in the order of the keys; of what
        is restored, LazyRows of such will do.
      states: of all optimizers.
    """

    held: Held
    values: Array
    states: Sequence[State] = ()


def take_held(table: EmbeddingTable) -> Held:
    """Returns the keys. Their row numbers are good as long as the caller holds `table.lock`."""
    return alone(table, lambda: _held(table))


def numbered_states(store: RowStore) -> list[tuple[int | None, str, Column]]:
    """Returns the number of its group, the name and the column of every optimizer state."""
    groups = store.state_groups
    grouped = [groups.get(None, {}), *(groups[owner] for owner in groups if owner)]
    return [
        (number or None, name, column)
        for number, group in enumerate(grouped)
        for name, column in group.items()
    ]


def _held(table: EmbeddingTable) -> Held:
    xp = table.backend.xp
    held = table.index.entries()
    keys = table.key_dtype.from_int64(xp, held.keys)
    order = xp.argsort(keys)
    scores, slots = xp.empty(0, np.uint64), xp.empty(0, np.int64)
    sighted_keys = xp.empty(0, np.int64)
    sightings = sighting_stamps = xp.empty(0, np.uint32)
    if isinstance(table, HkvTable):
        index = table.index
        if index.is_regular:
            slots = held.slots[order]
        if index.has_scores:
            scores = held.scores[order]
        if table.sightings is not None:
            sighted_keys, sightings, sighting_stamps = table.sightings.export()
    return Held(
        keys[order],
        held.rows[order],
        held.stamps[order],
        scores,
        slots,
        sighted_keys,
        sightings,
        sighting_stamps,
        facts_of(table),
    )


def facts_of(table: EmbeddingTable) -> dict[str, Any]:
    """Returns the facts of a table, as in Held: values that JSON knows."""
    facts: dict[str, Any] = {
        "num_lookups": table.num_lookups,
        "spans": table.clock.spans._asdict(),
    }
    if isinstance(table, HkvTable):
        index = table.index
        facts |= {
            "capacity": index.capacity,
            "bucket": index.bucket,
            "segment": index.segment_slots,
            "num_slots": index.num_slots - 2,
            "hash_seed": index.seed,
            "strategy": index.strategy,
            "epoch": index.epoch,
        }
    return facts


def restore(table: EmbeddingTable, snapshot: Snapshot) -> None:
    """Makes a table hold the keys of a snapshot and no others. Counters begin anew, and so does a
    log of removals.

    All that it is to hold is made beside what it holds, and takes its place in one piece. So until
    then there must be memory for both, unless the table is empty.

    The kinds and options of the two tables may differ: scores are taken over between equal
    strategies only, and else begin as those of new keys. Rows of the highest scores come near.

    Of the states those of an optimizer that uses the table go on with the first that fit. Where
    there are more such optimizers the others have copies, in the same order: one may be that of the
    checkpoint, made anew. Where none fit they begin anew. What nobody takes is free.

    Raises:
      ValueError: the keys do not fit the key type or `max_capacity`, or the snapshot contradicts
        itself. The table is as it was.
      MemoryError: no memory for keys and rows; the table is as it was.
    """
    changing_alone(table, lambda: publish_restored([table], [preparing(table, snapshot)]))


def publish_restored(
    tables: Sequence[EmbeddingTable], prepared: Sequence[Sequence[Action]]
) -> None:
    """Gives tables what `preparing` has made for each, all of them together."""
    old = [table.store for table in tables]  # kept: nothing of it is given back while it publishes
    publish([action for actions in prepared for action in actions])
    for store in old:
        store.close_far()


def preparing(table: EmbeddingTable, snapshot: Snapshot) -> list[Action]:
    """Prepares what `restore` does, for `publish_restored`. Hold the table from before it on.

    Raises:
      As of `restore`, and what reading LazyRows raises.
    """
    held = snapshot.held
    keys = table.key_dtype.to_int64(table.backend.xp, held.keys, f"keys of {table.name!r}")
    _check(table, held)
    _check_rows(table, snapshot)
    times = _times(table, held.facts)
    # No lookup has seen a key that is still to come: such a key would not be evicted or expire.
    latest = np.uint32(min(times[0], np.iinfo(np.uint32).max))
    seen, sighted = (
        table.backend.xp.minimum(each, latest) for each in (held.stamps, held.sighting_stamps)
    )
    snapshot = snapshot._replace(held=held._replace(stamps=seen, sighting_stamps=sighted))
    try:
        actions = _prepared(table, keys, snapshot)
    except MemoryError as error:
        size = f" Clear it first: it holds {table.size:,} keys." if table.size else ""
        raise MemoryError(
            f"No memory to restore {int(keys.size):,} keys of table {table.name!r}, beside what it "
            f"holds. It is as it was.{size} ({error})"
        ) from error
    counts = dict.fromkeys(COUNTERS, 0)
    clock = table.clock.restarting(*times)
    log = None if table.removals is None else table.removals.emptied(times[0])
    renewed = setting(table, _counts=counts, row_epoch=table.row_epoch + 1, removals=log)
    return [*actions, *clock, *renewed, *forgetting(table)]


def _prepared(table: EmbeddingTable, keys: Array, snapshot: Snapshot) -> list[Action]:
    """Makes what the table is to hold, and returns the actions that give it that."""
    if isinstance(table, HkvTable):
        return _prepared_hybrid(table, keys, snapshot)
    assert isinstance(table.index, DetIndex)
    index = table.index.emptied()
    index.make_room(int(keys.size))
    stamps = snapshot.held.stamps
    store, rows = _new_store(table, stamps, snapshot)
    index.insert(keys, rows, 1)
    publish(index.updating(keys, stamps=stamps))
    return setting(table, index=index, store=store)


def _new_store(table: EmbeddingTable, scores: Array, snapshot: Snapshot) -> tuple[RowStore, Array]:
    """Returns a new row store, and the row of each key.

    Args:
      scores: (n,) unsigned, of the keys; where there are two tiers, the highest get near rows.
    """
    xp, old = table.backend.xp, table.store
    store = old.emptied()
    rows = xp.empty(scores.size, np.uint32)
    order = xp.argsort(~scores)  # descending: ~ turns unsigned numbers round
    rows[order] = store.allocate(int(scores.size))
    states = snapshot.states
    _write(store, rows, snapshot.values)
    owners: dict[int | None, StateOwner | None] = {state.group: StateOwner() for state in states}
    owners[None] = None
    for state in states:
        kinds = {state.name: (state.dim, state.initial)}
        (column,) = store.add_states(kinds, owners[state.group])
        _write(store, rows, state.rows, column.name)
    copied: list[Kinds] = []
    for owner, its_states in old.state_groups.items():
        if owner is None or owner.optimizer is None:
            continue
        kinds, owner = kinds_of(its_states), StateOwner(owner.reference, is_restored=True)
        saved, given = fitting(store.state_groups, kinds), restored(store.state_groups, kinds)
        warn_if_several_fit(table.name, store.state_groups, kinds)
        if saved is not None:
            publish(store.giving(saved.values(), owner))
        elif given:
            store.copy_states(
                given[copied.count(kinds) % len(given)], store.add_states(kinds, owner)
            )
            copied.append(kinds)
        else:
            store.add_states(kinds, StateOwner(owner.reference))
    return store, rows


def _write(store: RowStore, rows: Array, content: Array | LazyRows, column: str = "value") -> None:
    if isinstance(content, LazyRows):
        for at, piece in content.read():
            store.write(rows[at], piece, column)
    else:
        store.write(rows, store.backend.xp.ascontiguousarray(content), column)


def _check(table: EmbeddingTable, held: Held) -> None:
    n = int(held.keys.size)
    sizes = {
        "stamps": ({n}, held.stamps),
        "scores": ({0, n}, held.scores),
        "slots": ({0, n}, held.slots),
        "sightings": ({int(held.sighted_keys.size)}, held.sightings),
        "numbers of sightings": ({int(held.sighted_keys.size)}, held.sighting_stamps),
    }
    for name, (expected, array) in sizes.items():
        if int(array.size) not in expected:
            raise ValueError(
                f"What was saved of table {table.name!r} is corrupt: {array.size:,} {name} for "
                f"{n:,} keys."
            )
    if bool((held.keys[1:] <= held.keys[:-1]).any()):
        raise ValueError(f"What was saved of table {table.name!r} is corrupt: its keys repeat.")


def _times(table: EmbeddingTable, facts: dict[str, Any]) -> tuple[int, Spans | None]:
    """Returns the number of the last lookup, and when there were lookups if that was saved."""
    now = int(facts["num_lookups"])
    try:
        return now, Spans.of(facts["spans"], now) if "spans" in facts else None
    except ValueError as error:
        raise ValueError(f"What was saved of table {table.name!r} is corrupt: {error}.") from error


def _check_rows(table: EmbeddingTable, snapshot: Snapshot) -> None:
    n = int(snapshot.held.keys.size)
    parts = [("rows", table.dim, snapshot.values)]
    parts += [(f"rows of state {s.name!r}", s.dim, s.rows) for s in snapshot.states]
    for what, dim, rows in parts:
        if rows.shape != (n, dim):
            raise ValueError(
                f"What was saved of table {table.name!r} is corrupt: {what} must have shape "
                f"({n}, {dim}), one for each key. Received: shape {tuple(rows.shape)}."
            )


def _prepared_hybrid(table: HkvTable, keys: Array, snapshot: Snapshot) -> list[Action]:
    xp, held = table.backend.xp, snapshot.held
    facts = held.facts
    index = _index_with(table, keys, held)
    # Scores and epochs of another strategy say nothing here.
    is_same = facts.get("strategy") == index.strategy
    index.epoch = int(facts["epoch"]) if is_same else table.index.epoch
    scores = None
    if index.has_scores:
        scores = (
            held.scores
            if is_same and held.scores.size == keys.size
            else index.initial_scores(held.stamps)
        )
    hottest = held.stamps if scores is None else scores
    store, rows = _new_store(table, hottest, snapshot)
    tiers = RowTiers(store)
    tiers.assigned(rows, keys)
    publish(index.updating(keys, rows, scores, held.stamps))
    sightings = table.sightings
    if sightings is not None:
        sightings = sightings.emptied()
        stamps = held.sighting_stamps
        stamps = xp.where(stamps == 0, np.uint32(facts["num_lookups"]), stamps)
        sightings.restore(held.sighted_keys, held.sightings, stamps)
    return setting(table, index=index, store=store, tiers=tiers, sightings=sightings)


# The largest index that is made because a file says so: so many slots, or so many a key. Fewer keys
# than that find room in any smaller one.
_SMALL, _MOST_SLOTS_A_KEY = 1 << 16, 64
# Seeds that are tried where keys must have other slots than they had: a full table of small buckets
# may have no room for all of them by one seed, and room by another.
_MOST_SEEDS = 4


def _index_with(table: HkvTable, keys: Array, held: Held) -> HkvIndex:
    """Returns a new index that has the keys."""
    index, facts, n = table.index, held.facts, int(keys.size)
    capacity = int(facts.get("capacity", 0))
    num_slots = int(facts.get("num_slots", 0))
    is_same = (facts.get("bucket"), facts.get("segment")) == (index.bucket, index.segment_slots)
    # As of an index that has so many slots, or the next size that it grows to step by step.
    is_capacity = capacity.bit_count() == 1 and capacity <= num_slots < 2 * capacity
    is_capacity &= num_slots <= min(index.max_capacity, max(_SMALL, _MOST_SLOTS_A_KEY * n))
    if is_same and is_capacity and held.slots.size == n:
        # Files of before there were seeds name none.
        seed = facts.get("hash_seed", 0)
        if not is_seed(seed):
            raise ValueError(
                f"What was saved of table {table.name!r} is corrupt: {seed!r} is no seed of a "
                "hash. Nothing was changed."
            )
        # Where there is no key, nothing depends on a seed that the file makes known.
        seed = seed if n else new_seed()
        return index.with_keys_in(keys, held.slots, num_slots, capacity, seed)
    seed = new_seed()
    for _ in range(_MOST_SEEDS):
        other = index.emptied(seed=seed)
        other.make_room(n)
        num_refused = other.insert_all(keys)
        if not num_refused:
            return other
        seed = seed_after(seed)
    room = f"{capacity:,} slots in buckets of {facts['bucket']}" if capacity else "no limit"
    raise ValueError(
        f"Table {table.name!r} has no room for {num_refused:,} of the {n:,} keys that were "
        f"saved: max_capacity is {index.max_capacity:,} slots, in buckets of {index.bucket}. "
        f"They come from a table with {room}. Nothing was changed. Use a larger max_capacity."
    )

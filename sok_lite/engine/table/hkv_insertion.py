"""New keys of a "hybrid" table: it grows, or they take the places of others, or are refused."""

import contextlib
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.backend.publish import Action, plan_set, publish
from sok_lite.engine.rows.allocator import Claim
from sok_lite.engine.rows.store import NO_ROW, RowStore
from sok_lite.engine.table.counters import Count, counter
from sok_lite.engine.table.hkv_placing import (
    Placed,
    plan_reserve,
    plan_take_back,
    unplaced,
)
from sok_lite.engine.table.insertion import plan_content
from sok_lite.engine.table.results import Evicted
from sok_lite.engine.table.stages import COMMIT, RESERVE, NewKeys, Stage, Stages, WithRows

if TYPE_CHECKING:
    from sok_lite.engine.table.hkv import HkvTable


class _Eviction(NamedTuple):
    """An insertion that has evicted, before the counters know of it.

    Attributes:
      num_keys: how many were to be inserted.
      are_updated: whether they came with an update, which leaves out those that are refused.
      claim: rows from which they took theirs where a slot was free.
      counters: (len(Count),) int64, what the kernels have counted.
      size: of the index before.
      before: the counters before.
    """

    num_keys: int
    are_updated: bool
    claim: Claim
    counters: Array
    size: int
    before: dict[str, int]


def insertion_stages(
    table: "HkvTable",
    new: NewKeys,
    before: list[Action],
    after: WithRows,
    counters: Array,
    evicted: list[Evicted] | None = None,
) -> Stages:
    """Gives rows to new keys: the table grows, or evicts others, or refuses some of them.

    Args:
      before: actions to be taken along, in front; none of the index, which may grow first.
      after: prepares those to be taken when the keys have their rows; NO_ROW if refused.
      counters: (len(Count),) int64, of this table.
      evicted: grows by what was evicted; None: it is not wanted.
    """
    n = int(new.keys.size)
    new = _with_pending_counts(table, new)
    claim = table.make_room(n)
    index, num_refused, has_new_seed = table.index, 0, False
    while not index.is_full_size or (index.is_sparse(n) and not has_new_seed):
        # Both buckets of a key can be full before the table is: then it grows early rather than
        # lose a key.
        placed = unplaced(table.backend, n)
        undo = [plan_take_back(index, new.keys, placed), *plan_set(table, unfinished=None)]
        undoing = plan_set(table, unfinished=partial(publish, undo))
        place = _plan_reserve(table, new, placed, counters)
        counted = yield Stage(RESERVE, [place, *undoing], is_counted=True)
        if counted[Count.REFUSED] == num_refused:
            yield from _giving_rows(table, new, claim, placed, before, after, counters)
            return
        num_refused = counted[Count.REFUSED]
        yield Stage(RESERVE, undo)
        if not index.is_sparse(n):
            index.double()
            continue
        if has_new_seed:
            raise index.error_of_chosen_keys()
        has_new_seed = True
        _take_new_seed(table)
    yield from _evicting(table, new, claim, before, after, counters, evicted)


def _take_new_seed(table: "HkvTable") -> None:
    """Gives the keys of a sparse index other places, if it can."""
    if table.index.is_full_size:
        with contextlib.suppress(MemoryError):  # then it evicts
            table.index.take_new_seed()
    elif not table.index.take_new_seed():
        raise table.index.error_of_chosen_keys()


def _with_pending_counts(table: "HkvTable", new: NewKeys) -> NewKeys:
    """Adds the pending counts of new keys to their scores: so no count ever falls."""
    has_scores = new.are_scores and new.scores is not None
    if table.pending is None or not table.counts_repeats or has_scores:
        return new
    xp = table.backend.xp
    added = np.uint64(1) if new.scores is None else new.scores
    scores = table.pending.of(new.keys).astype(np.uint64) + added
    scores = xp.where(scores < added, ~np.uint64(0), scores)
    return new._replace(scores=scores, are_scores=False)


def _plan_reserve(
    table: "HkvTable",
    new: NewKeys,
    placed: Placed,
    counters: Array,
    claim: Claim | None = None,
    rows: Array | None = None,
) -> Action:
    """Prepares `plan_reserve`; with a claim new keys may evict others, and all get `rows`."""
    counts = counter(counters, Count.REFUSED, Count.EVICTED)
    return plan_reserve(
        *(table.index, new.keys, new.lookup_number, new.scores, placed, counts, claim, rows),
        are_scores=new.are_scores,
        scores_follow=table.sees_updates,
    )


def _giving_rows(
    table: "HkvTable",
    new: NewKeys,
    claim: Claim,
    placed: Placed,
    before: list[Action],
    after: WithRows,
    counters: Array,
) -> Stages:
    """Gives rows to new keys all of which have found a free slot."""
    index, n, rows = table.index, int(new.keys.size), claim.rows
    actions = [
        *before,
        *table.store.plan_list(claim, placed.slots),
        plan_content(table, new, rows),
        *table.store.plan_take(claim),
        *table.tiers.plan_assign(rows, new.keys),
        *plan_set(index.record, size=index.size + n),
        *table.plan_count(inserted=n),
        *after(rows),
    ]
    if table.pending is None:
        yield Stage(COMMIT, [*actions, *plan_set(table, unfinished=None)])
    else:
        num_forgotten = counter(counters, Count.FORGOTTEN)
        forget = table.pending.plan_erase_found(new.keys, rows, num_forgotten)
        settling = plan_set(table, unfinished=partial(_settle_pending, table, num_forgotten))
        counted = yield Stage(COMMIT, [*actions, forget, *settling], is_counted=True)
        publish(_forgot(table, counted[Count.FORGOTTEN]))
    table.finish()


def _evicting(
    table: "HkvTable",
    new: NewKeys,
    claim: Claim,
    before: list[Action],
    after: WithRows,
    counters: Array,
    evicted: list[Evicted] | None,
) -> Stages:
    """Inserts new keys into a table that grows no more.

    Which keys go is known when it has happened, so the counters follow in a second step.
    """
    xp, index, store, n = table.backend.xp, table.index, table.store, int(new.keys.size)
    placed, rows = unplaced(table.backend, n), xp.empty(n, np.uint32)
    eviction = _Eviction(n, new.are_updated, claim, counters, index.size, table.counters.by_name())
    reading, forgetting, logging = [], [], []
    if table.removals is not None:
        num_again = counter(counters, Count.LOGGED)
        those = (placed.evicted_keys, placed.evicted_rows, new.lookup_number)
        logging = table.removals.plan_note_evicted(*those, min(n, index.size), num_again)
    if evicted is not None:
        last_values = store.output(n)
        reading = [store.plan_read(placed.evicted_rows, last_values)]
    if table.pending is not None:
        num_forgotten = counter(counters, Count.FORGOTTEN)
        forgetting = [table.pending.plan_erase_found(new.keys, rows, num_forgotten)]
    actions = [
        *plan_set(table, unfinished=partial(_settle, table, eviction)),
        *before,
        *store.plan_take(claim),
        _plan_reserve(table, new, placed, counters, claim, rows),
        *logging,
        *reading,
        *_plan_first_states(store, rows, placed.evicted_rows),
        plan_content(table, new, rows),
        *table.tiers.plan_assign(rows, new.keys),
        *after(rows),
        *forgetting,
    ]
    _settle(table, eviction, (yield Stage(COMMIT, actions, is_counted=True)))
    table.finish()
    if evicted is not None:
        has_evicted = placed.evicted_rows != np.uint32(NO_ROW)
        evicted.append(
            Evicted(
                placed.evicted_keys[has_evicted],
                last_values[has_evicted],
                placed.evicted_scores[has_evicted],
            )
        )


def _plan_first_states(store: RowStore, rows: Array, evicted_rows: Array) -> list[Action]:
    """Prepares to give rows (n,) uint32 their first states; new memory has zeros."""
    has_values = store.states_with_values
    return [
        store.plan_fill(state, rows if state in has_values else evicted_rows)
        for state in store.state_names
    ]


def _settle(table: "HkvTable", eviction: _Eviction, counted: list[int] | None = None) -> None:
    """Brings the counters to what the kernels have done. It can be done again.

    Args:
      counted: what they have counted; None: it is read.
    """
    if counted is None:
        counted = table.backend.to_host(eviction.counters).tolist()
    num_placed, num_evicted = counted[Count.PLACED], counted[Count.EVICTED]
    num_keys, before = eviction.num_keys, eviction.before
    num_refused = num_keys - num_placed
    counts = {
        "inserted": before["inserted"] + num_placed,
        "evicted": before["evicted"] + num_evicted,
        "refused": before["refused"] + num_refused,
        "not_updated": before["not_updated"] + num_refused * eviction.are_updated,
    }
    used = min(counted[Count.USED], int(eviction.claim.rows.size))
    publish(
        [
            *table.store.plan_take(eviction.claim, used),
            *plan_set(table.index.record, size=eviction.size + num_placed - num_evicted),
            *plan_set(table.counters, **counts),
            *(table.plan_renew() if num_evicted else ()),
            *plan_set(table, refused=(num_refused, num_keys)),
            *(table.removals.erased(counted[Count.LOGGED], num_evicted) if table.removals else ()),
            *_forgot(table, counted[Count.FORGOTTEN]),
        ]
    )


def _settle_pending(table: "HkvTable", num_forgotten: Array) -> None:
    """Brings the number of pending keys to what the kernels have done."""
    publish(_forgot(table, int(num_forgotten[0])))


def _forgot(table: "HkvTable", count: int) -> list[Action]:
    forgot = [] if table.pending is None else table.pending.erased(count)
    return [*forgot, *plan_set(table, unfinished=None)]

"""A lookup in several tables at once: all keys are looked for by one launch for all tables.

Only where keys are missing more is done; see engine/table/new_keys.py.
"""

from collections.abc import Sequence
from itertools import starmap
from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import Work, joined_launches
from sok_lite.backend.publish import Action, publish
from sok_lite.backend.ragged import split, split_offsets
from sok_lite.engine.table.clock import Clock
from sok_lite.engine.table.counters import Count, new_counters
from sok_lite.engine.table.finding import count_found, plan_begin_lookup
from sok_lite.engine.table.new_keys import Incomplete, LookupRequest, Output, complete, pooling
from sok_lite.engine.table.occurrences import occurrences
from sok_lite.engine.table.tiering import access_counts, plan_score_update, rebalance_if_due

# What a search tells.
_TOLD = [Count.MISSING, Count.SEEN, Count.WRONG_SPLITS]


class WrongSplitsError(ValueError):
    """Row splits do not rise from 0 to the number of keys."""


def look_up(backend: Backend, keys: Array, rows: Array, request: LookupRequest) -> int:
    """Does what `look_up_batch` does, for one table."""
    return look_up_batch(backend, keys, rows, [request])[0]


def look_up_batch(
    backend: Backend,
    keys: Array,
    rows: Array,
    requests: Sequence[LookupRequest],
    extra_actions: Sequence[Sequence[Action]] = (),
    begun: Array | None = None,
    is_lookup: bool = True,
) -> list[int]:
    """Finds keys, inserts those that are missing, and writes row numbers and rows.

    Args:
      keys: (n,) int64, which may repeat; those of each table follow those of the table before.
      rows: (n,) uint32, gets the row numbers.
      requests: to tables, all of them different and each in a call that may change it.
      extra_actions: lists of actions to be taken when new keys get their rows; there are such keys
        then.
      begun: the counters (num_tables, len(Count)), on the host, of a search that was made under the
        same locks, with the clocks' next numbers: `rows` and the results have what it has found.
        None: none was.
      is_lookup: whether what is found and missing counts as that of a lookup.

    Returns:
      How many keys have no row afterwards, for each table.

    Raises:
      MemoryError: no memory for new keys. Each table is as it was or as it is to be.
      WrongSplitsError: row splits of an output do not fit its keys. Nothing was inserted.
    """
    if begun is None:
        requests = _with_occurrences(backend, keys, requests)
        counters = _search(backend, keys, rows, requests)
        found = backend.to_host(counters)
    else:
        counters, found = backend.from_host(begun), begun
    missing, seen, wrong_splits = found[:, _TOLD].T.tolist()
    if any(wrong_splits):
        raise WrongSplitsError("Row splits do not rise from 0 to the number of keys.")
    if is_lookup:
        for request, num_missing in zip(requests, missing, strict=True):
            if num_missing:
                count_found(request.table, request.size, num_missing)
            else:
                request.table.counters.found += request.size
    touching = [
        plan_score_update(request.table, num_seen, None)
        for request, num_missing, num_seen in zip(requests, missing, seen, strict=True)
        if request.insert and not num_missing and not request.table.keeps_every_key
    ]
    publish(*[actions for actions in touching if actions])
    if not any(starmap(_is_incomplete, zip(requests, missing, strict=True))):
        return missing
    sizes = np.array([each.size for each in requests], np.int64)
    search = Incomplete(counters, found.tolist(), split_offsets(sizes))
    return complete(backend, keys, rows, requests, search, extra_actions)


def _is_incomplete(request: LookupRequest, num_missing: int) -> bool:
    """Whether more is to be done for missing keys than to give zeros, which the search does."""
    draws = request.missing == "initial" and bool(request.outputs)
    return num_missing > 0 and (request.insert or draws)


def _search(backend: Backend, keys: Array, rows: Array, requests: Sequence[LookupRequest]) -> Array:
    """Begins a lookup and finds the keys that are there; returns the counters of each table."""
    inserting = [each.table for each in requests if each.insert]
    for table in [table for table in inserting if not table.keeps_every_key]:
        rebalance_if_due(table)
    beginning = Clock.plan_tick_alike([table.clock for table in inserting])
    if beginning is None:
        beginning = [action for table in inserting for action in plan_begin_lookup(table)]
    # 0 of a lookup that inserts nothing, and notes nothing.
    lookup_numbers = [each.table.clock.now + 1 if each.insert else 0 for each in requests]
    counters = new_counters(backend, len(requests))
    publish([*beginning, *_plan_find(keys, rows, requests, lookup_numbers, counters)])
    return counters


def _with_occurrences(
    backend: Backend, keys: Array, requests: Sequence[LookupRequest]
) -> Sequence[LookupRequest]:
    """Returns requests that tell tables which count repeats how often each key comes."""
    counting = [
        i
        for i, each in enumerate(requests)
        if each.insert and each.table.counts_repeats and not each.unique_keys
    ]
    if not counting:
        return requests
    sizes, scores = [each.size for each in requests], [each.caller_scores for each in requests]
    scores = occurrences(backend, split(keys, sizes), scores, counting)
    return [each._replace(caller_scores=its) for each, its in zip(requests, scores, strict=True)]


def _plan_find(
    keys: Array,
    rows: Array,
    requests: Sequence[LookupRequest],
    lookup_numbers: Sequence[int],
    counters: Array,
) -> list[Action]:
    """Prepares to find the keys of tables, and to give the rows of those that are found.

    Args:
      lookup_numbers: number of this lookup for each table; 0: it inserts and notes nothing.
    """
    sizes = [each.size for each in requests]
    # Scores of the caller's are more than a kernel takes that does both.
    pools_at_once = all(each.caller_scores is None for each in requests)
    parts: list[tuple[Backend, str, Work]] = []
    for each, its_keys, its_rows, lookup_number, counts in zip(
        requests, split(keys, sizes), split(rows, sizes), lookup_numbers, counters, strict=True
    ):
        arrays = (its_keys, its_rows, counts)
        if pools_at_once and each.table.backend.name == "cpu" and _is_pooled(each):
            parts += _finding_and_pooling(each, lookup_number, *arrays)
        else:
            parts += _finding_of(each, lookup_number, *arrays)
    return joined_launches(parts)


def _is_pooled(request: LookupRequest) -> bool:
    return bool(request.outputs) and request.outputs[0].row_splits is not None


def _finding_and_pooling(
    request: LookupRequest, lookup_number: int, keys: Array, rows: Array, counts: Array
) -> list[tuple[Backend, str, Work]]:
    """Returns a search that pools the rows of keys as they are found, on a CPU."""
    table = request.table
    accesses = access_counts(table) if lookup_number else None
    search = (*table.index.place(), *table.index.seen_arguments(lookup_number, accesses))
    parts = []
    for output in request.outputs:
        batch, arguments = _pooled(output, rows, counts)
        its_keys = keys[output.first : output.end]
        work = Work(batch, (*search, its_keys, *table.store.place(), *arguments))
        parts.append((table.backend, "find_and_pool", work))
    return parts


def _finding_of(
    request: LookupRequest, lookup_number: int, keys: Array, rows: Array, counts: Array
) -> list[tuple[Backend, str, Work]]:
    table, outputs, is_pooled = request.table, request.outputs, _is_pooled(request)
    backend = table.backend
    accesses = access_counts(table) if lookup_number else None
    copying = None
    if outputs and not is_pooled:
        gives_zeros = not request.insert and request.missing == "zeros"
        if gives_zeros and backend.name != "cpu":
            outputs[0].out.fill(0)  # a kernel has no registers for it
        copying = table.store.copying(outputs[0].out, gives_zeros)
    find = table.index.plan_search(
        keys, lookup_number, request.caller_scores, accesses, copying, (rows, counts)
    ).launch
    parts = [(backend, find.kernel, find.part)]
    if is_pooled:
        *where, _ = table.store.place()
        kernel = f"pool_{table.row_dtype.suffix}"
        for output in outputs:
            batch, arguments = _pooled(output, rows, counts)
            parts.append((backend, kernel, Work(batch, (*where, *arguments, 0))))
    return parts


def _pooled(output: Output, rows: Array, counts: Array) -> tuple[int, tuple[Any, ...]]:
    """Returns the rows of a pooled output, and what a kernel takes that pools them."""
    batch, how = pooling(output)
    num_items = output.end - output.first
    rows = rows[output.first : output.end]
    return batch, (rows, *how, output.out, counts, num_items, batch)

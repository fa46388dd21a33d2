"""A lookup in several tables at once: all keys are looked for by one launch for all tables.

Only where keys are missing more is done; see engine/table/new_keys.py.
"""

from collections.abc import Callable, Sequence
from itertools import compress, starmap
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import Work, joined_column_launches, joined_launches
from sok_lite.backend.publish import Action, publish
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.rows.access import store_words
from sok_lite.engine.segments import cut
from sok_lite.engine.table.clock import Clock
from sok_lite.engine.table.counters import Count, new_counters
from sok_lite.engine.table.finding import count_found, plan_begin_lookup
from sok_lite.engine.table.index import place_words
from sok_lite.engine.table.new_keys import Incomplete, LookupRequest, Output, complete, pooling
from sok_lite.engine.table.occurrences import occurrences
from sok_lite.engine.table.parts import TableParts
from sok_lite.engine.table.tiering import access_counts, plan_score_update, rebalance_if_due

# What a search tells.
_TOLD = [Count.MISSING, Count.SEEN, Count.WRONG_SPLITS]


class WrongSplitsError(ValueError):
    """Row splits do not rise from 0 to the number of keys."""


class BatchedLookup(NamedTuple):
    """A lookup in several tables.

    Attributes:
      tables: all different, each in a call that may change it.
      inserts: of each table, whether keys without a row get one.
      sizes: of each table, number of its keys.
      requests: gives all of it, table by table.
      columns: of pooled rows, what kernels are told; None: `requests` say it.
      is_lookup: whether what is found and missing counts as that of a lookup.
    """

    tables: Sequence[TableParts]
    inserts: Sequence[bool]
    sizes: Sequence[int]
    requests: Callable[[], Sequence[LookupRequest]]
    columns: "LaunchColumns | None" = None
    is_lookup: bool = True


class PooledParts(NamedTuple):
    """The columns, (num_outputs,) int64, by which a kernel finds pooled outputs that lie one after
    another. They depend on sizes only, so that a `Layout` keeps them.

    Attributes:
      table: which of the tables each belongs to, a list; in ascending order.
      num_rows: rows of each, a list.
      numbers: (2, num_outputs), keys and rows of each.
      first: where its keys begin, among those of all tables.
      row_splits: bytes before its row splits.
      combiner: numbers of COMBINERS.
      no_weights: zeros.
    """

    table: list[int]
    num_rows: list[int]
    numbers: np.ndarray
    first: np.ndarray
    row_splits: np.ndarray
    combiner: np.ndarray
    no_weights: np.ndarray


class LaunchColumns(NamedTuple):
    """Outputs of all tables, as the kernel is told of them: (num_outputs,) int64.

    Attributes:
      parts: what it is told of all batches that lie alike.
      row_splits, out: addresses.
      weights: addresses, 0 for none.
      arrays: whose addresses they are.
    """

    parts: PooledParts
    row_splits: np.ndarray
    weights: np.ndarray
    out: np.ndarray
    arrays: Any


def batched(requests: Sequence[LookupRequest]) -> BatchedLookup:
    """Returns the requests to tables, all of them different, as one lookup."""
    return BatchedLookup(
        tables=[each.table for each in requests],
        inserts=[each.insert for each in requests],
        sizes=[each.size for each in requests],
        requests=lambda: requests,
    )


def look_up(backend: Backend, keys: Array, rows: Array, request: LookupRequest) -> int:
    """Does what `look_up_batch` does, for one table."""
    return look_up_batch(backend, keys, rows, batched([request]))[0]


def look_up_batch(
    backend: Backend,
    keys: Array,
    rows: Array,
    lookup: BatchedLookup,
    extra_actions: Sequence[Sequence[Action]] = (),
    begun: Array | None = None,
) -> list[int]:
    """Finds keys, inserts those that are missing, and writes row numbers and rows.

    Args:
      keys: (n,) int64, which may repeat; those of each table follow those of the table before.
      rows: (n,) uint32, gets the row numbers.
      lookup: what the tables are to do.
      extra_actions: lists of actions to be taken when new keys get their rows; there are such keys
        then.
      begun: the counters (num_tables, len(Count)), on the host, of a search that was made under the
        same locks, with the clocks' next numbers: `rows` and the results have what it has found.
        None: none was.

    Returns:
      How many keys have no row afterwards, for each table.

    Raises:
      MemoryError: no memory for new keys. Each table is as it was or as it is to be.
      WrongSplitsError: row splits of an output do not fit its keys. Nothing was inserted.
    """
    if begun is None:
        lookup = _with_occurrences(backend, keys, lookup)
        counters = _search(backend, keys, rows, lookup)
        found = backend.to_host(counters)
    else:
        counters, found = backend.from_host(begun), begun
    tables, sizes = lookup.tables, lookup.sizes
    inserting = list(compress(tables, lookup.inserts))
    missing, seen, wrong_splits = found[:, _TOLD].T.tolist()
    if any(wrong_splits):
        raise WrongSplitsError("Row splits do not rise from 0 to the number of keys.")
    if lookup.is_lookup:
        for table, size, num_missing in zip(tables, sizes, missing, strict=True):
            if num_missing:
                count_found(table, size, num_missing)
            else:
                table.counters.found += size
    if [table for table in inserting if not table.keeps_every_key]:
        of_tables = zip(tables, lookup.inserts, missing, seen, strict=True)
        touching = [
            plan_score_update(table, num_seen, None)
            for table, insert, num_missing, num_seen in of_tables
            if insert and not num_missing and not table.keeps_every_key
        ]
        publish(*[actions for actions in touching if actions])
    if not any(missing):
        return missing
    requests = lookup.requests()
    if not any(starmap(_is_incomplete, zip(requests, missing, strict=True))):
        return missing
    search = Incomplete(counters, found.tolist(), split_offsets(np.array(sizes, np.int64)))
    return complete(backend, keys, rows, requests, search, extra_actions)


def _is_incomplete(request: LookupRequest, num_missing: int) -> bool:
    """Whether more is to be done for missing keys than to give zeros, which the search does."""
    draws = request.missing == "initial" and bool(request.outputs)
    return num_missing > 0 and (request.insert or draws)


def _search(backend: Backend, keys: Array, rows: Array, lookup: BatchedLookup) -> Array:
    """Begins a lookup and finds the keys that are there; returns the counters of each table."""
    tables = lookup.tables
    inserting = list(compress(tables, lookup.inserts))
    for table in [table for table in inserting if not table.keeps_every_key]:
        rebalance_if_due(table)
    beginning = Clock.plan_tick_alike([table.clock for table in inserting])
    if beginning is None:
        beginning = [action for table in inserting for action in plan_begin_lookup(table)]
    # 0 of a lookup that inserts nothing, and notes nothing.
    lookup_numbers = [
        table.clock.now + 1 if insert else 0
        for table, insert in zip(tables, lookup.inserts, strict=True)
    ]
    counters = new_counters(backend, len(tables))
    if lookup.columns is None:
        finding = _plan_find(keys, rows, lookup.requests(), lookup_numbers, counters)
    else:
        finding = _plan_find_and_pool(backend, keys, rows, lookup, lookup_numbers, counters)
    publish([*beginning, *finding])
    return counters


def _with_occurrences(backend: Backend, keys: Array, lookup: BatchedLookup) -> BatchedLookup:
    """Returns a request that tells tables which count repeats how often each key comes."""
    counting = [
        i
        for i, (table, insert) in enumerate(zip(lookup.tables, lookup.inserts, strict=True))
        if insert and table.counts_repeats
    ]
    if not counting:
        return lookup
    requests = list(lookup.requests())
    counting = [i for i in counting if not requests[i].unique_keys]
    scores = occurrences(
        backend, cut(keys, lookup.sizes), [each.caller_scores for each in requests], counting
    )
    requests = [
        each._replace(caller_scores=its) for each, its in zip(requests, scores, strict=True)
    ]
    return lookup._replace(requests=lambda: requests, columns=None)


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
    parts: list[tuple[Backend, str, Work]] = []
    for each, its_keys, its_rows, lookup_number, counts in zip(
        requests, cut(keys, sizes), cut(rows, sizes), lookup_numbers, counters, strict=True
    ):
        parts += _finding_of(each, its_keys, its_rows, lookup_number, counts)
    return joined_launches(parts)


def _finding_of(
    request: LookupRequest, keys: Array, rows: Array, lookup_number: int, counts: Array
) -> list[tuple[Backend, str, Work]]:
    table, outputs = request.table, request.outputs
    backend = table.backend
    accesses = access_counts(table) if lookup_number else None
    is_pooled = bool(outputs) and outputs[0].row_splits is not None
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
            parts.append((backend, kernel, Work(batch, (*where, *arguments))))
    return parts


def _pooled(output: Output, rows: Array, counts: Array) -> tuple[int, tuple[Any, ...]]:
    """Returns the rows of a pooled output, and what a kernel takes that pools them."""
    batch, how = pooling(output)
    num_items = output.end - output.first
    rows = rows[output.first : output.end]
    return batch, (rows, *how, output.out, counts, num_items, batch, 0)


def _plan_find_and_pool(
    backend: Backend,
    keys: Array,
    rows: Array,
    lookup: BatchedLookup,
    lookup_numbers: Sequence[int],
    counters: Array,
) -> list[Action]:
    """Prepares to find the keys of tables and to pool their rows, all tables by the same launches.

    For 26 tables Python takes longer to say what to do than kernels to do it. So what is told of
    each table is kept as words, and the rest is made for all of them at once.
    """
    columns, tables = lookup.columns, lookup.tables
    assert columns is not None
    parts, address, num_tables = columns.parts, backend.address, len(tables)
    notes = np.zeros((num_tables, 5), np.int64)
    notes[:, 0] = lookup_numbers
    arrays = [keys, rows, counters, columns.arrays]
    for i in [i for i, table in enumerate(tables) if not table.keeps_every_key]:
        _, strategy, epoch, counts, is_counting = tables[i].index.seen_arguments(
            lookup_numbers[i], access_counts(tables[i]) if lookup_numbers[i] else None
        )
        arrays.append(counts)
        notes[i, 1:] = strategy, epoch, 0 if counts is None else address(counts), is_counting
    indexes = place_words([table.index for table in tables])
    stores = store_words([table.store for table in tables])
    counts = address(counters) + counters.strides[0] * np.arange(num_tables)
    actions: list[Action] = []
    if backend.name != "cpu":
        sizes = np.array(lookup.sizes, np.int64)
        first = split_offsets(sizes)[:-1]
        its_keys, its_rows = address(keys) + 8 * first, address(rows) + 4 * first
        search = (indexes, notes[:, :3], 0, notes[:, 3:], 0, 0, 0)
        found = (its_keys, its_rows, 0, 0, counts, sizes)
        kernels = [(table.backend, "find") for table in tables]
        actions += joined_column_launches(kernels, lookup.sizes, [*search, *found], arrays)
    if len(parts.table) > num_tables:  # a table has several outputs
        indexes, notes, stores, counts = (
            words[parts.table] for words in (indexes, notes, stores, counts)
        )
    its_rows = address(rows) + 4 * parts.first
    pooling = (columns.row_splits, columns.weights, parts.combiner, columns.out, counts)
    if backend.name == "cpu":
        its_keys = address(keys) + 8 * parts.first
        arguments = [indexes, notes, its_keys, stores, its_rows, *pooling, parts.numbers.T]
        return backend.joined_columns("find_and_pool", parts.num_rows, arguments, arrays)
    kernels = [(tables[t].backend, f"pool_{tables[t].row_dtype.suffix}") for t in parts.table]
    arguments = [stores[:, :3], its_rows, *pooling, parts.numbers.T, 0]
    return actions + joined_column_launches(kernels, parts.num_rows, arguments, arrays)

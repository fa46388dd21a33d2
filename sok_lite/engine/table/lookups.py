"""A lookup in several tables at once.

All keys are looked for first, by one launch for all tables. Only where keys are missing more is
done: they are deduplicated, admitted, given rows and inserted, and what they belong to is written
once more.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.publish import Action, publish
from sok_lite.engine.pooling import COMBINERS
from sok_lite.engine.rows.store import ABSENT
from sok_lite.engine.segments import unique
from sok_lite.engine.table.index import NUM_COUNTS
from sok_lite.engine.table.insertion import Inserts, NewKeys


class Output(NamedTuple):
    """Rows that a lookup gives, of keys that lie one behind another.

    Attributes:
      out: gets them: (m, dim) of the storage dtype from `store.output`; pooled, (batch, dim)
        float32.
      first, end: which of the table's keys they belong to.
      key_of: (m,) int32, which of these keys each row belongs to; None: row i to key i.
      row_splits: (batch + 1,) int64, from 0 to end - first: the rows are pooled; None: they are
        given as they are.
      weights: (end - first,) float32, of pooled rows; None: all 1.
      combiner: "sum", "mean" or "sqrtn", of pooled rows.
    """

    out: Array
    first: int
    end: int
    key_of: Array | None = None
    row_splits: Array | None = None
    weights: Array | None = None
    combiner: str = "sum"


class Asked(NamedTuple):
    """What one table is asked.

    Attributes:
      table: the table.
      keys: (n,) int64, which may repeat.
      rows: (n,) uint32, gets the row numbers.
      outputs: what else is wanted: one that has all keys, or pooled ones that have all keys
        together.
      insert: whether keys without a row get one.
      missing: what a key gives that has no row afterwards, "initial" or "zeros".
      filter_ratio: chance of a key without a row to get one this time.
      unique_keys: a promise that no key repeats.
      given: (n,) uint64 of keys that do not repeat: scores or increments of the caller's.
      evicted: grows by what was evicted; None: it is not wanted.
      also: actions to be taken when `rows` is complete.
    """

    table: Inserts
    keys: Array
    rows: Array
    outputs: Sequence[Output] = ()
    insert: bool = True
    missing: str = "initial"
    filter_ratio: float = 1.0
    unique_keys: bool = False
    given: Array | None = None
    evicted: list[Any] | None = None
    also: Sequence[Action] = ()


class WrongSplitsError(ValueError):
    """Row splits do not rise from 0 to the number of keys."""


def look_up(backend: Backend, asked: Sequence[Asked]) -> list[int]:
    """Finds keys, inserts those that are missing, and writes row numbers and rows.

    Args:
      asked: of tables that are all different, each in a call that may change it.

    Returns:
      How many keys have no row afterwards, for each table.

    Raises:
      MemoryError: no memory for new keys. Each table is as it was or as it is to be.
      WrongSplitsError: row splits of an output do not fit its keys. Nothing was inserted.
    """
    for each in asked:
        if each.insert:
            each.table._before_lookup()
    counts = backend.xp.zeros((len(asked), NUM_COUNTS), np.int64)
    publish(*(_finding(each, counts[i]) for i, each in enumerate(asked)))
    found = backend.to_host(counts).tolist()
    complete: list[list[Action]] = []
    incomplete: list[tuple[int, int, int]] = []
    if any(num_wrong for _, _, num_wrong in found):
        raise WrongSplitsError("Row splits do not rise from 0 to the number of keys.")
    for i, (each, (num_missing, num_seen, _)) in enumerate(zip(asked, found, strict=True)):
        each.table._count_found(int(each.keys.size), num_missing)
        if num_missing:
            incomplete.append((i, num_missing, num_seen))
        else:
            complete.append(_finishing(each, num_seen))
    publish(*complete)
    absent = [0] * len(asked)
    for i, num_missing, num_seen in incomplete:
        absent[i] = _complete(asked[i], num_missing, num_seen)
    return absent


def _finding(asked: Asked, counts: Array) -> list[Action]:
    """Prepares to find the keys of a table, and to give the rows of those that are found."""
    table, keys = asked.table, asked.keys
    actions = table._beginning_lookup() if asked.insert else []
    stamp = table.clock.now + 1 if asked.insert else 0
    warming = table._warming() if asked.insert else None
    is_pooled = any(output.row_splits is not None for output in asked.outputs)
    if is_pooled and table.backend.name == "cpu":
        place, note = table.index.place(), table.index.noting(stamp, warming)
        for output in asked.outputs:
            batch, arguments = _pooled(asked, output, counts)
            keys = asked.keys[output.first : output.end]
            find = (*place, *note, keys, *table.store.place(), *arguments)
            actions.append(table.backend.prepared("find_and_pool", batch, *find))
        return actions
    copies = [output.out for output in asked.outputs if _is_copied(output)]
    copying = table.store.copying(copies[0]) if copies else None
    into = (asked.rows, counts)
    actions += table.index.searching(keys, stamp, asked.given, warming, copying, into).actions
    if is_pooled:
        for output in asked.outputs:
            batch, arguments = _pooled(asked, output, counts)
            *where, _ = table.store.place()
            kernel = f"pool_{table.row_dtype.suffix}"
            actions.append(table.backend.prepared(kernel, batch, *where, *arguments))
    return actions


def _pooled(asked: Asked, output: Output, counts: Array) -> tuple[int, tuple[Any, ...]]:
    """Returns the rows of a pooled output, and what a kernel takes that pools them."""
    assert output.row_splits is not None
    batch = len(output.row_splits) - 1
    return batch, (
        *(asked.rows[output.first : output.end], output.row_splits, output.weights),
        *(COMBINERS[output.combiner], output.out, counts, output.end - output.first, batch),
    )


def _finishing(asked: Asked, num_seen: int, new_rows: Array | None = None) -> list[Action]:
    """Prepares what follows when all keys have their row numbers."""
    table = asked.table
    actions = [*table._touching(num_seen, new_rows)] if asked.insert else []
    for output in asked.outputs:
        if output.key_of is None:
            continue
        rows, m = asked.rows[output.first : output.end], int(output.key_of.size)
        nobody = table.backend.xp.zeros(1, np.int64)
        items = (output.key_of, None, None, output.out, nobody, m)
        actions.append(table.store.delivering(rows, *items))
    return [*actions, *asked.also]


def _complete(asked: Asked, num_missing: int, num_seen: int) -> int:
    """Inserts what is missing, or not, and writes what it belongs to. Returns how many are absent.

    Args:
      num_missing: keys that have no row, a repeated one each time.
      num_seen: see `index.Search`.
    """
    table, keys, rows = asked.table, asked.keys, asked.rows
    xp = table.backend.xp
    at = xp.flatnonzero(rows == np.uint32(ABSENT))
    new_keys, number = keys[at], None
    given = None if asked.given is None else asked.given[at]
    if not asked.unique_keys:
        new_keys, number = unique(table.backend, new_keys)
    values = absent_values = None
    if asked.outputs and (not asked.insert or table._may_refuse()):
        # What a key gives that gets no row is written now: there may be no memory afterwards.
        if asked.insert or asked.missing == "initial":
            values = table.initial_values(new_keys)
        absent_values = values if asked.missing == "initial" else None
    number_of_each = None
    if any(output.key_of is not None or output.row_splits is not None for output in asked.outputs):
        number_of_each = xp.full(int(keys.size), -1, np.int32)
        number_of_each[at] = xp.arange(at.size, dtype=np.int32) if number is None else number
    for output in asked.outputs:
        if output.row_splits is None and (not asked.insert or table._may_refuse()):
            _write_absent(table, output, at, number, number_of_each, absent_values)

    def again() -> list[Action]:
        return [
            _pooling_again(asked, output, number_of_each, absent_values)
            for output in asked.outputs
            if output.row_splits is not None
        ]

    if not asked.insert:
        publish([*again(), *_finishing(asked, num_seen)])
        return num_missing
    mask, noting = table._admission(new_keys, asked.filter_ratio)
    source = None
    if mask is not None:
        let_in = xp.flatnonzero(mask)
        place = xp.full(new_keys.size, -1, np.int32)
        place[let_in] = xp.arange(let_in.size, dtype=np.int32)
        number = place if number is None else xp.take(place, number)
        noting = [*noting, table._counting(not_admitted=int(new_keys.size - let_in.size))]
        given = None if given is None else given[let_in]
        new_keys, source = new_keys[let_in], let_in.astype(np.int32)
    new = NewKeys(new_keys, table.clock.now, given, values=values, source=source)
    num_absent = xp.zeros(1, np.int64)
    copies = [output.out for output in asked.outputs if _is_copied(output)]

    def after(new_rows: Array) -> list[Action]:
        items = (number, at, rows, copies[0] if copies else None, num_absent, int(at.size))
        deliver = table.store.delivering(new_rows, *items)
        return [deliver, *again(), *_finishing(asked, num_seen, new_rows)]

    table._insert(new, noting, after, asked.evicted)
    return int(num_absent[0]) if table._may_refuse() else 0


def _is_copied(output: Output) -> bool:
    return output.row_splits is None and output.key_of is None


def _pooling_again(
    asked: Asked, output: Output, number: Array | None, values: Array | None
) -> Action:
    """Prepares to pool anew the rows that have a key that was missing.

    Args:
      number: (n,) int32 of all keys of the table: which of `values` a missing one gives; -1: it
        was not missing.
      values: (k, dim) storage; None: zeros.
    """
    assert number is not None and output.row_splits is not None
    batch = len(output.row_splits) - 1
    pooled = (
        *(asked.rows[output.first : output.end], number[output.first : output.end]),
        *(None if values is None else values.view(np.uint8).reshape(-1), output.row_splits),
        *(output.weights, COMBINERS[output.combiner], output.out, batch),
    )
    *where, _ = asked.table.store.place()
    kernel = f"pool_again_{asked.table.row_dtype.suffix}"
    return asked.table.backend.prepared(kernel, batch, *where, *pooled)


def _write_absent(
    table: Inserts,
    output: Output,
    at: Array,
    number: Array | None,
    number_of_each: Array | None,
    values: Array | None,
) -> None:
    """Writes what missing keys give as long as they have no row.

    Args:
      at: (m,) int64, which keys of the table are missing.
      number: (m,) int32, which of `values` each of them has; None: the i-th.
      number_of_each: (n,) int32, the same of all keys, -1 where none is missing; None: it is not
        known.
      values: (k, dim) storage; None: zeros.
    """
    xp, out = table.backend.xp, output.out
    items = at
    if number_of_each is not None:
        of_items = number_of_each[output.first : output.end]
        if output.key_of is not None:
            of_items = xp.take(of_items, output.key_of)
        items = xp.flatnonzero(of_items >= 0)
        number = xp.take(of_items, items)
    if values is None:
        out[items] = 0
    else:
        out[items] = values if number is None else xp.take(values, number, axis=0)

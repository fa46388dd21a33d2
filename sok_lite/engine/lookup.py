"""One whole lookup and its gradient, for all tables of a call together, over all ranks.

 forward    one rank        keys -> find and pool, in one launch; new keys are inserted
            several ranks   keys -> unique -> send_keys -> find and copy -> return_rows -> pool
 backward                   sums of what belongs to one key of this rank, in pieces and a fixed
                            order; with several ranks first of one key that this rank asked for,
                            then send_grads

Two ranks that ask for one key send it twice; its owner looks it up twice and sums its gradients.
What the way back needs is a `Trail`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm import Communicator
from sok_lite.engine.combine import (
    combine,
    combine_grad,
    combine_weight_grad,
    normalise_combiner,
    segment_sum,
)
from sok_lite.engine.exchange import Route, return_rows, send_grads, send_keys
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.recent import remember
from sok_lite.engine.rows.store import ABSENT
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import holding
from sok_lite.engine.table.lookups import Asked, Output, WrongSplitsError, look_up
from sok_lite.engine.trail import Room, TableTrail, Trail
from sok_lite.engine.unique import last_of_each, unique


class Part(NamedTuple):
    """One table's part of a call.

    Attributes:
      table: the table of this rank.
      keys: (n,) integers.
      row_splits: (batch + 1,) int64, where each row of the batch begins and ends.
      weights: (n,) float32; None: all 1.
      combiner: "sum", "mean" or "sqrtn".
      insert, missing, filter_ratio: of the table's `lookup`.
    """

    table: EmbeddingTable
    keys: Array
    row_splits: Array
    weights: Array | None
    combiner: str
    insert: bool = True
    missing: str = "initial"
    filter_ratio: float = 1.0


class Gradients(NamedTuple):
    """The gradient of one part.

    Attributes:
      keys: (k,) int64, distinct, all of this rank; of a uint64 table their bits.
      row_grads: (k, dim) float32, summed over items and ranks in a fixed order.
      weight_grads: (n,) float32; None where there are no weights.
    """

    keys: Array
    row_grads: Array
    weight_grads: Array | None


def forward(
    backend: Backend,
    comm: Communicator,
    parts: Sequence[Part],
    tag: int = 0,
    room: Room | None = None,
) -> tuple[list[Array], Trail]:
    """Looks up and combines. Every rank must call it, with the same tables in the same order.

    Args:
      backend: where arrays live.
      comm: the ranks.
      parts: one per table; a table may come several times.
      tag: says which call this is; another one on another rank raises.
      room: gives memory for float32 results of some shapes; None: the backend's.

    Returns:
      ([(batch, dim) float32 per part], trail).

    Raises:
      TypeError, ValueError: keys, row splits, weights or combiner do not fit. No table has changed,
        and the other ranks raise a CommunicatorError with the same reason.
    """
    if comm.size == 1:
        return _forward_alone(backend, comm, parts, room)
    with shared_failure(comm):
        checked = [_checked(backend, i, part) for i, part in enumerate(parts)]
        for i, part in enumerate(checked):
            _check_splits(i, part)
        distinct = [unique(backend, part.keys) for part in checked]
    received, route = send_keys(
        backend,
        comm,
        [item.unique_keys for item in distinct],
        [part.table.key_dtype for part in checked],
        tag=tag,
    )
    with failure_known_to_all(comm):
        found = _found(
            [_Wanted(part, keys, None) for part, keys in zip(checked, received, strict=True)]
        )
        sources = return_rows(route, [each.out for each in found])
    outputs, trails = _memory(backend, [_shape(part) for part in checked], room), []
    for i, (part, each) in enumerate(zip(checked, found, strict=True)):
        inverse, weights = distinct[i].inverse, part.weights
        items = (inverse, part.row_splits, weights, part.combiner)
        combine(backend, sources[i], *items, out=outputs[i])
        source = None if weights is None else sources[i]
        trails.append(
            TableTrail(
                inverse, part.row_splits, received[i], each.rows, source, part.table.generation
            )
        )
    return list(outputs), Trail(route, trails)


def backward(
    backend: Backend,
    parts: Sequence[tuple[EmbeddingTable, Array | None, str]],
    out_grads: Sequence[Array],
    trail: Trail,
    room: Room | None = None,
) -> list[Gradients]:
    """Returns the gradients of a `forward`. Every rank must call it, in the order of the forwards.

    Args:
      backend: where arrays live.
      parts: (table, weights, combiner) of each part of the forward.
      out_grads: (batch, dim) float32 per part.
      trail: what the forward gave.
      room: gives memory for float32 results of some shapes; None: the backend's.

    Returns:
      One Gradients per part.
    """
    weight_grads: list[Array | None] = []
    for (_, weights, combiner), grads, way in zip(parts, out_grads, trail.tables, strict=True):
        weight_grads.append(
            None
            if weights is None
            else combine_weight_grad(
                backend, grads, way.source, way.inverse, way.row_splits, weights, combiner
            )
        )
    owned = [deduplicated(backend, way) for way in trail.tables]
    shapes = [(len(each.keys), table.dim) for each, (table, _, _) in zip(owned, parts, strict=True)]
    sums = _memory(backend, shapes, room)
    if trail.route.comm.size == 1:
        for i, ((_, weights, combiner), grads) in enumerate(zip(parts, out_grads, strict=True)):
            each, way = owned[i], trail.tables[i]
            items = (each.inverse, way.row_splits, weights, combiner, len(each.keys))
            combine_grad(backend, grads, *items, out=sums[i])
    else:
        num_asked = trail.route.send_counts.sum(axis=0).tolist()
        asked = []
        for i, ((_, weights, combiner), grads) in enumerate(zip(parts, out_grads, strict=True)):
            way = trail.tables[i]
            items = (way.inverse, way.row_splits, weights, combiner, num_asked[i])
            asked.append(combine_grad(backend, grads, *items))
        for i, received in enumerate(send_grads(trail.route, asked)):
            segment_sum(backend, received, owned[i].inverse, len(owned[i].keys), out=sums[i])
    results = []
    for i, ((table, _, _), each, way) in enumerate(zip(parts, owned, trail.tables, strict=True)):
        remember(table, each.keys, each.rows, way.generation)
        results.append(Gradients(each.keys, sums[i], weight_grads[i]))
    return results


class Owned(NamedTuple):
    """The distinct keys that ranks asked of this one.

    Attributes:
      keys: (k,) int64, in order of first occurrence.
      rows: (k,) uint32, their row numbers, or absent.
      inverse: (m,) int32, which of them each key was that was asked.
    """

    keys: Array
    rows: Array
    inverse: Array


def deduplicated(backend: Backend, way: TableTrail) -> Owned:
    """Returns the distinct keys of a table's part of a lookup."""
    keys, inverse = unique(backend, way.keys)
    rows = backend.xp.take(way.rows, last_of_each(backend, inverse, int(keys.size)))
    return Owned(keys, rows, inverse)


# ---------------------------------------------------------------- what a lookup finds


class _Wanted(NamedTuple):
    """What one part of a lookup asks of the table of this rank.

    Attributes:
      part: it.
      keys: (m,) int64.
      pooled: (batch, dim) float32, gets the rows pooled; None: they are wanted as they are.
    """

    part: Part
    keys: Array
    pooled: Array | None


class _Found(NamedTuple):
    """What became of it.

    Attributes:
      rows: (m,) uint32, row numbers.
      out: the rows, (m, dim) storage, or what was `pooled`.
      may_lack: whether a key of the table may have no row.
    """

    rows: Array
    out: Array
    may_lack: bool = False


def _found(wanted: Sequence[_Wanted]) -> list[_Found]:
    """Looks up the keys of all parts in one go, those of one table as one batch."""
    found: list[_Found] = [None] * len(wanted)  # type: ignore[list-item]
    asked, tables = [], []
    for numbers in _numbers_of_tables([each.part.table for each in wanted]):
        part = wanted[numbers[0]].part
        xp = part.table.backend.xp
        keys = wanted[numbers[0]].keys
        if len(numbers) > 1:
            keys = xp.concatenate([wanted[i].keys for i in numbers])
        rows = xp.empty(keys.size, np.uint32)
        whole, outputs, first = None, [], 0
        if wanted[numbers[0]].pooled is None:
            whole = part.table.store.output(int(keys.size))
            outputs.append(Output(whole, 0, int(keys.size)))
        for i in numbers:
            its_part, its_keys, pooled = wanted[i]
            end = first + int(its_keys.size)
            if whole is None:
                pooling = (its_part.row_splits, its_part.weights, its_part.combiner)
                outputs.append(Output(pooled, first, end, None, *pooling))
            found[i] = _Found(rows[first:end], pooled if whole is None else whole[first:end])
            first = end
        treatment = (part.insert, part.missing, part.filter_ratio)
        asked.append(Asked(part.table, keys, rows, outputs, *treatment))
        tables.append(part.table)
    if asked:
        absent = holding(tables, lambda: look_up(tables[0].backend, asked))
        lacking = {id(table) for table, count in zip(tables, absent, strict=True) if count}
        found = [
            each._replace(may_lack=id(one.part.table) in lacking)
            for one, each in zip(wanted, found, strict=True)
        ]
        for table in tables:
            table._report_refused()
    return found


def _numbers_of_tables(tables: Sequence[EmbeddingTable]) -> list[list[int]]:
    """Returns the numbers of the parts of each table, in the order in which tables come first."""
    numbers: dict[int, list[int]] = {}
    for i, table in enumerate(tables):
        numbers.setdefault(id(table), []).append(i)
    return list(numbers.values())


def _forward_alone(
    backend: Backend, comm: Communicator, parts: Sequence[Part], room: Room | None
) -> tuple[list[Array], Trail]:
    """Does what `forward` does on one rank: nothing travels, so nothing is deduplicated."""
    checked = [_checked(backend, i, part) for i, part in enumerate(parts)]
    for i, part in enumerate(checked):
        if len(part.row_splits) == 1:
            _check_splits(i, part)  # there are no rows whose splits a kernel looks at
    outputs = _memory(backend, [_shape(part) for part in checked], room)
    try:
        found = _found(
            [_Wanted(part, part.keys, out) for part, out in zip(checked, outputs, strict=True)]
        )
    except WrongSplitsError:
        for i, part in enumerate(checked):
            _check_splits(i, part)
        raise
    sizes = np.array([[part.keys.size for part in checked]], np.int64)
    route = Route(backend, comm, sizes, sizes, backend.xp.empty(0, np.int32), comm.turn)
    trails = []
    for part, each in zip(checked, found, strict=True):
        source = None if part.weights is None else _source(part, each)
        way = (None, part.row_splits, part.keys, each.rows, source, part.table.generation)
        trails.append(TableTrail(*way))
    return list(outputs), Trail(route, trails)


def _source(part: Part, found: _Found) -> Array:
    """Returns the row of each item, (n, dim) storage."""
    table = part.table
    source = table.store.read(found.rows)
    if found.may_lack and part.missing == "initial":
        at = table.backend.xp.flatnonzero(found.rows == np.uint32(ABSENT))
        source[at] = table.initial_values(part.keys[at])
    return source


def _shape(part: Part) -> tuple[int, int]:
    """Returns the shape of what a part gives."""
    return len(part.row_splits) - 1, part.table.dim


def _memory(
    backend: Backend, shapes: Sequence[tuple[int, int]], room: Room | None
) -> Sequence[Array]:
    if room is not None:
        return room(shapes)
    return [backend.xp.empty(shape, np.float32) for shape in shapes]


# ---------------------------------------------------------------- arguments


def _checked(backend: Backend, number: int, part: Part) -> Part:
    """Returns the part with engine keys, or raises."""
    what = f"keys of table {part.table.name!r}"
    keys = part.table.key_dtype.to_int64(backend.xp, part.keys, what)
    if keys.ndim != 1:
        raise ValueError(f"Keys of table {number} must have shape (n,). Received: {keys.shape}.")
    splits = part.row_splits
    if splits.ndim != 1 or len(splits) == 0:
        raise ValueError(
            f"`row_splits` of table {number} must have shape (batch + 1,). "
            f"Received: {splits.shape}."
        )
    if splits.dtype != np.int64:
        raise TypeError(f"`row_splits` of table {number} must be int64. Received: {splits.dtype}.")
    if part.weights is not None:
        if part.weights.shape != keys.shape:
            raise ValueError(
                f"Table {number} must have one weight for each of its {len(keys)} keys. "
                f"Received: weights of shape {part.weights.shape}."
            )
        if part.weights.dtype != np.float32:
            raise TypeError(
                f"Weights of table {number} must be float32. Received: {part.weights.dtype}."
            )
    return part._replace(keys=keys, combiner=normalise_combiner(part.combiner))


def _check_splits(number: int, part: Part) -> None:
    """Raises ValueError where row splits do not fit the keys. On a GPU it waits."""
    splits, keys = part.row_splits, part.keys
    ends = (int(splits[0]), int(splits[-1]))
    if ends != (0, len(keys)) or bool((splits[1:] < splits[:-1]).any()):
        raise ValueError(
            f"`row_splits` of table {number} must rise from 0 to the number of its keys, "
            f"{len(keys)}. Received: {ends[0]} to {ends[1]}"
            f"{' with a fall between them' if ends == (0, len(keys)) else ''}."
        )


def row_splits_of(backend: Backend, row_numbers: Array, batch: int) -> Array:
    """Returns the row splits of items that name their row, as a sparse matrix does.

    Args:
      row_numbers: (n,) int64, ascending, each in [0, batch).
      batch: number of rows.

    Returns:
      (batch + 1,) int64.

    Raises:
      ValueError: they fall, or leave [0, batch).
    """
    xp = backend.xp
    if row_numbers.size:
        if bool((row_numbers[1:] < row_numbers[:-1]).any()):
            raise ValueError(
                "The entries of a SparseTensor must be in row-major order. Received: row numbers "
                "that fall. Use tf.sparse.reorder first."
            )
        first, last = int(row_numbers[0]), int(row_numbers[-1])
        if first < 0 or last >= batch:
            raise ValueError(
                f"The rows of a SparseTensor must be in [0, {batch}), by its dense_shape. "
                f"Received: rows {first} to {last}."
            )
    return xp.searchsorted(row_numbers, xp.arange(batch + 1, dtype=np.int64)).astype(np.int64)

"""One whole lookup and its gradient, for all tables of a call together, over all ranks.

 forward    one rank        keys -> find and pool, in one launch; new keys are inserted
            several ranks   keys -> dedup -> send_keys -> find and copy -> return_rows -> pool
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
from sok_lite.backend.publish import Action, publish
from sok_lite.comm import Communicator
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.exchange import Check, Route, return_rows, send_grads, send_keys
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.pooling import (
    COMBINERS,
    coefficients_of,
    combining,
    combining_weight_grad,
    normalise_combiner,
    wrong_splits,
)
from sok_lite.engine.segments import Distinct, Terms, cut, dedup, group, segment_sums
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import holding
from sok_lite.engine.table.lookups import WrongSplitsError, look_up
from sok_lite.engine.table.new_keys import Asked, Output
from sok_lite.engine.table.results import KnownRows
from sok_lite.engine.trail import Room, Trail


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


class Joined(NamedTuple):
    """Arrays of all parts of a call, of which those of the parts are pieces that follow each other.

    Attributes:
      keys: (n,) int64; of uint64 tables their bits.
      row_splits: (rows + num_parts,) int64.
    """

    keys: Array
    row_splits: Array


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
    joined: Joined | None = None,
) -> tuple[list[Array], Trail]:
    """Looks up and combines. Every rank must call it, with the same tables in the same order.

    Args:
      backend: where arrays live.
      comm: the ranks.
      parts: one per table; a table may come several times.
      tag: says which call this is; another one on another rank raises.
      room: gives memory for float32 results of some shapes; None: the backend's.
      joined: keys and row splits of all parts, where they lie together already; None: they are
        copied.

    Returns:
      ([(batch, dim) float32 per part], trail).

    Raises:
      TypeError, ValueError: keys, row splits, weights or combiner do not fit. The other ranks raise
        a CommunicatorError with the same reason. No table has changed; where row splits do not fit
        on one rank, a kernel finds that, and keys of the call that were held count as seen.
    """
    with shared_failure(comm):
        checked = [_checked(backend, i, part) for i, part in enumerate(parts)]
        items = _Items(backend, checked, joined)
    if comm.size == 1:
        return _forward_alone(backend, comm, checked, items, room)
    with shared_failure(comm):
        wrong = wrong_splits(backend, [part.row_splits for part in checked], items.sizes)
        distinct = dedup(backend, items.keys, items.begin)
    received, route = send_keys(
        backend,
        comm,
        distinct.keys,
        distinct.sizes,
        [part.table.key_dtype for part in checked],
        tag=tag,
        check=Check(wrong, lambda: _check_all_splits(checked)),
    )
    with failure_known_to_all(comm):
        owned = _Found(backend, received, route.num_received)
        outputs = owned.look_up(checked, None)
        sources = return_rows(route, outputs)
    pooled = _memory(backend, [_shape(part) for part in checked], room)
    actions, starts = [], distinct.starts.tolist()
    for i, (part, inverse) in enumerate(
        zip(checked, cut(distinct.inverse, items.sizes), strict=True)
    ):
        pooling = (inverse, part.row_splits, part.weights, part.combiner)
        actions.append([combining(backend, sources[i], *pooling, pooled[i], starts[i])[1]])
    publish(*actions)
    kept = [
        None if part.weights is None else source
        for part, source in zip(checked, sources, strict=True)
    ]
    return list(pooled), _trail(route, checked, items, distinct.inverse, owned, kept)


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

    Raises:
      ValueError: a gradient is not float32, or of another shape than its output.
    """
    out_grads = [
        _checked_grads(backend, i, table, grads, int(trail.batch_sizes[i]))
        for i, ((table, _, _), grads) in enumerate(zip(parts, out_grads, strict=True))
    ]
    splits = trail.splits_of_parts()
    weight_grads, by_weights = _weight_grads(backend, parts, out_grads, trail, splits)
    index, coefficients, launches = coefficients_of(
        backend,
        splits,
        [(weights, combiner) for _, weights, combiner in parts],
        trail.num_items.tolist(),
    )
    publish(*by_weights, *launches)
    if trail.inverse is None:
        rows: Sequence[Array] = out_grads
        indices, factors = index, coefficients
    else:
        items = (split_offsets(trail.num_items), split_offsets(trail.route.num_sent))
        terms = [Terms(grads, index[i], coefficients[i]) for i, grads in enumerate(out_grads)]
        asked = segment_sums(backend, group(backend, trail.inverse, *items), terms)
        rows = send_grads(trail.route, asked)
        indices = factors = [None] * len(parts)
    owned = deduplicated(backend, trail)
    sizes = np.diff(owned.distinct.starts).tolist()
    sums = _memory(
        backend, [(n, table.dim) for n, (table, _, _) in zip(sizes, parts, strict=True)], room
    )
    groups = group(backend, owned.distinct.inverse, owned.begin, owned.distinct.starts)
    terms = [Terms(rows[i], indices[i], factors[i], sums[i]) for i in range(len(parts))]
    segment_sums(backend, groups, terms)
    results = []
    for i, (table, _, _) in enumerate(parts):
        keys, row_numbers = owned.keys[i], owned.rows[i]
        table.last_gradient = KnownRows(keys, row_numbers, int(trail.generations[i]))
        results.append(Gradients(keys, sums[i], weight_grads[i]))
    return results


def _weight_grads(
    backend: Backend,
    parts: Sequence[tuple[EmbeddingTable, Array | None, str]],
    out_grads: Sequence[Array],
    trail: Trail,
    splits: Sequence[Array],
) -> tuple[list[Array | None], list[list[Action]]]:
    """Prepares the gradients by the weights of each part, None where it has none."""
    results: list[Array | None] = [None] * len(parts)
    actions = []
    inverses, starts = [None] * len(parts), [0] * len(parts)
    if trail.inverse is not None:
        inverses = cut(trail.inverse, trail.num_items)
        starts = split_offsets(trail.route.num_sent).tolist()
    for i, (_, weights, combiner) in enumerate(parts):
        if weights is not None:
            way = (trail.sources[i], inverses[i], splits[i], weights, combiner, starts[i])
            results[i], action = combining_weight_grad(backend, out_grads[i], *way)
            actions.append([action])
    return results, actions


class Owned(NamedTuple):
    """The distinct keys that this rank was asked.

    Attributes:
      distinct: of all parts together.
      begin: (num_parts + 1,) int64 on the host, where the keys of each part start that were asked.
      keys: of each part (k,) int64, in order of first occurrence.
      rows: of each part (k,) uint32, their row numbers, or absent.
    """

    distinct: Distinct
    begin: np.ndarray
    keys: list[Array]
    rows: list[Array]


def deduplicated(backend: Backend, trail: Trail) -> Owned:
    """Returns the distinct keys of a lookup that this rank was asked."""
    begin = split_offsets(trail.num_owned)
    distinct = dedup(backend, trail.keys, begin)
    rows = backend.xp.take(trail.rows, distinct.first)
    return Owned(distinct, begin, cut(distinct.keys, distinct.sizes), cut(rows, distinct.sizes))


# ---------------------------------------------------------------- what a lookup finds


class _Items:
    """The items of all parts, one part after the other.

    Attributes:
      keys: (n,) int64.
      sizes: (num_parts,) int64, how many each part has.
      begin: (num_parts + 1,) int64, where they start.
      row_splits: (rows + num_parts,) int64, those of each part from 0 on.
    """

    def __init__(self, backend: Backend, parts: Sequence[Part], joined: Joined | None) -> None:
        self.keys, self.row_splits = joined or (
            _joined(backend, [part.keys for part in parts]),
            _joined(backend, [part.row_splits for part in parts]),
        )
        self.sizes = np.array([part.keys.size for part in parts], np.int64)
        self.begin = split_offsets(self.sizes)


class _Found:
    """Keys that this rank is asked, and what its tables find of them.

    Attributes:
      backend: where the arrays live.
      keys: (m,) int64, those of all parts.
      sizes: (num_parts,) int64, how many each part has.
      rows: (m,) uint32, row numbers, once they were looked up.
      generations: of the table of each part, by then.
      sources: of each part with weights whose rows were pooled (m, dim) storage, the row of each
        key; None of the others.
    """

    def __init__(self, backend: Backend, keys: Array, sizes: np.ndarray) -> None:
        self.backend, self.keys, self.sizes = backend, keys, sizes
        self.rows = backend.xp.empty(keys.size, np.uint32)
        self.generations = [0] * len(sizes)
        self.sources: list[Array | None] = [None] * len(sizes)

    def look_up(self, parts: Sequence[Part], pooled: Sequence[Array] | None) -> list[Array]:
        """Looks up the keys of all parts in one go, those of one table as one batch.

        Args:
          pooled: of each part (batch, dim) float32, gets its rows pooled; None: they are wanted as
            they are.

        Returns:
          `pooled`, or of each part (m, dim) storage.
        """
        if not parts:
            return []
        numbers_of = _numbers_of_tables([part.table for part in parts])
        order = [i for numbers in numbers_of for i in numbers]
        keys, rows, results = self.keys, self.rows, [*(pooled or [None] * len(parts))]
        is_ordered = order == sorted(order)
        if not is_ordered:  # a table comes twice: its keys are one batch
            keys = self._reordered(keys, self.sizes, order)
            rows = self.backend.xp.empty(keys.size, np.uint32)
        asked, sizes = [], self.sizes.tolist()
        for numbers in numbers_of:
            part, size = parts[numbers[0]], sum(sizes[i] for i in numbers)
            outputs, first = [], 0
            if pooled is None:
                whole = part.table.store.output(size)
                outputs.append(Output(whole, 0, size))
            for i in numbers:
                end = first + sizes[i]
                if pooled is None:
                    results[i] = whole[first:end]
                else:
                    pooling = (parts[i].row_splits, parts[i].weights, parts[i].combiner)
                    outputs.append(Output(pooled[i], first, end, *pooling))
                first = end
            treatment = (part.insert, part.missing, part.filter_ratio)
            asked.append(Asked(part.table, size, outputs, *treatment))

        def found() -> None:
            absent = look_up(self.backend, keys, rows, asked)
            if not is_ordered:
                places = sorted(range(len(order)), key=order.__getitem__)
                self.rows[...] = self._reordered(rows, self.sizes[order], places)
            self._keep(parts, numbers_of, absent, pooled is not None)
            for each in asked:
                each.table._report_refused()

        holding([each.table for each in asked], found)
        return results

    def _reordered(self, array: Array, sizes: np.ndarray, order: Sequence[int]) -> Array:
        """Returns the pieces of an array, of those sizes, in another order."""
        pieces = cut(array, sizes)
        return self.backend.xp.concatenate([pieces[i] for i in order])

    def _keep(
        self,
        parts: Sequence[Part],
        numbers_of: Sequence[Sequence[int]],
        absent: Sequence[int],
        is_pooled: bool,
    ) -> None:
        """Keeps what the way back needs, while nobody else uses the tables."""
        rows, readings = cut(self.rows, self.sizes), []
        for numbers, num_absent in zip(numbers_of, absent, strict=True):
            for i in numbers:
                self.generations[i] = parts[i].table.generation
                if is_pooled and parts[i].weights is not None:
                    self.sources[i], reading = _reading(parts[i], rows[i], num_absent > 0)
                    readings.append(reading)
        publish(*readings)


def _numbers_of_tables(tables: Sequence[EmbeddingTable]) -> list[list[int]]:
    """Returns the numbers of the parts of each table, in the order in which tables come first."""
    numbers: dict[int, list[int]] = {}
    for i, table in enumerate(tables):
        numbers.setdefault(id(table), []).append(i)
    return list(numbers.values())


def _forward_alone(
    backend: Backend,
    comm: Communicator,
    parts: Sequence[Part],
    items: _Items,
    room: Room | None,
) -> tuple[list[Array], Trail]:
    """Does what `forward` does on one rank: nothing travels, so nothing is deduplicated."""
    for i, part in enumerate(parts):
        if len(part.row_splits) == 1:
            _check_splits(i, part)  # there are no rows whose splits a kernel looks at
    found = _Found(backend, items.keys, items.sizes)
    outputs = _memory(backend, [_shape(part) for part in parts], room)
    try:
        found.look_up(parts, outputs)
    except WrongSplitsError:
        _check_all_splits(parts)
        raise
    sizes = items.sizes.reshape(1, -1)
    route = Route(backend, comm, sizes, sizes, backend.xp.empty(0, np.int32), comm.turn)
    return list(outputs), _trail(route, parts, items, None, found, found.sources)


def _trail(
    route: Route,
    parts: Sequence[Part],
    items: _Items,
    inverse: Array | None,
    owned: _Found,
    sources: list[Array | None],
) -> Trail:
    batches = [len(part.row_splits) - 1 for part in parts]
    numbers = np.array([items.sizes, batches, owned.sizes, owned.generations], np.int64)
    return Trail(route, numbers, items.row_splits, inverse, owned.keys, owned.rows, sources)


def _reading(part: Part, rows: Array, may_lack: bool) -> tuple[Array, list[Action]]:
    """Prepares to read the row of each item, (n, dim) storage."""
    table = part.table
    source = table.store.output(int(rows.size))
    actions = [table.store.reading(rows, source)]
    if may_lack and part.missing == "initial":
        actions.append(table.drawing(source, part.keys, rows))
    return source, actions


def _joined(backend: Backend, arrays: Sequence[Array]) -> Array:
    """Returns int64 arrays (n,) as one."""
    if len(arrays) == 1:
        return arrays[0]
    return backend.xp.concatenate([backend.xp.empty(0, np.int64), *arrays])


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


_INT64 = np.dtype(np.int64)


def _checked(backend: Backend, number: int, part: Part) -> Part:
    """Returns the part with engine keys, or raises."""
    if _is_plain(part):
        return part
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
    contiguous = backend.xp.ascontiguousarray
    return part._replace(
        keys=keys,
        row_splits=contiguous(splits),
        weights=None if part.weights is None else contiguous(part.weights),
        combiner=normalise_combiner(part.combiner),
    )


def _is_plain(part: Part) -> bool:
    """Whether a part without weights is as the engine wants it: a look instead of a conversion."""
    keys, splits = part.keys, part.row_splits
    return (
        part.weights is None
        and part.table.key_dtype.dtype is _INT64
        and part.combiner in COMBINERS
        and (keys.dtype is _INT64 and keys.ndim == 1 and keys.flags.c_contiguous)
        and (splits.dtype is _INT64 and splits.ndim == 1 and splits.flags.c_contiguous)
        and len(splits) > 0
    )


def _checked_grads(
    backend: Backend, number: int, table: EmbeddingTable, grads: Array, batch: int
) -> Array:
    """Returns the gradient of a part's output, C-contiguous, or raises."""
    if grads.shape != (batch, table.dim) or grads.dtype != np.float32:
        raise ValueError(
            f"The gradient of the output of table {number} must be float32 of shape "
            f"({batch}, {table.dim}). Received: {grads.dtype} of shape {grads.shape}."
        )
    return backend.xp.ascontiguousarray(grads)


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


def _check_all_splits(parts: Sequence[Part]) -> None:
    for i, part in enumerate(parts):
        _check_splits(i, part)


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

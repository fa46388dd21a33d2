"""One whole distributed lookup and its gradient, for all tables of a call together.

 forward    keys -> unique -> send_keys -> find_or_insert -> read -> return_rows -> combine
 backward   combine_grad -> send_grads -> sum over ranks -> one gradient row per key of this rank

Two ranks that ask for one key send it twice; the owner makes the keys distinct again, so that a row
is looked up once and its gradient is whole. What the way back needs is a `Trail`; it packs into one
integer array, so that a graph can carry it from forward to backward without anything kept aside.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm import Communicator
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.combine import (
    combine,
    combine_grad,
    combine_weight_grad,
    normalise_combiner,
)
from sok_lite.engine.exchange import Route, return_rows, send_grads, send_keys
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.recent import remember
from sok_lite.engine.segments import segment_sum, unique
from sok_lite.engine.table import EmbeddingTable, HkvTable
from sok_lite.engine.table.exclusive import alone

Empty = Callable[[tuple[int, ...]], Array]

# Dtypes that a trail may hold, by their number in a packed one.
_DTYPES = tuple(np.dtype(name) for name in ("int64", "int32", "float32", "float16", "uint16"))
# Per array: number of its dtype (-1: no array), length, row length (-1: one dimension).
_HEADER = 3
_ARRAYS_PER_TABLE = 5


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


class TableTrail(NamedTuple):
    """What the gradient of one table needs.

    Attributes:
      inverse: (n,) int32, the distinct key of each item.
      row_splits: (batch + 1,) int64.
      local_keys: (k,) int64, the keys that ranks asked of this one, distinct.
      local_inverse: (m,) int32, the local key of each received key; None: one rank, m = k.
      source: (u, dim), the rows of this rank's distinct keys; None where there are no weights.
    """

    inverse: Array
    row_splits: Array
    local_keys: Array
    local_inverse: Array | None
    source: Array | None


class Trail(NamedTuple):
    """What the way back needs: how the keys travelled, and each table's part."""

    route: Route
    tables: list[TableTrail]


class Gradients(NamedTuple):
    """The gradient of one part.

    Attributes:
      keys: (k,) of the table's key type, distinct, all of this rank.
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
    empty: Empty | None = None,
) -> tuple[list[Array], Trail]:
    """Looks up and combines. Every rank must call it, with the same tables in the same order.

    Args:
      backend: where arrays live.
      comm: the ranks.
      parts: one per table; a table may come several times.
      tag: says which call this is; another one on another rank raises.
      empty: gives memory for float32 results of a shape; None: the backend's.

    Returns:
      ([(batch, dim) float32 per part], trail).

    Raises:
      TypeError, ValueError: keys, row splits, weights or combiner do not fit. No table has changed,
        and the other ranks raise a CommunicatorError with the same reason.
    """
    with shared_failure(comm):
        checked = [_checked(backend, i, part) for i, part in enumerate(parts)]
        distinct = [unique(backend, part.keys) for part in checked]
    received, route = send_keys(
        backend,
        comm,
        [item.unique_keys for item in distinct],
        [part.table.key_dtype for part in checked],
        tag=tag,
    )
    local_keys: list[Array] = []
    local_inverses: list[Array | None] = []
    with failure_known_to_all(comm):
        for keys in received:
            local_inverse = None
            if comm.size > 1:
                keys, local_inverse = unique(backend, keys)
            local_keys.append(keys)
            local_inverses.append(local_inverse)
        sources = return_rows(route, _read_all(checked, local_keys, local_inverses))
    outputs, trails = [], []
    for i, part in enumerate(checked):
        inverse, weights = distinct[i].inverse, part.weights
        out = None
        if empty is not None:
            out = empty((len(part.row_splits) - 1, part.table.dim))
        outputs.append(
            combine(backend, sources[i], inverse, part.row_splits, weights, part.combiner, out=out)
        )
        source = None if weights is None else sources[i]
        trails.append(
            TableTrail(inverse, part.row_splits, local_keys[i], local_inverses[i], source)
        )
    return outputs, Trail(route, trails)


def backward(
    backend: Backend,
    parts: Sequence[tuple[EmbeddingTable, Array | None, str]],
    out_grads: Sequence[Array],
    trail: Trail,
    empty: Empty | None = None,
) -> list[Gradients]:
    """Returns the gradients of a `forward`. Every rank must call it, in the order of the forwards.

    Args:
      backend: where arrays live.
      parts: (table, weights, combiner) of each part of the forward.
      out_grads: (batch, dim) float32 per part.
      trail: what the forward gave.
      empty: gives memory for float32 results of a shape; None: the backend's.

    Returns:
      One Gradients per part.
    """
    sums: list[Array] = []
    weight_grads: list[Array | None] = []
    on_one_rank = trail.route.comm.size == 1
    for (_, weights, combiner), grads, way in zip(parts, out_grads, trail.tables, strict=True):
        num_unique = int(trail.route.send_counts.sum(axis=0)[len(sums)])
        out = None
        if empty is not None and on_one_rank:
            out = empty((num_unique, grads.shape[1]))
        sums.append(
            combine_grad(
                backend,
                grads,
                way.inverse,
                way.row_splits,
                weights,
                combiner,
                num_unique,
                out=out,
            )
        )
        weight_grads.append(
            None
            if weights is None
            else combine_weight_grad(
                backend, grads, way.source, way.inverse, way.row_splits, weights, combiner
            )
        )
    results = []
    for i, received in enumerate(send_grads(trail.route, sums)):
        way = trail.tables[i]
        if way.local_inverse is not None:
            num_local = len(way.local_keys)
            out = None if empty is None else empty((num_local, received.shape[1]))
            received = segment_sum(backend, received, way.local_inverse, num_local, out=out)
        keys = parts[i][0].key_dtype.from_int64(backend.xp, way.local_keys)
        results.append(Gradients(keys, received, weight_grads[i]))
    return results


def _read_all(
    parts: Sequence[Part], keys: Sequence[Array], indices: Sequence[Array | None]
) -> list[Array]:
    """Returns the rows of each part's distinct keys, or those of keys[index], in storage format.

    A table that comes several times is looked up once, with the keys of all its parts: it is one
    batch, whose keys evict none of each other and count once.
    """
    parts_of: dict[int, list[int]] = {}
    for i, part in enumerate(parts):
        parts_of.setdefault(id(part.table), []).append(i)
    values: list[Array] = [None] * len(parts)
    for numbers in parts_of.values():
        part = parts[numbers[0]]
        if len(numbers) == 1:
            values[numbers[0]] = _read(part, keys[numbers[0]], indices[numbers[0]])
            continue
        backend = part.table.backend
        together, inverse = unique(backend, backend.xp.concatenate([keys[i] for i in numbers]))
        pieces, start = [], 0
        for i in numbers:
            piece = inverse[start : start + int(keys[i].size)]
            start += int(keys[i].size)
            pieces.append(piece if indices[i] is None else piece[indices[i]])
        rows = _read(part, together, backend.xp.concatenate(pieces))
        start = 0
        for i, piece in zip(numbers, pieces, strict=True):
            values[i] = rows[start : start + int(piece.size)]
            start += int(piece.size)
    return values


def _read(part: Part, keys: Array, index: Array | None) -> Array:
    """Returns the rows of distinct keys in storage format, (k, dim), or those of keys[index]."""
    table = part.table

    def read() -> Array:
        values, rows, num_absent = table.lookup(
            table.key_dtype.from_int64(table.backend.xp, keys),
            unique_keys=True,
            index=index,
            insert=part.insert,
            missing=part.missing,
            filter_ratio=part.filter_ratio,
        )
        if num_absent == 0:
            remember(table, keys, rows)
        return values

    return alone(table, read)


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
    ends = (int(splits[0]), int(splits[-1]))
    if ends != (0, len(keys)) or bool((splits[1:] < splits[:-1]).any()):
        raise ValueError(
            f"`row_splits` of table {number} must rise from 0 to the number of its keys, "
            f"{len(keys)}. Received: {ends[0]} to {ends[1]}"
            f"{' with a fall between them' if ends == (0, len(keys)) else ''}."
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


# ---- row splits -------------------------------------------------------------------------------


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


# ---- a trail as one array ----------------------------------------------------------------------


def pack(backend: Backend, trail: Trail, empty: Empty | None = None) -> Array:
    """Returns a trail as one int64 array: a header, then each array's bytes, padded to 8.

    Args:
      empty: gives int64 memory of a shape; None: the backend's.
    """
    arrays: list[Array | None] = [backend.from_host(trail.route.pack())]
    for way in trail.tables:
        arrays.extend(way)
    header, words = [], []
    for array in arrays:
        if array is None:
            header += [-1, 0, -1]
            words.append(0)
            continue
        row_length = array.shape[1] if array.ndim == 2 else -1
        header += [_DTYPES.index(array.dtype), array.shape[0], row_length]
        words.append(-(-array.nbytes // 8))
    size = len(header) + sum(words)
    packed = backend.xp.empty(size, np.int64) if empty is None else empty((size,))
    packed[: len(header)] = backend.from_host(np.array(header, np.int64))
    start = len(header)
    for array, length in zip(arrays, words, strict=True):
        if array is not None and array.size:
            target = packed[start : start + length].view(np.uint8)[: array.nbytes]
            target[...] = backend.xp.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += length
    return packed


def unpack(backend: Backend, comm: Communicator, packed: Array, num_tables: int) -> Trail:
    """Returns the trail that `pack` wrote; its arrays are views of `packed`."""
    count = 1 + _ARRAYS_PER_TABLE * num_tables
    start = _HEADER * count
    header = backend.to_host(packed[:start]).reshape(count, _HEADER).tolist()
    arrays: list[Any] = []
    for code, length, row_length in header:
        if code < 0:
            arrays.append(None)
            continue
        shape = (length,) if row_length < 0 else (length, row_length)
        num_bytes = _DTYPES[code].itemsize * length * max(1, abs(row_length))
        words = -(-num_bytes // 8)
        flat = packed[start : start + words].view(np.uint8)[:num_bytes]
        arrays.append(flat.view(_DTYPES[code]).reshape(shape))
        start += words
    route = Route.unpack(backend.to_host(arrays[0]), backend, comm)
    tables = [
        TableTrail(*arrays[i : i + _ARRAYS_PER_TABLE]) for i in range(1, count, _ARRAYS_PER_TABLE)
    ]
    return Trail(route, tables)


# ---- agreement ---------------------------------------------------------------------------------

_agreed: "weakref.WeakKeyDictionary[Communicator, set[int]]" = weakref.WeakKeyDictionary()


def agree(
    comm: Communicator, tag: int, tables: Sequence[EmbeddingTable], combiners: Sequence[str]
) -> None:
    """Checks once per tag that all ranks make the same call. Every rank must call it.

    Raises:
      ValueError: a rank has other tables, formats, seeds or combiners; on every rank.
    """
    agreed = _agreed.setdefault(comm, set())
    if comm.size == 1 or tag in agreed:
        return
    description: dict[str, Any] = {"number of tables": len(tables)}
    for i, (table, combiner) in enumerate(zip(tables, combiners, strict=True)):
        description |= {
            f"name of table {i}": table.name,
            f"var_type of table {i}": table.var_type,
            f"dimension of table {i}": table.dim,
            f"key_type of table {i}": table.key_dtype.name,
            f"dtype of table {i}": table.row_dtype.name,
            f"seed of table {i}": table.seed,
            f"initializer of table {i}": repr(table.initializer),
            f"combiner of table {i}": combiner,
        }
        description |= {f"{name} of table {i}": value for name, value in _options(table).items()}
    check_equal_on_all_ranks(comm, description, "A lookup")
    agreed.add(tag)


def _options(table: EmbeddingTable) -> dict[str, Any]:
    """Returns the options that ranks must have in common: not what belongs to one machine."""
    if not isinstance(table, HkvTable):
        return {}
    of_machine = ("device_id", "far_path")
    return {name: x for name, x in asdict(table.options).items() if name not in of_machine}

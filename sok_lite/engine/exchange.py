"""Who owns a key, and the trip of keys, rows and gradients to that rank and back.

 this rank                                         the rank that owns the keys
   send_keys    -- keys of all tables together -->   recv_keys, table by table
   return_rows  <- rows, one trip per row format --  rows of those keys
   send_grads   -- gradients, along the same way ->  gradients, one per received key

Every trip names the lookup it belongs to, so ranks that go back in different orders all raise: none
takes the rows or gradients of another call. With one rank nothing is copied and nothing is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm.protocol import Communicator, CommunicatorError, split_offsets
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.dtypes import KeyDtype, key_dtype
from sok_lite.engine.failure import SEND_KEYS, reason_in
from sok_lite.engine.owner import Partitioner, owner
from sok_lite.engine.segments import cut, gather_rows, group

__all__ = [
    "Partitioner",
    "Route",
    "check_equal_on_all_ranks",
    "owner",
    "return_rows",
    "send_grads",
    "send_keys",
]

_MAX_KEYS = 2**31 - 1


@dataclass(frozen=True)
class Route:
    """How one batch of keys travelled: all that later trips need.

    Attributes:
      backend: where the arrays of the trips live.
      comm: the ranks between which they travel.
      send_counts: (size, num_tables) int64, on the host: keys of each table sent to each rank.
      recv_counts: (size, num_tables) int64, on the host: keys of each table from each rank.
      order: (n,) int32, an array of the backend: the keys of all tables, numbered one table after
        the other, in the order in which they were sent. Empty with one rank.
      lookup: number of the collective in which the keys travelled, equal on all ranks.
    """

    backend: Backend
    comm: Communicator
    send_counts: np.ndarray
    recv_counts: np.ndarray
    order: Array
    lookup: int

    @property
    def num_tables(self) -> int:
        return self.send_counts.shape[1]

    def pack(self) -> np.ndarray:
        """Returns the route as one int64 array, (3 + 2 * size * num_tables + len(order),)."""
        return np.concatenate(
            [
                np.array(self.send_counts.shape, np.int64),
                self.send_counts.reshape(-1),
                self.recv_counts.reshape(-1),
                self.backend.to_host(self.order).astype(np.int64),
                np.array([self.lookup], np.int64),
            ]
        )

    @staticmethod
    def unpack(packed: np.ndarray, backend: Backend, comm: Communicator) -> "Route":
        """Returns the route that `pack` wrote.

        Raises:
          ValueError: it is no packed route, or one of another number of ranks.
        """
        packed = np.asarray(packed)
        size, num_tables = (int(x) for x in packed[:2]) if len(packed) >= 2 else (-1, -1)
        counts_end = 2 + 2 * size * num_tables
        if size != comm.size or num_tables < 0 or len(packed) < counts_end:
            raise ValueError(
                f"A packed route of {comm.size} ranks was expected. "
                f"Received: {len(packed)} numbers that start with {packed[:2].tolist()}."
            )
        send_counts, recv_counts = packed[2:counts_end].reshape(2, size, num_tables)
        order = packed[counts_end:-1]
        num_keys = 0 if size == 1 else send_counts.sum()
        if len(order) != num_keys:
            raise ValueError(
                f"A packed route of {num_keys} keys was expected. Received: one of {len(order)}."
            )
        order = backend.from_host(order.astype(np.int32))
        return Route(backend, comm, send_counts, recv_counts, order, int(packed[-1]))


def send_keys(
    backend: Backend,
    comm: Communicator,
    unique_keys: Sequence[Array],
    key_dtypes: Sequence[KeyDtype | str],
    partitioner: Partitioner = "mod",
    tag: int = 0,
) -> tuple[list[Array], Route]:
    """Sends the keys of all tables to their owners, in one all-to-all. Every rank must call it.

    It waits for the device once, as splits live on the host. The received keys of a table hold the
    keys of rank 0 first, then those of rank 1, each in the order in which that rank gave them: a
    key that several ranks want comes once from each of them.

    Args:
      backend: where keys live.
      comm: the ranks.
      unique_keys: one (u_t,) int64 array per table; those of uint64 tables as bit patterns.
      key_dtypes: key type of each table.
      partitioner: see `owner`; the same on all ranks.
      tag: says which lookup this is, equal on all ranks; another one on another rank raises.

    Returns:
      (recv_keys, route): one (m_t,) int64 array per table, and the way back.

    Raises:
      ValueError, TypeError: keys that are not such arrays, or a bad partitioner.
      CommunicatorError: another rank sends other tables or another tag, failed before it could
        send (`shared_failure`), or has died.
    """
    _check_keys(unique_keys, key_dtypes)
    num_tables = len(unique_keys)
    table_sizes = np.array([len(keys) for keys in unique_keys], np.int64)
    if comm.size == 1 or num_tables == 0:
        counts = np.zeros((comm.size, num_tables), np.int64)
        counts[0] = table_sizes
        empty = backend.xp.empty(0, np.int32)
        return list(unique_keys), Route(backend, comm, counts, counts, empty, comm.turn)

    all_keys = _concatenate(backend, unique_keys)
    owners = _owners(backend, all_keys, table_sizes, comm.size, key_dtypes, partitioner)
    # Grouped by owner, then table. Stable: keys of one owner keep their order, so runs repeat.
    labels = owners * np.int32(num_tables)
    if num_tables > 1:
        labels += backend.from_host(np.repeat(np.arange(num_tables, dtype=np.int32), table_sizes))
    groups = group(backend, labels, (0, labels.size), (0, comm.size * num_tables))
    ends = backend.to_host(groups.offsets).reshape(-1)
    send_counts = np.diff(ends).reshape(comm.size, num_tables)

    sorted_keys = backend.to_host(all_keys[groups.order])
    message, send_splits = _with_headers(sorted_keys, send_counts, tag)
    received = comm.alltoallv(message, send_splits, call=SEND_KEYS)
    keys, recv_counts = _without_headers(comm, received.rows, received.recv_splits, num_tables, tag)
    route = Route(backend, comm, send_counts, recv_counts, groups.order, comm.turn)
    if num_tables > 1:
        pieces = _pieces(recv_counts, range(num_tables), keys)
        keys = np.concatenate([pieces[r][t] for t in range(num_tables) for r in range(comm.size)])
    return cut(backend.from_host(keys), recv_counts.sum(axis=0)), route


def return_rows(route: Route, rows: Sequence[Array]) -> list[Array]:
    """Sends rows back to the ranks that asked for them. Every rank must call it.

    Tables of equal dim and dtype share one all-to-all.

    Args:
      route: what `send_keys` gave for the keys.
      rows: one (m_t, dim_t) array per table, one row per received key.

    Returns:
      One (u_t, dim_t) array per table: row i belongs to the i-th key given to `send_keys`.

    Raises:
      ValueError: rows that do not fit the route.
      CommunicatorError: a rank has died, or is in another trip or lookup; on every rank.
    """
    _check_rows("return_rows", rows, route.recv_counts)
    if route.comm.size == 1:
        return list(rows)
    backend, ranks = route.backend, range(route.comm.size)
    results: list[Array] = [None] * route.num_tables
    for tables in _same_format(rows):
        message = rows[tables[0]]  # of one table alone they lie rank by rank already
        if len(tables) > 1:
            pieces = [cut(rows[t], route.recv_counts[:, t]) for t in tables]
            message = backend.xp.concatenate([piece[rank] for rank in ranks for piece in pieces])
        received = _trip(route, message, tables, back=True)
        index = _send_order(route, tables)
        place = backend.xp.empty_like(index)
        place[index] = backend.xp.arange(len(index), dtype=np.int32)
        sizes = route.send_counts[:, tables].sum(axis=0)
        for t, part in zip(tables, cut(_gather(backend, received, place), sizes), strict=True):
            results[t] = part
    return results


def send_grads(route: Route, grads: Sequence[Array]) -> list[Array]:
    """Sends gradients to the owners of their keys, where the keys went. Every rank must call it.

    Tables of equal dim and dtype share one all-to-all.

    Args:
      route: what `send_keys` gave for the keys.
      grads: one (u_t, dim_t) array per table, one row per key given to `send_keys`.

    Returns:
      One (m_t, dim_t) array per table, one row per received key; not summed.

    Raises:
      ValueError: gradients that do not fit the route.
      CommunicatorError: a rank has died, or is in another trip or lookup; on every rank.
    """
    _check_rows("send_grads", grads, route.send_counts)
    if route.comm.size == 1:
        return list(grads)
    backend, ranks = route.backend, range(route.comm.size)
    results: list[Array] = [None] * route.num_tables
    for tables in _same_format(grads):
        stacked = _concatenate(backend, [grads[t] for t in tables])
        message = _gather(backend, stacked, _send_order(route, tables))
        received = _trip(route, message, tables, back=False)
        if len(tables) == 1:
            results[tables[0]] = received
            continue
        pieces = _pieces(route.recv_counts, tables, received)
        for i, t in enumerate(tables):
            results[t] = backend.xp.concatenate([pieces[rank][i] for rank in ranks])
    return results


# ---- the message of keys: for each rank, [tag, num_tables, keys of each table, keys ...] --------


def _with_headers(
    sorted_keys: np.ndarray, send_counts: np.ndarray, tag: int
) -> tuple[np.ndarray, np.ndarray]:
    size, num_tables = send_counts.shape
    num_keys = send_counts.sum(axis=1)
    message = np.empty(len(sorted_keys) + size * (2 + num_tables), np.int64)
    sources, targets = split_offsets(num_keys), split_offsets(num_keys + 2 + num_tables)
    for rank in range(size):
        part = message[targets[rank] : targets[rank + 1]]
        part[:2] = tag, num_tables
        part[2 : 2 + num_tables] = send_counts[rank]
        part[2 + num_tables :] = sorted_keys[sources[rank] : sources[rank + 1]]
    return message, np.diff(targets)


def _without_headers(
    comm: Communicator, message: np.ndarray, recv_splits: np.ndarray, num_tables: int, tag: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys alone, (m,), and recv_counts; checks that all ranks sent the same tables."""
    recv_counts = np.empty((comm.size, num_tables), np.int64)
    ends = split_offsets(recv_splits)
    parts = []
    for rank in range(comm.size):
        part = message[ends[rank] : ends[rank + 1]]
        reason = reason_in(part)
        if reason is not None:
            raise CommunicatorError(f"Rank {rank} could not make this lookup. {reason}")
        if part[:2].tolist() != [tag, num_tables]:
            raise CommunicatorError(
                f"Rank {comm.rank} looks up {num_tables} tables with tag {tag}, rank {rank} sent "
                f"[tag, tables] = {part[:2].tolist()}. All ranks must make the same lookups in the "
                "same order."
            )
        recv_counts[rank] = part[2 : 2 + num_tables]
        parts.append(part[2 + num_tables :])
    return np.concatenate(parts), recv_counts


# ---- owners, and pieces of arrays --------------------------------------------------------------


def _owners(
    backend: Backend,
    all_keys: Array,
    table_sizes: np.ndarray,
    size: int,
    key_dtypes: Sequence[KeyDtype | str],
    partitioner: Partitioner,
) -> Array:
    kinds = [key_dtype(kind) if isinstance(kind, str) else kind for kind in key_dtypes]
    if len(set(kinds)) == 1 and not callable(partitioner):
        return owner(all_keys, size, kinds[0], partitioner)
    xp, parts = backend.xp, zip(cut(all_keys, table_sizes), kinds, strict=True)
    return xp.concatenate([owner(keys, size, kind, partitioner, xp) for keys, kind in parts])


def _trip(route: Route, message: Array, tables: list[int], back: bool) -> Array:
    splits = [route.send_counts[:, tables].sum(axis=1), route.recv_counts[:, tables].sum(axis=1)]
    send_splits, recv_splits = splits[::-1] if back else splits
    call = f"{'return_rows' if back else 'send_grads'} of lookup {route.lookup}"
    received = route.comm.alltoallv(
        route.backend.to_host(message), send_splits, recv_splits, call=call
    )
    return route.backend.from_host(received.rows)


def _send_order(route: Route, tables: list[int]) -> Array:
    """Returns `route.order` of some tables alone, numbered as if there were no others."""
    if len(tables) == route.num_tables:
        return route.order
    starts = split_offsets(route.send_counts.sum(axis=0))
    new_starts = split_offsets(route.send_counts.sum(axis=0)[tables])
    pieces = _pieces(route.send_counts, range(route.num_tables), route.order)
    return route.backend.xp.concatenate(
        [
            piece[t] + np.int32(new_starts[i] - starts[t])
            for piece in pieces
            for i, t in enumerate(tables)
        ]
    )


def _pieces(counts: np.ndarray, tables: Sequence[int], array: Array) -> list[list[Array]]:
    """Cuts an array that lies rank by rank, table by table within a rank; `[rank][i]` is a view."""
    counts = counts[:, list(tables)]
    parts = cut(array, counts.reshape(-1))
    width = counts.shape[1]
    return [parts[rank * width : (rank + 1) * width] for rank in range(len(counts))]


def _concatenate(backend: Backend, arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else backend.xp.concatenate(arrays)


def _gather(backend: Backend, rows: Array, index: Array) -> Array:
    """Returns rows[index]; by kernel, on all cores, where rows are whole 16- or 32-bit words."""
    row_bytes = rows.shape[1] * rows.dtype.itemsize
    if row_bytes == 0 or row_bytes % 2:
        return rows[index]
    word = np.uint16 if row_bytes % 4 else np.uint32
    words = backend.xp.ascontiguousarray(rows).view(word)
    return gather_rows(backend, words, index).view(rows.dtype)


def _same_format(rows: Sequence[Array]) -> list[list[int]]:
    """Returns the numbers of the tables of each (dim, dtype), in the order of their first table."""
    groups: dict[tuple[int, str], list[int]] = {}
    for t, array in enumerate(rows):
        groups.setdefault((array.shape[1], array.dtype.str), []).append(t)
    return list(groups.values())


# ---- checks: before a collective, for one rank that fails alone leaves the others waiting -------


def _check_keys(unique_keys: Sequence[Array], key_dtypes: Sequence[Any]) -> None:
    if len(unique_keys) != len(key_dtypes):
        raise ValueError(
            f"`send_keys` takes one key type per table. Received: {len(unique_keys)} arrays of "
            f"keys, {len(key_dtypes)} key types."
        )
    for t, keys in enumerate(unique_keys):
        if keys.ndim != 1 or keys.dtype != np.int64:
            raise TypeError(
                "`send_keys` takes keys of shape (n,) and dtype int64 (uint64 keys as their bit "
                f"pattern). Received: shape {keys.shape}, dtype {keys.dtype} for table {t}."
            )
    total = sum(len(keys) for keys in unique_keys)
    if total > _MAX_KEYS:
        raise ValueError(f"`send_keys` takes at most {_MAX_KEYS} keys at once. Received: {total}.")


def _check_rows(caller: str, rows: Sequence[Array], counts: np.ndarray) -> None:
    expected = counts.sum(axis=0)
    if len(rows) != len(expected):
        raise ValueError(
            f"`{caller}` takes one array per table of the route, {len(expected)}. "
            f"Received: {len(rows)}."
        )
    for t, array in enumerate(rows):
        if array.ndim != 2 or len(array) != expected[t]:
            raise ValueError(
                f"`{caller}` takes {expected[t]} rows for table {t}, shape ({expected[t]}, dim). "
                f"Received: shape {array.shape}."
            )

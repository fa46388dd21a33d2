"""The exchange of keys, rows and gradients between a rank and the owners of its keys.

 this rank                                         the rank that owns the keys
   send_keys    -- keys of all tables together -->   recv_keys, table by table
   return_rows  <- rows of all tables together ---   rows of those keys
   send_grads   -- gradients of all tables ------>   gradients, one per received key

Each of the three is one all-to-all and a constant number of launches, whatever the tables and their
formats. It names the lookup that it belongs to, so ranks that take gradients in different orders
all raise: none uses the rows or gradients of another call. With one rank nothing is copied and
nothing is sent.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import LaunchArgs
from sok_lite.backend.ragged import repeat_values, split
from sok_lite.comm.gpu_transport import Check, GpuTransport
from sok_lite.comm.protocol import Communicator
from sok_lite.engine.batch import Batch, ShardedTable
from sok_lite.engine.dedup import dedup
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.failure import SEND_KEYS, failure_known_to_all, shared_failure
from sok_lite.engine.message import LINE_BYTES, RowMessage, keys_with_headers, keys_without_headers
from sok_lite.engine.owner import OwnerRule, owners
from sok_lite.engine.pooling import wrong_splits
from sok_lite.engine.segments import Groups, group
from sok_lite.engine.work_counters import SENT_GRADIENTS, SENT_KEYS, SENT_ROWS, WorkCounter


@dataclass(frozen=True)
class AllToAllPlan:
    """How one batch of keys was sent: rows return and gradients follow by the same plan.

    Attributes:
      send_counts: (size, num_tables) int64, on the host: keys of each table sent to each rank.
      recv_counts: (size, num_tables) int64, on the host: keys of each table from each rank.
      order: (n,) int32, on the device: the indices of the keys of all tables in the order in which
        they were sent. Empty with one rank.
      lookup: identifies the lookup: the number of the collective that sent the keys, equal on all
        ranks.
    """

    backend: Backend
    comm: Communicator
    send_counts: np.ndarray
    recv_counts: np.ndarray
    order: Array
    lookup: int

    @staticmethod
    def of_one_rank(backend: Backend, comm: Communicator, num_keys: np.ndarray) -> "AllToAllPlan":
        """Returns the plan with one rank, for (num_tables,) int64 keys of each table."""
        counts = num_keys[None]
        nothing = backend.xp.empty(0, np.int32)
        return AllToAllPlan(backend, comm, counts, counts, nothing, comm.turn)

    @property
    def num_sent(self) -> np.ndarray:
        """(num_tables,) int64, keys of each table that this rank sent."""
        counts = self.send_counts
        return counts[0] if len(counts) == 1 else counts.sum(axis=0)

    @property
    def num_received(self) -> np.ndarray:
        """(num_tables,) int64, keys of each table that this rank received."""
        counts = self.recv_counts
        return counts[0] if len(counts) == 1 else counts.sum(axis=0)

    @property
    def numbers(self) -> np.ndarray:
        """All but `order`, (k,) int64 on the host, for `restore`."""
        if self.comm.size == 1:
            return np.array([1], np.int64)
        counts = (self.send_counts.reshape(-1), self.recv_counts.reshape(-1))
        return np.concatenate([np.array([self.comm.size, self.lookup], np.int64), *counts])

    @staticmethod
    def restore(
        backend: Backend,
        comm: Communicator,
        numbers: np.ndarray,
        order: Array,
        num_keys: np.ndarray,
    ) -> "AllToAllPlan":
        """Returns the plan that had these `numbers` and this `order`, which may be longer.

        Args:
          num_keys: (num_tables,) int64, the keys of each table of this rank.

        Raises:
          ValueError: there are other ranks now, or numbers and order do not fit each other.
        """
        size, *others = numbers.tolist()
        if size != comm.size:
            raise ValueError(
                f"A lookup and its gradient need the same ranks, of which there are {comm.size} "
                f"now. Received: what {size} ranks have sent. Take the gradient of a step before "
                "ranks come or go."
            )
        if size == 1:
            return AllToAllPlan.of_one_rank(backend, comm, num_keys)
        lookup, *counts = others
        send_counts, recv_counts = np.array(counts, np.int64).reshape(2, size, -1)
        num_sent = int(send_counts.sum())
        if len(order) < num_sent:
            raise ValueError(
                f"A route of {num_sent} keys was expected. Received: the order of {len(order)}."
            )
        return AllToAllPlan(backend, comm, send_counts, recv_counts, order[:num_sent], lookup)


class KeyDispatch(NamedTuple):
    """The keys of a batch after they were sent to their owners.

    Attributes:
      plan: how they were sent.
      inverse: (items,) int32, the index of each item's key among the distinct keys of all features
        that this rank sent.
      received: (m,) int64, the keys that this rank received, feature by feature; they may repeat.
    """

    plan: AllToAllPlan
    inverse: Array
    received: Array


def dispatch_keys(
    backend: Backend, comm: Communicator, batch: Batch, tag: int, check: Check | None = None
) -> KeyDispatch:
    """Sends the distinct keys of a batch to their owners. Every rank must call it.

    Args:
      tag: number of the call, equal on all ranks; if another rank has another one, all raise.
      check: decides whether the keys may be sent; None: they may if the row splits fit.

    Raises:
      ValueError: row splits do not fit; or whatever the check raises. The other ranks raise a
        CommunicatorError with the reason.
    """
    with shared_failure(comm):
        if check is None:
            count = wrong_splits(backend, batch.splits_per_feature(), batch.layout.sizes)
            check = Check(count, batch.check_splits)
        distinct = dedup(backend, batch.keys, batch.layout.begin)
    key_dtypes = [table.key_dtype for table in batch.tables]
    rules = [table.owner for table in batch.tables]
    received, plan = send_keys(
        backend, comm, distinct.keys, distinct.sizes, key_dtypes, rules, tag, check
    )
    return KeyDispatch(plan, distinct.inverse, received)


def send_keys(
    backend: Backend,
    comm: Communicator,
    keys: Array,
    sizes: Sequence[int] | np.ndarray,
    key_dtypes: Sequence[KeyDtype | str],
    rules: Sequence[OwnerRule],
    tag: int = 0,
    check: Check | None = None,
) -> tuple[Array, AllToAllPlan]:
    """Sends the keys of all tables to their owners, in one all-to-all. Every rank must call it.

    It waits for the device once: the host must know the counts. The received keys of a table are
    those of rank 0 first, then those of rank 1, each in the order in which that rank passed them: a
    key that several ranks look up is received once from each of them.

    Args:
      keys: (n,) int64, table by table, distinct within a table; those of uint64 tables as bit
        patterns.
      sizes: (num_tables,) keys of each table; they sum to n.
      key_dtypes, rules: of each table; the same on all ranks.
      tag: number of the lookup, equal on all ranks; if another rank has another one, all raise.
      check: decides whether the keys may be sent, read with the keys; None: they may.

    Returns:
      ((m,) int64 received keys, table by table, `plan.num_received` of each; the plan).

    Raises:
      ValueError: a rule returns no rank; or whatever the check raises. Both make this raise on all
        ranks.
      CommunicatorError: another rank sends other tables or another tag, failed before it could
        send (`shared_failure`), or has died.
    """
    sizes = np.asarray(sizes, np.int64)
    num_tables = len(sizes)
    if comm.size == 1 or num_tables == 0:
        if check is not None and backend.to_host(check.count).any():
            check.refuse()
        counts = np.zeros((comm.size, num_tables), np.int64)
        counts[0] = sizes
        empty = backend.xp.empty(0, np.int32)
        return keys, AllToAllPlan(backend, comm, counts, counts, empty, comm.turn)

    with shared_failure(comm):
        labels = owners(backend, keys, sizes, comm.size, key_dtypes, rules)
        # Grouped by owner, then table. Stable: keys of one owner keep their order, so runs repeat.
        labels *= np.int32(num_tables)
        if num_tables > 1:
            labels += repeat_values(backend, np.arange(num_tables, dtype=np.int32), sizes)
        groups = group(backend, labels, (0, labels.size), (0, comm.size * num_tables))
    if comm.gpu_transport is None:
        return _keys_by_host(backend, comm, keys, groups, num_tables, tag, check)
    transport = comm.gpu_transport
    return _keys_by_gpu_transport(transport, backend, comm, keys, sizes, groups, tag, check)


def _keys_by_host(
    backend: Backend,
    comm: Communicator,
    keys: Array,
    groups: Groups,
    num_tables: int,
    tag: int,
    check: Check | None,
) -> tuple[Array, AllToAllPlan]:
    """Sends keys through the host, in one message with the tag and the counts in its header."""
    with shared_failure(comm):
        parts = [] if check is None else [check.count]
        parts += [groups.offsets, backend.xp.take(keys, groups.order)]
        on_host = backend.to_host(backend.xp.concatenate(parts))  # one wait
        if check is not None:
            if on_host[0]:
                check.refuse()
            on_host = on_host[1:]
        ends, sorted_keys = np.split(on_host, [comm.size * num_tables + 1])
        send_counts = np.diff(ends).reshape(comm.size, num_tables)
        message, send_splits = keys_with_headers(sorted_keys, send_counts, tag)
    _count_sent_bytes(SENT_KEYS, comm, send_splits, message.itemsize)
    received = comm.alltoallv(message, send_splits, call=SEND_KEYS)
    with failure_known_to_all(comm):
        recv_keys, recv_counts = keys_without_headers(
            comm, received.rows, received.recv_splits, num_tables, tag
        )
        plan = AllToAllPlan(backend, comm, send_counts, recv_counts, groups.order, comm.turn)
        return backend.from_host(recv_keys), plan


def _keys_by_gpu_transport(
    transport: GpuTransport,
    backend: Backend,
    comm: Communicator,
    keys: Array,
    sizes: np.ndarray,
    groups: Groups,
    tag: int,
    check: Check | None,
) -> tuple[Array, AllToAllPlan]:
    """Sends counts, and then keys as rows of 8 bytes, from GPU to GPU."""
    counts = transport.counts(SEND_KEYS, groups.offsets, len(sizes), tag, check)
    with failure_known_to_all(comm):
        row_bytes = [keys.itemsize] * len(sizes)
        outgoing = RowMessage.layout(backend, counts.sent, row_bytes, groups.order)
        incoming = RowMessage.layout(backend, counts.received, row_bytes, None)
        message = outgoing.pack(split(keys, sizes))
        recv_keys = backend.xp.empty(int(counts.received.sum()), np.int64)
        plan = AllToAllPlan(backend, comm, counts.sent, counts.received, groups.order, comm.turn)
    _count_sent_bytes(SENT_KEYS, comm, outgoing.splits)
    received = transport.rows("keys", message, outgoing.splits, incoming.splits)
    with failure_known_to_all(comm):
        incoming.unpack(received, split(recv_keys, plan.num_received))
        return recv_keys, plan


def return_rows(plan: AllToAllPlan, rows: Sequence[Array]) -> list[Array]:
    """Sends rows back to the ranks that requested them. Every rank must call it.

    Args:
      plan: of the keys, from `send_keys`.
      rows: one (m_t, dim_t) array per table, one row per received key; dim_t and dtype equal on
        all ranks.

    Returns:
      One (u_t, dim_t) array per table: row i belongs to the i-th key passed to `send_keys`.

    Raises:
      CommunicatorError: a rank has died, or is in another call or lookup, or has rows of other
        formats; on every rank.
    """
    at_owner = (plan.recv_counts, None)
    return _exchange_rows("return_rows", plan, rows, at_owner, (plan.send_counts, plan.order))


def send_grads(plan: AllToAllPlan, grads: Sequence[Array]) -> list[Array]:
    """Sends gradients to the owners of their keys. Every rank must call it.

    Args:
      plan: of the keys, from `send_keys`.
      grads: one (u_t, dim_t) array per table, one row per key passed to `send_keys`; dim_t and
        dtype equal on all ranks.

    Returns:
      One (m_t, dim_t) array per table, one row per received key; not summed over ranks.

    Raises:
      CommunicatorError: a rank has died, or is in another call or lookup, or has gradients of
        other formats; on every rank.
    """
    at_sender = (plan.send_counts, plan.order)
    return _exchange_rows("send_grads", plan, grads, at_sender, (plan.recv_counts, None))


def send_rounded_grads(
    tables: Sequence[ShardedTable], plan: AllToAllPlan, grads: Sequence[Array]
) -> list[Array]:
    """Does `send_grads` for float32, as bfloat16 for tables that `rounds_gradients`.

    Those are rounded to nearest even, also if this rank owns the key itself: a gradient is the same
    whichever rank owns its key.
    """
    backend = plan.backend
    rounded = [i for i, table in enumerate(tables) if table.rounds_gradients]
    sent = list(grads)
    for i in rounded:
        sent[i] = backend.xp.empty(grads[i].shape, np.uint16)
    _convert(backend, "sent_gradients_round", [(grads[i], sent[i]) for i in rounded])
    received = send_grads(plan, sent)
    widened = list(received)
    for i in rounded:
        widened[i] = backend.xp.empty(received[i].shape, np.float32)
    _convert(backend, "sent_gradients_widen", [(received[i], widened[i]) for i in rounded])
    return widened


def _convert(backend: Backend, kernel: str, arrays: Sequence[tuple[Array, Array]]) -> None:
    """Converts the elements of (source, out) arrays, all in one launch."""
    parts = [LaunchArgs(source.size, (source, out, source.size)) for source, out in arrays]
    backend.launch_tables(kernel, parts)


def _exchange_rows(
    name: str,
    plan: AllToAllPlan,
    rows: Sequence[Array],
    mine: tuple[np.ndarray, Array | None],
    theirs: tuple[np.ndarray, Array | None],
) -> list[Array]:
    """Sends rows to other ranks and returns those that they sent.

    Args:
      name: of the exchange, in the call that all ranks compare.
      mine: counts (size, num_tables) of the rows to send, and their order in the message, or None.
      theirs: the same of the rows to receive.
    """
    if plan.comm.size == 1:
        return list(rows)
    backend, formats = plan.backend, [(each.shape[1], each.dtype) for each in rows]
    row_bytes = [dim * dtype.itemsize for dim, dtype in formats]
    outgoing = RowMessage.layout(backend, mine[0], row_bytes, mine[1])
    incoming = RowMessage.layout(backend, theirs[0], row_bytes, theirs[1])
    # Messages are bytes: the name of the call, which all ranks compare, has the formats.
    code = zlib.crc32(repr([(dim, dtype.str) for dim, dtype in formats]).encode())
    call = f"{name} of lookup {plan.lookup}, formats {code:08x}"
    message, splits = outgoing.pack(rows), (outgoing.splits, incoming.splits)
    _count_sent_bytes(
        SENT_ROWS if name == "return_rows" else SENT_GRADIENTS, plan.comm, outgoing.splits
    )
    transport = plan.comm.gpu_transport
    if transport is not None:
        received = transport.rows(call, message, *splits)
    else:
        answer = plan.comm.alltoallv(backend.to_host(message), *splits, call=call)
        received = backend.from_host(answer.rows)
    results = [
        backend.xp.empty((n, dim), dtype)
        for n, (dim, dtype) in zip(incoming.num_rows, formats, strict=True)
    ]
    incoming.unpack(received, results)
    return results


def _count_sent_bytes(
    work: WorkCounter, comm: Communicator, splits: np.ndarray, row_bytes: int = LINE_BYTES
) -> None:
    """Adds the bytes sent to other ranks, headers and padding too; splits: (size,) sent rows."""
    num_rows = int(splits.sum()) - int(splits[comm.rank])
    work.add(num_bytes=num_rows * row_bytes)

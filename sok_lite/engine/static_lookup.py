"""A lookup in static tables and its gradient, in two halves: the caller reads the rows between.

 locate     keys -> dedup -> send_keys -> dedup -> which rows this rank has to read
 forward    rows that were read -> return_rows -> pool
 backward   as of any lookup, to the rows that were read

On one rank nothing is sent. A lookup reads nothing of a table's rows and changes nothing before its
keys are known to be row numbers.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, cast

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.launches import launch_all
from sok_lite.backend.ragged import (
    Allocate,
    gather_split,
    new_results,
    numbers_of_tables,
    split,
    split_offsets,
)
from sok_lite.comm import Communicator
from sok_lite.comm.gpu_transport import Check
from sok_lite.engine.batch import Batch, ShardedTable
from sok_lite.engine.batch_pooling import (
    PoolingContext,
    SentKeys,
    gradients_at_owners,
    pool,
    pool_returned,
    send,
)
from sok_lite.engine.dedup import dedup
from sok_lite.engine.exchange import Route, return_rows
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.pooling import wrong_splits
from sok_lite.engine.segments import gather_launch, group, segment_sums
from sok_lite.engine.static_table import StaticTable


class Located(NamedTuple):
    """The rows of static tables that this rank has to read.

    Attributes:
      num_places: (num_tables,) int64, on the host, number of rows to read of each table.
      places: (u,) int64, distinct for each table, the positions of the rows on this rank; table by
        table.
      number: (m,) int32, the number of the position of each received key among those of its table;
        table by table, each from 0 on.
      sent: how the keys were sent; None on one rank, where the received keys are the items.
    """

    num_places: np.ndarray
    places: Array
    number: Array
    sent: SentKeys | None

    def numbers(self) -> np.ndarray:
        """Returns what the host knows beside the batch, (k,) int64; `Sent.of` takes it."""
        told = np.array([1], np.int64) if self.sent is None else self.sent.route.told
        return np.concatenate([self.num_places, told])

    def others(self) -> tuple[Array, Array, Array]:
        """Returns `number`, and of `sent` inverse (items,) int32 and order (n,) int32."""
        nothing = self.number[:0]
        if self.sent is None:
            return self.number, nothing, nothing
        return self.number, self.sent.inverse, self.sent.route.order


class Sent(NamedTuple):
    """How the keys of a static lookup were sent, as `forward` and the gradient get it.

    Attributes:
      num_places, number: as of the `Located`.
      route: by which rows and gradients go.
      inverse: (items,) int32, of several ranks; None on one.
    """

    num_places: np.ndarray
    number: Array
    route: Route
    inverse: Array | None

    @staticmethod
    def of(
        backend: Backend,
        comm: Communicator,
        batch: Batch,
        numbers: np.ndarray,
        others: Sequence[Array],
    ) -> "Sent":
        """Returns it of the batch, and of what the methods of `Located` gave; these may be longer.

        Raises:
          ValueError: there are other ranks now.
        """
        num_places, told = np.split(numbers, [len(batch.tables)])
        number, inverse, order = others
        num_items = batch.layout.num_items
        route = Route.of_told(backend, comm, told, order, num_items)
        number = number[: int(route.num_received.sum())]
        return Sent(
            num_places, number, route, None if comm.size == 1 else inverse[: batch.keys.size]
        )

    def context(self, batch: Batch, sources: list[Array | None]) -> "StaticContext":
        """Returns the context for the gradient.

        Args:
          sources: those of a PoolingContext.
        """
        pooling = PoolingContext.of(self.route, batch, self.inverse, sources)
        return StaticContext(pooling, self.num_places, self.number)


class StaticContext(NamedTuple):
    """The context that a lookup of static tables leaves for its gradient.

    Attributes:
      pooling: how rows were pooled and keys were sent to their owners.
      num_places: (num_tables,) int64, on the host, number of rows that were read of each table.
      number: (m,) int32, the number of the row of each received key among those of its table.
    """

    pooling: PoolingContext
    num_places: np.ndarray
    number: Array


def locate(backend: Backend, comm: Communicator, batch: Batch, tag: int) -> Located:
    """Returns which rows a lookup has to read. Every rank must call it.

    On one rank it waits for the device twice, else as `send` does and once more.

    Args:
      backend: where keys are.
      comm: the ranks.
      batch: of static tables.
      tag: number of the call, equal on all ranks; if another rank has another one, all raise.

    Raises:
      ValueError: a table has no such row, or row splits do not fit. The other ranks raise a
        CommunicatorError with the reason. Nothing has been read.
    """
    tables = cast(list[StaticTable], batch.tables)
    with shared_failure(comm):
        keys = split(batch.keys, batch.layout.sizes)
        count = wrong_splits(backend, batch.splits_of_parts(), batch.layout.sizes)
        _count_outside(tables, keys, count)
        check = Check(count, partial(_refuse, batch, tables, keys))
    if comm.size == 1:
        if int(count[0]):
            check.refuse()
        return _locate(backend, tables, batch.keys, batch.layout.sizes, 1, None)
    sent = send(backend, comm, batch, tag, check)
    with failure_known_to_all(comm):
        sizes = sent.route.num_received.tolist()
        return _locate(backend, tables, sent.received, sizes, comm.size, sent)


def copy_places(backend: Backend, located: Located, copies: Sequence[Array]) -> None:
    """Copies the places of each table to an array of its own, (its num_places,) int64."""
    index = backend.xp.arange(located.places.size, dtype=np.int32)
    gather_split(backend, located.places, index, located.num_places.tolist(), copies)


def forward(
    backend: Backend,
    comm: Communicator,
    batch: Batch,
    sent: Sent,
    rows: Sequence[Array],
    allocate: Allocate | None = None,
) -> tuple[Sequence[Array], StaticContext]:
    """Pools rows that were read. Every rank must call it.

    Args:
      batch: the batch of `locate`.
      sent: of what `locate` gave.
      rows: of each table (its num_places, dim) storage, C-contiguous, the rows at `places`.
      allocate: gives memory for the results; None: the backend does.

    Returns:
      ((batch, dim) float32 per part, context).
    """
    if comm.size == 1:
        pooled = pool(backend, batch, rows, sent.number, [0] * len(rows), allocate)
        are_weighted = [weights is not None for weights in batch.weights]
        sources = _rows_of_keys(backend, rows, split(sent.number, batch.layout.sizes), are_weighted)
        return pooled, sent.context(batch, sources)
    assert sent.inverse is not None
    with failure_known_to_all(comm):
        received = split(sent.number, sent.route.num_received)
        rows_of_keys = _rows_of_keys(backend, rows, received, [True] * len(rows))
        returned = return_rows(sent.route, cast(list[Array], rows_of_keys))
        # The others may come to the keys of the tables of the call that grow.
        keys = SentKeys(sent.route, sent.inverse, batch.keys[:0])
        pooled, pooling = pool_returned(backend, batch, keys, returned, allocate)
    return pooled, sent.context(batch, pooling.sources)


def backward(
    backend: Backend,
    parts: Sequence[tuple[ShardedTable, Array | None, str]],
    out_grads: Sequence[Array],
    context: StaticContext,
    allocate: Allocate | None = None,
) -> tuple[Sequence[Array], list[Array | None]]:
    """Returns the gradients of a `forward`. Every rank must call it, in the order of the forwards.

    Args:
      parts: (table, weights, combiner) of each part of the forward.
      out_grads: (batch, dim) float32 per part.
      context: that the forward returned.
      allocate: gives memory for all row gradients; None: the backend does.

    Returns:
      (of each part (its places, dim) float32, by the rows that were read; of each part (n,) float32
      by its weights, None where there are none).
    """
    shapes = [
        (n, table.dim) for n, (table, _, _) in zip(context.num_places.tolist(), parts, strict=True)
    ]
    out = new_results(backend, shapes, allocate)
    terms, weight_grads = gradients_at_owners(backend, parts, out_grads, context.pooling)
    begin = split_offsets(context.pooling.route.num_received)
    starts = split_offsets(context.num_places)
    labels = context.number + _repeat(backend, starts[:-1].astype(np.int32), np.diff(begin))
    groups = group(backend, labels, begin, starts)
    return segment_sums(backend, groups, terms, out), weight_grads


def _count_outside(tables: Sequence[StaticTable], keys: Sequence[Array], count: Array) -> None:
    """Counts row numbers that do not exist in their table, by one launch, into (1,) int64."""
    parts = []
    for table, its_keys in zip(tables, keys, strict=True):
        n = len(its_keys)
        of_keys = (its_keys, table.num_rows, count, n)
        parts.append([table.backend.prepared("keys_count_outside", n, *of_keys)])
    launch_all(*parts)


def _refuse(batch: Batch, tables: Sequence[StaticTable], keys: Sequence[Array]) -> None:
    """Raises ValueError where row splits or row numbers do not fit. On a GPU it waits."""
    batch.check_splits()
    for table, its_keys in zip(tables, keys, strict=True):
        table.check_rows(its_keys)


def _locate(
    backend: Backend,
    tables: Sequence[StaticTable],
    keys: Array,
    sizes: Sequence[int],
    num_ranks: int,
    sent: SentKeys | None,
) -> Located:
    """Returns which rows this rank has to read.

    Args:
      keys: (m,) int64, the received keys, table by table; they may repeat.
      sizes: number of keys of each table.
    """
    distinct = dedup(backend, keys, split_offsets(np.array(sizes, np.int64)))
    strides = np.array([table.stride(num_ranks) for table in tables], np.int64)
    places = distinct.keys // _repeat(backend, strides, distinct.sizes)
    starts = distinct.starts[:-1].astype(np.int32)
    number = distinct.inverse - _repeat(backend, starts, sizes)
    return Located(distinct.sizes, places, number, sent)


def _repeat(backend: Backend, numbers: np.ndarray, counts: Sequence[int] | np.ndarray) -> Array:
    """Returns a number for each item: the one there is, or as often each as it has items."""
    if len(numbers) == 1:
        return numbers[0]
    return numbers_of_tables(backend, numbers, counts)


def _rows_of_keys(
    backend: Backend, rows: Sequence[Array], numbers: Sequence[Array], are_wanted: Sequence[bool]
) -> list[Array | None]:
    """Returns the row of each key, (its keys, dim) storage, of the tables where they are wanted."""
    results: list[Array | None] = [None] * len(rows)
    launches = []
    for i, is_wanted in enumerate(are_wanted):
        if is_wanted:
            results[i], launch = gather_launch(backend, rows[i], numbers[i])
            launches.append([launch])
    launch_all(*launches)
    return results

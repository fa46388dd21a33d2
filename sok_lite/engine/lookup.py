"""One whole lookup and its gradient, for all tables of a call together, over all ranks.

 forward    one rank        keys -> find and pool, in one launch; missing keys are inserted
            several ranks   keys -> dedup -> send_keys -> find and copy -> return_rows -> pool
 backward                   gradients summed per key, in pieces and a fixed order; with several
                            ranks first per key that this rank sent, then send_sums to the owners,
                            which sum again

Two ranks that look up one key send it twice; its owner looks it up twice and sums its gradients.
A `BackwardContext` takes from forward to backward what the gradient needs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.ragged import Allocate, Shape, gather_split, new_results, split, split_offsets
from sok_lite.backend.table_lock import TableLock
from sok_lite.comm import Communicator
from sok_lite.engine.batch import Batch
from sok_lite.engine.batch_pooling import (
    PoolingContext,
    gradients_at_owners,
    pool_returned,
    send_batch,
)
from sok_lite.engine.dedup import dedup_and_group
from sok_lite.engine.exchange import Route, return_rows
from sok_lite.engine.failure import failure_known_to_all
from sok_lite.engine.owner_lookup import OwnerLookup
from sok_lite.engine.segments import segment_sums
from sok_lite.engine.table.find import WrongSplitsError
from sok_lite.engine.table.last_gradient import note_gradients


class BackwardContext(NamedTuple):
    """What a lookup leaves for its gradient. Parts lie one after another in its arrays.

    Attributes:
      pooling: how rows were pooled and keys were sent to their owners.
      found: (3, num_parts) int64, on the host: of the table of each part its row_epoch when the
        row numbers were found, how many of the keys of this call had no row, and the number of the
        lookup, 0 if it inserts nothing.
      keys: (m,) int64, the keys that this rank received, `pooling.route.num_received` of each
        part; they may repeat. On one rank those of the batch.
      rows: (m,) uint32, their row numbers, or NO_ROW.
    """

    pooling: PoolingContext
    found: np.ndarray
    keys: Array
    rows: Array

    def numbers(self) -> np.ndarray:
        """Returns what the host knows beside the batch, (k,) int64; `of` takes it."""
        return np.concatenate([self.found.reshape(-1), self.pooling.route.told])

    def others(self) -> tuple[Array, Array, Array]:
        """Returns keys (m,), inverse (items,) int32 and order (n,) int32; `of` takes them. On one
        rank there is none in any of them."""
        xp, route = self.pooling.route.backend.xp, self.pooling.route
        if route.comm.size == 1:
            return xp.empty(0, np.int64), xp.empty(0, np.int32), route.order
        return self.keys, self.pooling.inverse, route.order

    @staticmethod
    def of(
        backend: Backend,
        comm: Communicator,
        batch: Batch,
        numbers: np.ndarray,
        rows: Array,
        others: Sequence[Array],
        sources: list[Array | None],
    ) -> "BackwardContext":
        """Returns the context of a lookup from its batch and what it left.

        Args:
          numbers, others: what the methods of these names gave; numbers of 32 bits may be more.
          rows: as of the context; they may be more.
          sources: those of `pooling`.

        Raises:
          ValueError: there are other ranks now.
        """
        found, told = np.split(numbers, [3 * len(batch.tables)])
        keys, inverse, order = others
        inverse = inverse[: batch.keys.size]
        route = Route.of_told(backend, comm, told, order, batch.layout.num_items)
        if comm.size == 1:
            keys, inverse = batch.keys, None
        pooling = PoolingContext.of(route, batch, inverse, sources)
        return BackwardContext(pooling, found.reshape(3, -1), keys, rows[: keys.size])


class Gradients(NamedTuple):
    """The gradients of all parts.

    Attributes:
      keys: of each part (k,) int64, distinct, all of this rank; of a uint64 table their bits.
      row_grads: of each part (k, dim) float32, summed over items and ranks in a fixed order.
      weight_grads: of each part (n,) float32; None where there are no weights.
    """

    keys: Sequence[Array]
    row_grads: Sequence[Array]
    weight_grads: Sequence[Array | None]


def forward(
    backend: Backend,
    comm: Communicator,
    batch: Batch,
    tag: int = 0,
    allocate: Allocate | None = None,
    new_rows: Callable[[Shape], Array] | None = None,
    begun: np.ndarray | None = None,
) -> tuple[Sequence[Array], BackwardContext]:
    """Looks up and combines. Every rank must call it, with the same tables in the same order.

    Args:
      backend: where arrays live.
      comm: the ranks.
      batch: what is looked up; a table may come several times.
      tag: number of the call, equal on all ranks; if another rank has another one, all raise.
      allocate: gives memory for the results; None: the backend does.
      new_rows: allocates the `rows` of the context, uint32 of a shape; None: the backend does.
      begun: of one rank, the counters of a search that was made: rows and results have what it has
        found; see `look_up_batch`. None: none was.

    Returns:
      ((batch, dim) float32 per part, context).

    Raises:
      ValueError: row splits do not fit. The other ranks raise a CommunicatorError with the same
        reason. No key was inserted and no row has changed; on one rank a kernel finds the error,
        and the keys of the call that have a row count as seen.
    """
    if comm.size == 1:
        return _forward_alone(backend, comm, batch, allocate, new_rows, begun)
    sent = send_batch(backend, comm, batch, tag)
    with failure_known_to_all(comm):
        num_received = sent.route.num_received.tolist()
        owned = OwnerLookup(backend, batch, sent.received, num_received, new_rows)
        returned = return_rows(sent.route, owned.look_up())
    pooled, pooling = pool_returned(backend, batch, sent, returned, allocate)
    return pooled, _context(pooling, owned)


def _forward_alone(
    backend: Backend,
    comm: Communicator,
    batch: Batch,
    allocate: Allocate | None,
    new_rows: Callable[[Shape], Array] | None,
    begun: np.ndarray | None,
) -> tuple[Sequence[Array], BackwardContext]:
    """Does what `forward` does on one rank: no key is sent, so none is deduplicated."""
    batch.check_splits_of_no_rows()
    owned = OwnerLookup(backend, batch, batch.keys, batch.layout.sizes, new_rows)
    outputs = new_results(backend, batch.layout.shapes, allocate)
    try:
        owned.pool(outputs, begun)
    except WrongSplitsError:
        batch.check_splits()
        raise
    route = Route.alone(backend, comm, batch.layout.num_items)
    return outputs, _context(PoolingContext.of(route, batch, None, owned.sources), owned)


def _context(pooling: PoolingContext, owned: OwnerLookup) -> BackwardContext:
    found = np.array([owned.row_epochs, owned.num_without_row, owned.lookup_numbers], np.int64)
    return BackwardContext(pooling, found, owned.keys, owned.rows)


def backward(
    backend: Backend,
    parts: Sequence[tuple[Any, Array | None, str]],
    out_grads: Sequence[Array],
    context: BackwardContext,
    allocate: Callable[[Sequence[int]], tuple[Sequence[Array], Sequence[Array]]] | None = None,
) -> Gradients:
    """Returns the gradients of a `forward`. Every rank must call it, in the order of the forwards.

    Args:
      backend: where arrays live.
      parts: (table, weights, combiner) of each part of the forward.
      out_grads: (batch, dim) float32 per part.
      context: that the forward returned.
      allocate: takes how many keys each part has; gives memory for the gradients of its rows, and
        for a copy of its keys: (k, dim) float32, and (k,) int64 or, of a table of such keys,
        int32. None: the backend's, and there is no copy.

    Raises:
      ValueError: a gradient is not float32, or of another shape than its output.
    """
    terms, weight_grads = gradients_at_owners(backend, parts, out_grads, context.pooling)
    begin = split_offsets(context.pooling.route.num_received)
    distinct, groups = dedup_and_group(backend, context.keys, begin, context.rows)
    sizes = distinct.sizes.tolist()
    sums, copies = (None, None) if allocate is None else allocate(sizes)
    sums = segment_sums(backend, groups, terms, sums)
    if copies is not None:
        gather_split(backend, context.keys, distinct.first, sizes, copies)
    keys, rows = split(distinct.keys, sizes), split(distinct.rows, sizes)
    tables, route = [table for table, _, _ in parts], context.pooling.route
    # Of several ranks native code takes no gradient.
    is_native = route.comm.size == 1 and all(
        isinstance(getattr(table, "lock", None), TableLock) for table in tables
    )
    num_items = route.num_received.tolist() if is_native else None
    note_gradients(backend, tables, keys, rows, context.found, num_items)
    return Gradients(keys, sums, weight_grads)

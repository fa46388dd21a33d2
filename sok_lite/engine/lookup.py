"""One whole lookup and its gradient, for all tables of a call together, over all ranks.

 forward    one rank        keys -> find and pool, in one launch; missing keys are inserted
            several ranks   keys -> dedup -> send_keys -> find and copy -> return_rows -> pool
 backward                   gradients summed per key, in pieces and a fixed order; with several
                            ranks first per key that this rank sent, then send_sums to the owners,
                            which sum again

Two ranks that look up one key send it twice; its owner looks it up twice and sums its gradients.
A `BackwardContext` takes from forward to backward what the gradient needs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm import Communicator
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.backward_context import BackwardContext
from sok_lite.engine.batch import Batch
from sok_lite.engine.batch_pooling import gradients_at_owners, pool_returned
from sok_lite.engine.dedup import dedup
from sok_lite.engine.exchange import return_rows
from sok_lite.engine.failure import failure_known_to_all
from sok_lite.engine.owner_lookup import OwnerLookup
from sok_lite.engine.packed import Empty
from sok_lite.engine.pieces import OutputBuffer, Pieces
from sok_lite.engine.pooling_context import PoolingContext
from sok_lite.engine.route import Route
from sok_lite.engine.segments import group, segment_sums
from sok_lite.engine.sent_keys import send
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.lookups import WrongSplitsError
from sok_lite.engine.table.results import KnownRows


class Gradients(NamedTuple):
    """The gradients of all parts.

    Attributes:
      keys: of each part (k,) int64, distinct, all of this rank; of a uint64 table their bits.
      row_grads: of each part (k, dim) float32, summed over items and ranks in a fixed order.
      weight_grads: of each part (n,) float32; None where there are no weights.
    """

    keys: Pieces
    row_grads: Pieces
    weight_grads: Sequence[Array | None]

    @property
    def sizes(self) -> list[int]:
        """How many keys each part has."""
        return [size for (size,) in self.keys.shapes]


def forward(
    backend: Backend,
    comm: Communicator,
    batch: Batch,
    tag: int = 0,
    buffer: OutputBuffer | None = None,
    new_rows: Empty | None = None,
) -> tuple[Pieces, BackwardContext]:
    """Looks up and combines. Every rank must call it, with the same tables in the same order.

    Args:
      backend: where arrays live.
      comm: the ranks.
      batch: what is looked up; a table may come several times.
      tag: number of the call, equal on all ranks; if another rank has another one, all raise.
      buffer: allocates the results, (size,) float32; None: the backend does.
      new_rows: allocates the `rows` of the context, uint32 of a shape; None: the backend does.

    Returns:
      ((batch, dim) float32 per part, context).

    Raises:
      ValueError: row splits do not fit. The other ranks raise a CommunicatorError with the same
        reason. No key was inserted and no row has changed; on one rank a kernel finds the error,
        and the keys of the call that have a row count as seen.
    """
    if comm.size == 1:
        return _forward_alone(backend, comm, batch, buffer, new_rows)
    sent = send(backend, comm, batch, tag)
    with failure_known_to_all(comm):
        num_received = sent.route.num_received.tolist()
        owned = OwnerLookup(backend, batch, sent.received, num_received, new_rows)
        returned = return_rows(sent.route, owned.look_up())
    pooled, pooling = pool_returned(backend, batch, sent, returned, buffer)
    return pooled, _context(pooling, owned)


def _forward_alone(
    backend: Backend,
    comm: Communicator,
    batch: Batch,
    buffer: OutputBuffer | None,
    new_rows: Empty | None,
) -> tuple[Pieces, BackwardContext]:
    """Does what `forward` does on one rank: no key is sent, so none is deduplicated."""
    batch.check_splits_of_no_rows()
    owned = OwnerLookup(backend, batch, batch.keys, batch.layout.sizes, new_rows)
    outputs = Pieces.new(backend, batch.layout.places, buffer)
    try:
        owned.pool(outputs)
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
    parts: Sequence[tuple[EmbeddingTable, Array | None, str]],
    out_grads: Sequence[Array],
    context: BackwardContext,
    buffer: OutputBuffer | None = None,
) -> Gradients:
    """Returns the gradients of a `forward`. Every rank must call it, in the order of the forwards.

    Args:
      backend: where arrays live.
      parts: (table, weights, combiner) of each part of the forward.
      out_grads: (batch, dim) float32 per part.
      context: that the forward returned.
      buffer: allocates all row gradients, (size,) float32; None: the backend does.

    Raises:
      ValueError: a gradient is not float32, or of another shape than its output.
    """
    terms, weight_grads = gradients_at_owners(backend, parts, out_grads, context.pooling)
    begin = split_offsets(context.pooling.route.num_received)
    distinct = dedup(backend, context.keys, begin)
    groups = group(backend, distinct.inverse, begin, distinct.starts)
    sums = segment_sums(backend, groups, terms, buffer)
    shapes, starts = list(zip(distinct.sizes.tolist())), distinct.starts[:-1]
    keys = Pieces(distinct.keys, shapes, starts)
    rows = Pieces(backend.xp.take(context.rows, distinct.first), shapes, starts)
    row_epochs, num_without_row, lookup_numbers = context.found.tolist()
    are_complete = [count == 0 for count in num_without_row]
    known = KnownRows.of(backend, keys, rows, row_epochs, are_complete, lookup_numbers)
    for number, (table, _, _) in enumerate(parts):
        table.last_gradient = known, number
    return Gradients(keys, sums, weight_grads)

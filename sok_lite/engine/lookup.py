"""One whole lookup and its gradient, for all tables of a call together, over all ranks.

 forward    one rank        keys -> find and pool, in one launch; new keys are inserted
            several ranks   keys -> dedup -> send_keys -> find and copy -> return_rows -> pool
 backward                   sums of what belongs to one key of this rank, in pieces and a fixed
                            order; with several ranks first of one key that this rank sent, then
                            send_sums

Two ranks that ask for one key send it twice; its owner looks it up twice and sums its gradients.
What the way back needs is a `BackwardContext`.
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
from sok_lite.engine.exchange import Route, return_rows
from sok_lite.engine.failure import failure_known_to_all
from sok_lite.engine.owner_lookup import OwnerLookup
from sok_lite.engine.pooling_context import PoolingContext
from sok_lite.engine.room import Pieces, Room
from sok_lite.engine.segments import Distinct, dedup, group, segment_sums
from sok_lite.engine.sent_keys import send
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.lookups import WrongSplitsError
from sok_lite.engine.table.results import KnownRows


class Gradient(NamedTuple):
    """The gradient of one part.

    Attributes:
      keys: (k,) int64, distinct, all of this rank; of a uint64 table their bits.
      row_grads: (k, dim) float32, summed over items and ranks in a fixed order.
      weight_grads: (n,) float32; None where there are no weights.
    """

    keys: Array
    row_grads: Array
    weight_grads: Array | None


class Gradients(NamedTuple):
    """The gradients of all parts; see `Gradient`.

    Attributes:
      keys: those of each part, one after the other in one array.
      row_grads, weight_grads: of each part.
    """

    keys: Pieces
    row_grads: Pieces
    weight_grads: Sequence[Array | None]

    @property
    def sizes(self) -> list[int]:
        """How many keys each part has."""
        return [size for (size,) in self.keys.shapes]

    def of_parts(self) -> list[Gradient]:
        """Returns the gradient of each part."""
        return list(map(Gradient, *self))


def forward(
    backend: Backend,
    comm: Communicator,
    batch: Batch,
    tag: int = 0,
    room: Room | None = None,
) -> tuple[Pieces, BackwardContext]:
    """Looks up and combines. Every rank must call it, with the same tables in the same order.

    Args:
      backend: where arrays live.
      comm: the ranks.
      batch: what is looked up; a table may come several times.
      tag: says which call this is; another one on another rank raises.
      room: gives the memory of what is returned; None: the backend.

    Returns:
      ((batch, dim) float32 per part, context).

    Raises:
      ValueError: row splits do not fit. The other ranks raise a CommunicatorError with the same
        reason. No table has changed; on one rank a kernel finds that, and keys of the call that
        were held count as seen.
    """
    if comm.size == 1:
        return _forward_alone(backend, comm, batch, room)
    sent = send(backend, comm, batch, tag)
    with failure_known_to_all(comm):
        num_asked, check = sent.route.num_received.tolist(), sent.route.check
        owned = OwnerLookup(backend, batch, sent.received, num_asked, check)
        returned = return_rows(sent.route, owned.look_up())
    pooled, pooling = pool_returned(backend, batch, sent, returned, room)
    return pooled, _context(pooling, owned)


def _forward_alone(
    backend: Backend, comm: Communicator, batch: Batch, room: Room | None
) -> tuple[Pieces, BackwardContext]:
    """Does what `forward` does on one rank: nothing travels, so nothing is deduplicated."""
    batch.check_splits_of_no_rows()
    owned = OwnerLookup(backend, batch, batch.keys, batch.sizes)
    outputs = Pieces.new(backend, batch.layout.places, room)
    try:
        owned.pool(outputs)
    except WrongSplitsError:
        batch.check_splits()
        raise
    route = Route.alone(backend, comm, batch.layout.num_items)
    return outputs, _context(PoolingContext.of(route, batch, None, owned.sources), owned)


def _context(pooling: PoolingContext, owned: OwnerLookup) -> BackwardContext:
    found = np.array([owned.generations, owned.num_absent, owned.stamps], np.int64)
    return BackwardContext(pooling, found, owned.keys, owned.rows)


def backward(
    backend: Backend,
    parts: Sequence[tuple[EmbeddingTable, Array | None, str]],
    out_grads: Sequence[Array],
    context: BackwardContext,
    room: Room | None = None,
) -> Gradients:
    """Returns the gradients of a `forward`. Every rank must call it, in the order of the forwards.

    Args:
      backend: where arrays live.
      parts: (table, weights, combiner) of each part of the forward.
      out_grads: (batch, dim) float32 per part.
      context: what the forward gave.
      room: gives the memory of all row gradients; None: the backend.

    Raises:
      ValueError: a gradient is not float32, or of another shape than its output.
    """
    terms, weight_grads = gradients_at_owners(backend, parts, out_grads, context.pooling)
    owned = deduplicated(backend, context)
    groups = group(backend, owned.distinct.inverse, owned.begin, owned.distinct.starts)
    sums = segment_sums(backend, groups, terms, room)
    are_complete = (context.num_absent == 0).tolist()
    facts = (context.generations.tolist(), are_complete, context.stamps.tolist())
    known = KnownRows.of(backend, owned.keys, owned.rows, *facts)
    for number, (table, _, _) in enumerate(parts):
        table.last_gradient = known, number
    return Gradients(owned.keys, sums, weight_grads)


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
    keys: Pieces
    rows: Pieces


def deduplicated(backend: Backend, context: BackwardContext) -> Owned:
    """Returns the distinct keys of a lookup that this rank was asked."""
    begin = split_offsets(context.pooling.route.num_received)
    distinct = dedup(backend, context.keys, begin)
    rows = backend.xp.take(context.rows, distinct.first)
    sizes = distinct.sizes.tolist()
    keys, rows = Pieces.of_sizes(distinct.keys, sizes), Pieces.of_sizes(rows, sizes)
    return Owned(distinct, begin, keys, rows)

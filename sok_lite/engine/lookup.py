"""One whole lookup and its gradient, for all tables of a call together, over all ranks.

 forward    one rank        keys -> find and pool, in one launch; new keys are inserted
            several ranks   keys -> dedup -> send_keys -> find and copy -> return_rows -> pool
 backward                   sums of what belongs to one key of this rank, in pieces and a fixed
                            order; with several ranks first of one key that this rank asked for,
                            then send_sums

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
from sok_lite.engine.asked_keys import AskedKeys
from sok_lite.engine.batch import Batch, Part, batch_of
from sok_lite.engine.exchange import Route, return_rows
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.pooling import (
    coefficients_of,
    combining,
    combining_weight_grad,
)
from sok_lite.engine.room import Pieces, Room, places_of
from sok_lite.engine.segments import Distinct, Terms, cut, dedup, group, segment_sums
from sok_lite.engine.sent_gradients import send_sums
from sok_lite.engine.sent_keys import SentKeys, send
from sok_lite.engine.static_table import AnyTable
from sok_lite.engine.table.lookups import WrongSplitsError
from sok_lite.engine.table.results import KnownRows
from sok_lite.engine.trail import NUM_NUMBERS, Trail


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
) -> tuple[Pieces, Trail]:
    """Looks up and combines. Every rank must call it, with the same tables in the same order.

    Args:
      backend: where arrays live.
      comm: the ranks.
      parts: one per table; a table may come several times.
      tag: says which call this is; another one on another rank raises.
      room: gives the memory of what is returned; None: the backend.

    Returns:
      ((batch, dim) float32 per part, trail).

    Raises:
      TypeError, ValueError: keys, row splits, weights or combiner do not fit. The other ranks raise
        a CommunicatorError with the same reason. No table has changed; where row splits do not fit
        on one rank, a kernel finds that, and keys of the call that were held count as seen.
    """
    with shared_failure(comm):
        batch = batch_of(backend, parts)
    return forward_batch(backend, comm, batch, tag, room)


def forward_batch(
    backend: Backend,
    comm: Communicator,
    batch: Batch,
    tag: int = 0,
    room: Room | None = None,
    sent: SentKeys | None = None,
) -> tuple[Pieces, Trail]:
    """Does what `forward` does, of parts that lie together and were checked.

    Args:
      sent: what `send` gave for a batch with the same keys, on all ranks; None: the keys have not
        been sent yet.
    """
    if comm.size == 1:
        return _forward_alone(backend, comm, batch, room)
    if sent is None:
        sent = send(backend, comm, batch, tag)
    with failure_known_to_all(comm):
        inverses, splits = cut(sent.inverse, batch.sizes), batch.splits_of_parts()
        sizes = sent.route.num_received.tolist()
        owned = AskedKeys(backend, batch, sent.received, sizes, sent.route.check)
        sources = return_rows(sent.route, owned.look_up())
    pooled = Pieces(backend, batch.layout.places, room)
    actions, starts = [], split_offsets(sent.route.num_sent).tolist()
    for i, inverse in enumerate(inverses):
        pooling = (inverse, splits[i], batch.weights[i], batch.combiners[i])
        actions.append([combining(backend, sources[i], *pooling, pooled[i], starts[i])[1]])
    publish(*actions)
    owned.sources = [
        None if weights is None else source
        for weights, source in zip(batch.weights, sources, strict=True)
    ]
    return pooled, _trail(sent.route, batch, sent.inverse, owned)


def _forward_alone(
    backend: Backend, comm: Communicator, batch: Batch, room: Room | None
) -> tuple[Pieces, Trail]:
    """Does what `forward` does on one rank: nothing travels, so nothing is deduplicated."""
    batch.check_splits_of_no_rows()
    owned = AskedKeys(backend, batch, batch.keys, batch.sizes)
    outputs = Pieces(backend, batch.layout.places, room)
    try:
        owned.pool(outputs)
    except WrongSplitsError:
        batch.check_splits()
        raise
    route = Route.alone(backend, comm, batch.layout.num_items)
    return outputs, _trail(route, batch, None, owned)


def _trail(route: Route, batch: Batch, inverse: Array | None, owned: AskedKeys) -> Trail:
    of_owned = (owned.sizes, owned.generations, owned.num_absent, owned.stamps)
    numbers = np.array([batch.sizes, batch.num_rows, *of_owned], np.int64)
    way = (batch.row_splits, inverse, owned.keys, owned.rows, owned.sources)
    return Trail(route, numbers.reshape(NUM_NUMBERS, -1), *way)


def backward(
    backend: Backend,
    parts: Sequence[tuple[AnyTable, Array | None, str]],
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
      room: gives the memory of all row gradients; None: the backend.

    Returns:
      One Gradients per part.

    Raises:
      ValueError: a gradient is not float32, or of another shape than its output.
    """
    out_grads = [
        _checked_grads(backend, i, table, grads, batch)
        for i, ((table, _, _), grads, batch) in enumerate(
            zip(parts, out_grads, trail.batch_sizes.tolist(), strict=True)
        )
    ]
    splits = trail.splits_of_parts()
    weight_grads, by_weights = _weight_grads(backend, parts, out_grads, trail, splits)
    index, coefficients, launches = coefficients_of(
        backend,
        splits,
        [(weights, combiner) for _, weights, combiner in parts],
        trail.num_items.tolist(),
    )
    publish(*by_weights, launches)
    if trail.inverse is None:
        rows: Sequence[Array] = out_grads
        indices, factors = index, coefficients
    else:
        items = (split_offsets(trail.num_items), split_offsets(trail.route.num_sent))
        terms = [Terms(grads, index[i], coefficients[i]) for i, grads in enumerate(out_grads)]
        asked = segment_sums(backend, group(backend, trail.inverse, *items), terms)
        rows = send_sums(backend, [table for table, _, _ in parts], trail.route, asked)
        indices = factors = [None] * len(parts)
    owned = deduplicated(backend, trail)
    sizes = np.diff(owned.distinct.starts).tolist()
    shapes = [(n, table.dim) for n, (table, _, _) in zip(sizes, parts, strict=True)]
    sums = Pieces(backend, places_of(shapes), room)[:]
    groups = group(backend, owned.distinct.inverse, owned.begin, owned.distinct.starts)
    terms = [Terms(rows[i], indices[i], factors[i], sums[i]) for i in range(len(parts))]
    segment_sums(backend, groups, terms)
    known = zip(owned.keys, owned.rows, *_facts_of_rows(trail), strict=True)
    for (table, _, _), each in zip(parts, known, strict=True):
        table.last_gradient = KnownRows(*each)
    return list(map(Gradients, owned.keys, sums, weight_grads))


def _facts_of_rows(trail: Trail) -> tuple[list[int], list[bool], list[int]]:
    """Returns generation, whether all keys have rows, and the lookup's number, of each part."""
    return trail.generations.tolist(), (trail.num_absent == 0).tolist(), trail.stamps.tolist()


def _weight_grads(
    backend: Backend,
    parts: Sequence[tuple[AnyTable, Array | None, str]],
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


def _checked_grads(
    backend: Backend, number: int, table: AnyTable, grads: Array, batch: int
) -> Array:
    """Returns the gradient of a part's output, C-contiguous, or raises."""
    if grads.shape != (batch, table.dim) or grads.dtype != np.float32:
        raise ValueError(
            f"The gradient of the output of table {number} must be float32 of shape "
            f"({batch}, {table.dim}). Received: {grads.dtype} of shape {grads.shape}."
        )
    return backend.xp.ascontiguousarray(grads)

"""A lookup and its gradient, for all features of a call at once, over all ranks.

 forward    one rank        keys -> find and pool, in one launch; missing keys are inserted
            several ranks   keys -> dedup -> send_keys -> find and copy -> return_rows -> pool
 backward                   gradients summed per key, in a fixed order; with several ranks first
                            per key that this rank sent, then by the owners that they are sent to

A `BackwardContext` takes from forward to backward what the gradient needs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import F32
from sok_lite.backend.launches import Launch, launch_all
from sok_lite.backend.ragged import (
    Allocate,
    Shape,
    contiguous,
    gather_split,
    new_results,
    split,
    split_offsets,
)
from sok_lite.backend.table_lock import TableLock
from sok_lite.comm import Communicator
from sok_lite.engine.batch import Batch
from sok_lite.engine.dedup import dedup_and_group
from sok_lite.engine.exchange import (
    AllToAllPlan,
    dispatch_keys,
    return_rows,
    send_rounded_grads,
)
from sok_lite.engine.failure import failure_known_to_all
from sok_lite.engine.pooling import coefficients_of, combine_launch, combine_weight_grad_launch
from sok_lite.engine.segments import Terms, group, segment_sums
from sok_lite.engine.shard_lookup import ShardLookup
from sok_lite.engine.table.find import WrongSplitsError
from sok_lite.engine.table.row_cache import cache_rows


class BackwardContext(NamedTuple):
    """What the gradient of a lookup needs of it; arrays are feature by feature.

    Attributes:
      plan: how the keys were sent to their owners.
      batch: of this rank.
      inverse: (items,) int32, the index of each item's key among those that this rank sent; None
        with one rank.
      sources: of each feature with weights the rows of the keys that this rank sent, (u, dim), or
        with one rank those of its items, (n, dim); None of the others.
      found: (3, num_features) int64, on the host, of each feature's table: its row_version when the
        row numbers were found, how many keys of this call had no row, and the number of the lookup,
        0 if it inserts nothing.
      keys: (m,) int64, the keys that this rank received, which may repeat; with one rank those of
        the batch.
      rows: (m,) uint32, their row numbers, or NO_ROW.
    """

    plan: AllToAllPlan
    batch: Batch
    inverse: Array | None
    sources: list[Array | None]
    found: np.ndarray
    keys: Array
    rows: Array

    def numbers(self) -> np.ndarray:
        """Returns what is on the host beside the batch, (k,) int64, for `restore`."""
        return np.concatenate([self.found.reshape(-1), self.plan.numbers])

    def arrays(self) -> tuple[Array, Array, Array]:
        """Returns what is on the device beside the batch, `rows` and `sources`, for `restore`:
        keys (m,), inverse (items,) int32 and order (n,) int32; with one rank all are empty."""
        xp, plan = self.plan.backend.xp, self.plan
        if plan.comm.size == 1:
            return xp.empty(0, np.int64), xp.empty(0, np.int32), plan.order
        return self.keys, self.inverse, plan.order

    @staticmethod
    def restore(
        backend: Backend,
        comm: Communicator,
        batch: Batch,
        numbers: np.ndarray,
        rows: Array,
        arrays: Sequence[Array],
        sources: list[Array | None],
    ) -> "BackwardContext":
        """Returns the context of a lookup from its batch and what it left.

        Args:
          numbers, arrays: results of these methods; int32 arrays may be longer.
          rows: as of the context; it may be longer.

        Raises:
          ValueError: there are other ranks now.
        """
        found, of_plan = np.split(numbers, [3 * len(batch.tables)])
        keys, inverse, order = arrays
        inverse = inverse[: batch.keys.size]
        plan = AllToAllPlan.restore(backend, comm, of_plan, order, batch.layout.num_items)
        if comm.size == 1:
            keys, inverse = batch.keys, None
        found = found.reshape(3, -1)
        return BackwardContext(plan, batch, inverse, sources, found, keys, rows[: keys.size])


class Gradients(NamedTuple):
    """The gradients of all features.

    Attributes:
      keys: of each feature (k,) int64, distinct, owned by this rank; of uint64 tables bit patterns.
      row_grads: of each feature (k, dim) float32, summed over items and ranks in a fixed order.
      weight_grads: of each feature (n,) float32; None where there are no weights.
    """

    keys: Sequence[Array]
    row_grads: Sequence[Array]
    weight_grads: Sequence[Array | None]


# ---------------------------------------------------------------- forward


def forward(
    backend: Backend,
    comm: Communicator,
    batch: Batch,
    tag: int = 0,
    allocate: Allocate | None = None,
    new_rows: Callable[[Shape], Array] | None = None,
    begun: np.ndarray | None = None,
) -> tuple[Sequence[Array], BackwardContext]:
    """Looks up and pools. Every rank must call it, with the same tables in the same order.

    Args:
      batch: what is looked up; a table may come several times.
      tag: number of the call, equal on all ranks; if another rank has another one, all raise.
      allocate: allocates the results; None: the backend does.
      new_rows: allocates the `rows` of the context, uint32 of a shape; None: the backend does.
      begun: with one rank, the counters of a search that was made: rows and results have what it
        has found; see `look_up_batch`. None: none was.

    Returns:
      ((batch, dim) float32 per feature, context).

    Raises:
      ValueError: row splits do not fit. The other ranks raise a CommunicatorError with the same
        reason. No key was inserted and no row has changed; on one rank a kernel finds the error,
        and the keys of the call that have a row count as seen.
    """
    if comm.size > 1:
        return _forward_over_ranks(backend, comm, batch, tag, allocate, new_rows)
    # No key is sent, so none is deduplicated.
    batch.check_splits_of_no_rows()
    shard = ShardLookup(backend, batch, batch.keys, batch.layout.sizes, new_rows)
    outputs = new_results(backend, batch.layout.shapes, allocate)
    try:
        shard.pool(outputs, begun)
    except WrongSplitsError:
        batch.check_splits()
        raise
    plan = AllToAllPlan.of_one_rank(backend, comm, batch.layout.num_items)
    found = (shard.found(), shard.keys, shard.rows)
    return outputs, BackwardContext(plan, batch, None, shard.sources, *found)


def _forward_over_ranks(
    backend: Backend,
    comm: Communicator,
    batch: Batch,
    tag: int,
    allocate: Allocate | None,
    new_rows: Callable[[Shape], Array] | None,
) -> tuple[Sequence[Array], BackwardContext]:
    sent = dispatch_keys(backend, comm, batch, tag)
    plan = sent.plan
    with failure_known_to_all(comm):
        num_received = plan.num_received.tolist()
        shard = ShardLookup(backend, batch, sent.received, num_received, new_rows)
        returned = return_rows(plan, shard.look_up())
    inverses, splits = split(sent.inverse, batch.layout.sizes), batch.splits_per_feature()
    outputs = new_results(backend, batch.layout.shapes, allocate)
    starts = split_offsets(plan.num_sent)[:-1].tolist()
    launches, sources = [], []
    for i, (rows, inverse, start) in enumerate(zip(returned, inverses, starts, strict=True)):
        weights = batch.weights[i]
        weighting = (splits[i], weights, batch.layout.combiners[i])
        launches.append([combine_launch(backend, rows, inverse, *weighting, outputs[i], start)])
        sources.append(None if weights is None else rows)
    launch_all(*launches)
    found = (shard.found(), shard.keys, shard.rows)
    return outputs, BackwardContext(plan, batch, sent.inverse, sources, *found)


# ---------------------------------------------------------------- backward


def backward(
    backend: Backend,
    out_grads: Sequence[Array],
    context: BackwardContext,
    allocate: Callable[[Sequence[int]], tuple[Sequence[Array], Sequence[Array]]] | None = None,
) -> Gradients:
    """Returns the gradients of a `forward`. Every rank must call it, in the order of the forwards.

    Args:
      out_grads: (batch, dim) float32 per feature.
      allocate: takes the number of distinct keys of each feature; allocates the gradients of rows,
        (k, dim) float32, and copies of the keys, (k,) int64 or, for int32 tables, int32. None: the
        backend allocates gradients, and nothing is copied.

    Raises:
      ValueError: a gradient is not float32, or of another shape than its output.
    """
    plan, batch = context.plan, context.batch
    tables: Sequence[Any] = batch.tables
    out_grads = _checked_grads(backend, out_grads, batch.layout.shapes)
    splits = batch.splits_per_feature()
    weight_grads, launches = _weight_grads(backend, out_grads, context, splits)
    weighting = list(zip(batch.weights, batch.layout.combiners, strict=True))
    index, coefficients = coefficients_of(backend, splits, weighting, batch.layout.sizes)
    launch_all(*launches)
    terms = Terms(out_grads, index, coefficients)
    if context.inverse is not None:
        offsets = (batch.layout.begin, split_offsets(plan.num_sent))
        sums = segment_sums(backend, group(backend, context.inverse, *offsets), terms)
        terms = Terms(send_rounded_grads(tables, plan, sums))
    begin = split_offsets(plan.num_received)
    distinct, groups = dedup_and_group(backend, context.keys, begin, context.rows)
    sizes = distinct.sizes.tolist()
    row_grads, copies = (None, None) if allocate is None else allocate(sizes)
    row_grads = segment_sums(backend, groups, terms, row_grads)
    if copies is not None:
        gather_split(backend, context.keys, distinct.first, sizes, copies)
    keys, rows = split(distinct.keys, sizes), split(distinct.rows, sizes)
    # Native code takes gradients with one rank only.
    is_native = plan.comm.size == 1 and all(
        isinstance(getattr(table, "lock", None), TableLock) for table in tables
    )
    num_received = plan.num_received.tolist() if is_native else None
    cache_rows(backend, tables, keys, rows, context.found, num_received)
    return Gradients(keys, row_grads, weight_grads)


def _weight_grads(
    backend: Backend, out_grads: Sequence[Array], context: BackwardContext, splits: Sequence[Array]
) -> tuple[list[Array | None], list[list[Launch]]]:
    """Returns the gradients of the weights of each feature that has any, and the launches that
    write them."""
    batch, n, launches = context.batch, len(splits), []
    results: list[Array | None] = [None] * n
    inverses, starts = [None] * n, [0] * n
    if context.inverse is not None:
        inverses = split(context.inverse, batch.layout.sizes)
        starts = split_offsets(context.plan.num_sent).tolist()
    for i, weights in enumerate(batch.weights):
        if weights is not None:
            weighting = (weights, batch.layout.combiners[i], starts[i])
            pooling = (context.sources[i], inverses[i], splits[i], *weighting)
            results[i], launch = combine_weight_grad_launch(backend, out_grads[i], *pooling)
            launches.append([launch])
    return results, launches


def _checked_grads(
    backend: Backend, grads: Sequence[Array], shapes: Sequence[Shape]
) -> Sequence[Array]:
    """Returns the gradients of outputs, C-contiguous; ValueError for other dtypes and shapes."""
    for number, (grad, shape) in enumerate(zip(grads, shapes, strict=True)):
        if grad.shape != shape or grad.dtype != F32:
            raise ValueError(
                f"The gradient of the output of table {number} must be float32 of shape "
                f"({shape[0]}, {shape[1]}). Received: {grad.dtype} of shape {grad.shape}."
            )
    return contiguous(backend, grads)

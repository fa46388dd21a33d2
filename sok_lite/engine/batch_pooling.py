"""A pooled batch: its keys go to their owners, their rows are pooled, its gradients go back."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import F32, Work
from sok_lite.backend.launches import Launch, launch_all
from sok_lite.backend.ragged import Allocate, contiguous, new_results, split, split_offsets
from sok_lite.comm import Communicator
from sok_lite.comm.gpu_transport import Check
from sok_lite.engine.batch import Batch, ShardedTable
from sok_lite.engine.dedup import dedup
from sok_lite.engine.exchange import Route, send_grads, send_keys
from sok_lite.engine.failure import shared_failure
from sok_lite.engine.pooling import (
    coefficients_of,
    combine_launch,
    combine_weight_grad_launch,
    wrong_splits,
)
from sok_lite.engine.segments import Terms, group, segment_sums


class SentKeys(NamedTuple):
    """Keys that were sent to their owners.

    Attributes:
      route: how they were sent; rows and gradients follow it.
      inverse: (items,) int32, the number of the key of each item among the distinct keys that this
        rank sent, numbered over all parts.
      received: (m,) int64, the keys that this rank received, part by part; they may repeat.
    """

    route: Route
    inverse: Array
    received: Array


def send_batch(
    backend: Backend, comm: Communicator, batch: Batch, tag: int, check: Check | None = None
) -> SentKeys:
    """Sends the keys of a batch to their owners. Every rank must call it.

    Args:
      tag: number of the call, equal on all ranks; if another rank has another one, all raise.
      check: tells whether the keys may be sent; None: they may if the row splits fit.

    Raises:
      ValueError: row splits do not fit; or whatever the check raises. The other ranks raise a
        CommunicatorError with the reason.
    """
    with shared_failure(comm):
        if check is None:
            count = wrong_splits(backend, batch.splits_of_parts(), batch.layout.sizes)
            check = Check(count, batch.check_splits)
        distinct = dedup(backend, batch.keys, batch.layout.begin)
    received, route = send_keys(
        backend,
        comm,
        distinct.keys,
        distinct.sizes,
        [table.key_dtype for table in batch.tables],
        [table.owner for table in batch.tables],
        tag=tag,
        check=check,
    )
    return SentKeys(route, distinct.inverse, received)


class PoolingContext(NamedTuple):
    """How rows were pooled and keys were sent. Parts lie one after another in its arrays.

    Attributes:
      route: how the keys were sent to their owners.
      numbers: (2, num_parts) int64, on the host: items and rows of each part of this rank's batch.
      row_splits: (rows + num_parts,) int64, those of all parts, each of which begins with 0.
      inverse: (items,) int32, the number of the key of each item among those that this rank sent,
        over all parts; None on one rank, where no key is sent.
      sources: of each part with weights (u, dim), the rows of the keys that this rank sent, or, on
        one rank, (n, dim), the rows of its items; None of the others.
    """

    route: Route
    numbers: np.ndarray
    row_splits: Array
    inverse: Array | None
    sources: list[Array | None]

    @staticmethod
    def of(
        route: Route, batch: Batch, inverse: Array | None, sources: list[Array | None]
    ) -> "PoolingContext":
        """Returns the context of a batch."""
        numbers = np.array([batch.layout.sizes, batch.layout.num_rows], np.int64)
        return PoolingContext(route, numbers, batch.row_splits, inverse, sources)

    def splits_of_parts(self) -> list[Array]:
        """Returns the row splits of each part, (its rows + 1,) int64."""
        return split(self.row_splits, self.numbers[1] + 1)


def pool_returned(
    backend: Backend,
    batch: Batch,
    sent: SentKeys,
    rows: Sequence[Array],
    allocate: Allocate | None,
) -> tuple[Sequence[Array], PoolingContext]:
    """Pools the rows of keys that were sent: (batch, dim) float32 per part.

    Args:
      rows: of each part (u, dim) storage, one for each key that this rank sent.
      allocate: gives memory for the results; None: the backend does.
    """
    inverses, splits = split(sent.inverse, batch.layout.sizes), batch.splits_of_parts()
    pooled = new_results(backend, batch.layout.shapes, allocate)
    launches, weighted = [], []
    starts = split_offsets(sent.route.num_sent)[:-1].tolist()
    for i, (its_rows, its_inverse, start) in enumerate(zip(rows, inverses, starts, strict=True)):
        weights = batch.weights[i]
        pooling = (its_inverse, splits[i], weights, batch.layout.combiners[i])
        launches.append([combine_launch(backend, its_rows, *pooling, pooled[i], start)])
        weighted.append(None if weights is None else its_rows)
    launch_all(*launches)
    return pooled, PoolingContext.of(sent.route, batch, sent.inverse, weighted)


def gradients_at_owners(
    backend: Backend,
    parts: Sequence[tuple[ShardedTable, Array | None, str]],
    out_grads: Sequence[Array],
    pooling: PoolingContext,
) -> tuple[Terms, list[Array | None]]:
    """Sends the gradients of pooled rows to the owners of the keys. Every rank must call it.

    With several ranks the gradients of one key that this rank sent are summed first.

    Args:
      parts: (table, weights, combiner) of each part of the lookup.
      out_grads: (batch, dim) float32 per part.

    Returns:
      (the summands of the gradient of each key that this rank received, `route.num_received` of
      each part;
      of each part the gradients by its weights, (n,) float32, None where it has none).

    Raises:
      ValueError: a gradient is not float32, or of another shape than its output.
    """
    tables = [table for table, _, _ in parts]
    num_items, num_rows = pooling.numbers.tolist()
    out_grads = _checked_grads(backend, tables, out_grads, num_rows)
    splits = pooling.splits_of_parts()
    weight_grads, by_weights = _weight_grads(backend, parts, out_grads, pooling, splits)
    index, coefficients = coefficients_of(
        backend, splits, [(weights, combiner) for _, weights, combiner in parts], num_items
    )
    launch_all(*by_weights)
    terms = Terms(out_grads, index, coefficients)
    if pooling.inverse is not None:
        items = (split_offsets(num_items), split_offsets(pooling.route.num_sent))
        sums = segment_sums(backend, group(backend, pooling.inverse, *items), terms)
        terms = Terms(send_sums(backend, tables, pooling.route, sums))
    return terms, weight_grads


def send_sums(
    backend: Backend, tables: Sequence[ShardedTable], route: Route, sums: Sequence[Array]
) -> list[Array]:
    """Sends the gradients of a lookup to the owners of their keys. Every rank must call it.

    Those of a table that `rounds_gradients` are sent as bfloat16, each rounded to nearest even,
    also to this rank itself: so a gradient is the same whichever rank owns its key.

    Args:
      tables: of each part.
      route: of the keys of the lookup.
      sums: of each part (u, dim) float32, one row per key that this rank sent.

    Returns:
      Of each part (m, dim) float32, one row per key that this rank received; not summed over ranks.

    Raises:
      CommunicatorError: a rank has died, or is in another exchange or lookup, or has gradients of
        other formats; on every rank.
    """
    rounded = [i for i, table in enumerate(tables) if table.rounds_gradients]
    sent = list(sums)
    for i in rounded:
        sent[i] = backend.xp.empty(sums[i].shape, np.uint16)
    _convert(backend, "sent_gradients_round", [(sums[i], sent[i]) for i in rounded])
    received = send_grads(route, sent)
    arrived = list(received)
    for i in rounded:
        arrived[i] = backend.xp.empty(received[i].shape, np.float32)
    _convert(backend, "sent_gradients_widen", [(received[i], arrived[i]) for i in rounded])
    return arrived


def _convert(backend: Backend, kernel: str, arrays: Sequence[tuple[Array, Array]]) -> None:
    """Writes the elements of arrays into others, all in one launch."""
    parts = [Work(source.size, (source, out, source.size)) for source, out in arrays]
    backend.launch_parts(kernel, parts)


def _weight_grads(
    backend: Backend,
    parts: Sequence[tuple[ShardedTable, Array | None, str]],
    out_grads: Sequence[Array],
    pooling: PoolingContext,
    splits: Sequence[Array],
) -> tuple[list[Array | None], list[list[Launch]]]:
    """Returns the gradients by the weights of each part, None where it has none, and the launches
    that write them."""
    n, launches = len(parts), []
    results: list[Array | None] = [None] * n
    inverses, starts = [None] * n, [0] * n
    if pooling.inverse is not None:
        inverses = split(pooling.inverse, pooling.numbers[0])
        starts = split_offsets(pooling.route.num_sent).tolist()
    for i, (_, weights, combiner) in enumerate(parts):
        if weights is not None:
            way = (pooling.sources[i], inverses[i], splits[i], weights, combiner, starts[i])
            results[i], launch = combine_weight_grad_launch(backend, out_grads[i], *way)
            launches.append([launch])
    return results, launches


def _checked_grads(
    backend: Backend,
    tables: Sequence[ShardedTable],
    grads: Sequence[Array],
    num_rows: Sequence[int],
) -> Sequence[Array]:
    """Returns the gradients of outputs, C-contiguous.

    Raises:
      ValueError: one is not float32, or of another shape than its output.
    """
    expected = [(n, table.dim) for n, table in zip(num_rows, tables, strict=True)]
    for number, (its, shape) in enumerate(zip(grads, expected, strict=True)):
        if its.shape != shape or its.dtype != F32:
            raise ValueError(
                f"The gradient of the output of table {number} must be float32 of shape "
                f"({shape[0]}, {shape[1]}). Received: {its.dtype} of shape {its.shape}."
            )
    return contiguous(backend, grads)

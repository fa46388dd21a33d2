"""A batch of the engine, made part by part: what the bridge makes of tensors."""

from typing import NamedTuple

import numpy as np

from sok_lite.engine import lookup
from sok_lite.engine.batch import Batch, BatchLayout
from sok_lite.engine.failure import shared_failure
from sok_lite.engine.pooling import normalise_combiner


class Part(NamedTuple):
    """One table's part of a call: keys (n,), splits (batch + 1,) int64, weights (n,) float32 or
    None, and what `lookup` of a table takes."""

    table: object
    keys: object
    row_splits: object
    weights: object
    combiner: str
    insert: bool = True
    missing: str = "initial"
    filter_ratio: float = 1.0


class Gradient(NamedTuple):
    """What `lookup.Gradients` has of one part."""

    keys: object
    row_grads: object
    weight_grads: object


def by_part(gradients):
    """Returns a `Gradient` for each part."""
    return list(map(Gradient, *gradients))


def batch_of(backend, parts):
    """Returns parts as a batch."""
    tables = [part.table for part in parts]
    keys = [part.table.engine_keys(part.keys) for part in parts]
    xp = backend.xp
    return Batch(
        tables,
        BatchLayout(
            tables,
            [normalise_combiner(part.combiner) for part in parts],
            [int(each.size) for each in keys],
            [len(part.row_splits) - 1 for part in parts],
        ),
        keys=_joined(backend, keys),
        row_splits=_joined(backend, [part.row_splits for part in parts]),
        weights=[
            None if part.weights is None else xp.ascontiguousarray(part.weights) for part in parts
        ],
        inserts=[part.insert for part in parts],
        missing=[part.missing for part in parts],
        filter_ratios=[part.filter_ratio for part in parts],
    )


def forward_parts(backend, comm, parts, tag=0):
    """Looks parts up; see `forward` of sok_lite/engine/lookup.py."""
    with shared_failure(comm):
        batch = batch_of(backend, parts)
    return lookup.forward(backend, comm, batch, tag)


def carried(backend, comm, parts, context):
    """Returns the context of parts as their gradient gets it, from what the lookup told."""
    told = (context.numbers(), context.rows, context.arrays(), context.sources)
    return lookup.BackwardContext.restore(backend, comm, batch_of(backend, parts), *told)


def _joined(backend, arrays):
    """Returns int64 arrays (n,) as one, C-contiguous."""
    if len(arrays) == 1:
        return backend.xp.ascontiguousarray(arrays[0])
    return backend.xp.concatenate([backend.xp.empty(0, np.int64), *arrays])

"""Pooling and its gradients of one part of a batch, called one by one."""

from sok_lite.engine.pieces import Pieces
from sok_lite.engine.pooling import (
    coefficients_of,
    normalise_combiner,
    plan_combine,
    plan_combine_weight_grad,
)
from sok_lite.engine.segments import Terms, group, segment_sums


def combine(backend, source, inverse, row_splits, weights, combiner, out=None):
    """Pools rows, (batch, dim) float32; see `plan_combine`."""
    out, action = plan_combine(backend, source, inverse, row_splits, weights, combiner, out)
    action()
    return out


def combine_grad(
    backend, out_grads, inverse, row_splits, weights, combiner, num_unique, buffer=None
):
    """Returns the gradient of `combine` by its source, (num_unique, dim) float32."""
    contiguous = backend.xp.ascontiguousarray
    inverse, row_splits = contiguous(inverse), contiguous(row_splits)
    weighting, num_items = [(weights, normalise_combiner(combiner))], [len(inverse)]
    splits = Pieces.of_sizes(row_splits, [len(row_splits)])
    index, coefficients = coefficients_of(backend, splits, weighting, num_items)
    groups = group(backend, inverse, (0, len(inverse)), (0, num_unique))
    terms = Terms([contiguous(out_grads)], index, coefficients)
    return segment_sums(backend, groups, terms, buffer)[0]


def combine_weight_grad(backend, out_grads, source, inverse, row_splits, weights, combiner):
    """Returns the gradient of `combine` by its weights, (n,) float32."""
    result, action = plan_combine_weight_grad(
        backend, out_grads, source, inverse, row_splits, weights, combiner
    )
    action()
    return result

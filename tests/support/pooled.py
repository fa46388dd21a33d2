"""Pooling and its gradients of one part of a batch, called one by one."""

import numpy as np

from sok_lite.backend.base import as_words
from sok_lite.engine.pooling import coefficients_of, combine_launch, combine_weight_grad_launch
from sok_lite.engine.segments import Terms, group, segment_sums


def combine(backend, source, inverse, row_splits, weights, combiner, out=None):
    """Pools rows, (batch, dim) float32; see `combine_launch`."""
    if out is None:
        out = backend.xp.empty((len(row_splits) - 1, source.shape[1]), np.float32)
    combine_launch(backend, source, inverse, row_splits, weights, combiner, out)()
    return out


def combine_grad(
    backend, out_grads, inverse, row_splits, weights, combiner, num_unique, buffer=None
):
    """Returns the gradient of `combine` by its source, (num_unique, dim) float32."""
    weighting, num_items = [(weights, combiner)], [len(inverse)]
    index, coefficients = coefficients_of(backend, [row_splits], weighting, num_items)
    groups = group(backend, inverse, (0, len(inverse)), (0, num_unique))
    terms = Terms([out_grads], index, coefficients)
    return segment_sums(backend, groups, terms, buffer)[0]


def combine_weight_grad(backend, out_grads, source, inverse, row_splits, weights, combiner):
    """Returns the gradient of `combine` by its weights, (n,) float32."""
    result, action = combine_weight_grad_launch(
        backend, out_grads, source, inverse, row_splits, weights, combiner
    )
    action()
    return result


def gather_rows(backend, x, index):
    """Returns `x[index]`, (n, dim) of the dtype of `x`, C-contiguous."""
    out = backend.xp.empty((index.size, x.shape[1]), x.dtype)
    (suffix, words), (_, into) = as_words(x), as_words(out)
    backend.launch(f"dense_gather_{suffix}", index.size, words, x.shape[1], index, into, index.size)
    return out

"""Pooling of looked-up rows over the ids of a ragged row, and its gradients.

`combine_launch` pools unique rows (u, dim) into one row per ragged row (batch, dim). Its gradient
is `coefficients_of`, then sums over duplicates. Sums are taken in a fixed order, so a run repeats
bit for bit on any number of threads, and in pieces of 32 items, so that a long sum is as exact as a
short one.
"""

from collections.abc import Sequence

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import LaunchArgs
from sok_lite.backend.launches import Launch
from sok_lite.backend.ragged import split

COMBINERS = {"sum": 0, "mean": 1, "sqrtn": 2}  # COMBINE_SUM, ... of kernels/pooling.cuh
_SPELLINGS = {
    spelling: name
    for word, name in {"sum": "sum", "mean": "mean", "average": "mean", "sqrtn": "sqrtn"}.items()
    for spelling in (word, word.capitalize(), word.upper())
}
_SOURCE_SUFFIXES = {"float32": "f32", "float16": "f16", "uint16": "bf16", "float64": "f64"}


def normalise_combiner(combiner: object) -> str:
    """Returns "sum", "mean" or "sqrtn" for any of SOK's spellings ("Sum", "MEAN", "Average", ...).

    Raises:
      ValueError: an unknown combiner.
    """
    if isinstance(combiner, str) and combiner in _SPELLINGS:
        return _SPELLINGS[combiner]
    raise ValueError(
        "`combiner` must be 'sum', 'mean' (or 'average') or 'sqrtn'. "
        f"Received: combiner={combiner!r}. For one row per key use `tf.nn.embedding_lookup`."
    )


def combine_launch(
    backend: Backend,
    source: Array,
    inverse: Array,
    row_splits: Array,
    weights: Array | None,
    combiner: str,
    out: Array,
    first: int = 0,
) -> Launch:
    """Returns the launch that pools rows: `out[b]` sums `weights[j] * source[inverse[j] - first]`
    over the items j of b.

    The sum is divided by 1 ("sum"), by the sum of the weights ("mean") or by the root of the sum of
    their squares ("sqrtn"). A row without items, or whose divisor is 0, is zeros.

    Args:
      source: (u, dim) float32, float16, uint16 bits of bfloat16, or float64, which is rounded to
        float32.
      inverse: (n,) int32, each in [first, first + u).
      row_splits: (batch + 1,) int64, from 0 to n, ascending; not checked, as a GPU would wait.
      weights: (n,) float32; None: all 1.
      out: (batch, dim) float32, C-contiguous, to write into.
    """
    source, suffix = _kernel_source(backend, source)
    batch = len(row_splits) - 1
    items = (inverse, first, row_splits, weights, COMBINERS[combiner])
    arguments = (source, source.shape[1], *items, out, batch)
    return backend.prepared(f"combine_{suffix}", batch, *arguments)


def coefficients_of(
    backend: Backend,
    row_splits: Sequence[Array],
    weighting: Sequence[tuple[Array | None, str]],
    num_items: Sequence[int],
) -> tuple[list[Array], list[Array | None]]:
    """Returns the pooled row and the coefficient of each item: its gradient is their product.

    Args:
      row_splits: of each feature (batch + 1,) int64.
      weighting: of each feature weights (n,) float32, None: all 1; and the combiner.
      num_items: of each feature n.

    Returns:
      (of each feature (n,) int32, the row of each item;
      of each feature (n,) float32, the coefficient of each item, None: all 1).
    """
    xp = backend.xp
    index = split(xp.empty(sum(num_items), np.int32), num_items)
    has_coefficients = [weights is not None or name != "sum" for weights, name in weighting]
    coefficients: list[Array | None] = [None] * len(index)
    if True in has_coefficients:
        pairs = zip(
            split(xp.empty(sum(num_items), np.float32), num_items), has_coefficients, strict=True
        )
        coefficients = [each if has else None for each, has in pairs]
    parts = []
    of_features = zip(row_splits, weighting, index, coefficients, strict=True)
    for splits, (weights, name), items, its_coefficients in of_features:
        num_rows = len(splits) - 1
        if weights is not None:
            weights = xp.ascontiguousarray(weights)
        arguments = (splits, weights, COMBINERS[name], items, its_coefficients, 0, num_rows)
        parts.append(LaunchArgs(num_rows, arguments))
    backend.launch_tables("combine_items", parts)
    return index, coefficients


def combine_weight_grad_launch(
    backend: Backend,
    out_grads: Array,
    source: Array,
    inverse: Array | None,
    row_splits: Array,
    weights: Array,
    combiner: str,
    first: int = 0,
) -> tuple[Array, Launch]:
    """Returns the gradient of `combine_launch` by its weights, (n,) float32, and the launch that
    writes it.

    Args:
      out_grads: (batch, dim) float32, C-contiguous.
      inverse: (n,) int32, each in [first, first + u); None: item j is source[j], and `first` 0.
      The others: as of `combine_launch`.
    """
    source, suffix = _kernel_source(backend, source)
    batch = len(row_splits) - 1
    weight_grads = backend.xp.empty(len(weights), dtype=np.float32)  # each item is in some row
    items = (inverse, first, row_splits, weights, COMBINERS[combiner])
    arguments = (out_grads, source, source.shape[1], *items, weight_grads, batch)
    return weight_grads, backend.prepared(f"combine_weight_grad_{suffix}", batch, *arguments)


def wrong_splits(
    backend: Backend, row_splits: Sequence[Array], num_items: Sequence[int] | np.ndarray
) -> Array:
    """Counts row splits that do not rise from 0 to the number of items, (1,) int64; does not wait.

    Args:
      row_splits: of each feature (batch + 1,) int64, C-contiguous.
    """
    count = backend.xp.zeros(1, np.int64)
    parts = [
        LaunchArgs(len(splits), (splits, count, int(n), len(splits)))
        for splits, n in zip(row_splits, num_items, strict=True)
    ]
    backend.launch_tables("splits_count_wrong", parts)
    return count


def _kernel_source(backend: Backend, source: Array) -> tuple[Array, str]:
    """Returns rows as kernels take them, and the suffix of the kernels' names for their dtype."""
    suffix = _SOURCE_SUFFIXES[source.dtype.name]
    source = backend.xp.ascontiguousarray(source)
    return (source.view(np.uint16) if suffix == "f16" else source), suffix

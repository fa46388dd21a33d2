"""Pooling of looked-up rows over the ids of a ragged row, and the gradients of it.

`combine_launch` goes from unique rows (u, dim) to one row per ragged row (batch, dim). Its gradient
is `coefficients_of`, then sums over duplicates. Sums are taken in a fixed order, so a run repeats
bit for bit, on any number of threads. They are taken in pieces of 32 items, so that a long sum is
as exact as a short one.
"""

from collections.abc import Sequence

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import Work
from sok_lite.backend.launches import Launch
from sok_lite.backend.ragged import split

COMBINERS = {"sum": 0, "mean": 1, "sqrtn": 2}  # COMBINE_SUM, ... of kernels/pooling.cuh
_SPELLINGS = {
    spelling: name
    for name, words in {"sum": ("sum",), "mean": ("mean", "average"), "sqrtn": ("sqrtn",)}.items()
    for word in words
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
    """Returns the launch that pools rows: `out[b]` sums `weights[j] * source[inverse[j]]` over the
    items j of b.

    The sum is divided by 1 ("sum"), by the sum of the weights ("mean") or by the root of the sum of
    their squares ("sqrtn"). A row with no items, or whose divisor is 0, is zeros.

    Args:
      backend: where the arrays live.
      source: (u, dim) float32, float16, uint16 bits of bfloat16, or float64, which is rounded to
        float32.
      inverse: (n,) int32, each in [first, first + u).
      row_splits: (batch + 1,) int64, from 0 to n, ascending. That is not checked: a GPU would wait.
      weights: (n,) float32; None: all 1.
      combiner: "sum", "mean" or "sqrtn".
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
    """Returns the factors that the gradient of a pooled row is multiplied by, one for each item.

    Args:
      backend: where the arrays live.
      row_splits: of each part (batch + 1,) int64.
      weighting: of each part weights (n,) float32, None: all 1; and "sum", "mean" or "sqrtn".
      num_items: of each part n.

    Returns:
      (of each part (n,) int32, the row of each item; of each part (n,) float32, the number, None:
      all 1).
    """
    xp = backend.xp
    index = split(xp.empty(sum(num_items), np.int32), num_items)
    has_factors = [weights is not None or name != "sum" for weights, name in weighting]
    coefficients: list[Array | None] = [None] * len(index)
    if True in has_factors:
        factors = split(xp.empty(sum(num_items), np.float32), num_items)
        pairs = zip(factors, has_factors, strict=True)
        coefficients = [its if has else None for its, has in pairs]
    parts = []
    of_parts = zip(row_splits, weighting, index, coefficients, strict=True)
    for splits, (weights, name), items, its_factors in of_parts:
        num_rows = len(splits) - 1
        if weights is not None:
            weights = xp.ascontiguousarray(weights)
        arguments = (splits, weights, COMBINERS[name], items, its_factors, 0, num_rows)
        parts.append(Work(num_rows, arguments))
    backend.launch_parts("combine_items", parts)
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
    """Returns the gradient of `combine_launch` by its weights, and the launch that writes it.

    Args:
      out_grads: (batch, dim) float32, C-contiguous.
      inverse: (n,) int32, each in [first, first + u); None: item j is source[j], and `first` 0.
      The others: the arguments of `combine_launch`.

    Returns:
      ((n,) float32, the launch).
    """
    source, suffix = _kernel_source(backend, source)
    batch = len(row_splits) - 1
    weight_grads = backend.xp.empty(len(weights), dtype=np.float32)  # each item is of some row
    items = (inverse, first, row_splits, weights, COMBINERS[combiner])
    arguments = (out_grads, source, source.shape[1], *items, weight_grads, batch)
    return weight_grads, backend.prepared(f"combine_weight_grad_{suffix}", batch, *arguments)


def wrong_splits(
    backend: Backend, row_splits: Sequence[Array], num_items: Sequence[int] | np.ndarray
) -> Array:
    """Counts row splits that do not rise from 0 to the number of items. It waits for nothing.

    Args:
      row_splits: of each part (batch + 1,) int64, C-contiguous.
      num_items: of each part.

    Returns:
      (1,) int64, 0 where all fit.
    """
    count = backend.xp.zeros(1, np.int64)
    parts = [
        Work(len(splits), (splits, count, int(n), len(splits)))
        for splits, n in zip(row_splits, num_items, strict=True)
    ]
    backend.launch_parts("splits_count_wrong", parts)
    return count


def _kernel_source(backend: Backend, source: Array) -> tuple[Array, str]:
    """Returns rows as kernels take them, and what ends the names of the kernels for their dtype."""
    suffix = _SOURCE_SUFFIXES[source.dtype.name]
    source = backend.xp.ascontiguousarray(source)
    return (source.view(np.uint16) if suffix == "f16" else source), suffix

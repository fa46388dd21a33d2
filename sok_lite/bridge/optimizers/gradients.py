"""Transforms of gradients before an optimizer's step, for tables as for dense variables.

The gradient of a table, also of a static one, covers the whole table: the rows of all ranks, zero
for every key without a lookup, one row per key. A clipped norm is over all of it; one collective
sums the norms of all tables of a call.

The wrapped optimizer clips dense variables itself. If their norm counts together with that of
tables, they are scaled before: then it finds no norm above the limit.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge.collectives import agreed_sum
from sok_lite.bridge.host_call import refuse_replicas
from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.optimizers.family import Family
from sok_lite.bridge.optimizers.grad_transforms import GradTransforms, grad_transforms_of
from sok_lite.bridge.optimizers.host import checked_gradient
from sok_lite.bridge.optimizers.loss_scale import LossScale
from sok_lite.bridge.row_gradient import are_distinct
from sok_lite.bridge.static_variable import StaticVariable
from sok_lite.bridge.tensor import as_int64, from_int64
from sok_lite.bridge.variable import TableVariable
from sok_lite.comm import Communicator
from sok_lite.engine.failure import failure_known_to_all

Pairs = list[tuple[tf.IndexedSlices, TableVariable]]
DensePairs = list[tuple[Any, Any]]

_WHAT = "A step that looks at the gradients of all ranks"


def transform_grads(
    optimizer: Any,
    family: Family,
    pairs: Pairs,
    dense: DensePairs,
    loss_scale: LossScale | None = None,
    beside: Pairs | None = None,
) -> tuple[Pairs, DensePairs, Pairs, tf.Tensor | None]:
    """Applies an optimizer's gradient transforms before its step.

    With several ranks, if norms are clipped or steps may be skipped, every rank must call it, with
    the same tables in the same order; dense gradients must be equal on all ranks, except those of
    static tables.

    Args:
      pairs: of tables that have a gradient; a table may repeat.
      dense: of other variables; a gradient may be None.
      loss_scale: of the LossScaleOptimizer around the optimizer.
      beside: of tables that other optimizers train in the same step.

    Returns:
      `pairs`, transformed; `dense` for the optimizer, which transforms them itself; `beside`,
      unscaled; and a scalar bool tensor, whether to take the step, None: yes. If not, dense
      gradients are NaN.

    Raises:
      TypeError, ValueError: a gradient does not fit; nothing was sent to other ranks.
      NotImplementedError: the optimizer clips in a way that tables cannot follow, or is Horovod's
        and adds up the gradients of several steps.
      CommunicatorError: a rank has died, or ranks are in different calls.
    """
    transforms = grad_transforms_of(optimizer, family)
    skips = loss_scale is not None and loss_scale.skips
    if loss_scale is not None and loss_scale.unscale is not None:
        transforms = transforms._replace(unscale=loss_scale.unscale)
    beside = [] if beside is None else beside
    if all(each is None for each in transforms) and not skips:
        return pairs, dense, beside, None
    if not pairs and not any(_is_part(*pair) for pair in dense):
        if not beside:
            return pairs, dense, beside, None  # the optimizer's own affair
        transforms = transforms._replace(value=None, norm=None, global_norm=None)
    refuse_replicas(_WHAT)
    comm = other_ranks() if transforms.limit is not None or skips else None
    # In eager mode other ranks may already wait for the norms; in a graph nothing runs yet.
    with contextlib.ExitStack() as stack:
        if comm is not None and tf.executing_eagerly():
            stack.enter_context(failure_known_to_all(comm))
        bad = [_count_nonfinite([*pairs, *beside, *dense])] if skips else []
        pairs, dense = _clip_values(transforms, pairs, dense)
        beside = _unscale(transforms, beside)
    parts = [*pairs, *(pair for pair in dense if _is_part(*pair))]
    squares = [] if transforms.limit is None else _squares(parts, len(pairs), transforms)
    summed = _sum_over_ranks(comm, [var for _, var in parts], [*squares, *bad], transforms)
    totals = summed[: len(squares)]
    if transforms.norm is not None:
        pairs, dense = _clip_each(transforms, pairs, dense, squares, totals)
    elif transforms.global_norm is not None:
        pairs, dense = _clip_all(transforms, pairs, dense, totals)
    if not skips:
        return pairs, dense, beside, None
    go = tf.equal(summed[-1], 0.0)
    return pairs, map_values(partial(_or_nan, go), dense), beside, go


def _or_nan(go: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    return tf.where(go, values, tf.constant(float("nan"), values.dtype))


def _count_nonfinite(pairs: DensePairs) -> tf.Tensor:
    """Returns how many gradients have a NaN or an infinity, float32."""
    values = [_values(grad) for grad, _ in pairs if grad is not None]
    return tf.add_n(
        [tf.cast(~tf.reduce_all(tf.math.is_finite(each)), tf.float32) for each in values]
    )


def _clip_values(
    transforms: GradTransforms, pairs: Pairs, dense: DensePairs
) -> tuple[Pairs, DensePairs]:
    """Checks, unscales, deduplicates and clips gradients by value."""
    pairs = _unscale(transforms, pairs)
    if transforms.value is None and transforms.limit is None:
        return pairs, dense
    pairs = _deduplicate(pairs)
    dense = [
        (_sum_repeated(grad) if isinstance(var, StaticVariable) else grad, var)
        for grad, var in dense
    ]
    if transforms.value is None:
        return pairs, dense
    clip = partial(
        tf.clip_by_value, clip_value_min=-transforms.value, clip_value_max=transforms.value
    )
    return map_values(clip, pairs), dense if transforms.limit is None else map_values(clip, dense)


def _unscale(transforms: GradTransforms, pairs: Pairs) -> Pairs:
    """Checks gradients of tables and divides them by the loss scale."""
    pairs = [(_as_float32(*pair), pair[1]) for pair in pairs]
    if transforms.unscale is None:
        return pairs
    unscaled: Pairs = map_values(lambda values: values / transforms.unscale, pairs)
    return unscaled


# ---- norms ---------------------------------------------------------------------------------------


def _clip_each(
    transforms: GradTransforms,
    pairs: Pairs,
    dense: DensePairs,
    squares: Sequence[tf.Tensor],
    totals: Sequence[tf.Tensor],
) -> tuple[Pairs, DensePairs]:
    """Clips the norm of each table and static table; see tf.clip_by_norm.

    `squares` and `totals` are squared norms of all parts, on this rank and on all ranks.
    """
    limit = tf.constant(transforms.norm, tf.float32)

    def clipped(values: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
        dtype = values.dtype
        return values * tf.cast(limit, dtype) / tf.cast(tf.maximum(tf.sqrt(total), limit), dtype)

    def for_optimizer(grad: Any, square: tf.Tensor, total: tf.Tensor) -> Any:
        # The optimizer clips this rank's part again. An infinity makes all else 0 and itself NaN:
        # done here too, the whole part would be NaN.
        is_infinite = tf.math.is_inf(square) & tf.math.is_inf(total)
        values = _values(grad)
        return _with_values(grad, tf.where(is_infinite, values, clipped(values, total)))

    numbers = list(zip(squares, totals, strict=True))
    results = [
        (_with_values(grad, clipped(_values(grad), total)), var)
        for (grad, var), (_, total) in zip(pairs, numbers[: len(pairs)], strict=True)
    ]
    of_static = iter(numbers[len(pairs) :])
    dense = [
        (for_optimizer(grad, *next(of_static)) if _is_part(grad, var) else grad, var)
        for grad, var in dense
    ]
    return results, dense


def _clip_all(
    transforms: GradTransforms, pairs: Pairs, dense: DensePairs, totals: Sequence[tf.Tensor]
) -> tuple[Pairs, DensePairs]:
    """Clips the norm of all variables together; see tf.clip_by_global_norm.

    `totals` are squared norms of all parts on all ranks.
    """
    limit = tf.constant(transforms.global_norm, tf.float32)
    others = [pair for pair in dense if pair[0] is not None and not _is_part(*pair)]
    norm = tf.sqrt(tf.add_n([*totals, *_squares(others, 0, transforms)]))
    # With an infinity or a NaN, all become NaN.
    scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
    # Without clipping only the optimizer rounds.
    scale_of_dense = tf.where(norm <= limit, 1.0, scale)
    scaled = partial(_scale, scale=scale)
    return map_values(scaled, pairs), map_values(partial(_scale, scale=scale_of_dense), dense)


def _squares(
    parts: Sequence[tuple[Any, Any]], num_pairs: int, transforms: GradTransforms
) -> list[tf.Tensor]:
    """Returns the squared norm of each part on this rank, float32; for slices, of their values.

    The first `num_pairs` parts, of tables, are already unscaled.
    """
    values = [tf.cast(_values(grad), tf.float32) for grad, _ in parts]
    if transforms.unscale is not None:
        values[num_pairs:] = [each / transforms.unscale for each in values[num_pairs:]]
    return [tf.reduce_sum(tf.square(each)) for each in values]


def _sum_over_ranks(
    comm: Communicator | None,
    variables: Sequence[Any],
    numbers: Sequence[tf.Tensor],
    transforms: GradTransforms,
) -> list[tf.Tensor]:
    """Sums float32 numbers over ranks, in one collective."""
    if comm is None or not numbers:
        return list(numbers)
    description: dict[str, Any] = {"number of tables": len(variables)}
    description |= {f"name of table {i}": var.table.name for i, var in enumerate(variables)}
    description |= {"clipnorm": transforms.norm, "global_clipnorm": transforms.global_norm}
    description |= {"count of numbers": len(numbers)}
    total = agreed_sum(comm, tf.cast(tf.stack(numbers), tf.float64), description, _WHAT)
    return tf.unstack(tf.cast(total, tf.float32), len(numbers))


# ---- gradients -----------------------------------------------------------------------------------


def _is_part(grad: Any, variable: Any) -> bool:
    """Whether a dense gradient is this rank's part of a static table."""
    return grad is not None and isinstance(variable, StaticVariable)


def _as_float32(grad: tf.IndexedSlices, variable: TableVariable) -> tf.IndexedSlices:
    """Returns the gradient of a table with float32 rows and, if possible, the same keys tensor.

    Raises TypeError or ValueError if it does not fit the table.
    """
    keys, rows = checked_gradient(grad, variable)
    fits = rows.shape[1:].is_compatible_with([variable.dimension])
    if not fits or not keys.shape.is_compatible_with(rows.shape[:1]):
        raise ValueError(
            f"The gradient of table {variable.table.name!r} must have one row of dimension "
            f"{variable.dimension} for each of its keys (n,). Received: keys {keys.shape}, rows "
            f"{rows.shape}."
        )
    if keys.dtype == grad.indices.dtype and keys.shape.rank == grad.indices.shape.rank:
        keys = grad.indices
    return tf.IndexedSlices(rows, keys, grad.dense_shape)


def _deduplicate(pairs: Pairs) -> Pairs:
    """Returns pairs of distinct tables, with one row per key."""
    by_table: dict[int, Pairs] = {}
    for grad, var in pairs:
        by_table.setdefault(id(var.table), []).append((grad, var))
    result = []
    for (grad, var), *others in by_table.values():
        if others:
            keys = [as_int64(each.indices) for each in (grad, *(other for other, _ in others))]
            rows = [each.values for each in (grad, *(other for other, _ in others))]
            joined = from_int64(tf.concat(keys, 0), grad.indices.dtype)
            grad = tf.IndexedSlices(tf.concat(rows, 0), joined, grad.dense_shape)
        result.append((_sum_repeated(grad), var))
    return result


def _sum_repeated(grad: Any) -> Any:
    """Sums slices by index; returns other gradients unchanged."""
    if not isinstance(grad, tf.IndexedSlices) or are_distinct(grad.indices):
        return grad
    distinct, places = tf.unique(as_int64(grad.indices))
    sums = tf.math.unsorted_segment_sum(grad.values, places, tf.size(distinct))
    return tf.IndexedSlices(sums, from_int64(distinct, grad.indices.dtype), grad.dense_shape)


def _values(grad: Any) -> tf.Tensor:
    return grad.values if isinstance(grad, tf.IndexedSlices) else tf.convert_to_tensor(grad)


def _with_values(grad: Any, values: tf.Tensor) -> Any:
    """Returns a gradient with other values and the same indices tensor."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return values


def map_values(function: Callable[[tf.Tensor], tf.Tensor], pairs: Any) -> Any:
    """Applies a function to the values of each gradient; None stays None."""
    return [
        (None if grad is None else _with_values(grad, function(_values(grad))), var)
        for grad, var in pairs
    ]


def _scale(values: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    return values * tf.cast(scale, values.dtype)

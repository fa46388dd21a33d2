"""What an optimizer does to gradients before its step: to those of tables as to dense ones.

The gradient of a table is one of the whole table: the rows of all ranks, zero for every key that
nobody looked up, and one row for each key. So is that of a static table. A clipped norm is that of
all of it, and one collective tells all ranks the norms of all tables of a call.

Dense variables are clipped by the wrapped optimizer itself. Where their norm counts together with
that of tables they are scaled before it sees them: then it finds no norm that is too large.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.backend import get_backend
from sok_lite.bridge.host_call import host_call, refuse_replicas
from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.joined import as_int64, from_int64
from sok_lite.bridge.optimizers.family import Family
from sok_lite.bridge.optimizers.host import checked_gradient
from sok_lite.bridge.row_gradient import are_distinct
from sok_lite.bridge.static_variable import StaticVariable
from sok_lite.bridge.tensor import to_tensor
from sok_lite.bridge.variable import TableVariable
from sok_lite.comm import Communicator
from sok_lite.engine.agreement import agree_on
from sok_lite.engine.failure import failure_known_to_all

Pairs = list[tuple[tf.IndexedSlices, TableVariable]]
DensePairs = list[tuple[Any, Any]]

_WHAT = "Clipping of the norms of tables"


class Changes(NamedTuple):
    """What an optimizer does to gradients, in this order. None: it does not.

    Attributes:
      unscale: it divides by this.
      value: it clips elements to [-value, value].
      norm: it clips the norm of each variable.
      global_norm: it clips the norm of all variables together.
    """

    unscale: float | None
    value: float | None
    norm: float | None
    global_norm: float | None

    @property
    def limit(self) -> float | None:
        """The largest norm, of each or of all."""
        return self.norm if self.norm is not None else self.global_norm


def changes_of(optimizer: Any, family: Family) -> Changes:
    """Returns what an optimizer does to gradients.

    Raises:
      TypeError: a setting is no number.
      NotImplementedError: it clips the norm of each variable, and then that of all, or that of all
        to 0; or it is Horovod's and adds up the gradients of several steps.
    """
    if getattr(optimizer, "_agg_helper", None) is not None:
        raise NotImplementedError(
            "backward_passes_per_step of hvd.DistributedOptimizer does not work with tables: dense "
            "variables would take one step in several of theirs. Leave it out and use larger "
            "batches."
        )
    unscale = _number(optimizer, "loss_scale_factor")
    value, norm, global_norm = (
        _number(optimizer, name) for name in ("clipvalue", "clipnorm", "global_clipnorm")
    )
    if not family.clips_in_turn:
        # The first of these that is above 0, alone.
        norm = norm if norm is not None and norm > 0 else None
        global_norm = global_norm if global_norm and global_norm > 0 and norm is None else None
        is_free = norm is None and global_norm is None
        value = value if value is not None and value > 0 and is_free else None
    if norm is not None and global_norm is not None:
        raise NotImplementedError(
            f"{type(optimizer).__name__} has both clipnorm={norm} and global_clipnorm="
            f"{global_norm}, which tables do not support. Set one of them to None."
        )
    if global_norm == 0:
        raise NotImplementedError(
            f"global_clipnorm={global_norm} of {type(optimizer).__name__} would make every "
            "gradient 0. Set it to None, or train nothing."
        )
    return Changes(unscale, value, norm, global_norm)


def changed(
    optimizer: Any, family: Family, pairs: Pairs, dense: DensePairs
) -> tuple[Pairs, DensePairs]:
    """Returns gradients as an optimizer would have changed them before its step.

    With several ranks, and where norms are clipped, every rank must call it, with the same tables
    in the same order; dense gradients are the same on all ranks, those of static tables are not.

    Args:
      pairs: of tables that have a gradient; the same table may come several times.
      dense: of other variables; a gradient may be None.

    Returns:
      (pairs, dense): those of tables are changed for good. Those of dense variables are for the
      optimizer, which changes them itself.

    Raises:
      TypeError, ValueError: a gradient does not fit. No rank has been told anything.
      NotImplementedError: see `changes_of`.
      CommunicatorError: a rank has died, or ranks are in different calls.
    """
    changes = changes_of(optimizer, family)
    if all(each is None for each in changes):
        return pairs, dense
    if not pairs and not any(isinstance(var, StaticVariable) for _, var in dense):
        return pairs, dense  # the optimizer's own affair
    refuse_replicas(_WHAT)
    comm = None if changes.limit is None else other_ranks()
    # Eagerly, the other ranks may wait for the norms already; in a graph nothing runs yet.
    with contextlib.ExitStack() as stack:
        if comm is not None and tf.executing_eagerly():
            stack.enter_context(failure_known_to_all(comm))
        pairs, dense = _but_for_norms(changes, pairs, dense)
    if changes.norm is not None:
        return _clip_each(comm, changes, pairs, dense)
    if changes.global_norm is not None:
        return _clip_all(comm, changes, pairs, dense)
    return pairs, dense


def _but_for_norms(changes: Changes, pairs: Pairs, dense: DensePairs) -> tuple[Pairs, DensePairs]:
    """Returns gradients that are checked, unscaled, of one row a key and clipped by value."""
    pairs = [(_as_float32(*pair), pair[1]) for pair in pairs]
    if changes.unscale is not None:
        pairs = _mapped(lambda values: values / changes.unscale, pairs)
    if changes.value is None and changes.limit is None:
        return pairs, dense
    pairs = _one_row_a_key(pairs)
    dense = [
        (_summed(grad) if isinstance(var, StaticVariable) else grad, var) for grad, var in dense
    ]
    if changes.value is None:
        return pairs, dense
    clip = partial(_clipped_by_value, value=changes.value)
    return _mapped(clip, pairs), dense if changes.limit is None else _mapped(clip, dense)


# ---- norms ---------------------------------------------------------------------------------------


def _clip_each(
    comm: Communicator | None, changes: Changes, pairs: Pairs, dense: DensePairs
) -> tuple[Pairs, DensePairs]:
    """Clips the norm of each table and static table; see tf.clip_by_norm."""
    limit = tf.constant(changes.norm, tf.float32)
    static = [i for i, (grad, var) in enumerate(dense) if _is_part(grad, var)]
    parts = [*pairs, *(dense[i] for i in static)]
    squares = _squares(parts, len(pairs), changes)
    totals = tf.unstack(_over_ranks(comm, parts, squares, changes), len(parts))

    def clipped(values: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
        norm = tf.sqrt(total)
        dtype = values.dtype
        return values * tf.cast(limit, dtype) / tf.cast(tf.maximum(norm, limit), dtype)

    results = [
        (_with_values(grad, clipped(_values(grad), total)), var)
        for (grad, var), total in zip(parts, totals, strict=True)
    ]
    dense = list(dense)
    for place, i in enumerate(static, start=len(pairs)):
        grad, var = results[place]
        # The optimizer clips this rank's part once more. An infinity makes all else 0, and what is
        # one times 0 is no number: taken once, as here it would be, not for the whole part.
        is_infinite = tf.math.is_inf(squares[place]) & tf.math.is_inf(totals[place])
        given = _values(dense[i][0])
        dense[i] = (_with_values(grad, tf.where(is_infinite, given, _values(grad))), var)
    return results[: len(pairs)], dense


def _clip_all(
    comm: Communicator | None, changes: Changes, pairs: Pairs, dense: DensePairs
) -> tuple[Pairs, DensePairs]:
    """Clips the norm of all variables together; see tf.clip_by_global_norm."""
    limit = tf.constant(changes.global_norm, tf.float32)
    parts = [*pairs, *(pair for pair in dense if _is_part(*pair))]
    squares = _squares(parts, len(pairs), changes)
    of_parts = _over_ranks(comm, parts, squares, changes)
    others = [pair for pair in dense if pair[0] is not None and not _is_part(*pair)]
    of_others = tf.stack([0.0, *_squares(others, 0, changes)])
    norm = tf.sqrt(tf.reduce_sum(tf.concat([of_parts, of_others], 0)))
    # Of an infinity, and of what is no number, all are to be no numbers.
    scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
    # Where nothing is clipped the optimizer alone is to round.
    scale_of_dense = tf.where(norm <= limit, 1.0, scale)
    scaled = partial(_scaled, scale=scale)
    return _mapped(scaled, pairs), _mapped(partial(_scaled, scale=scale_of_dense), dense)


def _squares(parts: Sequence[tuple[Any, Any]], num_pairs: int, changes: Changes) -> list[tf.Tensor]:
    """Returns the squared norm of each part on this rank; those of tables are unscaled by now."""
    return [
        _square(grad, None if i < num_pairs else changes.unscale)
        for i, (grad, _) in enumerate(parts)
    ]


def _square(grad: Any, unscale: float | None = None) -> tf.Tensor:
    """Returns the squared norm of a gradient, float32; of slices, of their values as they are."""
    values = tf.cast(_values(grad), tf.float32)
    return tf.reduce_sum(tf.square(values if unscale is None else values / unscale))


def _over_ranks(
    comm: Communicator | None,
    parts: Sequence[tuple[Any, Any]],
    squares: Sequence[tf.Tensor],
    changes: Changes,
) -> tf.Tensor:
    """Returns (num_parts,) float32: what the parts of all ranks sum up to."""
    if not squares:
        return tf.zeros([0])
    stacked = tf.stack(squares)
    if comm is None:
        return stacked
    description: dict[str, Any] = {"number of tables": len(parts)}
    description |= {f"name of table {i}": var.table.name for i, (_, var) in enumerate(parts)}
    description |= {"clipnorm": changes.norm, "global_clipnorm": changes.global_norm}

    def run(numbers: tf.Tensor) -> Sequence[tf.Tensor]:
        agree_on(comm, description, _WHAT)
        total = comm.allreduce(numbers.numpy(), "sum")
        return (to_tensor(np.asarray(total), tf.float64, get_backend("cpu")),)

    numbers = tf.cast(stacked, tf.float64)
    (total,) = host_call(run, [numbers], [tf.float64], get_backend("cpu"), _WHAT)
    return tf.cast(tf.ensure_shape(total, [len(parts)]), tf.float32)


# ---- gradients -----------------------------------------------------------------------------------


def _is_part(grad: Any, variable: Any) -> bool:
    """Whether a dense gradient is one of this rank's rows of a table."""
    return grad is not None and isinstance(variable, StaticVariable)


def _as_float32(grad: tf.IndexedSlices, variable: TableVariable) -> tf.IndexedSlices:
    """Returns the gradient of a table with float32 rows, and the very keys it had.

    Raises:
      TypeError, ValueError: it does not fit the table.
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


def _one_row_a_key(pairs: Pairs) -> Pairs:
    """Returns pairs of different tables, with one row for each key."""
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
        result.append((_summed(grad), var))
    return result


def _summed(grad: Any) -> Any:
    """Returns slices with each index once, in place of all with it their sum; others as is."""
    if not isinstance(grad, tf.IndexedSlices) or are_distinct(grad.indices):
        return grad
    distinct, places = tf.unique(as_int64(grad.indices))
    sums = tf.math.unsorted_segment_sum(grad.values, places, tf.size(distinct))
    return tf.IndexedSlices(sums, from_int64(distinct, grad.indices.dtype), grad.dense_shape)


def _values(grad: Any) -> tf.Tensor:
    return grad.values if isinstance(grad, tf.IndexedSlices) else tf.convert_to_tensor(grad)


def _with_values(grad: Any, values: tf.Tensor) -> Any:
    """Returns a gradient with other values, and the very indices it had."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return values


def _mapped(function: Callable[[tf.Tensor], tf.Tensor], pairs: Any) -> Any:
    """Returns pairs with a function of the values of each gradient; of None, None."""
    return [
        (None if grad is None else _with_values(grad, function(_values(grad))), var)
        for grad, var in pairs
    ]


def _clipped_by_value(values: tf.Tensor, value: float) -> tf.Tensor:
    return tf.clip_by_value(values, -value, value)


def _scaled(values: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    return values * tf.cast(scale, values.dtype)


# ---- settings ------------------------------------------------------------------------------------


def _number(optimizer: Any, name: str) -> float | None:
    value = getattr(optimizer, name, None)
    if value is None:
        return None
    if not isinstance(value, (int, float, np.number)):
        raise TypeError(
            f"`{name}` of {type(optimizer).__name__} must be a number where tables are trained. "
            f"Received: {value!r}."
        )
    return float(value)

"""Exact steps and metrics of Keras over ranks whose batches differ in size, or are empty.

Keras' own step averages the loss over a rank's rows. Here each rank is weighted by its rows, so
that the step equals that of one rank with all rows. A rank without rows takes part, because others
need its part of the tables; what the step makes of an empty batch, NaN in moving averages and
metrics, is undone. At the end of an epoch the sums behind metrics are added over ranks.
"""

import functools
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.collectives import allreduce
from sok_lite.bridge.job import num_ranks, other_ranks
from sok_lite.bridge.keras import held, hooks
from sok_lite.bridge.keras.data import note_batch
from sok_lite.bridge.loss_weight import weight_loss
from sok_lite.bridge.set_within import set_within
from sok_lite.bridge.variable import TableVariable

_TRAINS, _TESTS = "train_step", "test_step"
_METHOD = "get_metrics_result"  # of models; ends an epoch of `fit` and `evaluate`
# Whether models return the metrics of this rank, as in a step.
_is_of_this_rank: ContextVar[bool] = ContextVar("is_of_this_rank", default=False)


def count_by_rows(name: str, package: Any) -> None:
    """Makes the steps of a Keras weight ranks by rows, and its metrics cover all ranks."""
    for method in (_TRAINS, _TESTS):
        hooks.around(package.Model, method, _step_by_rows, method)
    hooks.around(package.Model, _METHOD, _reduce_metrics)


def rows_of(batch: Any) -> tf.Tensor:
    """Returns the number of rows of a batch, a scalar int64."""
    first = next(each for each in tf.nest.flatten(batch) if each is not None)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int64)
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int64)
    return tf.shape(first, tf.int64)[0]


# ---- steps ---------------------------------------------------------------------------------------


def _step_by_rows(method: str, call: Any, self: Any, data: Any) -> Any:
    if other_ranks() is None or not held.kept_tables(self):
        return call(self, data)
    if method == _TRAINS:
        note_batch(self, data)
    rows, before = rows_of(data), _states(self)
    counts = weight_loss(rows) if method == _TRAINS else nullcontext()
    with counts, set_within(_is_of_this_rank, True):
        logs = call(self, data)
        return _undo_empty_step(self, rows, before, logs)


def _states(model: Any) -> dict[int, tuple[Any, tf.Tensor]]:
    """Returns the variables that a step changes without a gradient, and their values, by id."""
    variables = [variable for metric in model.metrics for variable in metric.variables]
    with suppress(ValueError):  # tf_keras: no weights before the first batch
        variables += model.non_trainable_variables
    dense = [each for each in variables if not isinstance(each, TableVariable)]
    # A variable is copied only if it is assigned to.
    return {id(each): (each, tf.convert_to_tensor(each)) for each in dense}


def _undo_empty_step(
    model: Any, rows: tf.Tensor, before: dict[int, tuple[Any, tf.Tensor]], logs: Any
) -> Any:
    """Undoes a step without rows, except for the tables; returns its logs."""
    after = _states(model)
    new = [after[each][1] for each in after.keys() - before.keys()]
    finite = [tf.reduce_all(tf.math.is_finite(each)) for each in new if each.dtype.is_floating]
    if finite:
        tf.debugging.Assert(
            (rows > 0) | tf.reduce_all(finite),
            ["The first batch of a rank must have rows, for it makes what a model counts with."],
        )

    as_tensors = {
        name: tf.nest.map_structure(tf.convert_to_tensor, log) for name, log in logs.items()
    }

    def taken_back() -> Any:
        for variable, value in before.values():
            variable.assign(value)
        found = model.get_metrics_result()
        return {
            name: tf.nest.map_structure(_like, found.get(name, log), log)
            for name, log in as_tensors.items()
        }

    return tf.cond(rows > 0, lambda: as_tensors, taken_back)


def _like(value: Any, log: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, log.dtype)


# ---- metrics -------------------------------------------------------------------------------------


def _reduce_metrics(call: Any, self: Any) -> Any:
    is_step = _is_of_this_rank.get() or not tf.executing_eagerly()
    if is_step or other_ranks() is None or not held.kept_tables(self):
        return call(self)
    return _metrics_of_all_ranks(self, functools.partial(call, self))


def _metrics_of_all_ranks(model: Any, result: Any) -> Any:
    """Returns the metrics of all ranks; each variable declares how it is reduced."""
    variables = {id(each): each for metric in model.metrics for each in metric.variables}
    if not variables:  # a custom step returns what it likes, and keeps no metrics
        return result()
    added = [each for each in variables.values() if _aggregation(each) in ("sum", "mean")]
    own = [each.numpy() for each in added]
    total = _sum_over_ranks([each.astype(np.float64) for each in own])
    try:
        for variable, value in zip(added, total, strict=True):
            is_mean = _aggregation(variable) == "mean"
            variable.assign(tf.cast(value / num_ranks() if is_mean else value, variable.dtype))
        found = result()
    finally:
        for variable, value in zip(added, own, strict=True):
            variable.assign(value)
    if len(added) == len(variables):
        return found
    flat = [np.asarray(each, np.float64) for each in tf.nest.flatten(found)]
    means = [each / num_ranks() for each in _sum_over_ranks(flat)]
    return tf.nest.pack_sequence_as(found, means)


# The call in which other ranks wait for a rank that has no more batches.
_CALL = "the metrics at the end of an epoch"


def _sum_over_ranks(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Returns float64 arrays summed over ranks."""
    flat = np.concatenate([np.zeros(0), *(each.reshape(-1) for each in arrays)])
    ends = np.cumsum([each.size for each in arrays])[:-1]
    parts = np.split(allreduce(tf.constant(flat), "sum", _CALL).numpy(), ends)
    return [part.reshape(each.shape) for part, each in zip(parts, arrays, strict=True)]


def _aggregation(variable: Any) -> str:
    """Returns how Keras reduces a variable of a metric: sum, mean or another way."""
    aggregation = getattr(variable, "aggregation", "sum")
    return str(getattr(aggregation, "name", aggregation)).lower()

"""Metrics of an epoch over all ranks: their sums are added, so that they are those of all rows."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.collectives import allreduce
from sok_lite.bridge.job import num_ranks, other_ranks
from sok_lite.bridge.keras import held, hooks

_METHOD = "get_metrics_result"  # of models, which `fit` and `evaluate` end an epoch with
_is_of_this_rank: ContextVar[bool] = ContextVar("is_of_this_rank", default=False)


@contextmanager
def of_this_rank() -> Iterator[None]:
    """Has models give the metrics of this rank within, as in a step."""
    token = _is_of_this_rank.set(True)
    try:
        yield
    finally:
        _is_of_this_rank.reset(token)


def add_over_ranks(name: str, package: Any) -> None:
    """Has models with tables give the metrics of all ranks, where every rank asks."""
    hooks.around(package.Model, _METHOD, _added)


def _added(call: Any, self: Any) -> Any:
    is_step = _is_of_this_rank.get() or not tf.executing_eagerly()
    if is_step or other_ranks() is None or not held.kept_tables(self):
        return call(self)
    return _of_all(self, functools.partial(call, self))


def _of_all(model: Any, result: Any) -> Any:
    """Returns the metrics of all ranks. What a variable is to become is what it says itself."""
    variables = {id(each): each for metric in model.metrics for each in metric.variables}
    if not variables:  # a step of a program's own gives what it likes, and keeps no metrics
        return result()
    added = [each for each in variables.values() if _aggregation(each) in ("sum", "mean")]
    own = [each.numpy() for each in added]
    total = _summed([each.astype(np.float64) for each in own])
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
    means = [each / num_ranks() for each in _summed(flat)]
    return tf.nest.pack_sequence_as(found, means)


# What a rank is in that has no more batches, while the others take a step.
_CALL = "the metrics at the end of an epoch"


def _summed(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Returns float64 arrays summed over ranks."""
    flat = np.concatenate([np.zeros(0), *(each.reshape(-1) for each in arrays)])
    ends = np.cumsum([each.size for each in arrays])[:-1]
    parts = np.split(allreduce(tf.constant(flat), "sum", _CALL).numpy(), ends)
    return [part.reshape(each.shape) for part, each in zip(parts, arrays, strict=True)]


def _aggregation(variable: Any) -> str:
    """Returns how Keras is to reduce a variable of a metric: sum, mean or another way."""
    aggregation = getattr(variable, "aggregation", "sum")
    return str(getattr(aggregation, "name", aggregation)).lower()

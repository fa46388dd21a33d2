"""Steps of Keras over ranks that have not as many rows: exact, also where a rank has none.

Keras' own step has the mean loss of a rank's rows. Here each counts by its rows, so that the step
is that of one rank which has them all. A rank without rows takes the step with the others, for its
part of the tables is asked for; what the step makes of nothing, NaN in moving averages and metrics,
is taken back.
"""

from contextlib import nullcontext, suppress
from typing import Any

import tensorflow as tf

from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.keras import held, hooks
from sok_lite.bridge.loss_weight import counted
from sok_lite.bridge.variable import TableVariable
from sok_lite.keras.metrics_of_all import of_this_rank
from sok_lite.keras.parts import rows_of

_TRAINS, _TESTS = "train_step", "test_step"


def count_by_rows(name: str, package: Any) -> None:
    """Has the steps of a Keras count each rank by its rows."""
    for method in (_TRAINS, _TESTS):
        hooks.around(package.Model, method, _counting, method)


def _counting(method: str, call: Any, self: Any, data: Any) -> Any:
    if other_ranks() is None or not held.kept_tables(self):
        return call(self, data)
    rows, before = rows_of(data), _states(self)
    counts = counted(rows) if method == _TRAINS else nullcontext()
    with counts, of_this_rank():
        logs = call(self, data)
        return _without_nothing(self, rows, before, logs)


def _states(model: Any) -> dict[int, tuple[Any, tf.Tensor]]:
    """Returns what a step changes without a gradient, by id: each variable and its value."""
    variables = [variable for metric in model.metrics for variable in metric.variables]
    with suppress(ValueError):  # tf_keras: there are no weights before the first batch
        variables += model.non_trainable_variables
    dense = [each for each in variables if not isinstance(each, TableVariable)]
    # A variable that is not assigned to is not copied.
    return {id(each): (each, tf.convert_to_tensor(each)) for each in dense}


def _without_nothing(
    model: Any, rows: tf.Tensor, before: dict[int, tuple[Any, tf.Tensor]], logs: Any
) -> Any:
    """Takes a step back, but for what all ranks have done, if it had no rows; returns its logs."""
    after = _states(model)
    new = [after[each][1] for each in after.keys() - before.keys()]
    finite = [tf.reduce_all(tf.math.is_finite(each)) for each in new if each.dtype.is_floating]
    if finite:
        tf.debugging.Assert(
            (rows > 0) | tf.reduce_all(finite),
            ["The first batch of a rank must have rows, for it makes what a model counts with."],
        )

    def taken_back() -> Any:
        for variable, value in before.values():
            variable.assign(value)
        found = model.get_metrics_result()
        return {
            name: tf.nest.map_structure(_like, found.get(name, log), log)
            for name, log in given.items()
        }

    given = {name: tf.nest.map_structure(tf.convert_to_tensor, log) for name, log in logs.items()}
    return tf.cond(rows > 0, lambda: given, taken_back)


def _like(value: Any, log: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, log.dtype)

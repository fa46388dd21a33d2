"""A step of a patched optimizer with tables among its variables; patched.py wraps methods."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from sok_lite.bridge.collectives import allreduce
from sok_lite.bridge.job import num_ranks, other_ranks
from sok_lite.bridge.keras import hooks
from sok_lite.bridge.keras.held import names_of
from sok_lite.bridge.keras.training import OVER_RANKS
from sok_lite.bridge.loss_weight import apply_weight
from sok_lite.bridge.optimizers.accumulation import accumulates
from sok_lite.bridge.optimizers.gradients import map_values
from sok_lite.bridge.optimizers.keras3 import KERAS3, num_batches
from sok_lite.bridge.optimizers.loss_scale import inner_of
from sok_lite.bridge.optimizers.minimize import check_any, warn_of_untrained
from sok_lite.bridge.optimizers.per_graph import DenseStep, PerGraphSteps
from sok_lite.bridge.optimizers.settings import NotForRowsError, family_of
from sok_lite.bridge.optimizers.v1 import V1
from sok_lite.bridge.variable import TableVariable

_Pairs = list[tuple[Any, Any]]

# Attributes of optimizers, stored in the dict: TensorFlow and Keras track what is set.
_STEPS = "_sok_lite_steps"
OPTIONS = "_sok_lite_options"
APIS = "_sok_lite_apis"

_of_thread = threading.local()  # the optimizers that are taking a step


def is_ours(variable: Any, optimizer: Any) -> bool:
    """Whether an optimizer that gets a variable's gradient trains a table with it."""
    return isinstance(variable, TableVariable) and (
        variable.trained_by_patched or variable.is_trained_by(optimizer)
    )


def refuse_others(optimizer: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Raises NotImplementedError for a gradient of a table that needs other optimizers."""
    for grad, variable in pairs:
        if grad is None or not isinstance(variable, TableVariable):
            continue
        instead = variable.instead_of_this_optimizer
        if instead is not None and not variable.is_trained_by(optimizer):
            raise NotImplementedError(
                f"{type(optimizer).__name__} would not train {variable.name!r}, a {variable.kind}. "
                f"{instead}"
            )


def is_stepping(optimizer: Any) -> bool:
    """Whether this thread is already in a step of an optimizer."""
    return id(optimizer) in getattr(_of_thread, "stepping", ())


@contextmanager
def step_of(optimizer: Any) -> Iterator[None]:
    """A `with` block in which this thread is in a step of an optimizer."""
    outer: frozenset[int] = getattr(_of_thread, "stepping", frozenset())
    _of_thread.stepping = outer | {id(optimizer)}
    try:
        yield
    finally:
        _of_thread.stepping = outer


def counts_all(optimizer: Any) -> bool:
    """Whether a purely dense step counts as one of tables: TFRA's of TF1 does."""
    return bool(vars(optimizer).get(APIS)) and family_of(optimizer) is V1


def over_ranks(optimizer: Any, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Returns gradients reduced over ranks, if all ranks take the step together."""
    if other_ranks() is None:
        return pairs
    how = vars(optimizer).get(OVER_RANKS)
    tables = [variable for _, variable in pairs if isinstance(variable, TableVariable)]
    if how == "mean" or any(variable.averages_over_ranks for variable in tables):
        return _average_over_ranks(pairs)
    return sum_over_ranks(pairs) if how == "sum" else pairs


def sum_over_ranks(pairs: _Pairs) -> _Pairs:
    """Returns gradients, those of dense variables summed over all ranks, those of tables unchanged.

    Every rank must call it, with the same variables in the same order.
    """
    dense = iter(_sum_dense([pair for pair in pairs if not isinstance(pair[1], TableVariable)]))
    return [pair if isinstance(pair[1], TableVariable) else next(dense) for pair in pairs]


def _sum_dense(dense: _Pairs) -> _Pairs:
    """Sums dense gradients over all ranks, in one exchange per dtype."""
    gradients = [None if grad is None else tf.convert_to_tensor(grad) for grad, _ in dense]
    for dtype in {grad.dtype: None for grad in gradients if grad is not None}:
        places = [i for i, grad in enumerate(gradients) if grad is not None and grad.dtype == dtype]
        flat = tf.concat([tf.reshape(gradients[i], [-1]) for i in places], 0)
        sizes = [tf.size(gradients[i]) for i in places]
        parts = tf.split(allreduce(flat, "sum"), sizes, num=len(places))
        for i, part in zip(places, parts, strict=True):
            gradients[i] = tf.reshape(part, tf.shape(gradients[i]))
    return [(grad, var) for grad, (_, var) in zip(gradients, dense, strict=True)]


def _average_over_ranks(pairs: _Pairs) -> _Pairs:
    """Returns weighted means over all ranks' losses (loss_weight.py) of dense gradients.

    Gradients of tables are already weighted and summed. Every rank must call it, with the same
    variables in the same order.
    """
    count = num_ranks()
    weighed_pairs = [
        (grad, var)
        if grad is None or isinstance(var, TableVariable)
        else (apply_weight(tf.convert_to_tensor(grad)), var)
        for grad, var in pairs
    ]
    every = sum_over_ranks(weighed_pairs)
    return map_values(lambda values: values / tf.cast(count, values.dtype), every)


def take_step(
    optimizer: Any, pairs: Iterable[tuple[Any, Any]], dense_step: DenseStep, options: dict[str, Any]
) -> Any:
    """Takes a step with tables."""
    pairs = list(pairs)
    dense = [pair for pair in pairs if not is_ours(pair[1], optimizer)]
    if all(grad is None for grad, _ in pairs):
        if family_of(optimizer) is not V1:  # else it would first create states for the tables
            check_any(pairs)
        return dense_step(optimizer, pairs, **options)
    warn_of_untrained(pairs, family_of(optimizer))
    ours = [pair for pair in pairs if pair[0] is not None and is_ours(pair[1], optimizer)]
    has_part = counts_all(optimizer) or accumulates(optimizer, len(dense) < len(pairs))
    if not ours and not has_part:
        return dense_step(optimizer, over_ranks(optimizer, dense), **options)
    pairs = [
        (grad, variable.trained_as if isinstance(variable, TableVariable) else variable)
        for grad, variable in over_ranks(optimizer, pairs)
    ]
    more = vars(inner_of(optimizer)).get(OPTIONS, {})
    steps = _steps_of(optimizer, dense_step, more)
    pairs, of_others = _split_by_optimizer(optimizer, pairs)
    if of_others:
        options = dict(options)
        options["beside"] = [
            (_steps_of(own, _dense_step_of(own), more), its) for own, its in of_others
        ]
    try:
        done = steps.take(pairs, **options)
    except NotForRowsError as error:
        raise error.of(f"table {names_of([variable.table for _, variable in ours])}") from None
    return _tell_trained(ours, done)


def _steps_of(optimizer: Any, dense_step: DenseStep, options: dict[str, Any]) -> PerGraphSteps:
    steps: PerGraphSteps | None = vars(optimizer).get(_STEPS)
    if steps is None or steps.optimizer is not optimizer:  # a copy has that of its model
        steps = vars(optimizer)[_STEPS] = PerGraphSteps(optimizer, dense_step, **options)
    return steps


def _split_by_optimizer(
    optimizer: Any, pairs: list[tuple[Any, Any]]
) -> tuple[list[tuple[Any, Any]], list[tuple[Any, list[tuple[Any, Any]]]]]:
    """Returns the pairs that an optimizer trains, and those of each other optimizer of a table.

    Raises NotImplementedError if this optimizer does not support others.
    """
    its, of_others = [], dict[int, tuple[Any, list[tuple[Any, Any]]]]()
    for grad, variable in pairs:
        own = variable.own_optimizer if isinstance(variable, TableVariable) else None
        if grad is None or own is None or own is optimizer:
            its.append((grad, variable))
            continue
        inner = inner_of(optimizer)
        if family_of(inner) is V1 or num_batches(inner) > 1:
            which = "of TF1" if family_of(inner) is V1 else "with gradient_accumulation_steps"
            raise NotImplementedError(
                f"Table {variable.table.name!r} has an optimizer of its own, which takes a step in "
                f"each step of an optimizer of Keras. Received: {type(optimizer).__name__} {which}."
                " Make the table without `optimizer`, or use another here."
            )
        of_others.setdefault(id(own), (own, []))[1].append((grad, variable))
    return its, list(of_others.values())


def _dense_step_of(optimizer: Any) -> DenseStep:
    """Returns the step of an optimizer's class without our wrapper."""
    if family_of(optimizer) is not KERAS3:
        return hooks.original_of(type(optimizer), "apply_gradients")
    apply = hooks.original_of(type(optimizer), "apply")
    return lambda its, dense: apply(its, *map(list, zip(*dense, strict=True)))


def _tell_trained(ours: list[tuple[Any, TableVariable]], done: Any) -> Any:
    """Passes trained keys to tables that override `after_step`; returns the step."""
    trained: dict[int, tuple[TableVariable, list[Any]]] = {}
    for grad, variable in ours:
        if type(variable).after_step is not TableVariable.after_step:
            trained.setdefault(id(variable.trained_as), (variable, []))[1].append(grad.indices)
    if not trained:
        return done
    is_tf1 = not tf.executing_eagerly() and not tf.inside_function()
    operations = []
    with tf.control_dependencies([done] if is_tf1 else []):
        for variable, indices in trained.values():
            keys = tf.concat(indices, 0) if len(indices) > 1 else tf.identity(indices[0])
            operations += variable.after_step(keys)
    return tf.group(done, *operations) if is_tf1 and operations else done

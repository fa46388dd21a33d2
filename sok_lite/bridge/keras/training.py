"""Rejects training steps of Keras that would silently skip a table, or that XLA compiles.

Keras 3 and tf_keras update the weights that they know. So models are checked when they are compiled
and when their training step is made; a lookup checks whether Keras' own step calls it, because a
model may use a table that it does not hold. A table passes if the model lists it among its weights
and its optimizer trains it.
"""

import inspect
import threading
from collections.abc import Sequence
from types import CodeType
from typing import Any, NoReturn

from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.keras import hooks
from sok_lite.bridge.keras.called import models_of_keras_3
from sok_lite.bridge.keras.held import (
    is_horovods,
    names_of,
    optimizers_in,
    package_of,
    tables_in,
)
from sok_lite.bridge.keras.hooks import caller_among

# Attribute of optimizers whose steps are over all ranks: "mean" for the mean of all ranks' losses,
# "sum" if gradients of dense variables are summed and those of tables are not.
OVER_RANKS = "_sok_lite_over_ranks"

_in_custom_step = threading.local()
_step_codes: set[CodeType] = set()


def watch_steps(model: Any) -> None:
    """Makes models of a Keras check their training."""
    if hooks.around(model, "train_step", _in_step) is not None:
        _step_codes.add(inspect.unwrap(model.train_step).__code__)
    hooks.around(model, "compile", _compile)
    hooks.around(model, "make_train_function", hooks.checking, check_training)
    for made in ("train", "test", "predict"):
        hooks.around(model, f"make_{made}_function", _make_function, made)


def refuse_custom_step(variables: Sequence[Any], is_new: bool) -> None:
    """Raises in a lookup within Keras' own training step if that would not train the tables.

    `is_new`: a Keras was just guarded, and may be within the step already.
    """
    model = getattr(_in_custom_step, "model", None)
    if is_new and model is None:
        frame = caller_among(_step_codes)
        model = None if frame is None else frame.f_locals.get("self")
    if model is None:
        return
    for variable in variables:
        is_left_out = variable.trainable and package_of(model) in variable.left_out_by
        if is_left_out and not _is_known_to(model, variable):
            _refuse_training([variable])


def left_out_of(variables: list[Any]) -> str | None:
    """Describes a table left out of variables that are all of some model's listed ones; or None.

    Keras 3 lists only variables of its own class. A list of variables refers to no model, so all
    called models are checked.
    """
    given = {id(variable) for variable in variables}
    for model in models_of_keras_3():
        listed = {id(variable) for variable in model.trainable_variables}
        if not listed or not listed <= given:
            continue
        missing = [
            table
            for _, table in tables_in(model)
            if table.trainable and id(table) not in given and not _is_frozen(model, table)
        ]
        if missing:
            return (
                f"The variables of the model {model.name!r} leave {names_of(missing)} out: Keras 3 "
                f"lists its own variables, and a {missing[0].kind} is none of them. Name it beside "
                "them, as in [*model.trainable_variables, model.table]. A table that is not to be "
                "trained is made with trainable=False, or is in a layer that is frozen."
            )
    return None


def check_training(model: Any, force: bool = False) -> None:
    if getattr(model, "train_function", None) is not None and not force:
        return  # checked when it was made
    found = [table for _, table in tables_in(model)]
    if has_custom_step(model):
        tables = [table for table in found if table.trainable]
        left_out = [table for table in tables if not _is_known_to(model, table)]
        if left_out:
            _refuse_training(left_out)
    averaged = [table for table in found if getattr(type(table), "averages_over_ranks", False)]
    if averaged:
        # A custom step may use another optimizer for dense weights.
        for optimizer in optimizers_in(model):
            _refuse_horovods(model, optimizer, averaged)
            vars(optimizer)[OVER_RANKS] = "mean"


def _refuse_horovods(model: Any, optimizer: Any, tables: Sequence[Any]) -> None:
    """Raises for Horovod's optimizers on several ranks: they gather the gradients of all keys."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    if other_ranks() is None or not is_horovods(type(inner)):
        return
    trained = [table for table in tables if table.trainable and not _is_frozen(model, table)]
    if trained:
        raise NotImplementedError(
            "Gradients of a model with tables are averaged over ranks by sok_lite, and "
            "hvd.DistributedOptimizer would gather those of "
            f"{names_of(trained)}. Received: {type(inner).__name__} of hvd.DistributedOptimizer. "
            "Do not wrap the optimizer: compile the model with it as it is, and give fit() the "
            "callback sok_lite.keras.AllRanks()."
        )


def has_custom_step(model: Any) -> bool:
    """Whether a model trains by Keras' own training step."""
    return hooks.is_theirs(model.train_step)


def _is_known_to(model: Any, table: Any) -> bool:
    """Whether Keras' own step trains a table like a weight, or leaves a frozen one unchanged."""
    is_trained = table.is_trained_by(getattr(model, "optimizer", None))
    try:
        trained, left = model.trainable_variables, model.non_trainable_variables
    except ValueError:  # tf_keras: no weights before the first batch
        return is_trained or _is_frozen(model, table)
    if _is_among(trained, table):
        return is_trained
    return _is_among(left, table) or _is_frozen(model, table)


def _is_frozen(model: Any, table: Any) -> bool:
    """Whether a model holds a table in frozen layers only."""
    layers = [layer for layer, its in tables_in(model, by_each=True) if its is table]
    return bool(layers) and not any(layer.trainable for layer in layers)


def _is_among(variables: list[Any], table: Any) -> bool:
    return any(variable is table for variable in variables)


def _refuse_training(tables: list[Any]) -> NoReturn:
    raise NotImplementedError(
        f"Keras' own training step would leave {names_of(tables)} untrained: it updates the "
        f"weights that Keras knows, and a {tables[0].kind} is none of them. "
        f"{tables[0].instead_of_custom_step} A table that is not to be trained is made with "
        "trainable=False, or is in a layer that is frozen. For evaluate() and predict() alone, "
        "compile(optimizer=None) or set model.trainable = False before."
    )


def _compile(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    _keep_from_xla(self)
    done = call(self, *args, **kwargs)
    if getattr(self, "optimizer", None) is not None and self.trainable:
        check_training(self, force=True)
    return done


def _make_function(made: str, call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    if getattr(self, f"{made}_function", None) is None and _keep_from_xla(self):
        self.jit_compile = False  # it was chosen before the model had its tables
    return call(self, *args, **kwargs)


def _keep_from_xla(model: Any) -> bool:
    """Tells Keras 3 that XLA cannot compile layers that hold tables; returns whether this is new.

    With a GPU, Keras 3 compiles every model by XLA unless a layer objects.
    """
    holders = [layer for layer, _ in tables_in(model) if getattr(layer, "supports_jit", False)]
    for layer in holders:
        layer.supports_jit = False
    return bool(holders)


def _in_step(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    outer = getattr(_in_custom_step, "model", None)
    _in_custom_step.model = self
    try:
        return call(self, *args, **kwargs)
    finally:
        _in_custom_step.model = outer

"""Copies of optimizers, which update other variables than the originals.

A copy has the settings of its optimizer and none of its variables. Keras optimizers are recreated
from their `get_config`, which must return all arguments of `__init__`; numbers, texts and functions
among the attributes are then copied with their current values.
"""

import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

# Why an optimizer cannot step on rows.
_REASONS = {
    "config": "copies of it are made from its get_config(), which raises {}. A schedule of your "
    "own needs a get_config too.",
    "copy": "no copy of it can be made, from_config(get_config()) raises {}. Let its get_config "
    "return all arguments of its __init__.",
    "variables": "it has variables ({}) that are no slots, and a copy of it would change them.",
    # A copy would share and train it.
    "optimizer": "it has an optimizer of its own in {}. Wrap that one, and do what is around it "
    "yourself.",
    "build": "it cannot be built on dense variables, which raises {}.",
    "step": "a step on dense variables raises {}.",
    "late": "it makes variables ({}) while it takes the step, so that they would be made anew in "
    "each step. Make them in build().",
    "count": "its attribute {} changes in a step and is no variable, so that the change would be "
    "lost. Keep it in a variable.",
    "hidden": "some of what it keeps from one step for the next is in no variable among its "
    "attributes, and would be lost after each step. Keep it in variables.",
    "size": "the size of its variable in {} depends on the number of rows, but it has not one row "
    "for each. Give it the shape of the variable, or (rows, anything).",
    "dtype": "its state {} is {}. Keep states of rows in float32.",
    "initial": "its state {} does not begin with the same number in all rows, and new rows come at "
    "any time. Let it begin with one number.",
}
# Settings that act before a step, and so not in a copy. (settings.py rejects averages.)
_NOT_OF_THE_STEP: dict[str, Any] = {
    **dict.fromkeys(["clipnorm", "clipvalue", "global_clipnorm"]),
    **dict.fromkeys(["loss_scale_factor", "gradient_accumulation_steps"]),
    "jit_compile": False,  # it would be compiled for each number of rows
}
_OF_THE_OBJECT = {"name", "_name", "built", "_built", "_lock", "_hypers_created"}
# Lists of all variables, which also have attributes with better names.
LISTS_OF_ALL = ["_trainable_variables", "_variables", "_weights"]
_SETTINGS = (
    *(bool, int, float, str, type(None), tuple, np.ndarray, np.generic),
    *(types.FunctionType, types.BuiltinFunctionType, partial),
)


class CannotStepError(NotImplementedError):
    """An optimizer without an update rule cannot step on rows either."""

    def __init__(self, optimizer: Any, reason: str, *values: Any) -> None:
        super().__init__(
            f"{type(optimizer).__name__} cannot train tables. There is no update rule for it, and "
            f"its own step cannot be taken on rows: {_REASONS[reason].format(*values)}"
        )


@contextmanager
def refusing(optimizer: Any, reason: str) -> Iterator[None]:
    """Raises CannotStepError, with the error of the block in its text."""
    try:
        yield
    except Exception as error:
        raise CannotStepError(optimizer, reason, repr(error)) from error


def config_of(optimizer: Any) -> dict[str, Any]:
    """Returns the config of a Keras optimizer; raises CannotStepError if it has none."""
    with refusing(optimizer, "config"):
        return dict(_own_class(optimizer).get_config(optimizer))


def clone_optimizer(
    optimizer: Any, config: Mapping[str, Any], changes: Mapping[str, Any], followed: Collection[str]
) -> Any:
    """Returns a copy of a Keras optimizer; raises CannotStepError if its config makes none.

    `changes` replace values in the config; `followed` attributes get their current values.
    """
    changes = {**_NOT_OF_THE_STEP, **changes}
    config = {name: changes.get(name, value) for name, value in config.items()}
    with refusing(optimizer, "copy"):
        made = _own_class(optimizer).from_config(config)
    for name, value in settings_in(optimizer).items():
        if name in followed and name.removeprefix("_") not in changes:
            setattr(made, name, value)
    for name, value in _NOT_OF_THE_STEP.items():  # `__init__` may set what the config lacks
        if getattr(made, name, value) != value:
            setattr(made, name, value)
    return made


def _own_class(optimizer: Any) -> Any:
    """Returns the class of an optimizer below Horovod's wrapper."""
    return next(c for c in type(optimizer).__mro__ if c.__module__.split(".")[0] != "horovod")


def settings_in(optimizer: Any) -> dict[str, Any]:
    """Returns the attributes that are settings, not variables or other objects."""
    return {
        name: value
        for name, value in list(vars(optimizer).items())  # other threads may add to it
        if isinstance(value, _SETTINGS)
        and not (name in _OF_THE_OBJECT or name.startswith("_self_"))
    }


def refuse_inner_optimizers(optimizer: Any) -> None:
    """Raises CannotStepError for an optimizer that has another among its attributes."""
    for name, value in vars(optimizer).items():
        if not name.startswith("_self_") and any(
            hasattr(leaf, "apply_gradients") for leaf in _leaves(value)
        ):
            raise CannotStepError(optimizer, "optimizer", repr(name))


def variables_in(optimizer: Any, left_out: Sequence[str]) -> list[tuple[str, Any]]:
    """Returns (attribute, variable) for an optimizer's variables, also in lists and dicts.

    Each once, in an order that depends only on names and lists.
    """
    attributes = vars(optimizer)
    seen = {id(leaf) for name in left_out for leaf in _leaves(attributes.get(name))}
    found = []
    # TensorFlow's tracking keeps lists under such names.
    plain = {name for name in attributes if not name.startswith("_self_")}
    for name in [*sorted(plain - {*left_out, *LISTS_OF_ALL}), *LISTS_OF_ALL]:
        for leaf in _leaves(attributes.get(name)):
            if id(leaf) not in seen and is_variable(leaf):
                seen.add(id(leaf))
                found.append((name, leaf))
    return found


def is_variable(value: Any) -> bool:
    """Whether a value is a variable of TensorFlow or of Keras 3."""
    return isinstance(value, tf.Variable) or any(
        base.__name__ == "Variable" and base.__module__.split(".")[0] == "keras"
        for base in type(value).__mro__
    )


def _leaves(value: Any) -> Iterator[Any]:
    parts = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(parts, (list, tuple)):
        for part in parts:
            yield from _leaves(part)
    else:
        yield value

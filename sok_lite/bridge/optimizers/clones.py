"""Copies of optimizers, made to update other variables than the optimizers themselves.

A copy has the settings of its optimizer and none of its variables. Keras optimizers are made anew
from their `get_config`, which is to have what their `__init__` takes; numbers, texts and functions
among the attributes are then what they are in the optimizer by now.
"""

import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

# What acts on gradients before a step or on variables after it, and so not in a copy.
_NOT_OF_THE_STEP: dict[str, Any] = {
    "clipnorm": None,
    "clipvalue": None,
    "global_clipnorm": None,
    "use_ema": False,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
    "jit_compile": False,  # each number of rows would be compiled
}
_OF_THE_OBJECT = {"name", "_name", "built", "_built", "_lock", "_hypers_created"}
# Lists of all variables, which others have under names that say more.
LISTS_OF_ALL = ["_trainable_variables", "_variables", "_weights"]
_SETTINGS = (
    *(bool, int, float, str, type(None), tuple, np.ndarray, np.generic),
    *(types.FunctionType, types.BuiltinFunctionType, partial),
)


class CannotStepError(NotImplementedError):
    """An optimizer that no rule follows cannot take its step on rows either."""

    def __init__(self, optimizer: Any, reason: str) -> None:
        super().__init__(
            f"{type(optimizer).__name__} cannot train tables. There is no update rule for it, and "
            f"its own step cannot be taken on rows: {reason}"
        )


def made_anew(
    optimizer: Any, config: Mapping[str, Any], changes: Mapping[str, Any], followed: Collection[str]
) -> Any:
    """Returns a copy of a Keras optimizer.

    Args:
      config: of the optimizer.
      changes: in place of what is in the config, if it is there.
      followed: attributes that the copy gets from the optimizer, as they are by now.

    Raises:
      CannotStepError: it cannot be made from its config.
    """
    changes = {**_NOT_OF_THE_STEP, **changes}
    config = {name: changes.get(name, value) for name, value in config.items()}
    try:
        made = own_class(optimizer).from_config(config)
    except Exception as error:
        raise CannotStepError(
            optimizer,
            f"no copy of it can be made, from_config(get_config()) raises {error!r}. Let its "
            "get_config return all arguments of its __init__.",
        ) from error
    for name, value in settings_in(optimizer):
        if name in followed and name.removeprefix("_") not in changes:
            setattr(made, name, value)
    for name, value in _NOT_OF_THE_STEP.items():  # its __init__ may set what the config lacks
        if getattr(made, name, value) != value:
            setattr(made, name, value)
    return made


def config_of(optimizer: Any) -> dict[str, Any]:
    """Returns the config that copies of a Keras optimizer are made from.

    Raises:
      CannotStepError: it has none.
    """
    try:
        return dict(own_class(optimizer).get_config(optimizer))
    except Exception as error:
        raise CannotStepError(
            optimizer,
            f"copies of it are made from its get_config(), which raises {error!r}. A schedule of "
            "your own needs a get_config too.",
        ) from error


def refuse_inner_optimizers(optimizer: Any) -> None:
    """Raises for an optimizer that has another: a copy would share it, and train it.

    Raises:
      CannotStepError: there is one among its attributes.
    """
    for name, value in vars(optimizer).items():
        if not name.startswith("_self_") and any(
            hasattr(leaf, "apply_gradients") for leaf in _leaves(value)
        ):
            raise CannotStepError(
                optimizer,
                f"it has an optimizer of its own in {name!r}. Wrap that one, and do what is around "
                "it yourself.",
            )


def own_class(optimizer: Any) -> Any:
    """Returns the class of an optimizer without what Horovod puts around it."""
    return next(
        base for base in type(optimizer).__mro__ if base.__module__.split(".")[0] != "horovod"
    )


def settings_in(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yields the attributes that are settings, and no variables or objects."""
    for name, value in list(vars(optimizer).items()):
        is_own = name in _OF_THE_OBJECT or name.startswith("_self_")
        if isinstance(value, _SETTINGS) and not is_own:
            yield name, value


def variables_in(optimizer: Any, left_out: Sequence[str]) -> list[tuple[str, Any]]:
    """Returns the variables among an optimizer's attributes, also in lists and dicts, each once.

    Args:
      left_out: attributes whose variables are not wanted.

    Returns:
      (name of the attribute, variable), in an order that depends on names and lists alone.
    """
    attributes = vars(optimizer)
    seen = {id(leaf) for name in left_out for leaf in _leaves(attributes.get(name))}
    found = []
    # TensorFlow's tracking has its own lists, under names that begin so.
    plain = {name for name in attributes if not name.startswith("_self_")}
    names = sorted(plain - {*left_out, *LISTS_OF_ALL})
    for name in [*names, *(name for name in LISTS_OF_ALL if name in attributes)]:
        for leaf in _leaves(attributes[name]):
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
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _leaves(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value

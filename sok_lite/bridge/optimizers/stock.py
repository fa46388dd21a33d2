"""Optimizers as they come train tables: no program wraps one, no program calls anything.

The public methods of TensorFlow's and Keras' optimizers that update variables look whether one of
these is a table that asks for it (`trained_by_stock`). If none is, the original runs. If one is, a
wrapped optimizer takes the step of tables and dense variables together, the dense ones by the
original; it belongs to the optimizer, one for eager mode and one for each graph.

Steps are counted where their number matters: by the optimizer's own counter with Keras; with Adam
and its like of tf.compat.v1.train by a variable "sok_iterations", a global one of a TF1 graph as
Adam's powers of beta are. So initializers and savers know it, a graph without the step has none,
and with any other optimizer a graph has the variables that it has without tables. Steps that have a
table count; one that the same optimizer takes of dense variables alone is none of them.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from sok_lite.bridge import keras_guard
from sok_lite.bridge.optimizers.here import DenseStep, StepsHere
from sok_lite.bridge.optimizers.minimize import check_any
from sok_lite.bridge.optimizers.settings import family_of
from sok_lite.bridge.optimizers.v1 import V1
from sok_lite.bridge.variable import TableVariable

# ---- the public names of other packages that this module relies on; a test looks at each ---------

UPDATES_PAIRS = "apply_gradients"  # of tf.compat.v1.train and tf_keras
UPDATES_LISTS = "apply"  # of Keras 3, whose `apply_gradients` comes to it
MAKES_STATES = "build"  # of Keras 3, for all weights of a model

# An attribute of optimizers. TensorFlow and Keras track what is set; this is put into the dict.
_STEPS = "_sok_lite_steps"

_Original = Callable[..., Any]
_wrapped: set[tuple[type, str]] = set()


def train_with_stock_optimizers() -> None:
    """Has all optimizers train tables that ask for it, those of a Keras imported later too."""
    _wrap_pairs(tf.compat.v1.train.Optimizer)
    keras_guard.tell(_wrap_keras)


def _wrap_keras(name: str, package: Any) -> None:
    base = package.optimizers.Optimizer
    if name == "keras":
        for cls in vars(package.optimizers).values():
            if inspect.isclass(cls) and issubclass(cls, base):
                _wrap_lists(cls)
                _wrap_build(cls)
        return
    legacy = package.optimizers.legacy.Optimizer
    # That around another optimizer has no public name for each of its kinds.
    around = [
        cls
        for cls in (*base.__subclasses__(), *legacy.__subclasses__())
        if issubclass(cls, package.mixed_precision.LossScaleOptimizer)
    ]
    for cls in (base, legacy, *around):
        _wrap_pairs(cls)


# ---- wrapping ------------------------------------------------------------------------------------


def _wrap_pairs(cls: type) -> None:
    """Wraps the method of a class that takes pairs."""
    cls, original = _method(cls, UPDATES_PAIRS)
    if original is None:
        return
    names = list(inspect.signature(original).parameters)[2:]

    def dense_step(optimizer: Any, dense: Any, **options: Any) -> Any:
        return original(optimizer, dense, **options)

    @functools.wraps(original)
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(grads_and_vars, (list, tuple)):
            grads_and_vars = list(grads_and_vars)  # it may be gone when it was looked at
        if not any(_is_ours(pair[-1]) for pair in grads_and_vars):
            return original(self, grads_and_vars, *args, **kwargs)
        options = dict(zip(names, args, strict=False)) | kwargs
        return _take(self, grads_and_vars, dense_step, options)

    _put(cls, UPDATES_PAIRS, apply_gradients)


def _wrap_lists(cls: type) -> None:
    """Wraps the method of a class that takes gradients and variables."""
    cls, original = _method(cls, UPDATES_LISTS)
    if original is None:
        return

    def dense_step(optimizer: Any, dense: Any) -> Any:
        return original(optimizer, *map(list, zip(*dense, strict=True)))

    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if any(map(_is_ours, trainable_variables)):
                pairs = list(zip(grads, trainable_variables, strict=True))
                return _take(self, pairs, dense_step, {})
        return original(self, grads, trainable_variables)

    _put(cls, UPDATES_LISTS, apply)


def _wrap_build(cls: type) -> None:
    """Has no dense states made for tables, where Keras makes those of all weights of a model."""
    cls, original = _method(cls, MAKES_STATES)
    if original is None:
        return

    @functools.wraps(original)
    def build(self: Any, variables: Any) -> Any:
        listed = list(variables)
        dense = [variable for variable in listed if not _is_ours(variable)]
        return original(self, variables if len(dense) == len(listed) else dense)

    _put(cls, MAKES_STATES, build, trains=False)


def _method(cls: type, name: str) -> tuple[type, _Original | None]:
    """Returns the class that has a method, and it; None: it was wrapped, or is not there."""
    owner = keras_guard.owner_of(cls, name)
    if owner is None or (owner, name) in _wrapped:
        return cls, None
    return owner, vars(owner)[name]


def _put(cls: type, name: str, method: _Original, trains: bool = True) -> None:
    _wrapped.add((cls, name))
    setattr(cls, name, method)
    if trains:
        keras_guard.trainers.add(cls)


# ---- what the wrapped methods do -----------------------------------------------------------------


def _is_ours(variable: Any) -> bool:
    return isinstance(variable, TableVariable) and variable.trained_by_stock


def _take(
    optimizer: Any,
    pairs: Iterable[tuple[Any, Any]],
    dense_step: DenseStep,
    options: dict[str, Any],
) -> Any:
    """Takes a step of which tables are a part."""
    pairs = list(pairs)
    if all(grad is None for grad, variable in pairs if _is_ours(variable)):
        dense = [pair for pair in pairs if not _is_ours(pair[1])]
        if all(grad is None for grad, _ in dense):
            if family_of(optimizer) is not V1:  # it would make states for the tables before
                check_any(pairs)
            dense = pairs
        return dense_step(optimizer, dense, **options)
    steps = vars(optimizer).get(_STEPS)
    if steps is None or steps.optimizer is not optimizer:  # a copy has that of its model
        steps = vars(optimizer)[_STEPS] = StepsHere(optimizer, dense_step)
    return steps.take(pairs, **options)

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

import inspect
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.keras import guard, held, hooks
from sok_lite.bridge.optimizers.all_ranks import averaged
from sok_lite.bridge.optimizers.here import DenseStep, StepsHere
from sok_lite.bridge.optimizers.keras3 import KERAS3
from sok_lite.bridge.optimizers.loss_scale import build, inner_of, scales_loss
from sok_lite.bridge.optimizers.minimize import check_any
from sok_lite.bridge.optimizers.settings import family_of
from sok_lite.bridge.optimizers.v1 import V1
from sok_lite.bridge.optimizers.wrapped import WrappedOptimizer
from sok_lite.bridge.variable import TableVariable

# ---- the public names of other packages that this module relies on; a test looks at each ---------

UPDATES_PAIRS = "apply_gradients"  # of tf.compat.v1.train and tf_keras
UPDATES_LISTS = "apply"  # of Keras 3, whose `apply_gradients` comes to it
MAKES_STATES = "build"  # of Keras 3 and tf_keras, for all weights of a model

COMPILES = "compile"  # of models
SAVES_COMPILED = "get_compile_config"
COMPILES_SAVED = "compile_from_config"
MAKES_STEPS = "make_train_function"  # of models of Keras 3

# In what Keras saves of how a model was compiled: the options of the wrapped optimizer.
_SAVED = "sok_lite"
# Attributes of optimizers. TensorFlow and Keras track what is set; these are put into the dict.
_STEPS = "_sok_lite_steps"
_OPTIONS = "_sok_lite_options"
_BUILT_FOR = "_sok_lite_built_for"  # weak references to variables, tables among them


def train_with_stock_optimizers() -> None:
    """Has all optimizers train tables that ask for it, those of a Keras imported later too."""
    _wrap_pairs(tf.compat.v1.train.Optimizer)
    guard.tell(_wrap_keras)


def _wrap_keras(name: str, package: Any) -> None:
    model = package.Model
    hooks.around(model, COMPILES, _compiling, package)
    if all(hooks.owner_of(model, each) is not None for each in (SAVES_COMPILED, COMPILES_SAVED)):
        hooks.around(model, SAVES_COMPILED, _with_options)
        hooks.around(model, COMPILES_SAVED, _taking_options)
    if name == "keras":
        hooks.around(model, MAKES_STEPS, _making_steps)
    base = package.optimizers.Optimizer
    for cls in vars(package.optimizers).values():
        if inspect.isclass(cls) and issubclass(cls, base):
            hooks.around(cls, MAKES_STATES, _building)
            if name == "keras":
                _wrap_lists(cls)
    if name == "keras":
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


# ---- around methods of optimizers and models -----------------------------------------------------


def _wrap_pairs(cls: type) -> None:
    """Has a class of optimizers, which takes pairs, train tables."""
    if hooks.owner_of(cls, UPDATES_PAIRS) is not None:
        names = tuple(inspect.signature(getattr(cls, UPDATES_PAIRS)).parameters)[2:]
        _train(hooks.around(cls, UPDATES_PAIRS, _applying_pairs, names))


def _wrap_lists(cls: type) -> None:
    """Has a class of optimizers, which takes gradients and variables, train tables."""
    _train(hooks.around(cls, UPDATES_LISTS, _applying_lists))


def _train(owner: type | None) -> None:
    if owner is not None:
        held.trainers.add(owner)


def _applying_pairs(
    names: Sequence[str], call: Any, self: Any, /, grads_and_vars: Any, *args: Any, **kwargs: Any
) -> Any:
    if not isinstance(grads_and_vars, (list, tuple)):
        grads_and_vars = list(grads_and_vars)  # it may be gone when it was looked at
    if not any(_is_ours(pair[-1]) for pair in grads_and_vars):
        if _averages(self, ()):
            grads_and_vars = averaged(grads_and_vars)
        return call(self, grads_and_vars, *args, **kwargs)
    options = dict(zip(names, args, strict=False)) | kwargs
    return _take(self, grads_and_vars, call, options)


def _applying_lists(call: Any, self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    def dense_step(optimizer: Any, dense: Any) -> Any:
        return call(optimizer, *map(list, zip(*dense, strict=True)))

    if trainable_variables is None:
        built_for = vars(self).get(_BUILT_FOR, ())
        if len(grads) == len(built_for):  # else they are of dense variables alone
            trainable_variables = [each() for each in built_for]
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
        if any(map(_is_ours, trainable_variables)):
            return _take(self, zip(grads, trainable_variables, strict=True), dense_step, {})
    if _averages(self, ()):
        variables = trainable_variables or [None] * len(grads)
        grads = [grad for grad, _ in averaged(list(zip(grads, variables, strict=True)))]
    return call(self, grads, trainable_variables)


def _building(call: Any, self: Any, variables: Any) -> Any:
    """Makes no dense states for tables, where Keras makes those of all weights of a model."""
    listed = list(variables)
    dense = [variable for variable in listed if not _is_ours(variable)]
    if len(dense) == len(listed):
        return call(self, variables)
    vars(self)[_BUILT_FOR] = [weakref.ref(each) for each in listed]
    return call(self, dense)


def _compiling(package: Any, call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Compiles a model with a wrapped optimizer, and with a class of a program's own."""
    if args:
        args = (_as_keras_knows(args[0], package), *args[1:])
    elif "optimizer" in kwargs:
        kwargs["optimizer"] = _as_keras_knows(kwargs["optimizer"], package)
    done = call(self, *args, **kwargs)
    optimizer = getattr(self, "optimizer", None)
    if isinstance(optimizer, package.optimizers.Optimizer):
        hooks.around(type(optimizer), MAKES_STATES, _building)
        if package.__name__ == "keras":
            _wrap_lists(type(optimizer))
    return done


def _with_options(call: Any, self: Any) -> Any:
    """Has the arguments of a wrapped optimizer be in what Keras saves of a model."""
    config = call(self)
    optimizer = getattr(self, "optimizer", None)
    options = None if optimizer is None else vars(inner_of(optimizer)).get(_OPTIONS)
    return {**config, _SAVED: options} if config and options else config


def _taking_options(call: Any, self: Any, config: Any) -> Any:
    config = dict(config)
    options = config.pop(_SAVED, None)
    done = call(self, config)
    if options is not None and getattr(self, "optimizer", None) is not None:
        vars(inner_of(self.optimizer))[_OPTIONS] = dict(options)
    return done


def _making_steps(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Has the scale of a loss be a variable before a step is traced that has it."""
    weights = self.trainable_variables
    if scales_loss(self.optimizer) and any(map(_is_ours, weights)):
        build(self.optimizer, KERAS3, [each for each in weights if not _is_ours(each)])
    return call(self, *args, **kwargs)


def _as_keras_knows(optimizer: Any, package: Any) -> Any:
    """Returns the optimizer in a wrapped one, which steps on tables as the wrapped one would."""
    if not isinstance(optimizer, WrappedOptimizer):
        return optimizer
    inner = optimizer.optimizer
    vars(inner_of(inner))[_OPTIONS] = {
        "on_nonfinite": optimizer.on_nonfinite,
        "stochastic_rounding": optimizer.stochastic_rounding,
    }
    return inner


# ---- what the wrapped methods do -----------------------------------------------------------------


def _is_ours(variable: Any) -> bool:
    return isinstance(variable, TableVariable) and variable.trained_by_stock


def _averages(optimizer: Any, pairs: Iterable[tuple[Any, Any]]) -> bool:
    """Whether a step is of the mean of all ranks' losses, and there are other ranks."""
    if other_ranks() is None:
        return False
    of_tables = (variable for _, variable in pairs if _is_ours(variable))
    return any(variable.averages_over_ranks for variable in of_tables) or vars(optimizer).get(
        guard.AVERAGES, False
    )


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
    if _averages(optimizer, pairs):
        pairs = averaged(pairs)
    steps = vars(optimizer).get(_STEPS)
    if steps is None or steps.optimizer is not optimizer:  # a copy has that of its model
        more = vars(inner_of(optimizer)).get(_OPTIONS, {})
        steps = vars(optimizer)[_STEPS] = StepsHere(optimizer, dense_step, **more)
    return steps.take(pairs, **options)

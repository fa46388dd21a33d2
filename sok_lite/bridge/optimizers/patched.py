"""Plain optimizers train tables: programs need no wrapper and no extra call.

The public methods of TensorFlow's and Keras' optimizers that update variables check for tables that
the optimizer trains (`is_trained_by`). Without any, the original runs. With one, a wrapped
optimizer takes the step of tables and dense variables together, dense ones by the original; it
belongs to the optimizer, one for eager mode and one per graph.

Most tables are trained by any optimizer. Tables of an API whose programs declare their optimizers
are trained only by these: the API names itself in them by `train_for`.

Steps are counted where their number matters: by the optimizer's own counter with Keras; with Adam
and similar ones of tf.compat.v1.train by a variable "sok_iterations", global in a TF1 graph like
Adam's powers of beta. So initializers and savers know it, a graph without the step lacks it, and
with any other optimizer a graph has the same variables as without tables. Only steps with a table
count, not dense steps of the same optimizer.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.keras import guard, held, hooks
from sok_lite.bridge.keras.training import OVER_RANKS
from sok_lite.bridge.optimizers.accumulation import accumulates
from sok_lite.bridge.optimizers.family import FallbackStep, Family
from sok_lite.bridge.optimizers.keras3 import KERAS3, TF_KERAS, num_batches
from sok_lite.bridge.optimizers.loss_scale import build, inner_of, scales_loss
from sok_lite.bridge.optimizers.patched_step import (
    APIS,
    OPTIONS,
    counts_all,
    is_ours,
    is_stepping,
    over_ranks,
    refuse_others,
    step_of,
    take_step,
)
from sok_lite.bridge.optimizers.settings import NotForRowsError, family_of, settings_of
from sok_lite.bridge.optimizers.slots import begin
from sok_lite.bridge.optimizers.wrapped import WrappedOptimizer

# Keys in Keras' saved compile config: the options of the wrapped optimizer, and in them what each
# API declared.
_SAVED, _SAVED_APIS = "sok_lite", "apis"

_do_train = False
# API name -> function that declares a loaded optimizer again.
_apis: dict[str, Callable[..., Any]] = {}
# The saved declarations of an optimizer, while its model is compiled again.
_of_thread = threading.local()


def patch_optimizers() -> None:
    """Makes all optimizers train tables that ask for it, also those of a Keras imported later."""
    global _do_train
    if not _do_train:
        _wrap_pairs(tf.compat.v1.train.Optimizer)
        guard.tell(_wrap_keras)
        _do_train = True


def know_api(api: str, again: Callable[..., Any]) -> None:
    """Registers an API whose programs declare the optimizers of its tables.

    `again` repeats a saved declaration for an optimizer that Keras has loaded. It takes the
    optimizer, and by name the arguments of `train_for`.
    """
    _apis[api] = again


def train_for(api: str, optimizer: Any, **said: Any) -> None:
    """Makes an optimizer train the tables of a registered API.

    The declaration `said` is saved with a model compiled with the optimizer. Raises TypeError for
    other objects, NotImplementedError if its step has no meaning for rows, or a setting no effect.
    """
    inner, family = inner_of(optimizer), family_of(optimizer)
    settings = settings_of(inner, family_of(inner))
    if isinstance(settings, FallbackStep):
        begin(settings, stochastic_rounding=False)
    patch_optimizers()
    _wrap_class(type(optimizer), family)
    vars(inner).setdefault(APIS, {})[api] = said


def train_alone(optimizer: Any, what: str) -> None:
    """Makes a Keras optimizer train tables, named by `what`, within the steps of another.

    Raises TypeError or NotImplementedError if it cannot.
    """
    for is_so, why in (
        (scales_loss(optimizer), "is a LossScaleOptimizer"),
        (num_batches(optimizer) > 1, "has gradient_accumulation_steps"),
        (getattr(optimizer, "loss_scale_factor", None) is not None, "has a loss_scale_factor"),
    ):
        if is_so:
            raise NotImplementedError(
                f"The optimizer of {what} steps when that of the model does, which alone scales "
                f"the loss and accumulates gradients. Received: {type(optimizer).__name__}, which "
                f"{why}. Leave that out here."
            )
    try:
        settings = settings_of(optimizer, family_of(optimizer))
    except NotForRowsError as error:
        raise error.of(what) from None
    if isinstance(settings, FallbackStep):
        begin(settings, stochastic_rounding=False)


def trains_for(api: str, optimizer: Any) -> bool:
    """Whether `train_for` was called for an optimizer."""
    return api in getattr(inner_of(optimizer), "__dict__", {}).get(APIS, {})


def _wrap_keras(name: str, package: Any) -> None:
    model = package.Model
    hooks.around(model, "compile", _compile, package)
    hooks.around(model, "get_compile_config", _save_options)
    hooks.around(model, "compile_from_config", _restore_options)
    if name == "keras":
        hooks.around(model, "make_train_function", _make_train_function)
    base = package.optimizers.Optimizer
    for cls in vars(package.optimizers).values():
        if inspect.isclass(cls) and issubclass(cls, base):
            _wrap_of_keras(cls, name)
    if name == "keras":
        return
    legacy = package.optimizers.legacy.Optimizer
    # Subclasses of LossScaleOptimizer have no public names.
    around = [
        cls
        for cls in (*base.__subclasses__(), *legacy.__subclasses__())
        if issubclass(cls, package.mixed_precision.LossScaleOptimizer)
    ]
    for cls in (base, legacy, *around):
        _wrap_pairs(cls)


# ---- wrapped methods of optimizers and models ----------------------------------------------------


def _wrap_class(cls: type, family: Family) -> None:
    """Makes a class of optimizers train tables, also a program's own."""
    if family is not KERAS3:
        _wrap_pairs(cls)
    if family in (KERAS3, TF_KERAS):
        _wrap_of_keras(cls, "keras" if family is KERAS3 else "tf_keras")


def _wrap_of_keras(cls: type, package: str) -> None:
    """Makes a Keras optimizer class skip dense states of tables and, in Keras 3, train them."""
    hooks.around(cls, "build", _build_dense)
    if package == "keras":  # `apply_gradients` calls `apply`, with lists
        _train(hooks.around(cls, "apply", _apply_lists))


def _wrap_pairs(cls: Any) -> None:
    """Makes a class of optimizers, which takes pairs, train tables."""
    if hooks.owner_of(cls, "apply_gradients") is not None:
        names = tuple(inspect.signature(cls.apply_gradients).parameters)[2:]
        _train(hooks.around(cls, "apply_gradients", _apply_pairs, names))


def _train(owner: type | None) -> None:
    if owner is not None:
        held.trainers.add(owner)


def _apply_pairs(
    names: Sequence[str], call: Any, self: Any, /, grads_and_vars: Any, *args: Any, **kwargs: Any
) -> Any:
    if is_stepping(self):  # a program's own method calls that of its base class
        return call(self, grads_and_vars, *args, **kwargs)
    if not isinstance(grads_and_vars, (list, tuple)):
        grads_and_vars = list(grads_and_vars)  # an iterator would be used up by the check
    refuse_others(self, grads_and_vars)
    with step_of(self):
        if not (counts_all(self) or any(is_ours(pair[-1], self) for pair in grads_and_vars)):
            return call(self, over_ranks(self, grads_and_vars), *args, **kwargs)
        options = dict(zip(names, args, strict=False)) | kwargs
        return take_step(self, grads_and_vars, call, options)


def _apply_lists(call: Any, self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    def dense_step(optimizer: Any, dense: Any) -> Any:
        return call(optimizer, *map(list, zip(*dense, strict=True)))

    if is_stepping(self):  # a program's own method calls that of its base class
        return call(self, grads, trainable_variables)
    if trainable_variables is None:
        built_for = vars(self).get(held.BUILT_FOR, ())
        if len(grads) == len(built_for):  # else they are only of dense variables
            trainable_variables = [each() for each in built_for]
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
        refuse_others(self, zip(grads, trainable_variables, strict=False))
    with step_of(self):
        variables = trainable_variables or ()
        if any(is_ours(each, self) for each in variables) or (variables and accumulates(self)):
            return take_step(self, zip(grads, trainable_variables, strict=True), dense_step, {})
        if OVER_RANKS in vars(self):
            variables = trainable_variables or [None] * len(grads)
            pairs = over_ranks(self, list(zip(grads, variables, strict=True)))
            grads = [grad for grad, _ in pairs]
        return call(self, grads, trainable_variables)


def _build_dense(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Builds no dense states for tables when Keras builds those of all weights of a model."""
    (variables,) = args or kwargs.values()
    listed = list(variables)
    dense = [variable for variable in listed if not is_ours(variable, self)]
    if len(dense) == len(listed):
        return call(self, variables)
    vars(self)[held.BUILT_FOR] = [weakref.ref(each) for each in listed]
    return call(self, dense)


def _compile(package: Any, call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Compiles a model with a wrapped optimizer, or with a program's own class."""
    if args:
        args = (_as_keras_knows(args[0]), *args[1:])
    elif "optimizer" in kwargs:
        kwargs["optimizer"] = _as_keras_knows(kwargs["optimizer"])
    passed = args[0] if args else kwargs.get("optimizer")
    apis, _of_thread.apis = getattr(_of_thread, "apis", {}), {}
    for api, said in apis.items():
        if api in _apis:  # else its package was not imported, and the model has no table of it
            _apis[api](passed, **said)
    done = call(self, *args, **kwargs)
    optimizer = getattr(self, "optimizer", None)
    if isinstance(optimizer, package.optimizers.Optimizer):
        _wrap_of_keras(type(optimizer), package.__name__)
    return done


def _save_options(call: Any, self: Any) -> Any:
    """Adds the options and declarations of an optimizer to Keras' saved config."""
    config = call(self)
    optimizer = getattr(self, "optimizer", None)
    if optimizer is None or not config:
        return config
    attributes = vars(inner_of(optimizer))
    saved = dict(attributes.get(OPTIONS, {}))
    if APIS in attributes:
        saved[_SAVED_APIS] = attributes[APIS]
    return {**config, _SAVED: saved} if saved else config


def _restore_options(call: Any, self: Any, config: Any) -> Any:
    config = dict(config)
    options = dict(config.pop(_SAVED, {}))
    # Compiling checks whether a model's optimizer trains its tables.
    _of_thread.apis = options.pop(_SAVED_APIS, {})
    try:
        done = call(self, config)
    finally:
        _of_thread.apis = {}
    if options and getattr(self, "optimizer", None) is not None:
        vars(inner_of(self.optimizer))[OPTIONS] = options
    return done


def _make_train_function(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Creates the variable of a loss scale before tracing a step that uses it."""
    optimizer, weights = self.optimizer, self.trainable_variables
    if scales_loss(optimizer) and any(is_ours(each, optimizer) for each in weights):
        build(optimizer, KERAS3, [each for each in weights if not is_ours(each, optimizer)])
    return call(self, *args, **kwargs)


def _as_keras_knows(optimizer: Any) -> Any:
    """Returns the optimizer in a wrapper, with the wrapper's options for its steps on tables."""
    if not isinstance(optimizer, WrappedOptimizer):
        return optimizer
    inner = optimizer.optimizer
    vars(inner_of(inner))[OPTIONS] = {
        "on_nonfinite": optimizer.on_nonfinite,
        "stochastic_rounding": optimizer.stochastic_rounding,
    }
    return inner

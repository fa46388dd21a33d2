"""Gradients of a loss for each family of optimizers, and optimizer configs.

Keras 3 has no `minimize`; the others have it, each with other arguments.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.keras.held import is_horovods
from sok_lite.bridge.keras.training import left_out_of
from sok_lite.bridge.optimizers.family import Family
from sok_lite.bridge.optimizers.keras3 import KERAS3, TF_KERAS
from sok_lite.bridge.optimizers.legacy import LEGACY
from sok_lite.bridge.optimizers.loss_scale import build, check_built, inner_of
from sok_lite.bridge.optimizers.v1 import V1
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.callers import warn

Gradients = list[tuple[Any, Any]]


def gradients_of(
    optimizer: Any,
    family: Family,
    loss: Any,
    var_list: Any,
    tape: tf.GradientTape | None = None,
    grad_loss: Any = None,
    **options: Any,
) -> Gradients:
    """Returns the gradients for `apply_gradients`, scaled as it expects.

    Args:
      optimizer: of the family.
      loss: a function without arguments, or a tensor, recorded by `tape` for Keras, in a graph for
        tf.compat.v1.train.
      var_list: the variables, or a function that returns them after the loss has been called; None:
        all trainable ones, only with tf.compat.v1.train.
      tape: only with Keras optimizers; has recorded, or records, the loss.
      grad_loss: gradient of the loss; None: ones.
      options: further arguments of tf.compat.v1.train's `compute_gradients`.

    Raises:
      ValueError: a tensor without a tape, or no variables.
      TypeError: an argument that the family does not have.
      NotImplementedError: several ranks with an optimizer of Horovod.
    """
    if family is V1:
        if tape is not None:
            raise TypeError(
                "Optimizers of tf.compat.v1.train take no `tape`. Give the loss as a function, or "
                "take the gradients of your tape and call apply_gradients."
            )
        return list(optimizer.compute_gradients(loss, var_list, grad_loss=grad_loss, **options))
    if options:
        raise TypeError(
            f"Optimizers of {family.name} have no arguments {sorted(options)}: those are of "
            "tf.compat.v1.train. Leave them out."
        )
    if other_ranks() is not None and is_horovods(type(inner_of(optimizer))):
        raise NotImplementedError(
            f"{type(optimizer).__name__} of hvd.DistributedOptimizer averages gradients over ranks "
            "while it computes them, but those of tables must not be averaged. Take them from "
            "hvd.DistributedGradientTape with tape.register_local_source(table) for each table, "
            "and call apply_gradients."
        )
    if var_list is None:
        raise ValueError("`var_list` must be the variables to train. Received: None.")
    if not callable(loss) and tape is None:
        raise ValueError(
            "A loss that is a tensor needs the `tape` that recorded it. Received: tape=None. Give "
            "the tape, or the loss as a function without arguments."
        )
    tape = tf.GradientTape() if tape is None else tape
    if callable(loss):
        with tape:
            if not callable(var_list):
                tape.watch([_of_tensorflow(each) for each in tf.nest.flatten(var_list)])
            loss = loss()
    variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
    build(optimizer, family, [each for each in variables if not isinstance(each, TableVariable)])
    with tape:
        loss = scaled_loss(optimizer, loss)
    gradients = tape.gradient(loss, [_of_tensorflow(each) for each in variables], grad_loss)
    if hasattr(optimizer, "get_unscaled_gradients"):
        gradients = optimizer.get_unscaled_gradients(gradients)
    return list(zip(gradients, variables, strict=True))


def scaled_loss(optimizer: Any, loss: Any) -> Any:
    """Returns a loss scaled by its optimizer, if that scales; see `check_built`."""
    if hasattr(optimizer, "get_scaled_loss"):
        return optimizer.get_scaled_loss(loss)
    if not hasattr(optimizer, "scale_loss"):
        return loss
    check_built(optimizer)
    return optimizer.scale_loss(loss)


def check_any(gradients: Gradients) -> None:
    """Raises ValueError if no variable has a gradient: the loss depends on none."""
    if all(grad is None for grad, _ in gradients):
        names = [variable.name for _, variable in gradients]
        raise ValueError(
            f"The loss must depend on one of the variables. Received: no gradient of any of {names}"
            ". Look rows up, and read dense variables, where the loss is computed."
        )


def check_trained(gradients: Gradients, family: Family | None = None) -> None:
    """Raises ValueError if a step would train nothing; warns, in Keras' words, of what it skips.

    `family` is of the optimizer, which warns of dense variables itself; None: there is none.
    """
    if not gradients and family in (TF_KERAS, LEGACY):
        return  # their optimizers then do nothing, as a program may want
    if not gradients:
        raise ValueError(
            "`grads_and_vars` must have a (gradient, variable) pair. Received: none. A model of "
            "Keras 3 lists no DynamicVariable among its trainable_variables: name its tables "
            "yourself, such as [model.table]."
        )
    check_any(gradients)
    left_out = left_out_of([variable for _, variable in gradients])
    if left_out is not None:
        warn(left_out)
    warn_of_untrained(gradients, family)


def warn_of_untrained(gradients: Gradients, family: Family | None) -> None:
    """Warns of variables without a gradient, in Keras' words.

    `family` is of the optimizer, which warns of dense variables itself if any has a gradient; TF1's
    never warn. None: there is none.
    """
    if family is V1:
        return
    is_dense = [not isinstance(variable, TableVariable) for _, variable in gradients]
    says_itself = family is not None and any(
        grad is not None and dense for (grad, _), dense in zip(gradients, is_dense, strict=True)
    )
    names = [
        getattr(variable, "path", variable.name)
        for (grad, variable), dense in zip(gradients, is_dense, strict=True)
        if grad is None and not (dense and says_itself)
    ]
    if names:
        warn(
            f"Gradients do not exist for variables {names} when minimizing the loss. If using "
            "`model.compile()`, did you forget to provide a `loss` argument?",
        )


def _of_tensorflow(variable: Any) -> Any:
    """Returns the tf.Variable of a Keras variable, which tapes know; others unchanged."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


# ---- configs
# ---------------------------------------------------------------------------------------


def config_of(optimizer: Any, family: Family) -> dict[str, Any]:
    """Returns a config for `optimizer_of`, without states; NotImplementedError for TF1's."""
    if family is V1:
        raise NotImplementedError(
            f"{type(optimizer).__name__} of tf.compat.v1.train has no get_config(): make it and "
            "its wrapper anew, with the same arguments."
        )
    return {"family": family.name, "optimizer": _module(family.name).serialize(optimizer)}


def optimizer_of(config: Mapping[str, Any], custom_objects: Any = None) -> Any:
    """Returns a new optimizer from `config_of`'s config; custom objects as in Keras."""
    options = {} if config["family"] == KERAS3.name else {"use_legacy_optimizer": False}
    make: Callable[..., Any] = _module(config["family"]).deserialize
    return make(config["optimizer"], custom_objects=custom_objects, **options)


def _module(family: str) -> Any:
    return importlib.import_module("keras" if family == KERAS3.name else "tf_keras").optimizers

"""Which update rule a TensorFlow or Keras optimizer stands for, and its hyper-parameters.

Four families of optimizers bear the same names and keep their settings under different ones: Keras
3, tf_keras, tf_keras' legacy classes and tf.compat.v1.train. A setting may be a number, a variable,
a tensor or a callable; what may change is read anew in every step, what selects a formula is not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import tensorflow as tf

from sok_lite.engine import optimizers as rules
from sok_lite.engine.optimizers import UpdateRule


class Settings(NamedTuple):
    """An optimizer's update of all variables in this step.

    Attributes:
      rule: class of the rule.
      numbers: hyper-parameter -> number, variable or tensor; read in every step.
      flags: hyper-parameter -> value that selects a formula; fixed.
      decays: whether weight decay acts on a variable.
    """

    rule: type[UpdateRule]
    numbers: dict[str, Any]
    flags: dict[str, Any]
    decays: Callable[[Any], bool] = lambda variable: True


@dataclass(frozen=True)
class Family:
    """What the optimizers of one family have in common.

    Attributes:
      name: for messages.
      settings: class name -> function of the optimizer.
      iterations: the optimizer's own step counter, or None.
      learning_rate: of the step after `iterations` steps.
      has_decay: whether the optimizers may have a `weight_decay`, and `_use_weight_decay`.
    """

    name: str
    settings: Mapping[str, Callable[[Any], Settings]]
    iterations: Callable[[Any], Any]
    learning_rate: Callable[[Any, Any], Any]
    has_decay: bool


def family_of(optimizer: Any) -> Family:
    """Returns the family of an optimizer.

    Raises:
      TypeError: it is no optimizer of a known family.
    """
    modules = {(base.__module__.split(".")[0], base.__name__) for base in type(optimizer).__mro__}
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _V1
    if ("keras", "BaseOptimizer") in modules:
        return _KERAS
    if modules & {("tf_keras", "OptimizerV2"), ("keras", "OptimizerV2")}:
        return _LEGACY
    if modules & {("tf_keras", "_BaseOptimizer"), ("keras", "_BaseOptimizer")}:
        return _TF_KERAS
    raise TypeError(
        "`optimizer` must be a Keras 3, tf_keras or tf.compat.v1.train optimizer. "
        f"Received: {type(optimizer).__module__}.{type(optimizer).__name__}."
    )


def settings_of(optimizer: Any, family: Family) -> Settings:
    """Returns the rule of an optimizer and its settings, the learning rate not included.

    Raises:
      NotImplementedError: there is no rule for its class, or it does something to gradients or
        variables that a rule cannot do row by row.
    """
    name = _class_name(optimizer, family)
    refuse_unsupported(optimizer)
    settings = family.settings[name](optimizer)
    decay = getattr(optimizer, "weight_decay", None) if family.has_decay else None
    if decay is None or decay is False:
        return settings
    numbers = settings.numbers | {"weight_decay": decay}
    return settings._replace(numbers=numbers, decays=optimizer._use_weight_decay)


def _class_name(optimizer: Any, family: Family) -> str:
    """Returns the class name that names the rule; a subclass counts if it changes nothing."""
    for base in type(optimizer).__mro__:
        module = base.__module__.split(".")[0]
        if module in ("keras", "tf_keras", "tensorflow"):
            if base.__name__ in family.settings:
                return base.__name__
            break
        changed = [
            name
            for name in vars(base)
            if name not in ("__init__", "get_config") and not name.startswith("__")
        ]
        if changed and module != "horovod":
            raise NotImplementedError(
                f"sok.OptimizerWrapper cannot know the update rule of {type(optimizer).__name__}, "
                f"which has its own {changed[0]}. Give it the optimizer class itself."
            )
    if type(optimizer).__name__.startswith("LossScaleOptimizer"):
        raise NotImplementedError(
            "sok.OptimizerWrapper does not take a LossScaleOptimizer: whether it skips a step is "
            "decided inside it. Wrap the inner optimizer, and scale loss and gradients yourself."
        )
    raise NotImplementedError(
        f"sok.OptimizerWrapper has no update rule for {type(optimizer).__name__} of {family.name}. "
        f"It has one for {', '.join(sorted(family.settings))}."
    )


_UNSUPPORTED = {
    "clipnorm": "clip the gradients of the rows yourself (tf.clip_by_norm on gradient.values)",
    "clipvalue": "clip the gradients of the rows yourself (tf.clip_by_value on gradient.values)",
    "global_clipnorm": "use tf.clip_by_global_norm on all gradients",
    "use_ema": "average the rows that you export",
    "gradient_accumulation_steps": "use larger batches, or apply the gradients of each batch",
    "loss_scale_factor": "scale the loss and the gradients yourself",
    "gradient_transformers": "transform the gradients before apply_gradients",
}


def refuse_unsupported(optimizer: Any) -> None:
    """Raises NotImplementedError for a setting that would silently not reach the rows."""
    for name, instead in _UNSUPPORTED.items():
        value = getattr(optimizer, name, None)
        if value:
            raise NotImplementedError(
                f"sok.OptimizerWrapper does not support {name}={value!r} of "
                f"{type(optimizer).__name__}: it would not act on rows of a DynamicVariable. "
                f"Leave it out and {instead}."
            )


# ---- settings under the names of Keras 3 and tf_keras ------------------------------------------


def _numbers(optimizer: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(optimizer, name) for name in names}


def _is_zero(value: Any) -> bool:
    """Whether a setting is the plain number 0, which selects a formula without momentum."""
    return isinstance(value, (int, float)) and value == 0


def _keras_sgd(o: Any) -> Settings:
    if _is_zero(o.momentum):
        return Settings(rules.SGD, {}, {})
    return Settings(rules.Momentum, _numbers(o, "momentum"), {"nesterov": bool(o.nesterov)})


def _keras_adam(o: Any) -> Settings:
    flags = {
        "amsgrad": bool(o.amsgrad),
        "adaptive_epsilon": bool(getattr(o, "adaptive_epsilon", False)),
    }
    return Settings(rules.Adam, _numbers(o, "beta_1", "beta_2", "epsilon"), flags)


def _keras_adagrad(o: Any) -> Settings:
    flags = {"initial_accumulator": float(o.initial_accumulator_value)}
    return Settings(rules.Adagrad, _numbers(o, "epsilon"), flags)


def _keras_rmsprop(o: Any) -> Settings:
    numbers = _numbers(o, "rho", "momentum", "epsilon")
    return Settings(rules.RMSprop, numbers, {"centered": bool(o.centered)})


def _keras_ftrl(o: Any) -> Settings:
    numbers = {
        "learning_rate_power": o.learning_rate_power,
        "l1": o.l1_regularization_strength,
        "l2": o.l2_regularization_strength,
        "l2_shrinkage": o.l2_shrinkage_regularization_strength,
        "beta": o.beta,
    }
    flags = {"initial_accumulator": float(o.initial_accumulator_value)}
    return Settings(rules.Ftrl, numbers, flags)


_KERAS_SETTINGS = {
    "SGD": _keras_sgd,
    "Adam": _keras_adam,
    "AdamW": _keras_adam,
    "Adagrad": _keras_adagrad,
    "RMSprop": _keras_rmsprop,
    "Ftrl": _keras_ftrl,
}


# ---- tf_keras' legacy optimizers: variables behind _get_hyper ----------------------------------


def _hypers(optimizer: Any, **names: str) -> dict[str, Any]:
    return {ours: optimizer._get_hyper(theirs) for ours, theirs in names.items()}


def _legacy_sgd(o: Any) -> Settings:
    if not o._momentum:
        return Settings(rules.SGD, {}, {})
    flags = {"nesterov": bool(o.nesterov)}
    return Settings(rules.Momentum, _hypers(o, momentum="momentum"), flags)


def _legacy_adam(o: Any) -> Settings:
    numbers = _hypers(o, beta_1="beta_1", beta_2="beta_2") | {"epsilon": o.epsilon}
    return Settings(rules.Adam, numbers, {"amsgrad": bool(o.amsgrad)})


def _legacy_adagrad(o: Any) -> Settings:
    flags = {
        "initial_accumulator": float(o._initial_accumulator_value),
        "epsilon_inside_root": False,
    }
    return Settings(rules.Adagrad, {"epsilon": o.epsilon}, flags)


def _legacy_rmsprop(o: Any) -> Settings:
    numbers = _hypers(o, rho="rho") | {"epsilon": o.epsilon}
    if o._momentum:
        numbers |= _hypers(o, momentum="momentum")
    flags = {"centered": bool(o.centered), "epsilon_inside_root": bool(o._momentum)}
    return Settings(rules.RMSprop, numbers, flags)


def _legacy_ftrl(o: Any) -> Settings:
    numbers = _hypers(
        o,
        learning_rate_power="learning_rate_power",
        l1="l1_regularization_strength",
        l2="l2_regularization_strength",
        beta="beta",
    )
    numbers["l2_shrinkage"] = o._l2_shrinkage_regularization_strength
    flags = {"initial_accumulator": float(o._initial_accumulator_value)}
    return Settings(rules.Ftrl, numbers, flags)


_LEGACY_SETTINGS = {
    "SGD": _legacy_sgd,
    "Adam": _legacy_adam,
    "Adagrad": _legacy_adagrad,
    "RMSprop": _legacy_rmsprop,
    "Ftrl": _legacy_ftrl,
}


# ---- tf.compat.v1.train: private attributes, each a number, a tensor or a callable -------------


def _called(value: Any) -> Any:
    return value() if callable(value) else value


def _v1_momentum(o: Any) -> Settings:
    flags = {"nesterov": bool(o._use_nesterov), "lr_in_state": False}
    return Settings(rules.Momentum, {"momentum": _called(o._momentum)}, flags)


def _v1_adam(o: Any) -> Settings:
    numbers = {"beta_1": o._beta1, "beta_2": o._beta2, "epsilon": o._epsilon}
    return Settings(rules.Adam, {k: _called(v) for k, v in numbers.items()}, {})


def _v1_adagrad(o: Any) -> Settings:
    flags = {"epsilon": 0.0, "initial_accumulator": float(o._initial_accumulator_value)}
    return Settings(rules.Adagrad, {}, flags)


def _v1_rmsprop(o: Any) -> Settings:
    numbers = {"rho": o._decay, "momentum": o._momentum, "epsilon": o._epsilon}
    flags = {"centered": bool(o._centered), "initial_rms": 1.0}
    return Settings(rules.RMSprop, {k: _called(v) for k, v in numbers.items()}, flags)


def _v1_ftrl(o: Any) -> Settings:
    numbers = {
        "learning_rate_power": o._learning_rate_power,
        "l1": o._l1_regularization_strength,
        "l2": o._l2_regularization_strength,
        "l2_shrinkage": o._l2_shrinkage_regularization_strength,
        "beta": o._beta,
    }
    flags = {"initial_accumulator": float(o._initial_accumulator_value)}
    return Settings(rules.Ftrl, {k: _called(v) for k, v in numbers.items()}, flags)


_V1_SETTINGS = {
    "GradientDescentOptimizer": lambda o: Settings(rules.SGD, {}, {}),
    "MomentumOptimizer": _v1_momentum,
    "AdamOptimizer": _v1_adam,
    "AdagradOptimizer": _v1_adagrad,
    "RMSPropOptimizer": _v1_rmsprop,
    "FtrlOptimizer": _v1_ftrl,
}


# ---- learning rate, counter --------------------------------------------------------------------


def _keras_learning_rate(optimizer: Any, iterations: Any) -> Any:
    rate = optimizer._learning_rate
    if hasattr(rate, "assign"):
        return rate
    if not callable(rate):
        return rate
    # A schedule takes the step; Keras 3 also allows a plain function of nothing.
    is_schedule = any("LearningRateSchedule" in base.__name__ for base in type(rate).__mro__)
    return rate(tf.convert_to_tensor(iterations)) if is_schedule else rate()


def _legacy_learning_rate(optimizer: Any, iterations: Any) -> Any:
    rate = optimizer._get_hyper("learning_rate", tf.float32)
    if any("LearningRateSchedule" in base.__name__ for base in type(rate).__mro__):
        rate = tf.cast(rate(tf.cast(iterations, tf.float32)), tf.float32)
    if optimizer._initial_decay > 0.0:
        decay = tf.cast(optimizer._initial_decay, tf.float32)
        rate = rate / (1.0 + decay * tf.cast(iterations, tf.float32))
    return rate


def _legacy_iterations(optimizer: Any) -> Any:
    with tf.init_scope():
        optimizer._create_hypers()
        return optimizer.iterations


def _v1_learning_rate(optimizer: Any, iterations: Any) -> Any:
    rate = optimizer._lr if hasattr(optimizer, "_lr") else optimizer._learning_rate
    return _called(rate)


_KERAS = Family(
    "Keras 3", _KERAS_SETTINGS, lambda o: o.iterations, _keras_learning_rate, has_decay=True
)
_TF_KERAS = replace(_KERAS, name="tf_keras")
_LEGACY = Family(
    "tf_keras.optimizers.legacy",
    _LEGACY_SETTINGS,
    _legacy_iterations,
    _legacy_learning_rate,
    has_decay=False,
)
_V1 = Family("tf.compat.v1.train", _V1_SETTINGS, lambda o: None, _v1_learning_rate, has_decay=False)

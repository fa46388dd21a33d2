"""Optimizers of Keras 3 and tf_keras, whose settings have the same names."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from sok_lite.bridge.optimizers.clones import clone_optimizer, config_of
from sok_lite.bridge.optimizers.family import Family, Settings
from sok_lite.engine import optimizers as rules

_MOMENTS = ("beta_1", "beta_2", "epsilon")


def _numbers(optimizer: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(optimizer, name) for name in names}


def _by_names(rule: type[rules.UpdateRule], *names: str) -> Callable[[Any], Settings]:
    """Returns a settings function for optimizers whose numbers have the rule's names."""
    return lambda o: Settings(rule, _numbers(o, *names), {})


def _sgd(o: Any) -> Settings:
    if isinstance(o.momentum, (int, float)) and o.momentum == 0:  # only for a plain number
        return Settings(rules.SGD, {}, {})
    return Settings(rules.Momentum, _numbers(o, "momentum"), {"nesterov": bool(o.nesterov)})


def _adam(o: Any) -> Settings:
    flags = {
        "amsgrad": bool(o.amsgrad),
        "adaptive_epsilon": bool(getattr(o, "adaptive_epsilon", False)),
        # Only for a plain number, as with momentum 0 of SGD.
        "has_m": bool(o.amsgrad) or not isinstance(o.beta_1, (int, float)) or o.beta_1 != 0,
    }
    return Settings(rules.Adam, _numbers(o, *_MOMENTS), flags)


def _adagrad(o: Any) -> Settings:
    flags = {"initial_accumulator": float(o.initial_accumulator_value)}
    return Settings(rules.Adagrad, _numbers(o, "epsilon"), flags)


def _rowwise_adagrad(o: Any) -> Settings:
    return _adagrad(o)._replace(rule=rules.RowWiseAdagrad)


def _rmsprop(o: Any) -> Settings:
    numbers = _numbers(o, "rho", "momentum", "epsilon")
    return Settings(rules.RMSprop, numbers, {"centered": bool(o.centered)})


def _ftrl(o: Any) -> Settings:
    numbers = {
        "learning_rate_power": o.learning_rate_power,
        "l1": o.l1_regularization_strength,
        "l2": o.l2_regularization_strength,
        "l2_shrinkage": o.l2_shrinkage_regularization_strength,
        "beta": o.beta,
    }
    flags = {"initial_accumulator": float(o.initial_accumulator_value)}
    return Settings(rules.Ftrl, numbers, flags)


def _penalties(o: Any) -> dict[str, Any]:
    return {
        "l1": o.l1_regularization_strength,
        "l2": o.l2_regularization_strength,
        "l21": o.l21_regularization_strength,
    }


def _group_adam(o: Any) -> Settings:
    rule = rules.GroupAMSGrad if o.amsgrad else rules.GroupAdam
    return Settings(rule, _numbers(o, *_MOMENTS) | _penalties(o), {})


def _group_lamb(o: Any) -> Settings:
    return Settings(rules.GroupLamb, _numbers(o, *_MOMENTS) | _penalties(o), {})


def _group_momentum(o: Any) -> Settings:
    numbers = _numbers(o, "momentum") | _penalties(o)
    return Settings(rules.GroupMomentum, numbers, {"nesterov": bool(o.nesterov)})


def _sparse_group_ftrl(o: Any) -> Settings:
    ftrl = _ftrl(o)
    return ftrl._replace(rule=rules.SparseGroupFtrl, numbers=ftrl.numbers | _penalties(o))


_KERAS_SETTINGS = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adam,
    "Adagrad": _adagrad,
    "RMSprop": _rmsprop,
    "Ftrl": _ftrl,
    "Adamax": _by_names(rules.Adamax, *_MOMENTS),
    "Adadelta": _by_names(rules.Adadelta, "rho", "epsilon"),
    "Nadam": _by_names(rules.Nadam, *_MOMENTS),
    "Lion": _by_names(rules.Lion, "beta_1", "beta_2"),
    "ScheduleFreeAdamW": _by_names(rules.ScheduleFreeAdamW, *_MOMENTS, "warmup_steps"),
    # Ours, see rowwise_adagrad.py and group.py.
    "RowWiseAdagrad": _rowwise_adagrad,
    "GroupAdam": _group_adam,
    "GroupAMSGrad": _group_adam,
    "GroupLamb": _group_lamb,
    "GroupMomentum": _group_momentum,
    "SparseGroupFtrl": _sparse_group_ftrl,
}


def num_batches(optimizer: Any) -> int:
    """Returns the number of batches per step; 1 except with Keras 3."""
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)


def batch_counter(optimizer: Any) -> Any:
    """Returns the variable that counts batches; `iterations` counts steps."""
    return optimizer.iterations if num_batches(optimizer) == 1 else optimizer.variables[0]


def counts_batches(optimizer: Any) -> bool:
    """Whether `iterations` counts batches, not steps: until it became a property in Keras 3.5."""
    return not isinstance(getattr(type(optimizer), "iterations", None), property)


def _learning_rate(optimizer: Any, iterations: Any) -> Any:
    rate = optimizer._learning_rate
    if hasattr(rate, "assign") or not callable(rate):
        return rate
    # A schedule takes the step; Keras 3 also allows a plain function without arguments.
    if not any("LearningRateSchedule" in base.__name__ for base in type(rate).__mro__):
        return rate()
    if num_batches(optimizer) > 1:  # as in Keras
        iterations = batch_counter(optimizer)
    return rate(tf.convert_to_tensor(iterations))


def _make(
    optimizer: Any,
    config: Mapping[str, Any],
    learning_rate: float,
    numbers: Mapping[str, float],
    followed: Collection[str],
) -> Any:
    copy = clone_optimizer(optimizer, config, {"learning_rate": learning_rate}, followed)
    if hasattr(getattr(copy, "_learning_rate", None), "assign"):
        copy.learning_rate = learning_rate
    return copy


def _variable(rows: Any, name: str) -> Any:
    import keras

    return keras.Variable(rows, name=name)


def _build(copy: Any, variables: Sequence[Any], undecayed: Sequence[Any]) -> None:
    copy.exclude_from_weight_decay(var_list=list(undecayed))
    copy.build(list(variables))


def apply_of_keras(copy: Any, pairs: Sequence[tuple[Any, Any]], step: int) -> None:
    """Takes a step of a copy of a Keras optimizer; the first has number 1."""
    copy.iterations.assign(step - 1)
    copy.apply_gradients(pairs)


KERAS3 = Family(
    "Keras 3",
    _KERAS_SETTINGS,
    lambda o: o.iterations,
    _learning_rate,
    has_decay=True,
    config=config_of,
    make=_make,
    variable=_variable,
    build=_build,
    apply=apply_of_keras,
    not_states=("_iterations", "_learning_rate", "_current_learning_rate"),
)


def tf_variable(rows: Any, name: str) -> tf.Variable:
    """Returns a variable for a copy of an optimizer, except of Keras 3."""
    return tf.Variable(rows, name=name)


# The optimizers of tf_keras except its legacy ones.
TF_KERAS = replace(KERAS3, name="tf_keras", variable=tf_variable)

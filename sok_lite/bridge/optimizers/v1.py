"""Optimizers of tf.compat.v1.train, whose settings are private: numbers, tensors, callables."""

import copy as copying
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge.optimizers.clones import CannotStepError, variables_in
from sok_lite.bridge.optimizers.family import Family, Settings
from sok_lite.bridge.optimizers.keras3 import tf_variable
from sok_lite.engine import optimizers as rules


def _value_of(value: Any) -> Any:
    return value() if callable(value) else value


def _values(**numbers: Any) -> dict[str, Any]:
    return {name: _value_of(value) for name, value in numbers.items()}


def _momentum(o: Any) -> Settings:
    flags = {"nesterov": bool(o._use_nesterov), "lr_in_state": False}
    return Settings(rules.Momentum, _values(momentum=o._momentum), flags)


def _moments(o: Any) -> dict[str, Any]:
    """Returns the numbers of Adam and similar optimizers."""
    betas = _values(beta_1=o._beta1, beta_2=o._beta2)
    # Its 1 - beta is computed in float32.
    numbers = {
        name: float(np.float32(v)) if isinstance(v, float) else v for name, v in betas.items()
    }
    return numbers | _values(epsilon=o._epsilon)


def _adam(o: Any) -> Settings:
    return Settings(rules.Adam, _moments(o), {"has_products": True})


def _group_adam(o: Any) -> Settings:
    return Settings(rules.GroupAdam, _moments(o) | _regularization(o) | _of_norms(o), {})


def _rectified_adam(o: Any) -> Settings:
    numbers = _values(beta_1=o._beta1, beta_2=o._beta2, epsilon=o._epsilon)
    numbers |= _values(weight_decay=o.weight_decay, sma_threshold=o.sma_threshold)
    flags = {"amsgrad": o.amsgrad, "nesterov": o._use_nesterov}
    return Settings(rules.RectifiedAdam, numbers, flags)


def _adagrad(o: Any) -> Settings:
    flags = {"epsilon": 0.0, "initial_accumulator": float(o._initial_accumulator_value)}
    return Settings(rules.Adagrad, {}, flags)


def _rmsprop(o: Any) -> Settings:
    numbers = _values(rho=o._decay, momentum=o._momentum, epsilon=o._epsilon)
    return Settings(rules.RMSprop, numbers, {"centered": bool(o._centered), "initial_rms": 1.0})


def _ftrl(o: Any) -> Settings:
    numbers = _values(
        learning_rate_power=o._learning_rate_power,
        l1=o._l1_regularization_strength,
        l2=o._l2_regularization_strength,
        l2_shrinkage=o._l2_shrinkage_regularization_strength,
        beta=o._beta,
    )
    flags = {"initial_accumulator": float(o._initial_accumulator_value)}
    return Settings(rules.Ftrl, numbers, flags)


def _sparse_group_ftrl(o: Any) -> Settings:
    ftrl = _ftrl(o)
    return Settings(rules.SparseGroupFtrl, ftrl.numbers | _of_norms(o), ftrl.flags)


def _adadelta(o: Any) -> Settings:
    return Settings(rules.Adadelta, _values(rho=o._rho, epsilon=o._epsilon), {})


def _regularization(o: Any) -> dict[str, Any]:
    return {"l1": o._l1_regularization_strength, "l2": o._l2_regularization_strength}


def _of_norms(o: Any) -> dict[str, Any]:
    return {"l21": o.l21_regularization_strength}


def _proximal_sgd(o: Any) -> Settings:
    return Settings(rules.ProximalSGD, _regularization(o), {})


def _proximal_adagrad(o: Any) -> Settings:
    flags = {"initial_accumulator": float(o._initial_accumulator_value)}
    return Settings(rules.ProximalAdagrad, _regularization(o), flags)


def _adagrad_da(o: Any) -> Settings:
    # It counts from the step after the program's.
    numbers = _regularization(o) | {"global_step": tf.convert_to_tensor(o._global_step) + 1}
    flags = {"initial_accumulator": float(o._initial_gradient_squared_accumulator_value)}
    return Settings(rules.AdagradDA, numbers, flags)


_V1_SETTINGS = {
    "GradientDescentOptimizer": lambda o: Settings(rules.SGD, {}, {}),
    "MomentumOptimizer": _momentum,
    "AdamOptimizer": _adam,
    "AdagradOptimizer": _adagrad,
    "RMSPropOptimizer": _rmsprop,
    "FtrlOptimizer": _ftrl,
    "AdadeltaOptimizer": _adadelta,
    "ProximalGradientDescentOptimizer": _proximal_sgd,
    "ProximalAdagradOptimizer": _proximal_adagrad,
    "AdagradDAOptimizer": _adagrad_da,
    # From sok_lite.kv_variable.training.
    "GroupAdamOptimizer": _group_adam,
    "RectifiedAdamOptimizer": _rectified_adam,
    "SparseGroupFtrlOptimizer": _sparse_group_ftrl,
}


def _learning_rate(optimizer: Any, iterations: Any) -> Any:
    if hasattr(optimizer, "learning_rate_after"):
        return optimizer.learning_rate_after(0 if iterations is None else iterations)
    if hasattr(optimizer, "_lr"):
        return _value_of(optimizer._lr)
    # A program's own class may keep it elsewhere.
    return _value_of(optimizer._learning_rate) if hasattr(optimizer, "_learning_rate") else None


def _name_of_rate(optimizer: Any) -> str:
    return "_lr" if hasattr(optimizer, "_lr") else "_learning_rate"


def _numbers(optimizer: Any) -> dict[str, Any]:
    """Returns the attributes that may belong to a graph."""
    here = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name != _name_of_rate(optimizer)
        and (isinstance(value, tf.Variable) or tf.is_tensor(value))
        and value.shape.rank == 0
        # A step of another graph may have left some.
        and (isinstance(value, tf.Variable) or getattr(value, "graph", None) is here)
    }


def _make(
    optimizer: Any,
    config: Mapping[str, Any],
    learning_rate: float,
    numbers: Mapping[str, float],
    followed: Collection[str],
) -> Any:
    copy = copying.copy(optimizer)
    for name in [name for name in vars(copy) if name == "get_slot" or name.startswith("_sok_lite")]:
        del vars(copy)[name]  # our attributes, and replacements by an API
    for name, value in vars(optimizer).items():
        if isinstance(value, (dict, list, set)):
            setattr(copy, name, copying.copy(value))
    # Slots begin anew; all else is as in the optimizer.
    tf.compat.v1.train.Optimizer.__init__(copy, optimizer._use_locking, optimizer.get_name())
    for name, value in numbers.items():
        setattr(copy, name, value)
    setattr(copy, _name_of_rate(optimizer), learning_rate)
    if found := variables_in(copy, ()):
        names = ", ".join(repr(name) for name, _ in found)
        raise CannotStepError(optimizer, "variables", names)
    return copy


def _build(copy: Any, variables: Sequence[Any], undecayed: Sequence[Any]) -> None:
    copy._create_slots(list(variables))


def _name_of_slot(copy: Any, own: Any, variable: Any) -> str | None:
    names = copy.get_slot_names()
    return next((name for name in names if copy.get_slot(variable, name) is own), None)


V1 = Family(
    "tf.compat.v1.train",
    _V1_SETTINGS,
    lambda o: None,
    _learning_rate,
    has_decay=False,
    config=lambda o: {},
    make=_make,
    variable=tf_variable,
    build=_build,
    # The class's method: a program may have replaced it on the optimizer, and so on the copy.
    apply=lambda copy, pairs, step: type(copy).apply_gradients(copy, pairs),
    numbers=_numbers,
    name_of_slot=_name_of_slot,
    slots="by name",
    slot_names={
        rules.RMSprop: {"mean_grad": "mg"},
        rules.Ftrl: {"accumulator": "accum"},
        rules.SparseGroupFtrl: {"accumulator": "accum"},
        rules.Adadelta: {"accumulator": "accum", "delta_accumulator": "accum_update"},
    },
)

"""The optimizers of tf.compat.v1.train, whose settings are private: numbers, tensors, callables."""

from typing import Any

import tensorflow as tf

from sok_lite.bridge.optimizers.family import Family, Settings
from sok_lite.engine import optimizers as rules


def _called(value: Any) -> Any:
    return value() if callable(value) else value


def _momentum(o: Any) -> Settings:
    flags = {"nesterov": bool(o._use_nesterov), "lr_in_state": False}
    return Settings(rules.Momentum, {"momentum": _called(o._momentum)}, flags)


def _adam(o: Any) -> Settings:
    numbers = {"beta_1": o._beta1, "beta_2": o._beta2, "epsilon": o._epsilon}
    return Settings(rules.Adam, {k: _called(v) for k, v in numbers.items()}, {})


def _adagrad(o: Any) -> Settings:
    flags = {"epsilon": 0.0, "initial_accumulator": float(o._initial_accumulator_value)}
    return Settings(rules.Adagrad, {}, flags)


def _rmsprop(o: Any) -> Settings:
    numbers = {"rho": o._decay, "momentum": o._momentum, "epsilon": o._epsilon}
    flags = {"centered": bool(o._centered), "initial_rms": 1.0}
    return Settings(rules.RMSprop, {k: _called(v) for k, v in numbers.items()}, flags)


def _ftrl(o: Any) -> Settings:
    numbers = {
        "learning_rate_power": o._learning_rate_power,
        "l1": o._l1_regularization_strength,
        "l2": o._l2_regularization_strength,
        "l2_shrinkage": o._l2_shrinkage_regularization_strength,
        "beta": o._beta,
    }
    flags = {"initial_accumulator": float(o._initial_accumulator_value)}
    return Settings(rules.Ftrl, {k: _called(v) for k, v in numbers.items()}, flags)


def _adadelta(o: Any) -> Settings:
    numbers = {"rho": o._rho, "epsilon": o._epsilon}
    return Settings(rules.Adadelta, {k: _called(v) for k, v in numbers.items()}, {})


def _regularization(o: Any) -> dict[str, Any]:
    return {
        "l1": o._l1_regularization_strength,
        "l2": o._l2_regularization_strength,
    }


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
}


def _learning_rate(optimizer: Any, iterations: Any) -> Any:
    rate = optimizer._lr if hasattr(optimizer, "_lr") else optimizer._learning_rate
    return _called(rate)


V1 = Family(
    "tf.compat.v1.train",
    _V1_SETTINGS,
    lambda o: None,
    _learning_rate,
    has_decay=False,
    slots="by name",
    slot_names={
        rules.RMSprop: {"mean_grad": "mg"},
        rules.Ftrl: {"accumulator": "accum"},
        rules.Adadelta: {"accumulator": "accum", "delta_accumulator": "accum_update"},
    },
)

"""tf_keras' legacy optimizers, whose settings are variables behind `_get_hyper`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.optimizers.clones import clone_optimizer, config_of
from sok_lite.bridge.optimizers.family import Family, Settings
from sok_lite.bridge.optimizers.keras3 import apply_of_keras, tf_variable
from sok_lite.engine import optimizers as rules


def _hyper(optimizer: Any, name: str) -> Any:
    """Returns a setting: its variable, or a number if the optimizer has not made one yet.

    `_get_hyper` would create it: an optimizer inspected in eager mode could not step in a graph.
    """
    value = optimizer._hyper[name]
    return value() if callable(value) and not _is_schedule(value) else value


def _is_schedule(value: Any) -> bool:
    return any("LearningRateSchedule" in base.__name__ for base in type(value).__mro__)


def _hypers(optimizer: Any, *names: str) -> dict[str, Any]:
    return {name: _hyper(optimizer, name) for name in names}


def _moments(o: Any) -> dict[str, Any]:
    """Returns the numbers of Adam and similar optimizers."""
    return _hypers(o, "beta_1", "beta_2") | {"epsilon": o.epsilon}


def _sgd(o: Any) -> Settings:
    if not o._momentum:
        return Settings(rules.SGD, {}, {})
    return Settings(rules.Momentum, _hypers(o, "momentum"), {"nesterov": bool(o.nesterov)})


def _adam(o: Any) -> Settings:
    return Settings(rules.Adam, _moments(o), {"amsgrad": bool(o.amsgrad)})


def _adagrad(o: Any) -> Settings:
    flags = {
        "initial_accumulator": float(o._initial_accumulator_value),
        "epsilon_inside_root": False,
    }
    return Settings(rules.Adagrad, {"epsilon": o.epsilon}, flags)


def _rmsprop(o: Any) -> Settings:
    numbers = _hypers(o, "rho") | {"epsilon": o.epsilon}
    if o._momentum:
        numbers |= _hypers(o, "momentum")
    flags = {"centered": bool(o.centered), "epsilon_inside_root": bool(o._momentum)}
    return Settings(rules.RMSprop, numbers, flags)


def _ftrl(o: Any) -> Settings:
    numbers = _hypers(o, "learning_rate_power", "beta") | {
        "l1": _hyper(o, "l1_regularization_strength"),
        "l2": _hyper(o, "l2_regularization_strength"),
        "l2_shrinkage": o._l2_shrinkage_regularization_strength,
    }
    flags = {"initial_accumulator": float(o._initial_accumulator_value)}
    return Settings(rules.Ftrl, numbers, flags)


def _adamax(o: Any) -> Settings:
    return Settings(rules.Adamax, _moments(o), {})


def _adadelta(o: Any) -> Settings:
    return Settings(rules.Adadelta, _hypers(o, "rho") | {"epsilon": o.epsilon}, {})


def _nadam(o: Any) -> Settings:
    return Settings(rules.Nadam, _moments(o), {"schedule_decay": float(o._initial_decay)})


_LEGACY_SETTINGS = {
    "SGD": _sgd,
    "Adam": _adam,
    "Adagrad": _adagrad,
    "RMSprop": _rmsprop,
    "Ftrl": _ftrl,
    "Adamax": _adamax,
    "Adadelta": _adadelta,
    "Nadam": _nadam,
}


def _learning_rate(optimizer: Any, iterations: Any) -> Any:
    rate = _hyper(optimizer, "learning_rate")
    if _is_schedule(rate):
        rate = rate(tf.cast(iterations, tf.float32))
    rate = tf.cast(rate, tf.float32)
    # Nadam's is the decay of its momentum.
    if optimizer._initial_decay > 0.0 and not _is_nadam(optimizer):
        decay = tf.cast(optimizer._initial_decay, tf.float32)
        rate = rate / (1.0 + decay * tf.cast(iterations, tf.float32))
    return rate


def _is_nadam(optimizer: Any) -> bool:
    return any(base.__name__ == "Nadam" for base in type(optimizer).__mro__)


def _iterations(optimizer: Any) -> Any:
    with tf.init_scope():
        optimizer._create_hypers()
        return optimizer.iterations


def _numbers(optimizer: Any) -> dict[str, Any]:
    names = [name for name in optimizer._hyper if name not in ("learning_rate", "decay")]
    values = _hypers(optimizer, *names)
    return {name: value for name, value in values.items() if not callable(value)}


def _make(
    optimizer: Any,
    config: Mapping[str, Any],
    learning_rate: float,
    numbers: Mapping[str, float],
    followed: Collection[str],
) -> Any:
    changes: dict[str, Any] = {"learning_rate": learning_rate}
    if not _is_nadam(optimizer):
        changes |= {"decay": 0.0, "initial_decay": 0.0}  # part of the learning rate
    copy = clone_optimizer(optimizer, config, changes, followed)
    copy._hyper.update({**numbers, "learning_rate": learning_rate})
    return copy


def _build(copy: Any, variables: Sequence[Any], undecayed: Sequence[Any]) -> None:
    copy._create_all_weights(list(variables))


def _name_of_slot(copy: Any, own: Any, variable: Any) -> str | None:
    names = copy.get_slot_names()
    slots = copy._slots.get(variable._unique_id, {})
    return next((name for name in names if slots.get(name) is own), None)


LEGACY = Family(
    "tf_keras.optimizers.legacy",
    _LEGACY_SETTINGS,
    _iterations,
    _learning_rate,
    has_decay=False,
    config=config_of,
    make=_make,
    variable=tf_variable,
    build=_build,
    apply=apply_of_keras,
    numbers=_numbers,
    not_states=("_iterations", "_hyper"),
    name_of_slot=_name_of_slot,
    slots="by variable",
    slot_names={
        rules.RMSprop: {"mean_grad": "mg"},
        rules.Adadelta: {"accumulator": "accum_grad", "delta_accumulator": "accum_var"},
    },
    clips_in_turn=True,
)

"""tf_keras' legacy optimizers, whose settings are variables behind `_get_hyper`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.optimizers.clones import config_of, made_anew
from sok_lite.bridge.optimizers.family import Cloning, Family, Settings
from sok_lite.bridge.optimizers.keras3 import tf_variable
from sok_lite.engine import optimizers as rules


def _hypers(optimizer: Any, **names: str) -> dict[str, Any]:
    return {ours: optimizer._get_hyper(theirs) for ours, theirs in names.items()}


def _sgd(o: Any) -> Settings:
    if not o._momentum:
        return Settings(rules.SGD, {}, {})
    flags = {"nesterov": bool(o.nesterov)}
    return Settings(rules.Momentum, _hypers(o, momentum="momentum"), flags)


def _adam(o: Any) -> Settings:
    numbers = _hypers(o, beta_1="beta_1", beta_2="beta_2") | {"epsilon": o.epsilon}
    return Settings(rules.Adam, numbers, {"amsgrad": bool(o.amsgrad)})


def _adagrad(o: Any) -> Settings:
    flags = {
        "initial_accumulator": float(o._initial_accumulator_value),
        "epsilon_inside_root": False,
    }
    return Settings(rules.Adagrad, {"epsilon": o.epsilon}, flags)


def _rmsprop(o: Any) -> Settings:
    numbers = _hypers(o, rho="rho") | {"epsilon": o.epsilon}
    if o._momentum:
        numbers |= _hypers(o, momentum="momentum")
    flags = {"centered": bool(o.centered), "epsilon_inside_root": bool(o._momentum)}
    return Settings(rules.RMSprop, numbers, flags)


def _ftrl(o: Any) -> Settings:
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


def _adamax(o: Any) -> Settings:
    numbers = _hypers(o, beta_1="beta_1", beta_2="beta_2") | {"epsilon": o.epsilon}
    return Settings(rules.Adamax, numbers, {})


def _adadelta(o: Any) -> Settings:
    return Settings(rules.Adadelta, _hypers(o, rho="rho") | {"epsilon": o.epsilon}, {})


def _nadam(o: Any) -> Settings:
    numbers = _hypers(o, beta_1="beta_1", beta_2="beta_2") | {"epsilon": o.epsilon}
    return Settings(rules.Nadam, numbers, {"schedule_decay": float(o._initial_decay)})


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
    rate = optimizer._get_hyper("learning_rate", tf.float32)
    if any("LearningRateSchedule" in base.__name__ for base in type(rate).__mro__):
        rate = tf.cast(rate(tf.cast(iterations, tf.float32)), tf.float32)
    # Nadam's is that of its momentum.
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
    values = {name: optimizer._get_hyper(name) for name in names}
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
        changes |= {"decay": 0.0, "initial_decay": 0.0}  # is in the learning rate
    copy = made_anew(optimizer, config, changes, followed)
    copy._hyper.update({**numbers, "learning_rate": learning_rate})
    return copy


def _build(copy: Any, variables: Sequence[Any], undecayed: Sequence[Any]) -> None:
    copy._create_all_weights(list(variables))


def _slot_name(copy: Any, own: Any, variable: Any) -> str | None:
    names = copy.get_slot_names()
    slots = copy._slots.get(variable._unique_id, {})
    return next((name for name in names if slots.get(name) is own), None)


def _apply(copy: Any, pairs: Sequence[tuple[Any, Any]], step: int) -> None:
    copy.iterations.assign(step - 1)
    copy.apply_gradients(pairs)


_CLONING = Cloning(
    numbers=_numbers,
    config=config_of,
    make=_make,
    variable=tf_variable,
    build=_build,
    not_states=("_iterations", "_hyper"),
    slot_name=_slot_name,
    apply=_apply,
)

LEGACY = Family(
    "tf_keras.optimizers.legacy",
    _LEGACY_SETTINGS,
    _iterations,
    _learning_rate,
    has_decay=False,
    cloning=_CLONING,
    slots="by variable",
    slot_names={
        rules.RMSprop: {"mean_grad": "mg"},
        rules.Adadelta: {"accumulator": "accum_grad", "delta_accumulator": "accum_var"},
    },
    clips_in_turn=True,
)

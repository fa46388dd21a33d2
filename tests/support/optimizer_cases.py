"""Every optimizer with a rule, and every option that selects or enters a formula: one list.

A case names the optimizer as the frameworks do and, beside it, its twin in reference_updates.py:
the function and what it is called with. Tests on the CPU and on a simulated GPU take them from
here, and docs/optimizers.md names no optimizer that is not among them.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from sok_lite import optimizers
from sok_lite.kv_variable import training
from tests.support import reference_updates

tf_keras = pytest.importorskip("tf_keras")

# By the names of the families in sok_lite/bridge/optimizers/.
MODULES = {
    "Keras 3": keras.optimizers,
    "tf_keras": tf_keras.optimizers,
    "tf_keras.optimizers.legacy": tf_keras.optimizers.legacy,
    "tf.compat.v1.train": tf.compat.v1.train,
}


@dataclass(frozen=True, eq=False)
class Case:
    """An optimizer with its options, and its twin.

    Attributes:
      family, name: of the class.
      options: what it is made with, besides the learning rate.
      twin: the function in tests/support/reference_updates.py.
      hyper: what the twin is called with.
      learning_rate: of every step.
      is_dense_alike: whether dense variables take the same step.
    """

    family: str
    name: str
    options: dict[str, Any]
    twin: str
    hyper: dict[str, Any]
    learning_rate: float = 0.1
    is_dense_alike: bool = True

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.family} {self.name}({options})"

    def make(self) -> "Made":
        """Returns the optimizer, made anew."""
        own = training if self.family == "tf.compat.v1.train" else optimizers
        make = getattr(MODULES[self.family], self.name, None) or getattr(own, self.name)
        if self.name == "AdagradDAOptimizer":  # alone in asking who counts the steps
            count = tf.Variable(0, dtype=tf.int64, trainable=False)
            made = make(self.learning_rate, count, **self.options)
            return Made(made, {"global_step": count})
        return Made(make(learning_rate=self.learning_rate, **self.options))

    def new_twin(self, rows: np.ndarray) -> "Twin":
        """Returns the twin of an optimizer that has taken no step, on these rows."""
        return Twin(self, rows)


@dataclass(frozen=True)
class Made:
    """An optimizer, and what its apply_gradients takes besides gradients."""

    optimizer: Any
    arguments: dict[str, Any] = field(default_factory=dict)


class Twin:
    """Rows and states in float64 that take the steps of a case, a few rows in each.

    States are (n, dim), or (n, 1) of what a row has once; some cases have no use for all of them.
    """

    def __init__(self, case: Case, rows: np.ndarray) -> None:
        self.rows = np.array(rows, np.float64)
        self._case = case
        self._update = getattr(reference_updates, case.twin)
        self.states = {
            name: np.full_like(self.rows, self._initial(name)) for name in self._update.states
        }
        if case.twin == "rowwiseadagrad":
            self.states["accumulator"] = self.states["accumulator"][:, :1]
        self.num_steps = 0

    def _initial(self, state: str) -> float:
        # The default is the same in Keras 3, tf_keras, its legacy optimizers and TF1.
        if state == "rms":
            return self._case.hyper.get("initial_rms", 0.0)
        is_sum = state in ("accumulator", "gradient_squared_accumulator")
        if is_sum and self._case.twin != "adadelta":
            return self._case.hyper.get("initial_accumulator", 0.1)
        return 0.0

    def step(self, touched: np.ndarray, grads: np.ndarray) -> None:
        """Takes a step of some distinct rows; the others stay, states included."""
        self.num_steps += 1
        hyper = dict(self._case.hyper)
        if self._case.twin == "adagradda":
            hyper["global_step"] = self.num_steps
        rows = self.rows[touched]
        states = {name: state[touched] for name, state in self.states.items()}
        grads = np.asarray(grads, np.float64)
        self._update(rows, states, grads, self._case.learning_rate, self.num_steps, **hyper)
        self.rows[touched] = rows
        for name, state in states.items():
            self.states[name][touched] = state


# What the frameworks call otherwise than the twins do.
_TWINS_NAMES = {
    "initial_accumulator_value": "initial_accumulator",
    "initial_gradient_squared_accumulator_value": "initial_accumulator",
    "l1_regularization_strength": "l1",
    "l2_regularization_strength": "l2",
    "l21_regularization_strength": "l21",
    "l2_shrinkage_regularization_strength": "l2_shrinkage",
    "use_nesterov": "nesterov",
    "beta1": "beta_1",
    "beta2": "beta_2",
}


_DECAY = {"weight_decay": 0.05}
_ROUGH = {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3}
_NESTEROV = {"momentum": 0.9, "nesterov": True}
_PROXIMAL = {"l1_regularization_strength": 0.05, "l2_regularization_strength": 0.2}
_FTRL = {**_PROXIMAL, "l2_shrinkage_regularization_strength": 0.02}
_POWER = {"learning_rate_power": -0.7, "initial_accumulator_value": 0.5}
_PENALTIES = {f"{name}_regularization_strength": 0.1 for name in ("l2", "l21")}
_PENALTIES["l1_regularization_strength"] = 0.01


def _cases(
    family: str,
    name: str,
    twin: str,
    *several: dict[str, Any],
    is_dense_alike: bool = True,
    **more: Any,
) -> list[Case]:
    """Returns a case for each of several options; `more`: what the twin has and no option says."""
    # Of 1.0, since its steps begin at about a thousandth of it.
    learning_rate = 1.0 if twin == "adadelta" else 0.1
    cases = []
    for options in several:
        told = {_TWINS_NAMES.get(option, option): value for option, value in options.items()}
        hyper = more | told
        cases.append(Case(family, name, options, twin, hyper, learning_rate, is_dense_alike))
    return cases


def _new_cases(family: str) -> list[Case]:
    """What Keras 3 and the new tf_keras have alike."""
    half = {"momentum": 0.5, "nesterov": True, **_DECAY}
    accumulated = {"initial_accumulator_value": 0.5, "epsilon": 1e-3, **_DECAY}
    centered = {"centered": True, "epsilon": 1e-3}
    listed: list[tuple[str, str, list[dict[str, Any]]]] = [
        ("SGD", "sgd", [{}, _DECAY]),
        ("SGD", "momentum", [{"momentum": 0.9}, _NESTEROV, half]),
        ("Adagrad", "adagrad", [{}, accumulated]),
        ("Adam", "adam", [{}, {"amsgrad": True}, _ROUGH | _DECAY, {"beta_1": 0.0, **_DECAY}]),
        ("AdamW", "adam", [_DECAY, {"amsgrad": True, **_ROUGH, **_DECAY}]),
        ("RMSprop", "rmsprop", [{}, {"momentum": 0.9, "rho": 0.8}, centered]),
        ("RMSprop", "rmsprop", [{"momentum": 0.5, **centered, **_DECAY}]),
        ("Ftrl", "ftrl", [{}, {**_FTRL, "beta": 0.3, **_DECAY}, _POWER]),
        ("Adamax", "adamax", [{}, _ROUGH | _DECAY]),
        ("Adadelta", "adadelta", [{}, {"rho": 0.5, "epsilon": 1e-3, **_DECAY}]),
        ("Nadam", "nadam", [{}, _ROUGH | _DECAY]),
        ("Lion", "lion", [{}, {"beta_1": 0.5, "beta_2": 0.7, **_DECAY}]),
    ]
    return [case for name, twin, several in listed for case in _cases(family, name, twin, *several)]


def _legacy_cases() -> list[Case]:
    def of(*args: Any, **more: Any) -> list[Case]:
        return _cases("tf_keras.optimizers.legacy", *args, **more)

    outside = {"epsilon_inside_root": False}
    rms = {"momentum": 0.5, "centered": True, "epsilon": 1e-2}
    return [
        *of("SGD", "sgd", {}),
        *of("SGD", "momentum", {"momentum": 0.9}, _NESTEROV),
        *of("Adagrad", "adagrad", {}, **outside),
        *of("Adagrad", "adagrad", {"initial_accumulator_value": 0.5, "epsilon": 1e-2}, **outside),
        *of("Adam", "adam", {}, {"amsgrad": True, **_ROUGH}),
        # Only its kernel with a momentum has epsilon inside the root.
        *of("RMSprop", "rmsprop", {}, {"centered": True, "epsilon": 1e-2}, **outside),
        *of("RMSprop", "rmsprop", {"momentum": 0.9, "rho": 0.8}, rms),
        *of("Ftrl", "ftrl", {}, {**_FTRL, "beta": 0.3}, _POWER),
        *of("Adamax", "adamax", {}, _ROUGH),
        *of("Adadelta", "adadelta", {}, {"rho": 0.5, "epsilon": 1e-3}),
        *of("Nadam", "nadam", {}, schedule_decay=0.004),
        *of("Nadam", "nadam", {**_ROUGH, "schedule_decay": 0.5}),
    ]


def _v1_cases() -> list[Case]:
    """TensorFlow's own, and ours by TFPlus' names."""

    def of(name: str, *args: Any, **more: Any) -> list[Case]:
        return _cases("tf.compat.v1.train", f"{name}Optimizer", *args, **more)

    nesterov = {"momentum": 0.9, "use_nesterov": True}
    rough = {"beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3}
    centered = {"centered": True, "epsilon": 1e-3}
    began = {"initial_accumulator_value": 0.5}
    squared = {"initial_gradient_squared_accumulator_value": 0.5, **_PROXIMAL}
    rms = [{"momentum": 0.9, "epsilon": 1e-3}, centered, {"momentum": 0.5, **centered}]
    threshold = {"amsgrad": True, **rough, "sma_threshold": 4.0}
    penalized = {"is_dense_alike": False}
    return [
        *of("GradientDescent", "sgd", {}),
        *of("Momentum", "momentum", {"momentum": 0.9}, nesterov, lr_in_state=False),
        *of("Adam", "adam", {}, epsilon=1e-8),
        *of("Adam", "adam", rough),
        *of("Adagrad", "adagrad", {}, began, epsilon=0.0),
        *of("RMSProp", "rmsprop", {}, epsilon=1e-10, initial_rms=1.0),
        *of("RMSProp", "rmsprop", *rms, initial_rms=1.0),
        *of("Ftrl", "ftrl", {}, {**_FTRL, "learning_rate_power": -0.6, "beta": 0.3}),
        *of("Adadelta", "adadelta", {}, epsilon=1e-8),
        *of("Adadelta", "adadelta", {"rho": 0.5, "epsilon": 1e-3}),
        *of("ProximalGradientDescent", "proximalsgd", {}, _PROXIMAL),
        *of("ProximalAdagrad", "proximaladagrad", {}, began | _PROXIMAL),
        *of("AdagradDA", "adagradda", {}, squared),
        *of("GroupAdam", "groupadam", {}, epsilon=1e-8),
        *of("GroupAdam", "groupadam", _PENALTIES, epsilon=1e-8, **penalized),
        *of("SparseGroupFtrl", "sparsegroupftrl", {}),
        *of("SparseGroupFtrl", "sparsegroupftrl", _PENALTIES, **penalized),
        *of("RectifiedAdam", "rectifiedadam", {}, {"use_nesterov": True, **_DECAY}, threshold),
    ]


def _keras_3_cases() -> list[Case]:
    """Ours, whose dense variables know no penalty on rows and one trust ratio alone, and what only
    newer versions of Keras 3 have."""

    def of(*args: Any, **more: Any) -> list[Case]:
        return _cases("Keras 3", *args, **more)

    penalized = {"is_dense_alike": False}
    adam = {**_PENALTIES, "beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-5, **_DECAY}
    shrunk = {"l2_shrinkage_regularization_strength": 0.01, "beta": 0.1, **_DECAY}
    rowwise = {"epsilon": 1e-3, "initial_accumulator_value": 0.2, **_DECAY}
    cases = [
        *of("GroupAdam", "groupadam", {}),
        *of("GroupAdam", "groupadam", adam, **penalized),
        *of("GroupAMSGrad", "groupamsgrad", {}),
        *of("GroupAMSGrad", "groupamsgrad", adam, **penalized),
        *of("GroupMomentum", "groupmomentum", {"momentum": 0.9}),
        *of("GroupMomentum", "groupmomentum", {**_PENALTIES, **_NESTEROV, **_DECAY}, **penalized),
        *of("SparseGroupFtrl", "sparsegroupftrl", {}),
        *of("SparseGroupFtrl", "sparsegroupftrl", {**_PENALTIES, **shrunk}, **penalized),
        *of("RowWiseAdagrad", "rowwiseadagrad", rowwise, **penalized),
    ]
    # The option of GroupAdam that makes it another rule.
    (amsgrad,) = of("GroupAdam", "groupamsgrad", {"amsgrad": True})
    cases.append(replace(amsgrad, hyper={}))
    if hasattr(keras.optimizers, "Lamb"):
        cases += of("GroupLamb", "grouplamb", {"epsilon": 1e-7}, adam, **penalized)
    if hasattr(keras.optimizers, "ScheduleFreeAdamW"):
        free = {**_ROUGH, **_DECAY, "warmup_steps": 10}
        cases += of("ScheduleFreeAdamW", "schedulefreeadamw", {}, free)
    return cases


_ADAPTIVE = {"epsilon": 1e-2, "adaptive_epsilon": True}
CASES = [
    *_new_cases("Keras 3"),
    *_keras_3_cases(),
    *_new_cases("tf_keras"),
    *_cases("tf_keras", "Adam", "adam", _ADAPTIVE, {**_ADAPTIVE, "amsgrad": True}),
    *_legacy_cases(),
    *_v1_cases(),
]

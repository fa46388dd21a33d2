"""Every optimizer with a rule, and every option that selects or enters a formula: one list.

A case names the optimizer as the frameworks do and, beside it, its twin in tests/reference_updates:
the function and what it is called with. Tests on one rank, on a simulated GPU and on several ranks
take them from here, and docs/optimizers.md names no optimizer that is not among them.
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


_STATES = {
    "sgd": (),
    "momentum": ("momentum",),
    "adagrad": ("accumulator",),
    "rowwiseadagrad": ("accumulator",),
    "adam": ("m", "v", "vhat"),
    "rectifiedadam": ("m", "v", "vhat"),
    "rmsprop": ("rms", "mean_grad", "momentum"),
    "ftrl": ("accumulator", "linear"),
    "adamax": ("m", "v"),
    "adadelta": ("accumulator", "delta_accumulator"),
    "nadam": ("m", "v"),
    "lion": ("m",),
    "proximalsgd": (),
    "proximaladagrad": ("accumulator",),
    "adagradda": ("gradient_accumulator", "gradient_squared_accumulator"),
    "schedulefreeadamw": ("ahead", "v"),
    "groupadam": ("m", "v", "linear"),
    "groupamsgrad": ("m", "v", "vhat", "linear"),
    "grouplamb": ("m", "v", "linear"),
    "groupmomentum": ("momentum", "linear"),
    "sparsegroupftrl": ("accumulator", "linear"),
}


class Twin:
    """Rows and states in float64 that take the steps of a case, a few rows in each.

    Attributes:
      rows: (n, dim) float64.
      states: by name, (n, dim) float64, or (n, 1) of what a row has once; some cases
        have no use for all of them.
      num_steps: that were taken.
    """

    def __init__(self, case: Case, rows: np.ndarray) -> None:
        self.rows = np.array(rows, np.float64)
        self._case = case
        self._update = getattr(reference_updates, case.twin)
        self.states = {
            name: np.full_like(self.rows, self._initial(name)) for name in _STATES[case.twin]
        }
        if case.twin == "rowwiseadagrad":
            self.states["accumulator"] = self.states["accumulator"][:, :1]
        self.num_steps = 0

    def _initial(self, state: str) -> float:
        # The default is the same in Keras 3, tf_keras, its legacy optimizers and TF1.
        if state == "rms":
            return self._case.hyper.get("initial_rms", 0.0)
        starts = {
            "adagrad": "accumulator",
            "rowwiseadagrad": "accumulator",
            "ftrl": "accumulator",
            "sparsegroupftrl": "accumulator",
            "proximaladagrad": "accumulator",
            "adagradda": "gradient_squared_accumulator",
        }
        if starts.get(self._case.twin) == state:
            return self._case.hyper.get("initial_accumulator", 0.1)
        return 0.0

    def step(self, touched: np.ndarray, grads: np.ndarray) -> None:
        """Takes a step of some rows; the others stay, states included.

        Args:
          touched: (k,) distinct numbers of rows.
          grads: (k, dim).
        """
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


def _case(family: str, name: str, options: dict[str, Any], twin: str, **more: Any) -> Case:
    """Returns a case; `more`: what the twin has and no option says."""
    hyper = more | {_TWINS_NAMES.get(option, option): value for option, value in options.items()}
    # Of 1.0, since its steps begin at about a thousandth of it.
    learning_rate = 1.0 if twin == "adadelta" else 0.1
    return Case(family, name, options, twin, hyper, learning_rate)


_FTRL = {
    "l1_regularization_strength": 0.05,
    "l2_regularization_strength": 0.1,
    "l2_shrinkage_regularization_strength": 0.02,
}
_PROXIMAL = {"l1_regularization_strength": 0.05, "l2_regularization_strength": 0.2}


def _new_cases(family: str) -> list[Case]:
    """What Keras 3 and the new tf_keras have alike."""
    decay = {"weight_decay": 0.05}
    rough = {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3}
    listed: list[tuple[str, str, list[dict[str, Any]]]] = [
        ("SGD", "sgd", [{}, decay]),
        (
            "SGD",
            "momentum",
            [
                {"momentum": 0.9},
                {"momentum": 0.9, "nesterov": True},
                {"momentum": 0.5, "nesterov": True, **decay},
            ],
        ),
        ("Adagrad", "adagrad", [{}, {"initial_accumulator_value": 0.5, "epsilon": 1e-3, **decay}]),
        ("Adam", "adam", [{}, {"amsgrad": True}, {**rough, **decay}, {"beta_1": 0.0, **decay}]),
        ("AdamW", "adam", [decay, {"amsgrad": True, **rough, **decay}]),
        (
            "RMSprop",
            "rmsprop",
            [
                {},
                {"momentum": 0.9, "rho": 0.8},
                {"centered": True, "epsilon": 1e-3},
                {"centered": True, "momentum": 0.5, "epsilon": 1e-3, **decay},
            ],
        ),
        (
            "Ftrl",
            "ftrl",
            [
                {},
                {**_FTRL, "beta": 0.3, **decay},
                {"learning_rate_power": -0.7, "initial_accumulator_value": 0.5},
            ],
        ),
        ("Adamax", "adamax", [{}, {**rough, **decay}]),
        ("Adadelta", "adadelta", [{}, {"rho": 0.5, "epsilon": 1e-3, **decay}]),
        ("Nadam", "nadam", [{}, {**rough, **decay}]),
        ("Lion", "lion", [{}, {"beta_1": 0.5, "beta_2": 0.7, **decay}]),
    ]
    return [
        _case(family, name, options, twin) for name, twin, several in listed for options in several
    ]


def _legacy_cases() -> list[Case]:
    family, outside = "tf_keras.optimizers.legacy", {"epsilon_inside_root": False}
    rough = {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3}
    return [
        _case(family, "SGD", {}, "sgd"),
        _case(family, "SGD", {"momentum": 0.9}, "momentum"),
        _case(family, "SGD", {"momentum": 0.9, "nesterov": True}, "momentum"),
        _case(family, "Adagrad", {}, "adagrad", **outside),
        _case(
            *(family, "Adagrad", {"initial_accumulator_value": 0.5, "epsilon": 1e-2}, "adagrad"),
            **outside,
        ),
        _case(family, "Adam", {}, "adam"),
        _case(family, "Adam", {"amsgrad": True, **rough}, "adam"),
        # Only its kernel with a momentum has epsilon inside the root.
        _case(family, "RMSprop", {}, "rmsprop", **outside),
        _case(family, "RMSprop", {"centered": True, "epsilon": 1e-2}, "rmsprop", **outside),
        _case(family, "RMSprop", {"momentum": 0.9, "rho": 0.8}, "rmsprop"),
        _case(family, "RMSprop", {"momentum": 0.5, "centered": True, "epsilon": 1e-2}, "rmsprop"),
        _case(family, "Ftrl", {}, "ftrl"),
        _case(family, "Ftrl", {**_FTRL, "beta": 0.3}, "ftrl"),
        _case(
            family, "Ftrl", {"learning_rate_power": -0.7, "initial_accumulator_value": 0.5}, "ftrl"
        ),
        _case(family, "Adamax", {}, "adamax"),
        _case(family, "Adamax", rough, "adamax"),
        _case(family, "Adadelta", {}, "adadelta"),
        _case(family, "Adadelta", {"rho": 0.5, "epsilon": 1e-3}, "adadelta"),
        _case(family, "Nadam", {}, "nadam", schedule_decay=0.004),
        _case(family, "Nadam", {**rough, "schedule_decay": 0.5}, "nadam"),
    ]


def _v1_cases() -> list[Case]:
    family = "tf.compat.v1.train"
    rms = {"initial_rms": 1.0}
    momentum = {"lr_in_state": False}
    return [
        _case(family, "GradientDescentOptimizer", {}, "sgd"),
        _case(family, "MomentumOptimizer", {"momentum": 0.9}, "momentum", **momentum),
        _case(
            *(family, "MomentumOptimizer", {"momentum": 0.9, "use_nesterov": True}, "momentum"),
            **momentum,
        ),
        _case(family, "AdamOptimizer", {}, "adam", epsilon=1e-8),
        _case(family, "AdamOptimizer", {"beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3}, "adam"),
        _case(family, "AdagradOptimizer", {}, "adagrad", epsilon=0.0),
        _case(
            *(family, "AdagradOptimizer", {"initial_accumulator_value": 0.5}, "adagrad"),
            epsilon=0.0,
        ),
        _case(family, "RMSPropOptimizer", {}, "rmsprop", epsilon=1e-10, **rms),
        _case(
            *(family, "RMSPropOptimizer", {"momentum": 0.9, "epsilon": 1e-3}, "rmsprop"),
            **rms,
        ),
        _case(
            *(family, "RMSPropOptimizer", {"centered": True, "epsilon": 1e-3}, "rmsprop"),
            **rms,
        ),
        _case(
            *(family, "RMSPropOptimizer"),
            *({"centered": True, "momentum": 0.5, "epsilon": 1e-3}, "rmsprop"),
            **rms,
        ),
        _case(family, "FtrlOptimizer", {}, "ftrl"),
        _case(
            family,
            "FtrlOptimizer",
            {**_FTRL, "learning_rate_power": -0.6, "beta": 0.3},
            "ftrl",
        ),
        _case(family, "AdadeltaOptimizer", {}, "adadelta", epsilon=1e-8),
        _case(family, "AdadeltaOptimizer", {"rho": 0.5, "epsilon": 1e-3}, "adadelta"),
        _case(family, "ProximalGradientDescentOptimizer", {}, "proximalsgd"),
        _case(family, "ProximalGradientDescentOptimizer", _PROXIMAL, "proximalsgd"),
        _case(family, "ProximalAdagradOptimizer", {}, "proximaladagrad"),
        _case(
            family,
            "ProximalAdagradOptimizer",
            {"initial_accumulator_value": 0.5, **_PROXIMAL},
            "proximaladagrad",
        ),
        _case(family, "AdagradDAOptimizer", {}, "adagradda"),
        _case(
            family,
            "AdagradDAOptimizer",
            {"initial_gradient_squared_accumulator_value": 0.5, **_PROXIMAL},
            "adagradda",
        ),
    ]


def _keras_3_cases() -> list[Case]:
    """What only Keras 3 has, and maybe only its newer versions."""
    if not hasattr(keras.optimizers, "ScheduleFreeAdamW"):
        return []
    rough = {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3, "weight_decay": 0.05}
    return [
        _case("Keras 3", "ScheduleFreeAdamW", options, "schedulefreeadamw")
        for options in ({}, {**rough, "warmup_steps": 10})
    ]


_PENALTIES = {
    "l1_regularization_strength": 0.01,
    "l2_regularization_strength": 0.1,
    "l21_regularization_strength": 0.1,
}


def _group_cases() -> list[Case]:
    """Our own. Dense variables know no penalty on rows, and one trust ratio alone."""
    listed: list[tuple[str, str, dict[str, Any]]] = [
        ("GroupAdam", "groupadam", {}),
        ("GroupAMSGrad", "groupamsgrad", {}),
        ("GroupMomentum", "groupmomentum", {"momentum": 0.9}),
        ("SparseGroupFtrl", "sparsegroupftrl", {}),
    ]
    cases = [_case("Keras 3", name, options, twin) for name, twin, options in listed]
    if hasattr(keras.optimizers, "Lamb"):
        listed.append(("GroupLamb", "grouplamb", {}))
        lamb = _case("Keras 3", "GroupLamb", {"epsilon": 1e-7}, "grouplamb")
        cases.append(replace(lamb, is_dense_alike=False))
    rowwise = _case("Keras 3", "RowWiseAdagrad", {"epsilon": 1e-3}, "rowwiseadagrad")
    cases.append(replace(rowwise, is_dense_alike=False))
    # The option of GroupAdam that makes it another rule.
    amsgrad = _case("Keras 3", "GroupAdam", {"amsgrad": True}, "groupamsgrad")
    cases.append(replace(amsgrad, hyper={}))
    cases += [
        replace(_case("Keras 3", name, {**options, **_PENALTIES}, twin), is_dense_alike=False)
        for name, twin, options in listed
    ]
    return cases


def _kv_variable_cases() -> list[Case]:
    """Our own of TF1, by TFPlus' names."""
    family = "tf.compat.v1.train"
    group, ftrl = "GroupAdamOptimizer", "SparseGroupFtrlOptimizer"
    rectified = [
        {},
        {"use_nesterov": True, "weight_decay": 0.05},
        {"amsgrad": True, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3, "sma_threshold": 4.0},
    ]
    return [
        _case(family, group, {}, "groupadam", epsilon=1e-8),
        _case(family, ftrl, {}, "sparsegroupftrl"),
        *(_case(family, "RectifiedAdamOptimizer", each, "rectifiedadam") for each in rectified),
        *(
            replace(_case(family, name, _PENALTIES, twin, **more), is_dense_alike=False)
            for name, twin, more in [
                (group, "groupadam", {"epsilon": 1e-8}),
                (ftrl, "sparsegroupftrl", {}),
            ]
        ),
    ]


def _tf_keras_cases() -> list[Case]:
    """What only the new tf_keras has."""
    adaptive = {"epsilon": 1e-2, "adaptive_epsilon": True}
    return [
        _case("tf_keras", "Adam", adaptive, "adam"),
        _case("tf_keras", "Adam", {**adaptive, "amsgrad": True}, "adam"),
    ]


CASES = [
    *_new_cases("Keras 3"),
    *_keras_3_cases(),
    *_group_cases(),
    *_new_cases("tf_keras"),
    *_tf_keras_cases(),
    *_legacy_cases(),
    *_v1_cases(),
    *_kv_variable_cases(),
]

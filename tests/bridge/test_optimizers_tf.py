"""Update rules against TensorFlow's own dense optimizers, on the touched rows.

The dense optimizer gets a variable of the touched rows only: a dense update moves rows without a
gradient too, and an embedding table's does not.
"""

import types
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from scripts.bench.common.row_steps import apply_rule
from sok_lite.backend import get_backend
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    AdagradDA,
    Adam,
    Adamax,
    AdamW,
    Ftrl,
    Lion,
    Momentum,
    Nadam,
    ProximalAdagrad,
    ProximalSGD,
    RMSprop,
)
from sok_lite.engine.rows.store import RowStore

tf_keras = pytest.importorskip("tf_keras")
legacy = tf_keras.optimizers.legacy
v1 = tf.compat.v1.train

LEARNING_RATES = [0.1, 0.1, 0.05, 0.02, 0.2, 0.01]
NUM_ROWS = 33


def keras_steps(optimizer, start, grads):
    """The rows after every step of a Keras 3, tf_keras or tf_keras legacy optimizer."""
    is_keras_3 = isinstance(optimizer, keras.optimizers.Optimizer)
    variable = (keras.Variable if is_keras_3 else tf.Variable)(start)
    for learning_rate, grad in zip(LEARNING_RATES, grads, strict=True):
        optimizer.learning_rate = learning_rate
        optimizer.apply_gradients([(tf.constant(grad), variable)])
        yield variable.numpy()


def v1_steps(make_optimizer, start, grads, num_times=1):
    """The rows after every step of a tf.compat.v1 optimizer, in a TF1 graph.

    Args:
      num_times: how often all gradients come.
    """
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("rows", initializer=start, use_resource=True)
        learning_rate = tf.compat.v1.placeholder(tf.float32, [])
        grad = tf.compat.v1.placeholder(tf.float32, start.shape)
        train = make_optimizer(learning_rate).apply_gradients([(grad, variable)])
        session.run(tf.compat.v1.global_variables_initializer())
        for rate, value in [*zip(LEARNING_RATES, grads, strict=True)] * num_times:
            session.run(train, {learning_rate: rate, grad: value})
            yield session.run(variable)


def our_steps(rule, start, grads, num_times=1):
    backend = get_backend("cpu")
    store = RowStore(backend, start.shape[1], row_dtype("float32"))
    rows = store.allocate(2 * NUM_ROWS)[::2].copy()
    store.write(rows, start)
    table = types.SimpleNamespace(backend=backend, store=store)
    pairs = [*zip(LEARNING_RATES, grads, strict=True)] * num_times
    for step, (rate, grad) in enumerate(pairs, start=1):
        apply_rule(table, rule, rows, grad, rate, step)
        yield store.read(rows).copy()


def compare(rule, theirs, start, grads, tolerance=2e-6):
    # Both are float32 in the same order of operations; TensorFlow has vector roots and powers and
    # fused multiply-adds that differ in the last place of values around 1.
    for step, (ours, expected) in enumerate(
        zip(our_steps(rule, start, grads), theirs, strict=True), start=1
    ):
        np.testing.assert_allclose(
            ours, expected, rtol=tolerance, atol=tolerance, err_msg=f"after step {step}"
        )


def a_start(dim):
    rng = np.random.default_rng(dim)
    start = rng.normal(0, 0.5, (NUM_ROWS, dim)).astype(np.float32)
    grads = rng.normal(0, 1, (len(LEARNING_RATES), NUM_ROWS, dim)).astype(np.float32)
    return start, grads


FTRL = {
    "l1_regularization_strength": 0.05,
    "l2_regularization_strength": 0.1,
    "l2_shrinkage_regularization_strength": 0.02,
    "beta": 0.3,
}
OUR_FTRL = Ftrl(l1=0.05, l2=0.1, l2_shrinkage=0.02, beta=0.3)

# Rules that Keras 3 and the new tf_keras optimizers have alike.
NEW = [
    ("SGD", {}, SGD()),
    ("SGD", {"momentum": 0.9}, Momentum()),
    ("SGD", {"momentum": 0.9, "nesterov": True}, Momentum(nesterov=True)),
    ("SGD", {"weight_decay": 0.1}, SGD(weight_decay=0.1)),
    ("Adagrad", {}, Adagrad()),
    (
        "Adagrad",
        {"initial_accumulator_value": 0.5, "epsilon": 1e-3},
        Adagrad(initial_accumulator=0.5, epsilon=1e-3),
    ),
    ("Adam", {}, Adam()),
    (
        "Adam",
        {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3},
        Adam(beta_1=0.5, beta_2=0.9, epsilon=1e-3),
    ),
    ("Adam", {"amsgrad": True}, Adam(amsgrad=True)),
    ("Adam", {"weight_decay": 0.1}, Adam(weight_decay=0.1)),
    ("AdamW", {}, AdamW()),
    ("AdamW", {"weight_decay": 0.1, "amsgrad": True}, AdamW(weight_decay=0.1, amsgrad=True)),
    ("RMSprop", {}, RMSprop()),
    ("RMSprop", {"momentum": 0.9, "rho": 0.8}, RMSprop(momentum=0.9, rho=0.8)),
    ("RMSprop", {"centered": True}, RMSprop(centered=True)),
    (
        "RMSprop",
        {"centered": True, "momentum": 0.5, "epsilon": 1e-3},
        RMSprop(centered=True, momentum=0.5, epsilon=1e-3),
    ),
    ("Ftrl", {}, Ftrl()),
    ("Ftrl", FTRL, OUR_FTRL),
    ("Ftrl", {"learning_rate_power": -0.7}, Ftrl(learning_rate_power=-0.7)),
    ("Ftrl", {"initial_accumulator_value": 1.0}, Ftrl(initial_accumulator=1.0)),
    ("Adamax", {}, Adamax()),
    (
        "Adamax",
        {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3, "weight_decay": 0.1},
        Adamax(beta_1=0.5, beta_2=0.9, epsilon=1e-3, weight_decay=0.1),
    ),
    ("Adadelta", {}, Adadelta()),
    ("Adadelta", {"rho": 0.5, "epsilon": 1e-3}, Adadelta(rho=0.5, epsilon=1e-3)),
    ("Nadam", {}, Nadam()),
    (
        "Nadam",
        {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3, "weight_decay": 0.1},
        Nadam(beta_1=0.5, beta_2=0.9, epsilon=1e-3, weight_decay=0.1),
    ),
    ("Lion", {}, Lion()),
    (
        "Lion",
        {"beta_1": 0.5, "beta_2": 0.7, "weight_decay": 0.1},
        Lion(beta_1=0.5, beta_2=0.7, weight_decay=0.1),
    ),
]


@pytest.mark.parametrize("dim", [1, 3, 64])
@pytest.mark.parametrize("package", ["keras", "tf_keras"])
@pytest.mark.parametrize("name, options, rule", NEW, ids=lambda value: str(value))
def test_a_keras_optimizer_steps_as_its_rule(package, name, options, rule, dim):
    start, grads = a_start(dim)
    make = getattr((keras if package == "keras" else tf_keras).optimizers, name)
    compare(rule, keras_steps(make(**options), start, grads), start, grads)


def test_tf_keras_adam_with_adaptive_epsilon():
    start, grads = a_start(31)
    optimizer = tf_keras.optimizers.Adam(epsilon=0.1, adaptive_epsilon=True)
    rule = Adam(epsilon=0.1, adaptive_epsilon=True)
    compare(rule, keras_steps(optimizer, start, grads), start, grads)


LEGACY = [
    ("SGD", {}, SGD()),
    ("SGD", {"momentum": 0.9}, Momentum()),
    ("SGD", {"momentum": 0.9, "nesterov": True}, Momentum(nesterov=True)),
    ("Adagrad", {"epsilon": 1e-2}, Adagrad(epsilon=1e-2, epsilon_inside_root=False)),
    ("Adam", {}, Adam()),
    ("Adam", {"amsgrad": True, "epsilon": 1e-3}, Adam(amsgrad=True, epsilon=1e-3)),
    ("RMSprop", {"epsilon": 1e-2}, RMSprop(epsilon=1e-2, epsilon_inside_root=False)),
    (
        "RMSprop",
        {"epsilon": 1e-2, "centered": True},
        RMSprop(epsilon=1e-2, centered=True, epsilon_inside_root=False),
    ),
    ("RMSprop", {"epsilon": 1e-2, "momentum": 0.9}, RMSprop(epsilon=1e-2, momentum=0.9)),
    (
        "RMSprop",
        {"epsilon": 1e-2, "momentum": 0.9, "centered": True},
        RMSprop(epsilon=1e-2, momentum=0.9, centered=True),
    ),
    ("Ftrl", {}, Ftrl()),
    ("Ftrl", FTRL, OUR_FTRL),
    ("Adamax", {}, Adamax()),
    ("Adamax", {"beta_2": 0.9, "epsilon": 1e-3}, Adamax(beta_2=0.9, epsilon=1e-3)),
    ("Adadelta", {"epsilon": 1e-3}, Adadelta(epsilon=1e-3)),
    ("Nadam", {}, Nadam(schedule_decay=0.004)),
    (
        "Nadam",
        {"beta_1": 0.5, "epsilon": 1e-3, "schedule_decay": 0.5},
        Nadam(beta_1=0.5, epsilon=1e-3, schedule_decay=0.5),
    ),
]


@pytest.mark.parametrize("dim", [1, 31])
@pytest.mark.parametrize("name, options, rule", LEGACY, ids=lambda value: str(value))
def test_tf_keras_legacy(name, options, rule, dim):
    start, grads = a_start(dim)
    tolerance = (
        2e-5 if isinstance(rule, (Adam, Nadam)) else 2e-6
    )  # the kernels of TF1, see test_tf1
    theirs = keras_steps(getattr(legacy, name)(**options), start, grads)
    compare(rule, theirs, start, grads, tolerance)


# It has 1 - beta in float32, where 1 - 0.999 has 5 digits.
BETAS = {"beta_1": float(np.float32(0.9)), "beta_2": float(np.float32(0.999))}
OF_TF1 = Adam(**BETAS, epsilon=1e-8, has_products=True)

V1 = [
    (lambda lr: v1.GradientDescentOptimizer(lr), SGD()),
    (lambda lr: v1.MomentumOptimizer(lr, 0.9), Momentum(lr_in_state=False)),
    (
        lambda lr: v1.MomentumOptimizer(lr, 0.9, use_nesterov=True),
        Momentum(nesterov=True, lr_in_state=False),
    ),
    (lambda lr: v1.AdagradOptimizer(lr), Adagrad(epsilon=0.0)),
    (
        lambda lr: v1.AdagradOptimizer(lr, initial_accumulator_value=1.0),
        Adagrad(epsilon=0.0, initial_accumulator=1.0),
    ),
    (lambda lr: v1.AdamOptimizer(lr), OF_TF1),
    (lambda lr: v1.RMSPropOptimizer(lr), RMSprop(epsilon=1e-10, initial_rms=1.0)),
    (
        lambda lr: v1.RMSPropOptimizer(lr, decay=0.5, momentum=0.9),
        RMSprop(rho=0.5, momentum=0.9, epsilon=1e-10, initial_rms=1.0),
    ),
    (
        lambda lr: v1.RMSPropOptimizer(lr, momentum=0.9, centered=True),
        RMSprop(momentum=0.9, epsilon=1e-10, initial_rms=1.0, centered=True),
    ),
    (lambda lr: v1.FtrlOptimizer(lr), Ftrl()),
    (
        lambda lr: v1.FtrlOptimizer(
            lr,
            learning_rate_power=-0.6,
            l1_regularization_strength=0.05,
            l2_regularization_strength=0.1,
            l2_shrinkage_regularization_strength=0.02,
        ),
        Ftrl(learning_rate_power=-0.6, l1=0.05, l2=0.1, l2_shrinkage=0.02),
    ),
    (lambda lr: v1.AdadeltaOptimizer(lr), Adadelta(epsilon=1e-8)),
    (lambda lr: v1.ProximalGradientDescentOptimizer(lr), ProximalSGD()),
    (
        lambda lr: v1.ProximalGradientDescentOptimizer(
            lr, l1_regularization_strength=0.5, l2_regularization_strength=0.3
        ),
        ProximalSGD(l1=0.5, l2=0.3),
    ),
    (lambda lr: v1.ProximalAdagradOptimizer(lr), ProximalAdagrad()),
    (
        lambda lr: v1.ProximalAdagradOptimizer(
            lr,
            initial_accumulator_value=0.5,
            l1_regularization_strength=0.5,
            l2_regularization_strength=0.3,
        ),
        ProximalAdagrad(l1=0.5, l2=0.3, initial_accumulator=0.5),
    ),
    # Its step is a constant here; the program counts it.
    (
        lambda lr: v1.AdagradDAOptimizer(lr, global_step=tf.constant(2, tf.int64)),
        AdagradDA(global_step=3),
    ),
    (
        lambda lr: v1.AdagradDAOptimizer(
            lr,
            global_step=tf.constant(2, tf.int64),
            initial_gradient_squared_accumulator_value=0.5,
            l1_regularization_strength=0.3,
            l2_regularization_strength=0.2,
        ),
        AdagradDA(l1=0.3, l2=0.2, initial_accumulator=0.5, global_step=3),
    ),
]


@pytest.mark.parametrize("dim", [1, 31])
@pytest.mark.parametrize(
    "make_optimizer, rule", V1, ids=lambda value: "" if callable(value) else repr(value)[:60]
)
def test_tf1(make_optimizer, rule, dim):
    start, grads = a_start(dim)
    compare(rule, v1_steps(make_optimizer, start, grads), start, grads)


def test_tf1_adam_after_many_steps():
    start, grads = a_start(7)
    *_, expected = v1_steps(lambda lr: v1.AdamOptimizer(lr), start, grads, 50)
    for has_products, tolerance in ((True, 2e-6), (False, 2e-4)):
        *_, ours = our_steps(replace(OF_TF1, has_products=has_products), start, grads, 50)
        np.testing.assert_allclose(ours, expected, rtol=tolerance, atol=tolerance)
    assert np.abs(ours - expected).max() > 1e-5


def test_momentum_of_keras_and_of_tf1_differ_when_the_learning_rate_changes():
    # The reason for `lr_in_state`: a rule that ignored it would pass one of the two.
    start, grads = a_start(4)
    *_, keras_form = our_steps(Momentum(), start, grads)
    *_, v1_form = our_steps(Momentum(lr_in_state=False), start, grads)
    assert np.abs(keras_form - v1_form).max() > 1e-2

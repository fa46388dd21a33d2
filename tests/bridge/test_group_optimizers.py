"""Optimizers that set rows to zero as Keras has them, and what is done with such rows.

test_every_optimizer.py compares their rows with the twins.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import optimizers
from sok_lite.optimizers import GroupAdam, GroupAMSGrad, GroupLamb, GroupMomentum, SparseGroupFtrl

DIM = 6
PENALTIES = {f"{name}_regularization_strength": 0.1 for name in ("l1", "l2", "l21")}
k3 = keras.optimizers
# The optimizer, what dense variables are trained by, and what is said to both of these two. Ftrl
# has the first two penalties too.
CLASSES = {
    GroupAdam: (k3.Adam, {"beta_1": 0.8, "epsilon": 1e-5}),
    GroupAMSGrad: (lambda **options: k3.Adam(amsgrad=True, **options), {"beta_2": 0.9}),
    SparseGroupFtrl: (
        lambda **options: k3.Ftrl(**dict([*PENALTIES.items()][:2]), **options),
        {"initial_accumulator_value": 0.2, "beta": 0.1},
    ),
    GroupMomentum: (k3.SGD, {"momentum": 0.7, "nesterov": True}),
    GroupLamb: (getattr(k3, "Lamb", None), {"beta_1": 0.8}),
}


@pytest.mark.parametrize("make", CLASSES)
def test_dense_variables_take_the_step_of_the_parent(make, mode):
    parent, options = CLASSES[make]
    if parent is None:
        pytest.skip("this Keras has no Lamb")
    options = {"learning_rate": 0.1, "weight_decay": 0.05, **options}
    optimizer, theirs = sok.OptimizerWrapper(make(**PENALTIES, **options)), parent(**options)
    table = sok.DynamicVariable(DIM)
    dense, alone = tf.Variable([0.5, -1.0, 2.0]), tf.Variable([0.5, -1.0, 2.0])

    @mode
    def step(rows, grad):
        optimizer.apply_gradients([(tf.IndexedSlices(rows, [1]), table), (grad, dense)])

    for seed in range(3):
        grad = tf.constant(np.random.default_rng(seed).normal(size=3), tf.float32)
        step(tf.ones([1, DIM]), grad)
        theirs.apply_gradients([(grad, alone)])
    np.testing.assert_array_equal(dense, alone)


def test_a_strength_may_change_between_steps_and_a_subclass_has_the_rule_too():
    class Mine(GroupMomentum):
        def __init__(self):
            super().__init__(0.1)

    for inner in (GroupMomentum(0.1), Mine()):
        optimizer, table = sok.OptimizerWrapper(inner), sok.DynamicVariable(2, initializer="ones")
        gradient = tf.IndexedSlices(tf.ones([1, 2]), [4])
        for strength, count in ((0.0, 0), (100.0, 1)):
            inner.l21_regularization_strength = strength
            optimizer.apply_gradients([(gradient, table)])
            assert int(table.num_zero_rows()) == count


def test_a_bad_cutoff_is_refused(mode):
    table = sok.DynamicVariable(2)
    with pytest.raises(ValueError, match="`cutoff` must be above 0. Received: cutoff=0"):
        mode(lambda: table.export(cutoff=0.0))()
    with pytest.raises(TypeError, match="`cutoff` must be a number or None"):
        mode(lambda: table.export(cutoff="1e-20"))()


@pytest.mark.cases("make")
@pytest.mark.parametrize("make", CLASSES)
def test_a_configuration_comes_back_and_bad_strengths_are_refused(make):
    schedule = k3.schedules.ExponentialDecay(0.1, 10, 0.5)
    optimizer = make(schedule, **PENALTIES, weight_decay=0.25)
    saved = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(saved)
    for other in (again, make.from_config(optimizer.get_config())):
        assert type(other) is make
        assert other.get_config() == optimizer.get_config()
        assert {name: getattr(other, name) for name in PENALTIES} == PENALTIES
        assert other.weight_decay == 0.25
    for argument in PENALTIES:
        for strength in (-0.5, float("inf"), float("nan")):
            with pytest.raises(ValueError, match=f"`{argument}` of {make.__name__} must be finite"):
                make(0.1, **{argument: strength})
        with pytest.raises(TypeError, match=f"`{argument}` of {make.__name__} must be a number"):
            make(0.1, **{argument: "much"})


def test_the_module_has_them_and_nothing_else(monkeypatch):
    assert set(optimizers.__all__) == {*(make.__name__ for make in CLASSES), "RowWiseAdagrad"}
    assert sok.optimizers is optimizers
    assert isinstance(GroupMomentum().momentum, float) and GroupMomentum().momentum == 0.9
    assert GroupAMSGrad().amsgrad and not GroupAdam().amsgrad
    with pytest.raises(ValueError, match="`amsgrad` of GroupAMSGrad must be True"):
        GroupAMSGrad(amsgrad=False)
    monkeypatch.setattr("sok_lite.bridge.optimizers.group._Lamb", None)
    with pytest.raises(NotImplementedError, match="Install a newer Keras, or use GroupAdam"):
        GroupLamb(0.1)


@pytest.mark.skipif(not hasattr(k3, "Lamb"), reason="this Keras has no Lamb")
def test_without_penalties_group_lamb_is_keras_lamb_of_a_variable_of_one_row():
    # Epsilon counts where second moments are corrected in one and not in the other.
    options = {"epsilon": 1e-12}
    start = np.random.default_rng(1).normal(0, 1, (3, DIM)).astype(np.float32)
    table = sok.DynamicVariable(DIM)
    sok.assign(table, [0, 1, 2], start)
    optimizer = sok.OptimizerWrapper(GroupLamb(0.1, **options))
    rows = [tf.Variable(row) for row in start]
    theirs = k3.Lamb(0.1, **options)
    for seed in range(5):
        grads = np.random.default_rng(seed).normal(0, 1, (3, DIM)).astype(np.float32)
        optimizer.apply_gradients([(tf.IndexedSlices(grads, [0, 1, 2]), table)])
        theirs.apply_gradients(list(zip(map(tf.constant, grads), rows, strict=True)))
    np.testing.assert_allclose(sok.export(table)[1], np.stack(rows), rtol=2e-5, atol=2e-6)
